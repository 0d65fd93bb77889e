"""How many attention edges are open, by prompt, layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.results import Result

_FAR_BELOW = 5000.0
"""How far a masked score lies below a query's best at least, and all scores of padding below 0."""


def possible_attention_edges(
    scores: Float[Tensor, "prompt head query key"], pattern: Float[Tensor, "prompt head query key"]
) -> Bool[Tensor, "prompt head query key"]:
    """The pairs that a model does not mask, as its own pattern says.

    A masked pair has no attention, and a score far below all others of its query: models mask with
    -inf, with the lowest number there is, or with -1e4 or -1e5. (That it has no attention is not
    enough: the smallest of a sharp pattern vanish too.) Where all keys of a query are masked, as at
    padding, none is possible. A score that is no number counts as possible: it must reach the loss.
    """
    scores, pattern = scores.detach(), pattern.detach()
    best = scores.amax(dim=-1, keepdim=True)
    masked = (pattern == 0) & (scores < best - _FAR_BELOW)
    return ~(masked | (best < -_FAR_BELOW))


@dataclass(frozen=True, eq=False)
class AttentionEdgeCounts(Result):
    """Attention edges of a batch of prompts.

    Args:
        active: gates open under deterministic gates (all valid pairs for a dense model).
        expected: ``sum sigmoid(s + b)`` over the valid pairs; differentiable while training.
        possible: causal pairs of real tokens, ``T (T + 1) / 2`` in each head.
        tokens: real tokens of each prompt.
        gates: every deterministic gate, where they were asked for.
        cost: `expected` with every edge at its cost, where costs were given.
    """

    active: Int[Tensor, "layer prompt head"]
    expected: Float[Tensor, "layer prompt head"]
    possible: Int[Tensor, "layer prompt head"]
    tokens: Int[Tensor, " prompt"]
    gates: Bool[Tensor, "layer prompt head query key"] | None = None
    cost: Float[Tensor, "layer prompt head"] | None = None

    @property
    def active_per_prompt(self) -> float:
        """Active edges of one prompt, summed over layers and heads; mean over prompts."""
        return self.active.sum(dim=(0, 2)).double().mean().item()

    @property
    def possible_per_prompt(self) -> float:
        """Causal edges of one prompt, summed over layers and heads; mean over prompts."""
        return self.possible.sum(dim=(0, 2)).double().mean().item()

    @property
    def active_per_token(self) -> float:
        """Active edges per real token, summed over layers and heads."""
        return self.active.sum().item() / self.tokens.sum().item()

    @property
    def active_share(self) -> float:
        """Active edges as a share of the possible ones."""
        return self.active.sum().item() / self.possible.sum().item()

    @property
    def active_heads(self) -> int:
        """Heads with at least one active edge in some prompt."""
        return int((self.active.sum(dim=1) > 0).sum())

    def by_head(self) -> Float[Tensor, "layer head"]:
        """Active edges per prompt of each head."""
        return self.active.double().mean(dim=1)

    def to_pandas(self) -> pd.DataFrame:
        """One row per layer and head; edges per prompt."""
        n_layers, _, n_heads = self.active.shape
        index = pd.MultiIndex.from_product(
            [range(n_layers), range(n_heads)], names=["layer", "head"]
        )
        columns = {"active": self.active, "expected": self.expected, "possible": self.possible}
        return pd.DataFrame(
            {name: t.detach().double().mean(dim=1).flatten() for name, t in columns.items()},
            index=index,
        )

    def __repr__(self) -> str:
        return (
            f"AttentionEdgeCounts({self.active.shape[1]} prompts: {self.active_per_prompt:,.2f} "
            f"active of {self.possible_per_prompt:,.0f} attention edges per prompt "
            f"({self.active_share:.2%}), {self.active_per_token:,.2f} per token, "
            f"{self.active_heads} heads in use)"
        )

    def _summary(self) -> pd.DataFrame:
        """Active edges per prompt, one row per layer and one column per head."""
        return pd.DataFrame(self.by_head().tolist()).rename_axis(index="layer", columns="head")

    @staticmethod
    def of_layer(
        valid: Bool[Tensor, "prompt head query key"],
        is_open: Bool[Tensor, "prompt head query key"],
        probability: Float[Tensor, "prompt head query key"],
        cost: Float[Tensor, "#head #query #key"] | None,
        keep_gates: bool,
    ) -> AttentionEdgeCounts:
        """Counted over the queries and keys of one layer."""
        return AttentionEdgeCounts(
            active=is_open.sum(dim=(-2, -1))[None],
            expected=probability.sum(dim=(-2, -1))[None],
            possible=valid.sum(dim=(-2, -1))[None],
            # A real token attends at least to itself; a padding token has no valid pair.
            tokens=valid[:, 0].any(dim=-1).sum(dim=-1),
            gates=is_open[None] if keep_gates else None,
            cost=None if cost is None else (cost * probability).sum(dim=(-2, -1))[None],
        )

    @staticmethod
    def concatenate(
        parts: Sequence[AttentionEdgeCounts], *, layers: bool = False
    ) -> AttentionEdgeCounts:
        """Counts of several batches of prompts, or of several layers, as one.

        Raises:
            ValueError: there is none.
        """
        if not parts:
            raise ValueError("expected at least one batch of prompts to count edges on; got none")
        names = ["active", "expected", "possible"]
        for name in ("gates", "cost"):
            names += [name] * all(getattr(part, name) is not None for part in parts)
        dim = 0 if layers else 1
        joined = {name: torch.cat([getattr(part, name) for part in parts], dim) for name in names}
        tokens = parts[0].tokens if layers else torch.cat([part.tokens for part in parts])
        return AttentionEdgeCounts(**joined, tokens=tokens)

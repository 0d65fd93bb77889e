"""How many attention edges are open, by prompt, layer and head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
class LayerCounts:
    """The edges of one layer in one forward pass."""

    active: Int[Tensor, "prompt head"]
    expected: Float[Tensor, "prompt head"]
    expected_self: Float[Tensor, "prompt head"]
    possible: Int[Tensor, "prompt head"]
    tokens: Int[Tensor, " prompt"]
    gates: Bool[Tensor, "prompt head query key"] | None

    @staticmethod
    def of(
        valid: Bool[Tensor, "prompt head query key"],
        is_open: Bool[Tensor, "prompt head query key"],
        probability: Float[Tensor, "prompt head query key"],
        keep_gates: bool,
    ) -> LayerCounts:
        """Counted over queries and keys."""
        # With a key-value cache the queries are the last of the keys.
        own = probability.diagonal(probability.shape[-1] - probability.shape[-2], -2, -1)
        return LayerCounts(
            active=is_open.sum(dim=(-2, -1)),
            expected=probability.sum(dim=(-2, -1)),
            expected_self=own.sum(dim=-1),
            possible=valid.sum(dim=(-2, -1)),
            # A real token attends at least to itself; a padding token has no valid pair.
            tokens=valid[:, 0].any(dim=-1).sum(dim=-1),
            gates=is_open if keep_gates else None,
        )


@dataclass(frozen=True, eq=False)
class AttentionEdgeCounts(Result):
    """Attention edges of a batch of prompts.

    Args:
        active: gates open under deterministic gates (all valid pairs for a dense model).
        expected: ``sum sigmoid(s + b)`` over the valid pairs; differentiable while training.
        expected_self: the part of it that leads from a position to itself.
        possible: causal pairs of real tokens, ``T (T + 1) / 2`` in each head.
        tokens: real tokens of each prompt.
        gates: every deterministic gate, where they were asked for.
    """

    active: Int[Tensor, "layer prompt head"]
    expected: Float[Tensor, "layer prompt head"]
    expected_self: Float[Tensor, "layer prompt head"]
    possible: Int[Tensor, "layer prompt head"]
    tokens: Int[Tensor, " prompt"]
    gates: Bool[Tensor, "layer prompt head query key"] | None = None

    @property
    def active_per_prompt(self) -> float:
        """Active edges of one prompt, summed over layers and heads; mean over prompts."""
        return self.active.sum(dim=(0, 2)).double().mean().item()

    @property
    def expected_per_prompt(self) -> float:
        """Expected edges of one prompt, summed over layers and heads; mean over prompts."""
        return self.expected.detach().sum(dim=(0, 2)).double().mean().item()

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
            f"AttentionEdgeCounts({self.active.shape[1]} prompts: {self.active_per_prompt:.2f} "
            f"active of {self.possible_per_prompt:.0f} attention edges per prompt "
            f"({self.active_share:.2%}), {self.active_per_token:.2f} per token, "
            f"{self.active_heads} heads in use)"
        )

    def _summary(self) -> pd.DataFrame:
        """Active edges per prompt, one row per layer and one column per head."""
        return pd.DataFrame(self.by_head().tolist()).rename_axis(index="layer", columns="head")

    @staticmethod
    def of(layers: Sequence[LayerCounts]) -> AttentionEdgeCounts:
        """From the counts of all layers."""

        def stacked(name: str) -> Tensor:
            return torch.stack([getattr(layer, name) for layer in layers])

        return AttentionEdgeCounts(
            **{name: stacked(name) for name in ("active", "expected", "expected_self", "possible")},
            tokens=layers[0].tokens,
            gates=None if layers[0].gates is None else stacked("gates"),
        )

    @staticmethod
    def concatenate(parts: list[AttentionEdgeCounts]) -> AttentionEdgeCounts:
        """Counts of several batches of prompts as one.

        Raises:
            ValueError: there is no batch.
        """
        if not parts:
            raise ValueError("expected at least one batch of prompts to count edges on; got none")
        return AttentionEdgeCounts(
            active=torch.cat([p.active for p in parts], dim=1),
            expected=torch.cat([p.expected for p in parts], dim=1),
            expected_self=torch.cat([p.expected_self for p in parts], dim=1),
            possible=torch.cat([p.possible for p in parts], dim=1),
            tokens=torch.cat([p.tokens for p in parts]),
        )


def pieces(
    tokens: Int[Tensor, "*prompt pos"], size: int, kwargs: dict[str, Any]
) -> Iterator[tuple[Int[Tensor, "prompt pos"], dict[str, Any]]]:
    """So many prompts at a time, with what belongs to them of a model's arguments."""
    if tokens.ndim == 1:
        yield tokens[None], kwargs
        return
    for start in range(0, len(tokens), size):
        rows = slice(start, start + size)
        some = {k: v[rows] if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        yield tokens[rows], some


def table_of_shares(share: Float[Tensor, "layer head query key"]) -> pd.DataFrame:
    """One row per attention edge with a share above 0, the largest first."""
    found = pd.DataFrame(share.nonzero().tolist(), columns=["layer", "head", "query", "key"])
    found["share"] = share[share > 0].tolist()
    return found.sort_values("share", ascending=False, kind="stable").reset_index(drop=True)

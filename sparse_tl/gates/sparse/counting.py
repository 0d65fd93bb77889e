"""Counts of open attention edges and MLP outputs, per prompt, layer and head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.data import PromptPairs
from sparse_tl.gates.passes import as_rows
from sparse_tl.lens import adapt
from sparse_tl.results import Result

Prompts = Int[Tensor, "*prompt pos"] | PromptPairs


@dataclass(frozen=True, eq=False)
class AttentionEdgeCounts(Result):
    """Counts of open attention edges, and open MLP outputs, for a batch of prompts.

    Args:
        active: edges that are open under deterministic gates (all possible ones for a dense model).
        expected: ``sum sigmoid(s + b)`` over possible edges; differentiable while training.
        possible: pairs of real tokens that the layer's mask allows, whatever their scores:
            ``T (T + 1) / 2`` in each causal head, fewer with a sliding window or chunks.
        tokens: number of real tokens in each prompt.
        gates: every deterministic gate, if requested.
        cost: `expected` weighted by edge costs, if costs were given.
        active_cost: `active` weighted by edge costs, if costs were given.
        active_mlps: MLP outputs that are open under deterministic gates, one per token and layer.
            This field and those below are None for models without MLP gates.
        expected_mlps: ``sum sigmoid(w . u + b)`` over the tokens; differentiable while training.
        possible_mlps: number of real tokens.
        mlp_gates: every deterministic MLP gate, if requested.
    """

    finite = False
    active: Int[Tensor, "layer prompt head"]
    expected: Float[Tensor, "layer prompt head"]
    possible: Int[Tensor, "layer prompt head"]
    tokens: Int[Tensor, " prompt"]
    gates: Bool[Tensor, "layer prompt head query key"] | None = None
    cost: Float[Tensor, "layer prompt head"] | None = None
    active_cost: Float[Tensor, "layer prompt head"] | None = None
    active_mlps: Int[Tensor, "layer prompt"] | None = None
    expected_mlps: Float[Tensor, "layer prompt"] | None = None
    possible_mlps: Int[Tensor, "layer prompt"] | None = None
    mlp_gates: Bool[Tensor, "layer prompt pos"] | None = None

    @property
    def active_per_prompt(self) -> float:
        """Active edges per prompt, summed over layers and heads; mean over prompts."""
        return _per_prompt(self.active)

    @property
    def possible_per_prompt(self) -> float:
        """Possible edges per prompt, summed over layers and heads; mean over prompts."""
        return _per_prompt(self.possible)

    @property
    def active_per_token(self) -> float:
        """Active edges per real token, summed over layers and heads."""
        return self.active.sum().item() / self.tokens.sum().item()

    @property
    def active_share(self) -> float:
        """Active edges as a share of possible edges."""
        return self.active.sum().item() / self.possible.sum().item()

    @property
    def active_heads(self) -> int:
        """Number of heads with at least one active edge in some prompt."""
        return int((self.active.sum(dim=1) > 0).sum())

    @property
    def active_mlps_per_prompt(self) -> float | None:
        """Open MLP outputs per prompt, summed over layers; mean over prompts."""
        return None if self.active_mlps is None else _per_prompt(self.active_mlps)

    @property
    def possible_mlps_per_prompt(self) -> float | None:
        """Number of layers times real tokens per prompt; mean over prompts."""
        return None if self.possible_mlps is None else _per_prompt(self.possible_mlps)

    def size_by_prompt(self) -> Float[Tensor, " prompt"]:
        """Active edges of each prompt, weighted by cost, plus its open MLP outputs, if counted."""
        edges = self.active if self.active_cost is None else self.active_cost
        size = edges.double().sum(dim=(0, 2))
        return size if self.active_mlps is None else size + self.active_mlps.sum(dim=0)

    def by_head(self) -> Float[Tensor, "layer head"]:
        """Mean number of active edges per prompt, for each head."""
        return self.active.double().mean(dim=1)

    def to_pandas(self) -> pd.DataFrame:
        """One row per layer and head; mean number of edges per prompt."""
        n_layers, _, n_heads = self.active.shape
        index = pd.MultiIndex.from_product(
            [range(n_layers), range(n_heads)], names=["layer", "head"]
        )
        columns = {"active": self.active, "expected": self.expected, "possible": self.possible}
        return pd.DataFrame(
            {name: t.detach().double().mean(dim=1).flatten() for name, t in columns.items()},
            index=index,
        )

    def mlps_to_pandas(self) -> pd.DataFrame:
        """One row per layer: mean open MLP outputs per prompt. Empty without MLP gates."""
        columns = {
            "active": self.active_mlps,
            "expected": self.expected_mlps,
            "possible": self.possible_mlps,
        }
        means = {
            name: [] if t is None else t.detach().double().mean(dim=1).tolist()
            for name, t in columns.items()
        }
        return pd.DataFrame(means).rename_axis(index="layer")

    def __repr__(self) -> str:
        mlps = ""
        if self.active_mlps is not None:
            mlps = (
                f", {self.active_mlps_per_prompt:,.2f} active of "
                f"{self.possible_mlps_per_prompt:,.0f} MLP outputs per prompt"
            )
        return (
            f"AttentionEdgeCounts({self.active.shape[1]} prompts: {self.active_per_prompt:,.2f} "
            f"active of {self.possible_per_prompt:,.0f} attention edges per prompt "
            f"({self.active_share:.2%}), {self.active_per_token:,.2f} per token, "
            f"{self.active_heads} heads in use{mlps})"
        )

    def _summary(self) -> pd.DataFrame:
        """Active edges per prompt, one row per layer and one column per head."""
        return pd.DataFrame(self.by_head().tolist()).rename_axis(index="layer", columns="head")

    @staticmethod
    def of_pass(layers: Sequence[Mapping[str, Tensor]]) -> AttentionEdgeCounts:
        """Combine what `attention_edges_of_layer` and `mlps_of_layer` counted in one pass.

        Raises:
            ValueError: no layer was counted.
        """
        if not layers:
            raise ValueError("expected a pass whose gates were counted; got one without any layer")
        names = {name: [layer[name] for layer in layers if name in layer] for name in _COUNTED}
        found = {name: torch.stack(parts) for name, parts in names.items() if parts}
        real = found.pop("real")[0]
        for name in ("active_mlps", "expected_mlps", "possible_mlps", "mlp_gates"):
            if name in found:
                at_real = found[name] * real
                found[name] = at_real if name == "mlp_gates" else at_real.sum(dim=-1)
        return AttentionEdgeCounts(**found, tokens=real.sum(dim=-1))

    @staticmethod
    def concatenate(parts: Sequence[AttentionEdgeCounts]) -> AttentionEdgeCounts:
        """Join the counts of several batches of prompts.

        Raises:
            ValueError: `parts` is empty.
        """
        if not parts:
            raise ValueError("expected at least one batch of prompts to count edges on; got none")
        tokens = torch.cat([part.tokens for part in parts])
        joined: dict[str, Tensor] = {}
        for name in _COUNTED[1:]:
            found = [getattr(part, name) for part in parts]
            if all(values is not None for values in found):
                joined[name] = torch.cat(found, dim=1)
        return AttentionEdgeCounts(**joined, tokens=tokens)


_COUNTED = (
    "real",
    *(field.name for field in fields(AttentionEdgeCounts) if field.name != "tokens"),
)
"""Names of a layer's counts: the mask of real tokens, and all fields stacked over layers."""


def counted(
    model: Any, tokens: Prompts, size: int, kwargs: Mapping[str, Any]
) -> Iterator[AttentionEdgeCounts]:
    """Yield the counts of `size` prompts at a time.

    Args:
        model: a `SparseTransformer`.
        tokens: prompts, or a single prompt; of pairs, the clean prompts.
        size: prompts per forward pass.
        kwargs: keyword arguments of every call; tensors are split along the prompts.

    Raises:
        ValueError: no prompt is given.
    """
    if isinstance(tokens, PromptPairs):
        pairs = tokens.to(adapt(model).device)
        tokens, kwargs = pairs.clean, {**kwargs, "attention_mask": pairs.attention_mask}
    if not len(tokens):
        raise ValueError("expected at least one prompt to count attention edges on; got none")
    (prompts,), kwargs = as_rows((tokens,), kwargs)
    for start in range(0, len(prompts), size):
        rows = slice(start, start + size)
        some: dict[str, Any] = {
            name: value[rows] if isinstance(value, Tensor) else value
            for name, value in kwargs.items()
        }
        yield model.run_with_counts(prompts[rows], return_type=None, **some)[1]


def open_shares(parts: Iterable[AttentionEdgeCounts]) -> pd.DataFrame:
    """The attention edges that are open in some prompt, each with its share of prompts.

    Args:
        parts: counts of batches of prompts of one length, with their gates.
    """
    n_prompts, opened = 0, []
    for part in parts:
        assert part.gates is not None
        n_prompts += part.gates.shape[1]
        opened.append(part.gates.sum(dim=1))
    share = torch.stack(opened).sum(dim=0) / n_prompts
    found = pd.DataFrame(share.nonzero().tolist(), columns=["layer", "head", "query", "key"])
    found["share"] = share[share > 0].tolist()
    return found.sort_values("share", ascending=False, kind="stable").reset_index(drop=True)


def _per_prompt(
    counts: Float[Tensor, "layer prompt *head"] | Int[Tensor, "layer prompt *head"],
) -> float:
    """Sum over layers and heads; mean over prompts."""
    return counts.transpose(0, 1).flatten(1).sum(dim=1).double().mean().item()

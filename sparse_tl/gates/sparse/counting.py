"""Counts of open attention edges and MLP outputs, per prompt, layer and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from sparse_tl.results import Result

Pattern = Float[Tensor, "prompt head query key"]
QueryTerm = Float[Tensor, "#prompt head #query 1"]
EdgeCost = Float[Tensor, "#head #query #key"]
Pairs = Bool[Tensor, "#prompt #head query key"]
"""Pairs of real tokens that a layer's mask allows."""
Counted = dict[str, Tensor]
"""Counts of one layer in one pass, keyed by field of `AttentionEdgeCounts`."""


@dataclass(frozen=True, eq=False)
class AttentionEdgeCounts(Result):
    """Counts of open attention edges, and open MLP outputs, for a batch of prompts.

    Args:
        active: edges that are open under deterministic gates (all possible ones for a dense model).
        expected: sum of the gates' probabilities over possible edges; differentiable in training.
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
        heads = range(n_layers), range(n_heads)
        counts = {name: getattr(self, name) for name in ("active", "expected", "possible")}
        return pd.DataFrame(
            {name: x.detach().double().mean(dim=1).flatten() for name, x in counts.items()},
            index=pd.MultiIndex.from_product(heads, names=["layer", "head"]),
        )

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
        """Combine what was counted in the layers of one pass."""
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
        """Join the counts of several batches of prompts."""
        joined = {
            name: torch.cat([getattr(part, name) for part in parts], dim=1)
            for name in _COUNTED[1:]
            if all(getattr(part, name) is not None for part in parts)
        }
        return AttentionEdgeCounts(**joined, tokens=torch.cat([part.tokens for part in parts]))


_COUNTED = (
    "real",
    *(field.name for field in fields(AttentionEdgeCounts) if field.name != "tokens"),
)
"""Names of a layer's counts: the mask of real tokens, and all fields stacked over layers."""


def _per_prompt(counts: Tensor) -> float:
    """Sum over layers and heads; mean over prompts."""
    return counts.transpose(0, 1).flatten(1).sum(dim=1).double().mean().item()


def counted_edges(
    valid: Pairs,
    is_open: Real[Tensor, "prompt head query key"] | Bool[Tensor, "prompt head query key"],
    probability: Pattern,
    cost: EdgeCost | None,
) -> Counted:
    """Counts over the queries and keys of one layer, keyed by field of `AttentionEdgeCounts`.

    `is_open` says which valid pairs have an open deterministic gate; `probability` is 0 at others.
    ``real`` says which queries are real tokens: those with a valid pair, since a real token attends
    at least to itself.
    """
    n_prompts, n_heads = is_open.shape[:2]
    found = {
        "real": valid[:, 0].any(dim=-1).expand(n_prompts, -1),
        "possible": _number_of(valid).expand(n_prompts, n_heads),
        "active": _number_of(is_open),
        "expected": probability.sum(dim=(-2, -1)),
    }
    if cost is not None:
        found["cost"] = (cost * probability).sum(dim=(-2, -1))
        found["active_cost"] = (cost * is_open).sum(dim=(-2, -1))
    return found


def _number_of(edges: Tensor) -> Int[Tensor, "*head"]:
    """The number of edges; summed over keys in float32, which is exact and faster than int64."""
    return edges.sum(dim=-1, dtype=torch.float32).sum(dim=-1, dtype=torch.int64)

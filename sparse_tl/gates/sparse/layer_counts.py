"""Counts of one layer in one pass: possible, open and expected attention edges; MLP outputs."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def attention_edges_of_layer(
    valid: Bool[Tensor, "#prompt #head query key"],
    is_open: Bool[Tensor, "prompt head query key"],
    probability: Float[Tensor, "prompt head query key"],
    cost: Float[Tensor, "*#prompt #head #query #key"] | None,
    keep_gates: bool,
) -> dict[str, Tensor]:
    """Counts over the queries and keys of one layer, keyed by field of `AttentionEdgeCounts`.

    Args:
        valid: pairs of real tokens that the layer's mask allows.
        is_open: valid pairs whose deterministic gate is open.
        probability: probability that a gate is open; 0 at pairs that are not valid.
        cost: cost per edge.
        keep_gates: whether to keep `is_open`, and not only its sums.
    """
    n_prompts, n_heads = is_open.shape[:2]
    found = possible_edges(valid, n_prompts, n_heads) | open_edges(is_open, probability, cost)
    return found | {"gates": is_open} if keep_gates else found


def possible_edges(
    valid: Bool[Tensor, "#prompt #head query key"], n_prompts: int, n_heads: int
) -> dict[str, Tensor]:
    """The number of possible edges, and ``real``: which queries of each prompt are real tokens.

    A real token attends at least to itself; a padding token has no valid pair.
    """
    return {
        "real": valid[:, 0].any(dim=-1).expand(n_prompts, -1),
        "possible": _number_of(valid).expand(n_prompts, n_heads),
    }


def open_edges(
    is_open: Bool[Tensor, "*head query key"] | Float[Tensor, "*head query key"],
    probability: Float[Tensor, "*head query key"],
    cost: Float[Tensor, "*#head #query #key"] | None,
) -> dict[str, Tensor]:
    """The numbers and costs of active and expected edges."""
    edges = (-2, -1)
    found = {"active": _number_of(is_open), "expected": probability.sum(dim=edges)}
    if cost is not None:
        found["cost"] = (cost * probability).sum(dim=edges)
        found["active_cost"] = (cost * is_open).sum(dim=edges)
    return found


def _number_of(
    edges: Bool[Tensor, "*head query key"] | Float[Tensor, "*head query key"],
) -> Int[Tensor, "*head"]:
    """The number of edges; summed over keys in float32, which is exact and faster than int64."""
    return edges.sum(dim=-1, dtype=torch.float32).sum(dim=-1, dtype=torch.int64)


def mlps_of_layer(
    is_open: Bool[Tensor, "prompt pos"], probability: Float[Tensor, "prompt pos"], keep_gates: bool
) -> dict[str, Tensor]:
    """Counts of one MLP at each position; `AttentionEdgeCounts.of_pass` drops padding."""
    found = {
        "active_mlps": is_open,
        "expected_mlps": probability,
        "possible_mlps": torch.ones_like(is_open),
    }
    return found | {"mlp_gates": is_open} if keep_gates else found

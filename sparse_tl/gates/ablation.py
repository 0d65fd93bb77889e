"""Ablate heads and attention edges by hand, as gates that are closed inside a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_tl.calls.arguments import Seed, checked
from sparse_tl.calls.scopes import Scope
from sparse_tl.gates.closed_edges import ClosedAttentionEdges, ClosedByRule, ClosedEdges
from sparse_tl.gates.columns import Columns
from sparse_tl.gates.patches import Patch, ReferencePrompts
from sparse_tl.gates.run import gated
from sparse_tl.gates.sites import AttentionEdges, Heads
from sparse_tl.lens import Adapter, HeadOrName, HookedModel, adapt, heads_of
from sparse_tl.parts.grids import AttentionGrid

EVERY = slice(None)
AttentionEdgeOrName = tuple[int, int, int, int] | str
"""An attention edge: (layer, head, query, key), or its name, such as "a3.h2:5->8"."""


@checked
def ablate_heads(
    model: HookedModel,
    heads: Sequence[HeadOrName],
    patch: Patch = "zero",
    *,
    reference: ReferencePrompts | None = None,
    seed: Seed = 0,
) -> Scope[None]:
    """Inside the block, patch the output of these heads at ``hook_z``; see `gated`.

    Args:
        model: dense or sparse model.
        heads: heads to ablate, as (layer, head) pairs or by name: ``["a3.h2"]``.
        patch: value that replaces the heads' output, as in `gated`.
        reference: reference prompts for "mean", "corrupted" and "resample", as in `gated`.
        seed: random seed for "resample".

    Raises:
        ValueError: no head is given, the model lacks a head, or as in `gated`.
    """
    adapter = adapt(model)
    if not heads:
        raise ValueError("expected at least one head to ablate; got none")
    gates = torch.ones(adapter.n_layers, adapter.n_heads, device=adapter.device)
    for layer, head in heads_of(adapter, heads):
        gates[layer, head] = 0
    return gated(model, Heads(), gates, patch, reference=reference, seed=seed)


@checked
def ablate_attention_edges(
    model: HookedModel,
    edges: Sequence[AttentionEdgeOrName] | None = None,
    *,
    heads: Sequence[HeadOrName] | None = None,
    query: Columns | None = None,
    key: Columns | None = None,
) -> Scope[None]:
    """Inside the block, attention is 0 at these edges, whatever the learned gates are.

    Edges are listed, or chosen by a rule: ``query=slice(15, None), key=[2, 3]`` cuts attention from
    column 15 on, including tokens still to be generated, to columns 2 and 3. As with a closed gate,
    nothing is renormalised: the weights of other keys do not change.

    Args:
        model: dense or sparse model.
        edges: (layer, head, query, key) tuples, with query and key as columns from 0; or names,
            from key to query: ``["a3.h2:5->8"]``.
        heads: in place of `edges`: heads in which the rule holds, as in `ablate_heads`; all by
            default.
        query: columns of the queries: one, a list, a slice, or a function that says whether a
            column is selected; all by default. Negative columns count from the end of the tokens
            that are run.
        key: columns of the keys, likewise.

    Raises:
        ValueError: no edge is given, both edges and a rule are, the model lacks a head or an edge,
            or a causal model's key follows its query; when the model is run, an edge or a listed
            column lies beyond the end of the prompts, or a column counts from the end in a run with
            a key-value cache.

    Reference: Geva et al., arXiv 2304.14767 (attention knockout), which renormalises.
    """
    return gated(model, AttentionEdges(), _closed(adapt(model), edges, heads, query, key))


def _closed(
    adapter: Adapter,
    edges: Sequence[AttentionEdgeOrName] | None,
    heads: Sequence[HeadOrName] | None,
    query: Columns | None,
    key: Columns | None,
) -> ClosedEdges:
    ruled = query is not None or key is not None
    if ruled if edges is not None else not ruled:
        raise ValueError(
            "expected attention edges, or a rule for query, key or both; got "
            + ("both" if ruled else "neither")
        )
    if edges is None:
        if heads is None:
            heads = [(i, j) for i in range(adapter.n_layers) for j in range(adapter.n_heads)]
        if not len(heads):
            raise ValueError("expected at least one head in which to cut attention; got none")
        heads = heads_of(adapter, heads)
        return ClosedByRule(heads, EVERY if query is None else query, EVERY if key is None else key)
    if heads is not None:
        raise ValueError("expected heads with a rule alone; listed edges name their own")
    if not len(edges):
        raise ValueError("expected at least one attention edge to ablate; got none")
    places = [AttentionGrid.parse(edge) if isinstance(edge, str) else edge for edge in edges]
    heads_of(adapter, [(layer, head) for layer, head, _, _ in places])
    for edge, (_, _, at, to) in zip(edges, places, strict=True):
        inside = 0 <= at < adapter.n_ctx and 0 <= to < adapter.n_ctx
        if not inside or (adapter.causal and to > at):
            raise ValueError(
                "expected attention edges (layer, head, query, key)"
                + (" with the key at or before the query" if adapter.causal else "")
                + f", in columns 0..{adapter.n_ctx - 1}; got {edge}"
            )
    return ClosedAttentionEdges(torch.tensor(places))

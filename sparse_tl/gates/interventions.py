"""Interventions by hand, inside a block: ablate heads, ablate attention edges, steer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import (
    EMBEDDED,
    HeadOrName,
    Hook,
    HookedModel,
    Order,
    adapt,
    attached,
    evaluation_mode,
    heads_of,
)
from sparse_tl.calls.arguments import Seed, checked
from sparse_tl.calls.scopes import scope
from sparse_tl.gates.closed_edges import ClosedAttentionEdges, ClosedByRule, Columns, meant
from sparse_tl.gates.patches import Patch, ReferencePrompts
from sparse_tl.gates.run import gated
from sparse_tl.gates.sites import AttentionEdges, Heads
from sparse_tl.graph import AttentionGrid

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
) -> AbstractContextManager[None]:
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
        raise ValueError("there is no head to ablate")
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
) -> AbstractContextManager[None]:
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
    adapter = adapt(model)
    ruled = query is not None or key is not None
    if ruled == (edges is not None) or not ruled and heads is not None:
        raise ValueError("give either attention edges, or a rule: query, key or both, and heads")
    if edges is None:
        if heads is None:
            heads = [(i, j) for i in range(adapter.n_layers) for j in range(adapter.n_heads)]
        if not len(heads):
            raise ValueError("there is no head in which to cut attention")
        every = slice(None)
        rule = (every if columns is None else columns for columns in (query, key))
        return gated(model, AttentionEdges(), ClosedByRule(heads_of(adapter, heads), *rule))
    if not len(edges):
        raise ValueError("there is no attention edge to ablate")
    places = [AttentionGrid.parse(edge) if isinstance(edge, str) else edge for edge in edges]
    heads_of(adapter, [(layer, head) for layer, head, _, _ in places])
    for edge, (_, _, at, to) in zip(edges, places, strict=True):
        inside = 0 <= at < adapter.n_ctx and 0 <= to < adapter.n_ctx
        if not inside or (adapter.causal and to > at):
            raise ValueError(
                f"{edge} is no attention edge (layer, head, query, key) of this model, whose "
                f"columns are 0..{adapter.n_ctx - 1}"
                + (" and whose keys are at or before their query" if adapter.causal else "")
            )
    return gated(model, AttentionEdges(), ClosedAttentionEdges(torch.tensor(places)))


@checked
@scope
def steer(
    model: HookedModel,
    name: str,
    vector: Float[Tensor, "*size"],
    *,
    scale: float = 1.0,
    positions: Columns | None = None,
) -> Iterator[None]:
    """Inside the block, add ``scale * vector`` to the activations at a hook point.

    Unlike a gate, which takes something away, this adds something that the model did not compute.
    ``positions=slice(0, 15)`` steers the 15 tokens of a prompt, and none that `generate` adds, with
    or without a key-value cache. The model is in evaluation mode in the block.

    Args:
        model: dense or sparse model.
        name: hook point, such as "blocks.3.hook_resid_pre".
        vector: vector of the size of one position's activation: ``[d_model]`` in the residual
            stream, ``[head, d_head]`` at ``attn.hook_z``. Gradients reach it.
        scale: factor; negative to steer the other way.
        positions: columns to steer: one, a list, a slice, or a function that says whether to steer
            a column. Negative columns count from the end of the tokens that are run. By default
            all, including those of generated tokens.

    Raises:
        ValueError: the model lacks the hook point, or it has no position of its own to steer; when
            the model is run, the vector has another size than the activation, a listed position
            lies outside the prompts, or one counts from the end in a run with a key-value cache;
            when the block ends, the model was run to its end and never called the hook point.

    Reference: Turner et al., arXiv 2308.10248 (activation addition).
    """
    adapter = adapt(model)
    if name.endswith(("hook_attn_scores", "hook_pattern")):
        raise ValueError(
            f"{name} has a number for each query and key, not a vector for each position: hook it "
            "by hand, or cut edges with ablate_attention_edges"
        )
    if not vector.isfinite().all():
        raise ValueError("the vector holds NaN or infinity")
    start = end = 0  # the columns of this pass
    ran = fired = False

    def add(value: Float[Tensor, "batch pos *size"]) -> Tensor:
        if value.shape[2:] != vector.shape:
            raise ValueError(
                f"the vector has shape {tuple(vector.shape)}; a position at {name} has "
                f"{tuple(value.shape[2:])}"
            )
        nonlocal fired
        fired = True
        change = scale * vector.to(value)
        if positions is None:
            return value + change
        n = value.shape[1]
        last = end or start + n
        chosen = meant(positions, start, last, first=last - n).to(value.device)
        return value + chosen.view(n, *[1] * vector.ndim) * change

    def begin(cached: Int[Tensor, ""]) -> None:
        nonlocal start, end
        start, end = int(cached), 0

    def note(residual: Float[Tensor, "batch pos d_model"]) -> None:
        # HookedTransformer's `hook_rot_k` has the keys of all columns, so a width is not enough.
        nonlocal end
        end = start + residual.shape[1]

    def done(*_: object) -> None:
        nonlocal ran
        ran = True

    hooks: list[Hook] = [(name, Order.FIRST, add)]
    if positions is not None:
        hooks += [("cached_columns", Order.FIRST, begin), (EMBEDDED, Order.FIRST, note)]
    handle = adapter.core.register_forward_hook(done)
    try:
        with attached(adapter, hooks), evaluation_mode(model):
            yield
    finally:
        handle.remove()
    if ran and not fired:
        raise ValueError(
            f"{name} of {adapter.name!r} never fired, so nothing was steered: choose a hook point "
            f"that the model calls, such as {EMBEDDED} in the residual stream"
        )

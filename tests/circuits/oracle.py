"""The slow, obviously right way to run a model under a circuit: every input and output split.

TransformerLens materialises each head's inputs and output (``use_split_qkv_input``,
``use_attn_result``, ``use_hook_mlp_in``), and plain hooks exchange at each input what patched
sources wrote there. Nothing of `sparse_tl.lens` is used: this is what fast paths are tested by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitEdge, CircuitGraph, Node
from sparse_tl.lens import Model
from sparse_tl.metrics import Metric, explained_effect


@torch.no_grad()
def run_patched(
    model: Model,
    graph: CircuitGraph,
    pairs: PromptPairs,
    mask: Tensor,
    patch: Literal["corrupted", "mean", "zero"] = "corrupted",
) -> Float[Tensor, "pair vocab"]:
    """Logits at each pair's position when a circuit alone carries the clean prompt.

    A destination v reads ``b + sum_u mask[u, v] written_u + (1 - mask[u, v]) patch_u`` over all
    earlier sources u. ``written_u`` is what u writes *in this very run*, from its own patched
    inputs; ``b`` are the biases ``b_O`` of earlier layers, which belong to no source.
    Normalisations are computed anew from that sum.

    Args:
        model: dense; its weights and flags are as before afterwards.
        graph: its graph.
        pairs: the prompts.
        mask: ``[source, destination]``, 1 (True) keeps and 0 (False) patches; gates between
            interpolate. What is no edge of the graph is ignored.
        patch: the corrupted prompt's own run, the mean over the clean prompts position by
            position, or 0.
    """
    with _split(model, graph):
        if patch == "corrupted":
            patched = written_by(model, graph, pairs.corrupted)
        else:
            patched = written_by(model, graph, pairs.clean).mean(dim=1, keepdim=True)
            patched = patched * (patch == "mean")
        closed = (1 - mask.to(patched.dtype)) * graph.exists
        written = torch.zeros_like(patched).expand(-1, *pairs.clean.shape, -1).clone()
        hooks: list[Any] = [*_recording(model, graph, written)]
        hooks += _exchanging(model, graph, written, patched, closed)
        logits = model.run_with_hooks(pairs.clean, fwd_hooks=hooks)
    return pairs.read(logits)


def explained(
    model: Model, graph: CircuitGraph, pairs: PromptPairs, metric: Metric, mask: Tensor
) -> float:
    """Explained effect of a circuit; what is outside of it is patched with the corrupted run."""
    with torch.no_grad():
        clean, corrupted = (
            metric(pairs.read(model(tokens)), pairs) for tokens in (pairs.clean, pairs.corrupted)
        )
    circuit = metric(run_patched(model, graph, pairs, mask), pairs)
    return explained_effect(circuit, clean, corrupted).item()


def mask_of(graph: CircuitGraph, edges: Sequence[CircuitEdge | str] | frozenset[str]) -> Tensor:
    """True at these edges: the mask that keeps them and patches all others."""
    mask = torch.zeros_like(graph.exists)
    for edge in edges:
        mask[graph.index(edge)] = True
    return mask


@torch.no_grad()
def written_by(
    model: Model, graph: CircuitGraph, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "source batch pos d_model"]:
    """What every source writes to the residual stream in a plain run; heads without ``b_O``."""
    shape = (len(graph.sources), *tokens.shape, model.cfg.d_model)
    written = torch.zeros(shape, dtype=model.W_E.dtype, device=model.W_E.device)
    with _split(model, graph):
        hooks: list[Any] = [*_recording(model, graph, written)]
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    return written


@contextmanager
def _split(model: Model, graph: CircuitGraph) -> Iterator[None]:
    """TransformerLens's flags on, and afterwards as they were."""
    flags = ["use_split_qkv_input", "use_attn_result"] + ["use_hook_mlp_in"] * graph.has_mlps
    before = {flag: getattr(model.cfg, flag) for flag in flags}
    for flag in flags:
        getattr(model, f"set_{flag}")(True)
    try:
        yield
    finally:
        for flag, value in before.items():
            getattr(model, f"set_{flag}")(value)


def _recording(model: Model, graph: CircuitGraph, written: Tensor) -> Iterator[tuple[str, Any]]:
    """Hooks that fill `written` as the sources write."""

    def keep(value: Tensor, hook: Any, rows: slice, heads: bool) -> None:
        written[rows] = value.permute(2, 0, 1, 3) if heads else value

    def rows_of(node: Node, n: int = 1) -> slice:
        first = graph.source_index(node)
        return slice(first, first + n)

    yield "blocks.0.hook_resid_pre", partial(keep, rows=rows_of(Node("input")), heads=False)
    for layer in range(graph.n_layers):
        heads = rows_of(Node("head", layer), graph.n_heads)
        yield f"blocks.{layer}.attn.hook_result", partial(keep, rows=heads, heads=True)
        if graph.has_mlps:
            mlp = rows_of(Node("mlp", layer))
            yield f"blocks.{layer}.hook_mlp_out", partial(keep, rows=mlp, heads=False)


def _exchanging(
    model: Model, graph: CircuitGraph, written: Tensor, patched: Tensor, closed: Tensor
) -> Iterator[tuple[str, Any]]:
    """Hooks that exchange, at every input, a patched source's write for its patch.

    ``residual + closed (patch - written)``: the residual already holds all that was written.
    """

    def change_at(columns: list[int]) -> Tensor:
        return torch.einsum("sbpm,sc->bpcm", patched - written, closed[:, columns])

    def at_heads(value: Tensor, hook: Any, columns: list[int]) -> Tensor:
        return value + change_at(columns)

    def at_whole(value: Tensor, hook: Any, columns: list[int]) -> Tensor:
        return value + change_at(columns)[:, :, 0]

    for layer in range(graph.n_layers):
        for slot in "qkv":
            columns = [
                column
                for column, destination in enumerate(graph.destinations)
                if destination.slot == slot and destination.node.layer == layer
            ]
            yield f"blocks.{layer}.hook_{slot}_input", partial(at_heads, columns=columns)
        if graph.has_mlps:
            columns = [graph.destination_index(f"m{layer}")]
            yield f"blocks.{layer}.hook_mlp_in", partial(at_whole, columns=columns)
    last = f"blocks.{graph.n_layers - 1}.hook_resid_post"
    yield last, partial(at_whole, columns=[graph.destination_index("logits")])

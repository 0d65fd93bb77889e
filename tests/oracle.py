"""The slow, obviously right way to run a model under a circuit: one destination after the other.

Each destination reads a residual stream of its own. It is put in the place of the model's in a
whole forward pass, of which nothing is kept but what that destination makes of it: the q of a head,
say. Attention then runs with the q, k and v that were collected so. Where what attention writes is
normalised or multiplied, each head gets its share of what came of their sum. Nothing of
`sparse_tl.backend` is used, and nothing but plain hooks that every kind of model has: this is what
fast paths are tested by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import Model
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitEdge, CircuitGraph, Destination
from sparse_tl.metrics import Metric, explained_effect

Reading = Callable[[Destination, Tensor], Tensor]


def run_split(
    model: Model,
    graph: CircuitGraph,
    tokens: Int[Tensor, "batch pos"],
    read: Reading,
    embedded: Tensor | None = None,
) -> Float[Tensor, "batch pos vocab"]:
    """Logits when every destination reads what `read` makes of the sources before it.

    Biases ``b_O`` of earlier layers, which belong to no source, are added to that. Differentiable.

    Args:
        model: dense.
        graph: its graph.
        tokens: the prompts.
        read: given a destination and what the earlier sources wrote *in this very run*, ``[source,
            batch, pos, d_model]``, the ``[batch, pos, d_model]`` that the destination reads.
        embedded: what the input node writes, if not the tokens' embeddings.
    """
    with torch.no_grad():
        streams = [_place(graph, to) for to in graph.destinations]
        plain = _pass(model, tokens, keep=[*streams, *_source_points(graph)])
        own = _written(model, graph, plain)
    written = [own[0] if embedded is None else embedded]

    def read_by(destination: Destination) -> Tensor:
        n = graph.n_sources_before(destination.node)
        biases = plain[_place(graph, destination)] - own[:n].sum(0)
        return biases + read(destination, torch.stack(written[:n]))

    for layer in range(graph.n_layers):
        here = [to for to in graph.destinations[:-1] if to.node.layer == layer]
        entering = f"blocks.{layer}.hook_resid_pre"
        slots: dict[str, Tensor] = {}
        for slot in "qkv":
            heads = [to for to in here if to.slot == slot]
            inputs = torch.cat([read_by(to) for to in heads])
            point = f"blocks.{layer}.attn.hook_{slot}"
            every = tokens.repeat(len(heads), 1)
            found = _pass(model, every, keep=[point], put={entering: inputs})[point]
            parts = zip(found.chunk(len(heads)), heads, strict=True)
            axis = 1 if is_latent(model) else 2  # of heads
            slots[point] = torch.stack([p.select(axis, to.node.head) for p, to in parts], axis)
        attention = _pass(model, tokens, keep=_attention_points(layer), put=slots)
        written += [*_by_head(model, layer, attention)]
        if graph.has_mlps:
            out, put = f"blocks.{layer}.hook_mlp_out", {_place(graph, here[-1]): read_by(here[-1])}
            written.append(_pass(model, tokens, keep=[out], put=put)[out])
    last = graph.destinations[-1]
    return _pass(model, tokens, put={_place(graph, last): read_by(last)})["logits"]


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
        model: dense.
        graph: its graph.
        pairs: the prompts.
        mask: ``[source, destination]``, or one for every token, ``[pair, pos, source,
            destination]``; 1 (True) keeps and 0 (False) patches, gates between interpolate. What
            is no edge of the graph is ignored.
        patch: the corrupted prompt's own run, the mean over the clean prompts position by
            position, or 0.
    """
    if patch == "corrupted":
        patches = written_by(model, graph, pairs.corrupted)
    else:
        patches = written_by(model, graph, pairs.clean).mean(dim=1, keepdim=True)
        patches = patches * (patch == "mean")

    def read(destination: Destination, written: Tensor) -> Tensor:
        n = len(written)
        kept = mask[..., :n, graph.destination_index(destination)].to(written.dtype)
        kept = kept[:, None, None, None] if mask.ndim == 2 else kept.permute(2, 0, 1)[..., None]
        return (patches[:n] + kept * (written - patches[:n])).sum(0)

    return pairs.read(run_split(model, graph, pairs.clean, read))


def run_patched_each(
    model: Model, graph: CircuitGraph, pairs: PromptPairs, masks: Tensor, patch: Any = "corrupted"
) -> Float[Tensor, "mask pair vocab"]:
    """`run_patched` under each of several masks ``[mask, source, destination]``, in one pass."""
    rows, length = torch.arange(len(pairs)).repeat(len(masks)), pairs.clean.shape[1]
    each = masks.repeat_interleave(len(pairs), dim=0)[:, None].expand(-1, length, -1, -1)
    found = run_patched(model, graph, pairs.select(rows), each, patch)
    return found.unflatten(0, (len(masks), len(pairs)))


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


def slow_scores(
    model: Model, graph: CircuitGraph, pairs: PromptPairs, metric: Metric, share: float = 1.0
) -> Float[Tensor, "source destination"]:
    """Edge attribution by the paper's formula, over all tokens, mean over pairs."""
    return slow_token_scores(model, graph, pairs, metric, share).sum(dim=(0, 1)) / len(pairs)


def slow_token_scores(
    model: Model, graph: CircuitGraph, pairs: PromptPairs, metric: Metric, share: float = 1.0
) -> Float[Tensor, "pair pos source destination"]:
    """Edge attribution of every token, with what every destination reads a leaf of its own.

    Gradients are taken at embeddings that lie so far on the way from corrupted to clean.
    """
    clean, corrupted = (written_by(model, graph, some) for some in (pairs.clean, pairs.corrupted))
    embedded = torch.lerp(corrupted[0], clean[0], share)
    leaves: dict[Destination, Tensor] = {}

    def read(destination: Destination, written: Tensor) -> Tensor:
        leaves[destination] = torch.zeros_like(embedded, requires_grad=True)
        return written.sum(0) + leaves[destination]

    logits = run_split(model, graph, pairs.clean, read, embedded)
    metric(pairs.read(logits), pairs).sum().backward()
    scores = torch.zeros(*pairs.clean.shape, *graph.exists.shape, dtype=torch.float64)
    for edge in graph.edges:
        index = graph.index(edge)
        gradient = leaves[edge.destination].grad
        assert gradient is not None
        scores[..., *index] = ((corrupted - clean)[index[0]] * gradient).sum(dim=-1).double()
    return scores


@torch.no_grad()
def written_by(
    model: Model, graph: CircuitGraph, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "source batch pos d_model"]:
    """What every source writes to the residual stream in a plain run; heads without ``b_O``."""
    return _written(model, graph, _pass(model, tokens, keep=_source_points(graph)))


def _pass(
    model: Any, tokens: Tensor, keep: Sequence[str] = (), put: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """A whole forward pass: its logits, and what stood at some hook points; others are replaced."""
    kept: dict[str, Tensor] = {}

    def hook_at(name: str) -> Any:
        def hook(value: Tensor, hook: Any) -> Tensor:
            kept[name] = put[name] if put and name in put else value
            return kept[name]

        return name, hook

    hooks = [hook_at(name) for name in dict.fromkeys([*keep, *(put or ())])]
    kept["logits"] = model.run_with_hooks(tokens, fwd_hooks=hooks)
    return kept


def is_latent(model: Any) -> bool:
    """Whether q, k and v come from latents: then they are ``[batch, head, pos, d_head]``."""
    return hasattr(model.blocks[0].attn, "hook_kv_latent")


def by_head(model: Any, z: Tensor) -> Tensor:
    """z as ``[batch, pos, head, d_head]``; under latent attention hook_z shows other groups."""
    return z.reshape(*z.shape[:2], model.cfg.n_heads, -1)


def _place(graph: CircuitGraph, destination: Destination) -> str:
    """The hook point of the residual stream from which a destination reads."""
    node = destination.node
    if node.kind == "logits":
        return f"blocks.{graph.n_layers - 1}.hook_resid_post"
    after_attention = node.kind == "mlp" and not graph.parallel
    return f"blocks.{node.layer}.hook_resid_{'mid' if after_attention else 'pre'}"


def _attention_points(layer: int) -> list[str]:
    return [f"blocks.{layer}.attn.hook_z", f"blocks.{layer}.hook_attn_out"]


def _source_points(graph: CircuitGraph) -> list[str]:
    points = ["blocks.0.hook_resid_pre"]
    for layer in range(graph.n_layers):
        points += _attention_points(layer)
        points += [f"blocks.{layer}.hook_mlp_out"] * graph.has_mlps
    return points


def _written(model: Model, graph: CircuitGraph, found: dict[str, Tensor]) -> Tensor:
    """``[source, batch, pos, d_model]`` of what stood at the source points."""
    written = [found["blocks.0.hook_resid_pre"]]
    for layer in range(graph.n_layers):
        written += [*_by_head(model, layer, found)]
        written += [found[f"blocks.{layer}.hook_mlp_out"]] if graph.has_mlps else []
    return torch.stack(written)


def _by_head(model: Any, layer: int, found: dict[str, Tensor]) -> Tensor:
    z, out = (found[name] for name in _attention_points(layer))
    attention = model.blocks[layer].attn
    if is_latent(model):
        z = by_head(model, z)
        project = attention.original_component.o_proj.original_component
        weight, bias = project.weight.T.unflatten(0, (z.shape[2], -1)), project.bias
    else:
        weight, bias = attention.W_O, attention.b_O
    parts = torch.einsum("bphe,hed->hbpd", z, weight)
    if bias is not None:
        out = out - bias
    total = parts.sum(0)
    if (out - total).abs().max() <= 1e-4 * out.abs().max():
        return parts
    return parts * (out / total)  # entry by entry: a multiplier, or weight over scale of a norm

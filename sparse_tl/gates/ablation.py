"""Heads and attention edges taken out by hand, for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.lens import HookedModel, Order, attached, attention_shape, layer_points

Ablation = Literal["zero", "mean", "resample"]


@contextmanager
def ablate_heads(
    model: HookedModel,
    heads: Sequence[tuple[int, int]],
    kind: Ablation | str = "zero",
    *,
    reference: Int[Tensor, "prompt pos"] | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Inside the block, what these heads write is replaced at ``hook_z``; after it nothing is.

    Args:
        model: dense or sparse.
        heads: (layer, head) of each.
        kind: "zero" writes nothing; "mean" writes the head's mean over the reference prompts,
            position by position; "resample" writes, for every prompt that is run, what the head
            writes on a reference prompt drawn at random.
        reference: prompts for "mean" and "resample", at least as long as those that are run;
            neither have padding on the left.
        seed: of the draws.

    Raises:
        ValueError: a head that the model lacks, an unknown kind, a reference that is missing, not
            asked for, or shorter than a prompt that is run.
    """
    shape = attention_shape(model)
    if kind not in get_args(Ablation):
        raise ValueError(f"expected a kind of {get_args(Ablation)}; got {kind!r}")
    if not heads:
        raise ValueError("expected at least one head to ablate; got none")
    for layer, head in heads:
        shape.check_head(layer, head)
    if (reference is None) != (kind == "zero"):
        raise ValueError(
            f"expected reference prompts for 'mean' and 'resample', and for these alone; got "
            f"kind={kind!r} {'without' if reference is None else 'with'} them"
        )
    by_layer: dict[int, list[int]] = {}
    for layer, head in dict.fromkeys(heads):
        by_layer.setdefault(layer, []).append(head)
    names = {layer: layer_points(model, "attn.hook_z")[layer] for layer in by_layer}
    written = {} if reference is None else _written(model, reference, names, kind)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(0, dtype=torch.long)
    keys: dict[int, int] = {}

    def note(layer: int, pattern: Float[Tensor, "batch head query key"]) -> None:
        keys[layer] = pattern.shape[-1]

    def replace(layer: int, z: Float[Tensor, "batch pos head d_head"]) -> Tensor:
        nonlocal rows
        z, chosen = z.clone(), by_layer[layer]
        if layer not in written:
            z[:, :, chosen] = 0
            return z
        source, length = written[layer], keys[layer]
        first = length - z.shape[1]  # with a key-value cache the queries are the last of the keys
        if source.shape[1] < length:
            raise ValueError(
                f"expected reference prompts at least as long as the {length} tokens that are "
                f"run; they have {source.shape[1]}"
            )
        if kind == "resample":
            # All heads of a prompt show the same reference prompt, from its start to its end.
            if layer == min(by_layer) and not (first and len(rows) == len(z)):
                rows = torch.randint(len(source), (len(z),), generator=generator)
            source = source[rows.repeat(len(z) // len(rows)).to(source.device)]
        z[:, :, chosen] = source[:, first:length, chosen].to(z.dtype)
        return z

    # First, so that a cache and the user's own hooks see what the heads write now.
    hooks = [(name, Order.FIRST, partial(replace, layer)) for layer, name in names.items()]
    if written:
        patterns = layer_points(model, "attn.hook_pattern")
        hooks += [(patterns[layer], Order.FIRST, partial(note, layer)) for layer in names]
    with attached(model, hooks):
        yield


@contextmanager
def ablate_attention_edges(
    model: HookedModel, edges: Sequence[tuple[int, int, int, int]]
) -> Iterator[None]:
    """Inside the block the pattern at these attention edges is 0, after any gate.

    The weights of the other keys stay as they are, as with a closed gate: nothing is renormalised.

    Args:
        model: dense or sparse.
        edges: (layer, head, query, key) of each; query and key are columns, from 0.

    Raises:
        ValueError: no edge, an edge that the model lacks or that leads backwards, or, when the
            model is run, an edge beyond the end of the prompts.
    """
    shape = attention_shape(model)
    if not edges:
        raise ValueError("expected at least one attention edge to ablate; got none")
    by_layer: dict[int, list[tuple[int, int, int]]] = {}
    for layer, head, query, key in edges:
        shape.check_head(layer, head)
        if not 0 <= key <= query < model.cfg.n_ctx:
            raise ValueError(
                f"expected attention edges (layer, head, query, key) with the key at or before the "
                f"query, in columns 0..{model.cfg.n_ctx - 1}; got {(layer, head, query, key)}"
            )
        by_layer.setdefault(layer, []).append((head, query, key))

    def cut(layer: int, pattern: Float[Tensor, "batch head query key"]) -> Tensor:
        n_queries, n_keys = pattern.shape[2:]
        last = max(query for _, query, _ in by_layer[layer])
        if last >= n_keys:
            raise ValueError(
                f"expected attention edges within the prompt of {n_keys} tokens; got query {last}"
            )
        before = n_keys - n_queries  # with a key-value cache only the last queries run
        here = [(head, q - before, key) for head, q, key in by_layer[layer] if q >= before]
        pattern = pattern.clone()
        if here:
            heads, rows, keys = torch.tensor(here, device=pattern.device).unbind(dim=1)
            pattern[:, heads, rows, keys] = 0
        return pattern

    names = layer_points(model, "attn.hook_pattern")
    # Last, so that gates, which come first, cannot open an edge again.
    hooks = [(names[layer], Order.LAST, partial(cut, layer)) for layer in by_layer]
    with attached(model, hooks):
        yield


@torch.no_grad()
def _written(
    model: HookedModel, reference: Int[Tensor, "prompt pos"], names: Mapping[int, str], kind: str
) -> dict[int, Float[Tensor, "source pos head d_head"]]:
    """What the heads of some layers write on the reference prompts, or its mean over them."""
    kept: dict[int, Tensor] = {}

    def keep(layer: int, z: Tensor) -> None:
        kept[layer] = z.mean(dim=0, keepdim=True) if kind == "mean" else z

    hooks = [(name, Order.LAST, partial(keep, layer)) for layer, name in names.items()]
    with attached(model, hooks):
        model(reference, return_type=None)
    return kept

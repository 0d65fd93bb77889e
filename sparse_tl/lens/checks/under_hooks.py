"""Check that circuits are defined under the user's own hooks.

Let u(a) be what node u writes in a prompt a. For two prompts a and b, every residual stream that is
read has to satisfy

    residual_v(a) - residual_v(b) = sum_u (u(a) - u(b)),

and every head and MLP has to read its normalised residual stream. Hooks that add the same to both
prompts (steering) or act within a head or an MLP preserve this. Hooks that rescale, project or
overwrite the stream do not: an edge then carries something other than what its source writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens.checks.sums import rebuilt_reads
from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.hooks import gate_hooks, hooks_besides, record
from sparse_tl.lens.core.modes import evaluation_mode
from sparse_tl.lens.core.numerics import excess, precise, tolerance
from sparse_tl.lens.core.points import Model

LENGTH = 32
"""Length in tokens of the prompt that is run by default."""

_held: WeakKeyDictionary[Model, frozenset[int]] = WeakKeyDictionary()
"""For each model, the hooks under which circuits were last found to be defined."""


@autograd(False)
def check_sums_under_hooks(
    adapter: Adapter, tokens: Int[Tensor, "batch pos"] | None = None
) -> None:
    """Check that a model is the sum of its heads and MLPs under the user's hooks, if it has any.

    Gates of a SparseTransformer act within heads and MLPs, and need no check.

    Args:
        adapter: adapter of the model.
        tokens: prompts to run, since hooks may fit only these; by default, one short prompt.

    Raises:
        ValueError: it is not; the message names the value that a hook changes.
    """
    hooks = hooks_besides(adapter, gate_hooks(adapter))
    if hooks and _held.get(adapter.model) != hooks:
        if tokens is None:
            tokens = torch.arange(min(LENGTH, adapter.n_ctx), device=adapter.device)[None]
        with evaluation_mode(adapter.model):
            _check(adapter, tokens % adapter.d_vocab)
        _held[adapter.model] = hooks


def _check(adapter: Adapter, tokens: Tensor) -> None:
    layers = range(adapter.n_layers)
    reads = [name for layer in layers for name in adapter.destination_points(layer)]
    names = adapter.source_points()
    for layer in layers:
        names += [f"blocks.{layer}.hook_attn_out", *adapter.residual_points(layer)]
    other, other_final = record(adapter, (tokens + 1) % adapter.d_vocab, names)
    kept, final = record(adapter, tokens, [*names, *reads], first=reads)
    kept["final"], other["final"] = final, other_final
    streams = [adapter.residual_points(layer)[0] for layer in layers] + ["final"]
    for layer in layers:
        for what, found, rebuilt, size in rebuilt_reads(adapter, kept, layer):
            _same(adapter, found, rebuilt, size, what)
        parts, attention = [streams[layer]], f"blocks.{layer}.hook_attn_out"
        z, weight = adapter.heads_point(layer), precise(adapter.W_O(layer))
        moved = precise(kept[z]) - precise(other[z])
        squares = precise(kept[z]) ** 2 + precise(other[z]) ** 2
        size = torch.einsum("bphe,hed->bpd", squares, weight**2).sqrt() + kept[attention].abs()
        written = adapter.heads_written(layer, moved).sum(dim=0)
        change = precise(kept[attention]) - precise(other[attention])
        _same(adapter, change, written, size, f"what the heads of layer {layer} write")
        for read in adapter.residual_points(layer)[1:]:
            before = parts if adapter.parallel else [*parts, attention]
            _adds_up(adapter, kept, other, read, before, f"what MLP {layer} reads")
            parts.append(f"blocks.{layer}.hook_mlp_out")
        what = f"the residual stream after layer {layer}"
        _adds_up(adapter, kept, other, streams[layer + 1], [*parts, attention], what)


def _adds_up(
    adapter: Adapter,
    kept: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    whole: str,
    parts: Sequence[str],
    what: str,
) -> None:
    """Check that two prompts' sums differ by the sum of their parts' differences."""
    one, two = (torch.stack([precise(run[part]) for part in parts]) for run in (kept, other))
    change, size = precise(kept[whole]) - precise(other[whole]), one.abs() + two.abs()
    _same(adapter, change, (one - two).sum(dim=0), size.sum(dim=0), what)


def _same(adapter: Adapter, found: Tensor, rebuilt: Tensor, size: Tensor, what: str) -> None:
    beyond = excess(adapter.dtype, found, rebuilt, size)
    if beyond is not None:
        raise ValueError(
            f"expected hooks that leave {adapter.name!r} the sum of its heads and MLPs; a hook on "
            f"it changes {what} by {beyond[0]:.3g}, other than by adding the same to every "
            "prompt: edges would carry something other than what their sources write. Remove the "
            "hook, or let it act within heads or MLPs (at attn.hook_z or hook_mlp_out, for example)"
        )


def check_alike(found: Float[Tensor, "label d_model"], expected: Tensor) -> None:
    """Check that prompts run in a batch, or from a later layer on, give the same as when run alone.

    Raises:
        ValueError: they differ.
    """
    off = float((found.detach() - expected).abs().max())
    most = float(expected.abs().max())
    if off > tolerance(expected.dtype) * most:
        raise ValueError(
            "expected hooks that act on each row and layer by itself; with those on this model, "
            f"prompts that are run beside others, or from a later layer on, differ by {off:.3g} "
            "from the same prompts run alone. Remove hooks that use other rows of the batch, or "
            "values from an earlier layer"
        )

"""Check numerically that a model is the sum of its heads and MLPs, also under the user's hooks.

Each value is rebuilt from what the model had just before, so that rounding in earlier layers does
not matter: in bfloat16, a layer that adds 1 to an activation of 26,368 does not change it. Each
entry may differ by what rounding explains (`excess`).

Under hooks, let u(a) be what node u writes in a prompt a. For two prompts a and b, every residual
stream that is read has to satisfy

    residual_v(a) - residual_v(b) = sum_u (u(a) - u(b)),

and every head and MLP has to read its normalised residual stream. Hooks that add the same to both
prompts (steering) or act within a head or an MLP preserve this. Hooks that rescale, project or
overwrite the stream do not: an edge then carries something other than what its source writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.attaching import Order, attached, gate_hooks, hooks_besides
from sparse_tl.lens.core.limits import check_supported
from sparse_tl.lens.core.modes import evaluation_mode
from sparse_tl.lens.core.points import EMBEDDED, SLOTS, Model
from sparse_tl.lens.core.rounding import excess, precise, tolerance
from sparse_tl.lens.hooks.recording import check_fired, record

_LENGTH = 32
"""Length in tokens of the prompt that is run under hooks by default."""
_UNLIKE = (
    "expected a model that is the sum of its heads and MLPs, each of which reads the normalised "
    "residual stream; in {name!r} {what} differs from that by {off:.3g}, where rounding explains "
    "{allowed:.3g}. Its parts are normalised, scaled or weighted in a way that circuits do not "
    "support."
)
_UNLIKE_UNDER_HOOKS = (
    "expected hooks that leave {name!r} the sum of its heads and MLPs; a hook on it changes {what} "
    "by {off:.3g}, other than by adding the same to every prompt: edges would carry something "
    "other than what their sources write. Remove the hook, or let it act within heads or MLPs (at "
    "attn.hook_z or hook_mlp_out, for example)"
)
_held: WeakKeyDictionary[Model, frozenset[int]] = WeakKeyDictionary()
"""For each model, the hooks under which circuits were last found to be defined."""


def check_sums(adapter: Adapter, tokens: Int[Tensor, "prompt pos"]) -> None:
    """Check that a model is the sum of its heads and MLPs, each reading the residual stream."""
    check_supported(adapter, "circuits")
    names = _points(adapter)
    for layer in range(adapter.n_layers):
        names += adapter.destination_points(layer)
    final = f"blocks.{adapter.n_layers - 1}.hook_resid_post"
    kept, logits = _own_pass(adapter, tokens, [*names, final])
    _check_layers(adapter, {**kept, "final": kept[final]}, None)
    _same_run(adapter, logits, adapter.logits(kept[final]), "the logits")
    _edits_reach(adapter, tokens)


@autograd(False)
def check_sums_under_hooks(
    adapter: Adapter, tokens: Int[Tensor, "batch pos"] | None = None
) -> None:
    """Check that a model is the sum of its heads and MLPs under the user's hooks, if it has any.

    Gates of a SparseTransformer act within heads and MLPs, and need no check.

    Args:
        adapter: adapter of the model.
        tokens: prompts to run, since hooks may fit only these; by default, one short prompt.
    """
    hooks = hooks_besides(adapter, gate_hooks(adapter))
    if not hooks or _held.get(adapter.model) == hooks:
        return
    if tokens is None:
        tokens = torch.arange(min(_LENGTH, adapter.n_ctx), device=adapter.device)[None]
    tokens, names = tokens % adapter.d_vocab, _points(adapter)
    reads = [n for layer in range(adapter.n_layers) for n in adapter.destination_points(layer)]
    with evaluation_mode(adapter.model):
        other, other_final = record(adapter, (tokens + 1) % adapter.d_vocab, names)
        kept, final = record(adapter, tokens, [*names, *reads], first=reads)
    _check_layers(adapter, {**kept, "final": final}, {**other, "final": other_final})
    _held[adapter.model] = hooks


def _points(adapter: Adapter) -> list[str]:
    """What nodes write, and the residual streams."""
    names = adapter.source_points()
    for layer in range(adapter.n_layers):
        names += [f"blocks.{layer}.hook_attn_out", *adapter.residual_points(layer)]
    return names


def _own_pass(
    adapter: Adapter, tokens: Tensor, names: Sequence[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """Activations and logits as the model itself computes them, without fused normalisations."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    with attached(adapter, [(name, Order.LAST, found[name].append) for name in found]):
        logits = adapter.model(tokens)
    kept = {name: values[-1] for name, values in found.items() if values}
    check_fired(adapter, names, kept)
    return kept, logits


def _check_layers(
    adapter: Adapter, kept: Mapping[str, Tensor], other: Mapping[str, Tensor] | None
) -> None:
    """Check every layer of a run; if there is another prompt's, by the differences between both."""
    message = _UNLIKE if other is None else _UNLIKE_UNDER_HOOKS
    runs = [kept] if other is None else [kept, other]

    def moved(name: str) -> Tensor:
        exact = precise(kept[name])
        return exact if other is None else exact - precise(other[name])

    def check_sum(whole: str, parts: Sequence[str], what: str) -> None:
        size = torch.stack([precise(run[part]).abs() for run in runs for part in parts])
        rebuilt = torch.stack([moved(part) for part in parts]).sum(dim=0)
        _same(adapter, moved(whole), rebuilt, size.sum(dim=0), what, message)

    layers = range(adapter.n_layers)
    streams = [adapter.residual_points(layer)[0] for layer in layers] + ["final"]
    for layer in layers:
        for what, found, rebuilt, size in _rebuilt_reads(adapter, kept, layer):
            _same(adapter, found, rebuilt, size, what, message)
        parts, attention = [streams[layer]], f"blocks.{layer}.hook_attn_out"
        z, weight = adapter.heads_point(layer), precise(adapter.W_O(layer))
        squares = torch.stack([precise(run[z]) ** 2 for run in runs]).sum(dim=0)
        size = torch.einsum("bphe,hed->bpd", squares, weight**2).sqrt() + kept[attention].abs()
        heads, written = adapter.heads_written(layer, moved(z)).sum(dim=0), moved(attention)
        if other is None:  # the bias belongs to no head; it is equal at all positions
            heads, size = heads + (written - heads)[:, :1], size + size[:, :1]
        _same(adapter, written, heads, size, f"what the heads of layer {layer} write", message)
        for read in adapter.residual_points(layer)[1:]:
            before = parts if adapter.parallel else [*parts, attention]
            check_sum(read, before, f"what MLP {layer} reads")
            parts.append(f"blocks.{layer}.hook_mlp_out")
        what = f"the residual stream after layer {layer}"
        check_sum(streams[layer + 1], [*parts, attention], what)


def _rebuilt_reads(
    adapter: Adapter, kept: Mapping[str, Tensor], layer: int
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """What a layer's heads and MLP read: name, value, value rebuilt from the residual stream, and
    the size of its terms."""
    *slots, mlp = [*adapter.destination_points(layer), ""][:4]
    before, *before_mlp = adapter.residual_points(layer)
    norm, residual = adapter.norm(layer, "attn").precise(), precise(kept[before])
    normed, size = norm(residual), norm.size(residual)
    for slot, name in zip(SLOTS, slots, strict=True):
        weight, bias = map(precise, adapter.qkv(layer, slot))
        rebuilt = torch.einsum("bpd,hde->bphe", normed, weight) + bias
        added = torch.einsum("bpd,hde->bphe", size**2, weight**2).sqrt() + bias.abs()
        yield f"{slot} of layer {layer}", kept[name], rebuilt, added + rebuilt.abs()
    for name in before_mlp:
        norm, residual = adapter.norm(layer, "mlp").precise(), precise(kept[name])
        yield f"what MLP {layer} reads", kept[mlp], norm(residual), norm.size(residual)


def _edits_reach(adapter: Adapter, tokens: Tensor) -> None:
    """Check that heads and MLPs given another prompt's inputs produce its outputs."""
    layers = range(adapter.n_layers)
    written = [name for name in adapter.source_points() if name != EMBEDDED]
    read = [name for layer in layers for name in adapter.destination_points(layer)]
    there, _ = record(adapter, (tokens + 1) % adapter.d_vocab, [*written, *read])
    replaced = {name: there[name] for name in read}
    found, _ = record(adapter, tokens, written, replaced=replaced)
    for name in written:
        what = f"{name} after edits to what its layer reads"
        _same_run(adapter, found[name], there[name], what)


def _same_run(adapter: Adapter, found: Tensor, again: Tensor, what: str) -> None:
    """Check that the same operations, run twice, gave the same vectors."""
    _same(adapter, found, again, found.abs().amax(dim=-1, keepdim=True), what)


def _same(
    adapter: Adapter,
    found: Tensor,
    rebuilt: Tensor,
    size: Tensor,
    what: str,
    message: str = _UNLIKE,
) -> None:
    beyond = excess(adapter.dtype, found, rebuilt, size)
    if beyond is not None:
        off, allowed = beyond
        said = message.format(name=adapter.name, what=what, off=off, allowed=allowed)
        raise ValueError(said)


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

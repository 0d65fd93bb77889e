"""Check numerically that a model is the sum of its heads and MLPs.

Each value is rebuilt from what the model had just before, so that rounding in earlier layers does
not matter: in bfloat16, a layer that adds 1 to an activation of 26,368 does not change it. Each
entry may differ by what rounding explains (`excess`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.hooks import Order, attached, check_fired, record
from sparse_tl.lens.core.limits import check_supported
from sparse_tl.lens.core.numerics import excess, precise
from sparse_tl.lens.core.points import EMBEDDED, SLOTS


def check_sums(adapter: Adapter, tokens: Int[Tensor, "prompt pos"]) -> None:
    """Check that a model is the sum of its heads and MLPs, each reading the residual stream.

    Raises:
        ValueError: it is not; the message names the part that differs.
    """
    check_supported(adapter, "circuits")
    layers = range(adapter.n_layers)
    names = adapter.source_points()
    for layer in layers:
        names += adapter.destination_points(layer) + adapter.residual_points(layer)
        names.append(f"blocks.{layer}.hook_attn_out")
    final = f"blocks.{adapter.n_layers - 1}.hook_resid_post"
    kept, logits = _own_pass(adapter, tokens, [*names, final])
    for layer in layers:
        _check_heads(adapter, kept, layer)
        _check_stream(adapter, kept, layer)
    _same_run(adapter, logits, adapter.logits(kept[final]), "the logits")
    _edits_reach(adapter, tokens)


def _own_pass(
    adapter: Adapter, tokens: Tensor, names: Sequence[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """Activations and logits as the model itself computes them."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    with attached(adapter, [(name, Order.LAST, found[name].append) for name in found]):
        logits = adapter.model(tokens)
    kept = {name: values[-1] for name, values in found.items() if values}
    check_fired(adapter, names, kept)
    return kept, logits


def _check_heads(adapter: Adapter, kept: Mapping[str, Tensor], layer: int) -> None:
    """Check q, k and v against the residual stream, and what heads write against z."""
    block = f"blocks.{layer}"
    for what, found, rebuilt, size in rebuilt_reads(adapter, kept, layer):
        _same(adapter, found, rebuilt, size, what)
    z, weight = precise(kept[adapter.heads_point(layer)]), precise(adapter.W_O(layer))
    written, heads = kept[f"{block}.hook_attn_out"], adapter.heads_written(layer, z).sum(dim=0)
    added = torch.einsum("bphe,hed->bpd", z**2, weight**2).sqrt() + written.abs()
    # The bias belongs to no head; it is equal at all positions.
    rebuilt, added = heads + (written - heads)[:, :1], added + added[:, :1]
    _same(adapter, written, rebuilt, added, f"what the heads of layer {layer} write")


def rebuilt_reads(
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


def _check_stream(adapter: Adapter, kept: Mapping[str, Tensor], layer: int) -> None:
    """Check what a layer adds to the residual stream, and what its MLP reads from it."""
    block = f"blocks.{layer}"
    parts = [kept[f"{block}.hook_resid_pre"], kept[f"{block}.hook_attn_out"]]
    if adapter.has_mlps:
        reads, what = kept[f"{block}.mlp_input"], f"what MLP {layer} reads"
        _same_sum(adapter, reads, parts[:1] if adapter.parallel else parts, what)
        parts = [*(parts if adapter.parallel else [reads]), kept[f"{block}.hook_mlp_out"]]
    last = layer == adapter.n_layers - 1
    after = kept[f"{block}.hook_resid_post" if last else f"blocks.{layer + 1}.hook_resid_pre"]
    _same_sum(adapter, after, parts, f"the residual stream after layer {layer}")


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


def _same_sum(adapter: Adapter, found: Tensor, parts: Sequence[Tensor], what: str) -> None:
    """Check that a residual stream is the sum of a few parts."""
    exact = torch.stack([precise(part) for part in parts])
    _same(adapter, found, exact.sum(dim=0), exact.abs().sum(dim=0), what)


def _same(adapter: Adapter, found: Tensor, rebuilt: Tensor, size: Tensor, what: str) -> None:
    beyond = excess(adapter.dtype, found, rebuilt, size)
    if beyond is not None:
        off, allowed = beyond
        raise ValueError(
            f"expected a model that is the sum of its heads and MLPs, each of which reads the "
            f"normalised residual stream; in {adapter.name!r} {what} differs from that by "
            f"{off:.3g}, where rounding explains {allowed:.3g}. Its parts are normalised, scaled "
            "or weighted in a way that circuits do not support."
        )

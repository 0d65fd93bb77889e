"""Numerical checks that a model behaves as the package assumes, made on first use.

Each is a small forward pass in which only the package's own hooks run:

*both*     two passes over a prompt agree (no dropout); a bridge computes the same as the
           `transformers` model that it wraps;
*gates*    editing attention scores changes the pattern in every layer; with a pattern of zeros,
           heads write nothing, and nothing of a token reaches later positions;
*mlps*     each MLP is called once before it writes; whatever replaces its output is what the layer
           adds to the residual stream, besides the output of its heads;
*circuits* normalising and projecting the residual stream gives q, k and v; head outputs sum to the
           attention layer's output, and all sources to the final residual stream; unembedding that
           gives the logits; a pass that starts at layer 1 matches a full pass; heads and MLPs given
           the inputs from another prompt produce the outputs from that prompt.

This covers architectures that no list could, and turns wrong numbers into errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakSet

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl import shards
from sparse_tl.graph import CircuitGraph
from sparse_tl.lens.adapter import Adapter
from sparse_tl.lens.attaching import Hook, Order, attached, others_off
from sparse_tl.lens.limits import check_numbers
from sparse_tl.lens.lora import lora_layers
from sparse_tl.lens.places import HookFunction
from sparse_tl.lens.plain import check_wrapped
from sparse_tl.lens.points import EMBEDDED, Model
from sparse_tl.lens.recording import record
from sparse_tl.scopes import autograd

_checked: dict[str, WeakSet[Model]] = {
    kind: WeakSet[Model]() for kind in ("gates", "mlps", "circuits")
}

_WITHOUT_LORA = ("use_attn_result", "use_split_qkv_input")


def check_gates(adapter: Adapter) -> None:
    """Check that gates on attention edges and heads take effect on a model.

    Raises:
        ValueError: a hook point is missing, does not fire exactly once, or ignores edits.
    """
    _once("gates", adapter, _gates_act)


def check_mlps(adapter: Adapter) -> None:
    """Check that gates on MLP outputs take effect on a model.

    Raises:
        ValueError: the model has no MLPs, or they write to the residual stream in other ways.
    """
    _once("mlps", adapter, _mlps_write)


def check_circuits(adapter: Adapter) -> None:
    """Check that a model is the sum of its heads and MLPs, each reading the residual stream.

    Raises:
        ValueError: it is not; the message names the part that differs. Or ranks hold parts of it.
    """
    check_whole(adapter)
    _once("circuits", adapter, _circuits_hold)


def circuit_graph(adapter: Adapter) -> CircuitGraph:
    """The circuit graph of a model that passes `check_circuits`."""
    check_circuits(adapter)
    return CircuitGraph(
        n_layers=adapter.n_layers,
        n_heads=adapter.n_heads,
        n_kv_heads=adapter.n_kv_heads,
        has_mlps=adapter.has_mlps,
        parallel=adapter.parallel,
        coupled=adapter.coupled,
    )


def check_whole(adapter: Adapter) -> None:
    """Check that this process holds the whole model.

    Raises:
        ValueError: ranks hold parts of its weights.
    """
    if shards.is_dealt(adapter.model):
        raise ValueError(
            f"expected a whole model; {adapter.name!r} is sharded, which is for training, held-out "
            "measurements and saving. Load what was saved"
        )


def _check_switches(adapter: Adapter) -> None:
    """Check that no switch is on with which TransformerLens leaves low-rank adapters out."""
    on = [name for name in _WITHOUT_LORA if getattr(adapter.model.cfg, name, False)]
    if on and lora_layers(adapter.model):
        raise ValueError(
            f"expected {' and '.join(on)} to be off in {adapter.name!r}, which has low-rank "
            "adapters: TransformerLens leaves them out there. Or call merge_lora(model) first"
        )


@autograd(False)
def _once(kind: str, adapter: Adapter, check: Callable[[Adapter, Tensor], None]) -> None:
    _check_switches(adapter)
    if adapter.model in _checked[kind]:
        return
    with others_off(adapter.model):
        tokens = _few_tokens(adapter)
        _repeats(adapter, tokens)
        check_wrapped(adapter.model)
        check(adapter, tokens)
    _checked[kind].add(adapter.model)


def _few_tokens(adapter: Adapter) -> Int[Tensor, "1 pos"]:
    """A fixed random prompt."""
    generator = torch.Generator().manual_seed(0)
    length = min(5, adapter.n_ctx)
    return torch.randint(adapter.d_vocab, (1, length), generator=generator).to(adapter.device)


def _repeats(adapter: Adapter, tokens: Tensor) -> None:
    """Check that there is no dropout, which would be mistaken for an effect, and no NaN."""
    first = adapter.model(tokens)
    check_numbers(adapter, first)
    if not adapter.model.training:
        return
    second = adapter.model(tokens)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise ValueError(
            f"expected a model that returns the same for the same prompt; {adapter.name!r} is in "
            "training mode and drops activations at random: call its eval() first"
        )


def _gates_act(adapter: Adapter, tokens: Tensor) -> None:
    model = adapter.model
    suffixes = ("attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z", "hook_resid_post")
    scores, patterns, heads, residuals = map(adapter.layer_points, suffixes)

    def seen(
        prompts: Tensor,
        names: Sequence[str],
        edited: Sequence[str] = (),
        edit: HookFunction = torch.clone,
    ) -> dict[str, list[Tensor]]:
        """Activations at some hook points while others are edited."""
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        hooks: list[Hook] = [(name, Order.FIRST, edit) for name in edited]
        hooks += [(name, Order.LAST, found[name].append) for name in names]
        with attached(adapter, hooks):
            model(prompts, return_type=None)
        return found

    plain = seen(tokens, [*scores, *patterns, *heads])
    for name, values in plain.items():
        if len(values) != 1:
            raise ValueError(
                f"expected {name} to fire once in a forward pass of {adapter.name!r}; it fired "
                f"{len(values)} times. Gates cannot sit on this model as it is configured."
            )
    ramp = torch.arange(tokens.shape[1], device=tokens.device).to(adapter.dtype)
    moved = seen(tokens, patterns, scores, lambda values: values + ramp)
    for layer, name in enumerate(patterns):
        if tokens.shape[1] > 1 and torch.equal(moved[name][0], plain[name][0]):
            _refuse(adapter, layer, "edits to its attention scores do not reach the pattern")
    # Two versions of the first token: later differences must have come through attention.
    two = tokens.repeat(2, 1)
    two[1, 0] = (two[1, 0] + 1) % adapter.d_vocab
    closed = seen(two, [*heads, *residuals], patterns, torch.zeros_like)
    for layer in range(adapter.n_layers):
        if bool(closed[heads[layer]][0].any()):
            _refuse(adapter, layer, "edits to its attention pattern do not reach its heads")
        first, second = closed[residuals[layer]][0][:, 1:]
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-5):
            _refuse(adapter, layer, "what it writes does not come from its heads alone")


def _refuse(adapter: Adapter, layer: int, why: str) -> None:
    raise ValueError(
        f"expected a model whose attention can be gated by hooks; in layer {layer} of "
        f"{adapter.name!r} {why}: gates would have no effect on it"
    )


def _mlps_write(adapter: Adapter, tokens: Tensor) -> None:
    if not adapter.has_mlps:
        raise ValueError(
            f"expected a model with MLPs, for gates on them; {adapter.name!r} has attention alone"
        )
    suffixes = ("hook_resid_pre", "mlp_read", "hook_mlp_out", "hook_resid_post")
    places = [[f"blocks.{layer}.{at}" for at in suffixes] for layer in range(adapter.n_layers)]
    found: dict[str, list[Tensor]] = {name: [] for layer in places for name in layer}
    generator = torch.Generator().manual_seed(0)

    def write(before: str, written: str, value: Tensor) -> Tensor:
        """Noise as large as the residual stream, so that it is not lost to rounding."""
        noise = torch.randn(value.shape, generator=generator).to(value)
        found[written].append(noise * found[before][-1].abs().max())
        return found[written][-1]

    # With a zero pattern heads write nothing, and their biases are equal at all positions.
    hooks: list[Hook] = [
        (name, Order.FIRST, torch.zeros_like) for name in adapter.layer_points("attn.hook_pattern")
    ]
    for before, read, written, after in places:
        hooks.append((written, Order.FIRST, partial(write, before, written)))
        hooks += [(name, Order.LAST, found[name].append) for name in (before, read, after)]
    with attached(adapter, hooks):
        adapter.model(tokens, return_type=None)
    exact = adapter.dtype in (torch.float32, torch.float64)
    for layer, names in enumerate(places):
        once = all(len(found[name]) == 1 for name in names)
        before, read, written, after = (found[name][0] if once else tokens for name in names)
        rest = after - before - written
        off, most = (rest - rest[:, :1]).abs().max(), after.abs().max()
        if not (once and read.shape == before.shape and off <= (1e-3 if exact else 5e-2) * most):
            raise ValueError(
                "expected MLPs that are called once and write to the residual stream, for gates on "
                f"them; that in layer {layer} of {adapter.name!r} does not, or not at hook_mlp_out"
            )


def _circuits_hold(adapter: Adapter, tokens: Tensor) -> None:
    why = adapter.unsupported()
    if why is not None:
        raise ValueError(
            f"expected a causal model whose parts read the residual stream alone; circuits do not "
            f"support {adapter.name!r}: {why}"
        )
    has_mlps, layers = adapter.has_mlps, range(adapter.n_layers)
    names = adapter.source_points()
    for layer in layers:
        names += adapter.destination_points(layer) + adapter.residual_points(layer)
        names.append(f"blocks.{layer}.hook_attn_out")
    kept, final = record(adapter, tokens, names)
    total = kept[EMBEDDED]
    for layer in layers:
        block = f"blocks.{layer}"
        normed = adapter.norm(layer, "attn")(kept[f"{block}.hook_resid_pre"])
        for slot in "qkv":
            weight, bias = adapter.qkv(layer, slot)  # type: ignore[arg-type]
            rebuilt = torch.einsum("bpd,hde->bphe", normed, weight.to(normed.dtype)) + bias
            _same(adapter, kept[f"{block}.attn.hook_{slot}"], rebuilt, f"{slot} of layer {layer}")
        heads = adapter.heads_written(layer, kept[adapter.heads_point(layer)]).sum(dim=0)
        written = kept[f"{block}.hook_attn_out"]
        # The bias belongs to no head; it is equal at all positions.
        rest = written - heads
        _same(adapter, written, heads + rest[:, :1], f"what the heads of layer {layer} write")
        if has_mlps:
            reads = total if adapter.parallel else total + written
            _same(adapter, kept[f"{block}.mlp_input"], reads, f"what MLP {layer} reads")
            rebuilt = adapter.norm(layer, "mlp")(kept[f"{block}.mlp_input"])
            _same(adapter, kept[f"{block}.mlp_normalized"], rebuilt, f"what MLP {layer} reads")
            total = total + kept[f"{block}.hook_mlp_out"]
        total = total + written
    _same(adapter, final, total, "the final residual stream")
    _same(adapter, adapter.model(tokens), adapter.logits(final), "the logits")
    if adapter.n_layers > 1:
        entered = adapter.final(kept["blocks.1.hook_resid_pre"], from_layer=1)
        _same(adapter, final, entered, "the final residual stream of a pass that starts at layer 1")
    _edits_reach(adapter, tokens)


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
        _same(adapter, found[name], there[name], what)


def _same(adapter: Adapter, found: Tensor, rebuilt: Tensor, what: str) -> None:
    exact = adapter.dtype in (torch.float32, torch.float64)
    off = (found - rebuilt).abs().max().item()
    if off > (1e-3 if exact else 5e-2) * (1e-6 + found.abs().max().item()):
        raise ValueError(
            f"expected a model that is the sum of its heads and MLPs, each of which reads the "
            f"normalised residual stream; in {adapter.name!r} {what} differs from that by "
            f"{off:.3g}. Its parts are normalised, scaled or weighted in a way that circuits do "
            "not support."
        )

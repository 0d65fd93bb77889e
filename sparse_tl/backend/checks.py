"""Numerical checks that a model behaves as the package assumes, made on first use.

Each is a small forward pass in evaluation mode, in which only the package's own hooks run (but for
`check_sums_under_hooks`):

*all*      every layer has attention with hook points; the logits are numbers; a bridge computes the
           same as the `transformers` model that it wraps;
*gates*    masked pairs have no attention; editing attention scores changes every pattern; with a
           pattern of zeros, heads write nothing, and nothing of a token reaches later positions;
           if only one head has a pattern, hook_z is zero for the others;
*scores*   the scores of a prompt do not change when tokens follow;
*mlps*     each MLP is called once before it writes; whatever replaces its output is what the layer
           adds to the residual stream, besides the output of its heads;
*circuits* normalising and projecting the residual stream gives q, k and v; head outputs sum to the
           attention layer's output; each layer adds what its heads and MLP write to the stream, and
           nothing else; unembedding the final stream gives the logits; heads and MLPs given inputs
           from another prompt produce that prompt's outputs.

For *circuits*, each value is rebuilt from what the model had just before, so that rounding in
earlier layers does not matter: in bfloat16, a layer that adds 1 to an activation of 26,368 does not
change it. Each entry may differ by what rounding explains (`excess`).

Under the user's hooks, let u(a) be what node u writes in a prompt a. For two prompts a and b, every
residual stream that is read has to satisfy

    residual_v(a) - residual_v(b) = sum_u (u(a) - u(b)),

and every head and MLP has to read its normalised residual stream. Hooks that add the same to both
prompts (steering) or act within a head or an MLP preserve this. Hooks that rescale, project or
overwrite the stream do not: an edge then carries something other than what its source writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend.bridges import check_wrapped
from sparse_tl.backend.devices import has_sharded_weights
from sparse_tl.backend.hook_points import EMBEDDED, SLOTS, HookFunction, Model
from sparse_tl.backend.hooks import (
    Hook,
    Order,
    attached,
    check_fired,
    evaluation_mode,
    gate_hooks,
    hooks_besides,
    record,
    without_user_hooks,
)
from sparse_tl.backend.inputs import check_numbers
from sparse_tl.backend.interface import Adapter
from sparse_tl.backend.lora import lora_layers
from sparse_tl.backend.numerics import excess, precise, tolerance
from sparse_tl.graph import CircuitGraph

_WITHOUT_LORA = ("use_attn_result", "use_split_qkv_input")
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


def _once(check: Callable[[Adapter, Tensor], None]) -> Callable[[Adapter], None]:
    """Make a check of a model on a prompt run once per model, without the user's hooks."""
    passed = WeakSet[Model]()

    @wraps(check)
    @torch.no_grad()
    def run(adapter: Adapter) -> None:
        on = [name for name in _WITHOUT_LORA if getattr(adapter.model.cfg, name, False)]
        if on and lora_layers(adapter.model):
            raise ValueError(
                f"{' and '.join(on)} of {adapter.name!r} makes TransformerLens ignore its low-rank "
                "adapters: switch it off, or call merge_lora(model) first"
            )
        if adapter.model in passed:
            return
        for name in _each(adapter, "attn.hook_attn_scores", "attn.hook_z"):
            try:
                adapter.place(name)
            except ValueError as error:
                layer, _, point = name.removeprefix("blocks.").partition(".")
                raise ValueError(
                    f"expected attention with hook points in every layer; layer {layer} of "
                    f"{adapter.name!r} has no {point}: it is of another kind, such as a recurrence "
                    "or a convolution, or TransformerLens leaves its attention to transformers"
                ) from error
        with without_user_hooks(adapter.model), evaluation_mode(adapter.model):
            generator, shape = torch.Generator().manual_seed(0), (1, min(5, adapter.n_ctx))
            tokens = torch.randint(adapter.d_vocab, shape, generator=generator).to(adapter.device)
            check_numbers(adapter, adapter.model(tokens))
            check_wrapped(adapter.model)
            check(adapter, tokens)
        passed.add(adapter.model)

    return run


def check_whole(adapter: Adapter) -> None:
    """Raise a ValueError if the weights are sharded over processes."""
    if has_sharded_weights(adapter.model):
        raise ValueError(
            f"expected a whole model; {adapter.name!r} is sharded, which is for training, held-out "
            "measurements and saving. Load what was saved"
        )


def _each(adapter: Adapter, *suffixes: str) -> list[str]:
    """The names of places in every layer, layer by layer."""
    return [f"blocks.{layer}.{at}" for layer in range(adapter.n_layers) for at in suffixes]


def _seen(
    adapter: Adapter, tokens: Tensor, names: Sequence[str], edits: Sequence[Hook] = ()
) -> tuple[dict[str, list[Any]], Tensor]:
    """What is at some places in a pass of the model itself under edits, and the logits."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    hooks = [(name, Order.LAST, values.append) for name, values in found.items()]
    with attached(adapter, [*edits, *hooks]):
        return found, adapter.model(tokens)


@_once
def check_gates(adapter: Adapter, tokens: Tensor) -> None:
    """Check that gates on attention edges and heads take effect on a model.

    Raises:
        ValueError: a hook point is missing, does not fire exactly once, or ignores edits.
    """
    suffixes = ("attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z", "hook_resid_post")
    scores, patterns, heads, residuals = map(adapter.layer_points, suffixes)
    masks = _each(adapter, "attn.mask")

    def edited(edit: HookFunction, names: Sequence[str] = patterns) -> list[Hook]:
        return [(name, Order.FIRST, edit) for name in names]

    plain, _ = _seen(adapter, tokens, [*scores, *patterns, *heads, *masks])
    for name, values in plain.items():
        if len(values) != 1:
            raise ValueError(
                f"expected {name} to fire once in a forward pass of {adapter.name!r}; it fired "
                f"{len(values)} times. Gates cannot sit on this model as it is configured."
            )
    ramp = torch.arange(tokens.shape[1], device=tokens.device).to(adapter.dtype)
    rise = edited(lambda values: torch.zeros_like(values) + ramp, scores)
    moved, _ = _seen(adapter, tokens, patterns, rise)
    for layer, name in enumerate(patterns):
        if tokens.shape[1] > 1 and torch.equal(moved[name][0], plain[name][0]):
            _refuse(adapter, layer, "edits to its attention scores do not reach the pattern")
    # Two versions of the first token: later differences must have come through attention.
    two = tokens.repeat(2, 1)
    two[1, 0] = (two[1, 0] + 1) % adapter.d_vocab
    closed, _ = _seen(adapter, two, [*heads, *residuals], edited(torch.zeros_like))
    for layer in range(adapter.n_layers):
        if bool(closed[heads[layer]][0].any()):
            _refuse(adapter, layer, "edits to its attention pattern do not reach its heads")
        first, second = closed[residuals[layer]][0][:, 1:]
        # An MLP's rounding is relative to all that it reads, not to the entry that it writes.
        if excess(adapter.dtype, first, second, first.norm(dim=-1, keepdim=True)):
            _refuse(adapter, layer, "what it writes does not come from its heads alone")
    for name, mask in zip(patterns, masks, strict=True):
        plain[mask][0].check(plain[name][0], f"{name} of {adapter.name!r}")
    own = torch.eye(adapter.n_heads, device=tokens.device).to(adapter.dtype)
    every = tokens[:, :2].repeat(adapter.n_heads, 1)
    alone, _ = _seen(adapter, every, heads, edited(lambda values: values * own[:, :, None, None]))
    for layer, name in enumerate(heads):
        z = alone[name][0]
        if z.shape[2:-1] != own.shape[1:] or bool(z[own[:, None].expand(z.shape[:-1]) == 0].any()):
            _refuse(adapter, layer, "hook_z has no axis with one entry for each head")


def _refuse(adapter: Adapter, layer: int, why: str) -> None:
    raise ValueError(
        f"expected a model whose attention can be gated by hooks; in layer {layer} of "
        f"{adapter.name!r} {why}: gates would have no effect on it"
    )


@_once
def check_score_gates(adapter: Adapter, tokens: Tensor) -> None:
    """Check that gates on attention scores do not depend on the tokens that follow."""
    check_gates(adapter)
    names = adapter.layer_points("attn.hook_attn_scores")
    short, _ = record(adapter, tokens[:, :2], names)
    long, _ = record(adapter, tokens, names)
    for layer, name in enumerate(names):
        found, expected = long[name][:, :, :2, :2].tril(), short[name].tril()
        off, most = (found - expected).abs().max(), expected.abs().max()
        if off > tolerance(adapter.dtype) * most:
            raise ValueError(
                "expected attention scores that stay the same when tokens follow, for gates that "
                f"read them; in layer {layer} of {adapter.name!r} they change by {off:.3g}: the "
                "same gate would open or close with the length of the prompt. Gates on heads and "
                "circuit edges read no scores"
            )


@_once
def check_mlps(adapter: Adapter, tokens: Tensor) -> None:
    """Check that gates on MLP outputs take effect on a model."""
    if not adapter.has_mlps:
        raise ValueError(
            f"expected a model with MLPs, for gates on them; {adapter.name!r} has attention alone"
        )
    generator, stream = torch.Generator().manual_seed(0), list[Tensor]()

    def write(value: Tensor) -> Tensor:
        """Noise as large as the residual stream, so that it is not lost to rounding."""
        noise = torch.randn(value.shape, generator=generator).to(value)
        return noise * stream[-1].abs().max()

    # With a zero pattern heads write nothing, and their biases are equal at all positions.
    patterns = adapter.layer_points("attn.hook_pattern")
    edits: list[Hook] = [(name, Order.FIRST, torch.zeros_like) for name in patterns]
    edits += [(name, Order.LAST, stream.append) for name in _each(adapter, "hook_resid_pre")]
    edits += [(name, Order.FIRST, write) for name in _each(adapter, "hook_mlp_out")]
    suffixes = ("hook_resid_pre", "mlp_read", "hook_mlp_out", "hook_resid_post")
    found, _ = _seen(adapter, tokens, _each(adapter, *suffixes), edits)
    for layer in range(adapter.n_layers):
        places = [found[f"blocks.{layer}.{at}"] for at in suffixes]
        once = all(len(values) == 1 for values in places)
        before, read, written, after = (precise(values[0] if once else tokens) for values in places)
        rest, size = after - before - written, before.abs() + written.abs() + after.abs()
        first, sizes = rest[:, :1].expand_as(rest), size + size[:, :1]
        if not once or read.shape != before.shape or excess(adapter.dtype, rest, first, sizes):
            raise ValueError(
                "expected MLPs that are called once and write to the residual stream, for gates on "
                f"them; that in layer {layer} of {adapter.name!r} does not, or not at hook_mlp_out"
            )


# ---- circuits -----------------------------------------------------------------------------------


def check_circuits(adapter: Adapter) -> None:
    """Check that a model is the sum of its heads and MLPs, each reading the residual stream.

    Raises:
        ValueError: it is not, and the message names the part that differs; or it is sharded.
    """
    check_whole(adapter)
    _parts_add_up(adapter)


def circuit_graph(adapter: Adapter) -> CircuitGraph:
    """The circuit graph of a model that passes `check_circuits`."""
    check_circuits(adapter)
    sizes = ["n_layers", "n_heads", "n_kv_heads", "has_mlps", "parallel", "coupled"]
    return CircuitGraph(**{name: getattr(adapter, name) for name in sizes})


@_once
def _parts_add_up(adapter: Adapter, tokens: Int[Tensor, "prompt pos"]) -> None:
    adapter.check_supported("circuits")
    final, reads = f"blocks.{adapter.n_layers - 1}.hook_resid_post", _reads(adapter)
    names = [*_points(adapter), *reads, final]
    found, logits = _seen(adapter, tokens, names)
    kept = {name: values[-1] for name, values in found.items() if values}
    check_fired(adapter, names, kept)
    _check_layers(adapter, {**kept, "final": kept[final]}, None)
    _same_run(adapter, logits, adapter.logits(kept[final]), "the logits")
    # Heads and MLPs given another prompt's inputs produce its outputs.
    written = [name for name in adapter.source_points() if name != EMBEDDED]
    there, _ = record(adapter, (tokens + 1) % adapter.d_vocab, [*written, *reads])
    again, _ = record(adapter, tokens, written, replaced={name: there[name] for name in reads})
    for name in written:
        what = f"{name} after edits to what its layer reads"
        _same_run(adapter, again[name], there[name], what)


@torch.no_grad()
def check_sums_under_hooks(
    adapter: Adapter, tokens: Int[Tensor, "batch pos"] | None = None
) -> None:
    """Check that a model is the sum of its heads and MLPs under the user's hooks, if it has any.

    Gates of a SparseTransformer act within heads and MLPs, and need no check. `tokens` are prompts
    to run, since hooks may fit only these; by default, one short prompt.
    """
    hooks = hooks_besides(adapter, gate_hooks(adapter))
    if not hooks or _held.get(adapter.model) == hooks:
        return
    if tokens is None:
        tokens = torch.arange(min(_LENGTH, adapter.n_ctx), device=adapter.device)[None]
    tokens, names, reads = tokens % adapter.d_vocab, _points(adapter), _reads(adapter)
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


def _reads(adapter: Adapter) -> list[str]:
    """What heads and MLPs read."""
    layers = range(adapter.n_layers)
    return [name for layer in layers for name in adapter.destination_points(layer)]


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


def _same_run(adapter: Adapter, found: Tensor, again: Tensor, what: str) -> None:
    """Check that the same operations, run twice, gave the same vectors."""
    _same(adapter, found, again, found.abs().amax(dim=-1, keepdim=True), what, _UNLIKE)


def _same(
    adapter: Adapter, found: Tensor, rebuilt: Tensor, size: Tensor, what: str, message: str
) -> None:
    beyond = excess(adapter.dtype, found, rebuilt, size)
    if beyond is not None:
        off, allowed = beyond
        raise ValueError(message.format(name=adapter.name, what=what, off=off, allowed=allowed))


def check_same_alone(found: Float[Tensor, "label d_model"], expected: Tensor) -> None:
    """Check that prompts give the same in a batch, or from a later layer on, as when run alone."""
    off = float((found.detach() - expected).abs().max())
    most = float(expected.abs().max())
    if off > tolerance(expected.dtype) * most:
        raise ValueError(
            "expected hooks that act on each row and layer by itself; with those on this model, "
            f"prompts that are run beside others, or from a later layer on, differ by {off:.3g} "
            "from the same prompts run alone. Remove hooks that use other rows of the batch, or "
            "values from an earlier layer"
        )

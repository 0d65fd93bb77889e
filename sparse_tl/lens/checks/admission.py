"""Numerical checks that a model behaves as the package assumes, made on first use.

Each is a small forward pass in evaluation mode, in which only the package's own hooks run (for
circuits under the user's hooks, see `sparse_tl.lens.checks.under_hooks`):

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
           from another prompt produce that prompt's outputs (`check_sums`).

This covers architectures that no list could, and turns wrong numbers into errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens.checks.sums import check_sums
from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.hooks import Hook, Order, attached, record, without_user_hooks
from sparse_tl.lens.core.limits import check_numbers
from sparse_tl.lens.core.lora import lora_layers
from sparse_tl.lens.core.modes import evaluation_mode
from sparse_tl.lens.core.numerics import excess, precise, tolerance
from sparse_tl.lens.core.places import HookFunction
from sparse_tl.lens.core.points import Model
from sparse_tl.lens.loading.plain import check_wrapped
from sparse_tl.parallel import shards
from sparse_tl.parts.graph import CircuitGraph

_checked: dict[str, WeakSet[Model]] = {
    kind: WeakSet[Model]() for kind in ("gates", "scores", "mlps", "circuits")
}

_WITHOUT_LORA = ("use_attn_result", "use_split_qkv_input")


def check_gates(adapter: Adapter) -> None:
    """Check that gates on attention edges and heads take effect on a model.

    Raises:
        ValueError: a hook point is missing, does not fire exactly once, or ignores edits.
    """
    _once("gates", adapter, _gates_act)


def check_scores(adapter: Adapter) -> None:
    """Check that gates on attention scores do not depend on the tokens that follow.

    Raises:
        ValueError: the scores change when tokens follow; otherwise as in `check_gates`.
    """
    check_gates(adapter)
    _once("scores", adapter, _scores_stay)


def check_mlps(adapter: Adapter) -> None:
    """Check that gates on MLP outputs take effect on a model.

    Raises:
        ValueError: the model has no MLPs, or one that does not write to the residual stream.
    """
    _once("mlps", adapter, _mlps_write)


def check_circuits(adapter: Adapter) -> None:
    """Check that a model is the sum of its heads and MLPs, each reading the residual stream.

    Raises:
        ValueError: it is not, and the message names the part that differs; or it is sharded.
    """
    check_whole(adapter)
    _once("circuits", adapter, check_sums)


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
        ValueError: its weights are sharded over ranks.
    """
    if shards.has_sharded_weights(adapter.model):
        raise ValueError(
            f"expected a whole model; {adapter.name!r} is sharded, which is for training, held-out "
            "measurements and saving. Load what was saved"
        )


def _check_switches(adapter: Adapter) -> None:
    """Check that no flag is set that makes TransformerLens ignore low-rank adapters."""
    on = [name for name in _WITHOUT_LORA if getattr(adapter.model.cfg, name, False)]
    if on and lora_layers(adapter.model):
        raise ValueError(
            f"expected {' and '.join(on)} to be off in {adapter.name!r}, which has low-rank "
            "adapters: with it on, TransformerLens ignores them. Or call merge_lora(model) first"
        )


@autograd(False)
def _once(kind: str, adapter: Adapter, check: Callable[[Adapter, Tensor], None]) -> None:
    _check_switches(adapter)
    if adapter.model in _checked[kind]:
        return
    _check_attention(adapter)
    with without_user_hooks(adapter.model), evaluation_mode(adapter.model):
        tokens = _few_tokens(adapter)
        check_numbers(adapter, adapter.model(tokens))
        check_wrapped(adapter.model)
        check(adapter, tokens)
    _checked[kind].add(adapter.model)


def _check_attention(adapter: Adapter) -> None:
    """Check that every layer has attention that can be observed."""
    for layer in range(adapter.n_layers):
        for point in ("attn.hook_attn_scores", "attn.hook_z"):
            try:
                adapter.place(f"blocks.{layer}.{point}")
            except ValueError as error:
                raise ValueError(
                    f"expected attention with hook points in every layer; layer {layer} of "
                    f"{adapter.name!r} has no {point}: it is of another kind, such as a recurrence "
                    "or a convolution, or TransformerLens leaves its attention to transformers"
                ) from error


def _few_tokens(adapter: Adapter) -> Int[Tensor, "1 pos"]:
    """A fixed random prompt."""
    generator = torch.Generator().manual_seed(0)
    length = min(5, adapter.n_ctx)
    return torch.randint(adapter.d_vocab, (1, length), generator=generator).to(adapter.device)


def _gates_act(adapter: Adapter, tokens: Tensor) -> None:
    model = adapter.model
    suffixes = ("attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z", "hook_resid_post")
    scores, patterns, heads, residuals = map(adapter.layer_points, suffixes)
    masks = [f"blocks.{layer}.attn.mask" for layer in range(adapter.n_layers)]

    def seen(
        prompts: Tensor,
        names: Sequence[str],
        edited: Sequence[str] = (),
        edit: HookFunction = torch.clone,
    ) -> dict[str, list[Any]]:
        """Activations and masks at some places while others are edited."""
        found: dict[str, list[Any]] = {name: [] for name in names}
        hooks: list[Hook] = [(name, Order.FIRST, edit) for name in edited]
        hooks += [(name, Order.LAST, found[name].append) for name in names]
        with attached(adapter, hooks):
            model(prompts, return_type=None)
        return found

    plain = seen(tokens, [*scores, *patterns, *heads, *masks])
    for name, values in plain.items():
        if len(values) != 1:
            raise ValueError(
                f"expected {name} to fire once in a forward pass of {adapter.name!r}; it fired "
                f"{len(values)} times. Gates cannot sit on this model as it is configured."
            )
    ramp = torch.arange(tokens.shape[1], device=tokens.device).to(adapter.dtype)
    moved = seen(tokens, patterns, scores, lambda values: torch.zeros_like(values) + ramp)
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
        # An MLP's rounding is relative to all that it reads, not to the entry that it writes.
        if excess(adapter.dtype, first, second, first.norm(dim=-1, keepdim=True)):
            _refuse(adapter, layer, "what it writes does not come from its heads alone")
    for name, mask in zip(patterns, masks, strict=True):
        plain[mask][0].check(plain[name][0], f"{name} of {adapter.name!r}")
    own = torch.eye(adapter.n_heads, device=tokens.device).to(adapter.dtype)
    every = tokens[:, :2].repeat(adapter.n_heads, 1)
    alone = seen(every, heads, patterns, lambda values: values * own[:, :, None, None])
    for layer, name in enumerate(heads):
        z = alone[name][0]
        if z.shape[2:-1] != own.shape[1:] or bool(z[own[:, None].expand(z.shape[:-1]) == 0].any()):
            _refuse(adapter, layer, "hook_z has no axis with one entry for each head")


def _refuse(adapter: Adapter, layer: int, why: str) -> None:
    raise ValueError(
        f"expected a model whose attention can be gated by hooks; in layer {layer} of "
        f"{adapter.name!r} {why}: gates would have no effect on it"
    )


def _scores_stay(adapter: Adapter, tokens: Tensor) -> None:
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
    for layer, names in enumerate(places):
        once = all(len(found[name]) == 1 for name in names)
        before, read, written, after = (
            precise(found[name][0] if once else tokens) for name in names
        )
        rest, size = after - before - written, before.abs() + written.abs() + after.abs()
        first, sizes = rest[:, :1].expand_as(rest), size + size[:, :1]
        if not once or read.shape != before.shape or excess(adapter.dtype, rest, first, sizes):
            raise ValueError(
                "expected MLPs that are called once and write to the residual stream, for gates on "
                f"them; that in layer {layer} of {adapter.name!r} does not, or not at hook_mlp_out"
            )

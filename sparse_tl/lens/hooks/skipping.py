"""Forward passes that compute only the positions that matter to what is read.

A position does not matter

- in the last layer, where it is not read;
- in a causal model, after the last position that is read;
- where another pass has stored its keys and values: before the first token in which two prompts
  differ, these are equal in every layer.

There, MLPs and the projections of attention are skipped and write zeros. Everything else runs at
all positions, so activations keep their shapes; at skipped positions they are meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparse_tl.calls.scopes import autograd, scope
from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.attaching import (
    Hook,
    Order,
    attached,
    gate_hooks,
    hooks_besides,
    others_off,
)
from sparse_tl.lens.core.points import Model, Slot
from sparse_tl.lens.core.rounding import excess
from sparse_tl.lens.core.shortcuts import hooked, repeated

COPIED = 30
"""Number of products that take as long as selecting a row's value and putting the result back."""
LEAST = {"cpu": 2**21}
"""Products below which skipping saves less than it costs, by type of device."""
LEAST_ELSEWHERE = 2**30


@scope
def only_needed(
    adapter: Adapter,
    read: Bool[Tensor, "batch pos"],
    alike: Bool[Tensor, "batch pos"] | None = None,
    copies: int = 1,
    from_layer: int = 0,
    made: Mapping[int, Sequence[str]] | None = None,
    own: Set[int] = frozenset(),
) -> Iterator[None]:
    """Inside the block, passes over these prompts skip positions that do not matter.

    Nothing is skipped if hooks might see it: any hooks but `own` and a SparseTransformer's gates,
    which act on each position or attention edge separately.

    Args:
        adapter: adapter of the model.
        read: positions that are read after the last layer.
        alike: positions whose keys and values are held; see `Held`.
        copies: number of copies of the prompts in the batch, one after the other.
        from_layer: first layer that is run.
        made: which of "q", "k" and "v" the caller's hooks replace in each layer.
        own: ids of the caller's hooks, to which skipped positions do not matter.
    """
    inner = needed(adapter, read, alike)
    rows = {"inner": inner, "last": inner & read, "none": torch.zeros_like(inner)}
    counts = {which: int(mask.count_nonzero()) for which, mask in rows.items()}
    sizes, chosen = _sizes(adapter), list[tuple[int, str, str]]()
    for layer in range(from_layer, adapter.n_layers):
        replaced = [] if made is None else made.get(layer, ())
        for kind in sizes:
            at_end = layer == adapter.n_layers - 1 and kind not in ("k", "v")
            which = "none" if kind in replaced else "last" if at_end else "inner"
            if _saves(inner, counts[which], *sizes[kind]):
                chosen.append((layer, kind, which))
    if not chosen or seen_by_hooks(adapter, own):
        yield
        return
    selected = {which: _Rows(repeated(mask, copies)) for which, mask in rows.items()}
    with ExitStack() as removed:
        for layer, kind, which in chosen:
            for module in _body(adapter.model.blocks[layer], kind):
                for handle in _compute_only(module, selected[which]):
                    removed.callback(handle.remove)
        yield


class Held:
    """Keys and values that passes share, at positions before their prompts first differ.

    The first pass stores them; later passes reuse them.

    Args:
        adapter: adapter of the model.
        alike: positions up to which both prompts of a row have the same tokens.
    """

    def __init__(self, adapter: Adapter, alike: Bool[Tensor, "batch pos"]) -> None:
        self.adapter, self.alike = adapter, alike
        self._rows = alike.flatten().nonzero()[:, 0]
        self._values: dict[str, Tensor] = {}

    @property
    def skipped(self) -> Bool[Tensor, "batch pos"] | None:
        """The positions that the next pass can skip; None before the first pass."""
        return self.alike if self._values else None

    def hooks(self, from_layer: int = 0) -> list[Hook]:
        """The hooks of the next pass, which may run stacked copies of the prompts."""
        act, order = (self._give, Order.FIRST) if self._values else (self._note, Order.LAST)
        slots: tuple[Slot, ...] = ("k", "v")
        layers = range(from_layer, self.adapter.n_layers)
        names = [self.adapter.read_point(layer, slot) for layer in layers for slot in slots]
        return [(name, order, partial(act, name)) for name in names]

    def _note(self, name: str, value: Float[Tensor, "batch pos head d_head"]) -> Tensor:
        self._values[name] = value.detach().flatten(0, 1)[self._rows]
        return value

    def _give(self, name: str, value: Float[Tensor, "rows pos head d_head"]) -> Tensor:
        copies = len(value) // len(self.alike)
        shifts = torch.arange(copies, device=value.device)[:, None] * self.alike.numel()
        rows, held = (self._rows + shifts).flatten(), repeated(self._values[name], copies)
        return value.flatten(0, 1).index_copy(0, rows, held).view_as(value)


def held_between(
    adapter: Adapter,
    tokens: Tensor,
    others: Tensor,
    read: Bool[Tensor, "batch pos"],
) -> Held | None:
    """Storage for keys and values that each row's prompts share; None if nothing can be skipped.

    Rows whose prompts agree up to the position that is read are computed in full.
    """
    if not adapter.causal or tokens.shape != others.shape:
        return None
    alike = (tokens == others).cumprod(dim=1).bool()
    alike &= ~(alike & read).any(dim=1, keepdim=True)
    if not bool(alike.any()):
        return None
    inner = needed(adapter, read, alike)
    saves = _saves(inner, int(inner.count_nonzero()), *_sizes(adapter)["mlp"])
    if not saves or seen_by_hooks(adapter) or not _can_hold(adapter):
        return None
    return Held(adapter, alike)


def needed(
    adapter: Adapter,
    read: Bool[Tensor, "batch pos"],
    alike: Bool[Tensor, "batch pos"] | None = None,
) -> Bool[Tensor, "batch pos"]:
    """The positions that matter, in any layer, to those that are read; see `only_needed`."""
    found = read.flip(1).cumsum(dim=1).flip(1) > 0 if adapter.causal else torch.ones_like(read)
    return found if alike is None else found & ~alike


def places_needed(
    adapter: Adapter, read: Bool[Tensor, "batch pos"], alike: Bool[Tensor, "batch pos"] | None
) -> Int[Tensor, " place"] | None:
    """Flat indices of the positions that matter; None if passes do not skip the others."""
    inner = needed(adapter, read, alike)
    saves = _saves(inner, int(inner.count_nonzero()), *_sizes(adapter)["mlp"])
    return inner.flatten().nonzero()[:, 0] if saves and not seen_by_hooks(adapter) else None


def _sizes(adapter: Adapter) -> dict[str, tuple[int, int]]:
    """For each kind of module, its number of weights, and of values in and out at a position."""
    cfg: Any = adapter.model.cfg
    d_model, d_mlp = adapter.d_model, getattr(cfg, "d_mlp", None) or 4 * adapter.d_model
    wide, narrow = adapter.n_heads * cfg.d_head, adapter.n_kv_heads * cfg.d_head
    sizes = {
        slot: (d_model * width, d_model + width)
        for slot, width in (("q", wide), ("k", narrow), ("v", narrow), ("o", wide))
    }
    return {**sizes, "mlp": (2 * d_model * d_mlp, 2 * d_model)}


def _saves(mask: Bool[Tensor, "batch pos"], computed: int, weights: int, values: int) -> bool:
    """Whether computing only `computed` positions of a batch saves more than it costs."""
    least = LEAST.get(mask.device.type, LEAST_ELSEWHERE)
    return (mask.numel() - computed) * weights > COPIED * computed * values + least


def seen_by_hooks(adapter: Adapter, own: Set[int] = frozenset()) -> bool:
    """Whether hooks other than those of gates and `own` might see what a pass skips or repeats."""
    return bool(hooks_besides(adapter, gate_hooks(adapter) | own))


def _body(block: Any, kind: str) -> list[nn.Module]:
    """The module that does a kind of computation position by position; none if hooked inside."""
    outer = getattr(block if kind == "mlp" else getattr(block, "attn", None), kind, None)
    inner = getattr(outer, "original_component", None)
    found = [inner] if kind != "mlp" else [outer, inner]
    return [some for some in found if some is not None and not any(map(hooked, some.modules()))][:1]


class _Rows:
    """Some positions of a batch, by their index in it."""

    def __init__(self, mask: Bool[Tensor, "rows pos"]) -> None:
        self.shape, flat = mask.shape, mask.flatten()
        self.index, self.others = flat.nonzero()[:, 0], (~flat).nonzero()[:, 0]


def _compute_only(module: nn.Module, rows: _Rows) -> list[RemovableHandle]:
    """Make a module compute only some positions, and write zeros elsewhere."""
    selected = False

    def select(_module: nn.Module, args: Sequence[Any]) -> tuple[Any, ...] | None:
        nonlocal selected
        selected = len(args) > 0 and args[0].shape[:2] == rows.shape
        if not selected:  # a pass over other prompts
            return None
        # Bloom's MLPs also take the residual stream, to add to it.
        return tuple(
            arg.flatten(0, 1).index_select(0, rows.index)[None] if isinstance(arg, Tensor) else arg
            for arg in args
        )

    def scatter(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not selected:
            return None
        # Experts may also return their router's scores, which nothing reads.
        written, *rest = output if isinstance(output, tuple) else (output,)
        flat = written.reshape(-1, written.shape[-1])
        everywhere = flat.new_empty(rows.shape.numel(), flat.shape[-1])
        everywhere.index_fill_(0, rows.others, 0).index_copy_(0, rows.index, flat)
        everywhere = everywhere.unflatten(0, rows.shape)
        return (everywhere, *rest) if isinstance(output, tuple) else everywhere

    return [module.register_forward_pre_hook(select), module.register_forward_hook(scatter)]


_holds: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()


@autograd(False)
def _can_hold(adapter: Adapter) -> bool:
    """Whether positions affect later ones only by keys and values; tested once per model.

    Convolutions and recurrent states also carry information.
    """
    model = adapter.model
    if model not in _holds:
        n = min(4, adapter.n_ctx)
        tokens = torch.arange(n, device=adapter.device)[None] % adapter.d_vocab
        others = tokens.clone()
        others[:, -1] = (others[:, -1] + 1) % adapter.d_vocab
        held = Held(adapter, tokens == others)
        with others_off(model):
            with attached(adapter, held.hooks()):
                adapter.final(tokens)
            expected = adapter.final(others)[:, -1:]
            # Earlier tokens differ: only the stored keys and values carry the original ones.
            with attached(adapter, held.hooks()):
                found = adapter.final(others[:, -1:].repeat(1, n))[:, -1:]
            size = expected.abs().amax(dim=-1, keepdim=True)
        _holds[model] = excess(adapter.dtype, expected, found, size) is None
    return _holds[model]

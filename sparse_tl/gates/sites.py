"""Sites: where gates can sit, and how they act there: ``gate * clean + (1 - gate) * patch``.

Gates may have a leading *stack* axis. The batch then holds as many copies of the prompts as the
stack has entries, one after the other, and each copy runs under its own gates.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from sparse_tl.calls.arguments import MOST, AtLeastOne, checked
from sparse_tl.data import Spans
from sparse_tl.gates.closed_edges import ClosedEdges
from sparse_tl.gates.patches import PatchValues, gate
from sparse_tl.lens import Adapter, Hook, Order, check_gates, repeated


@dataclass
class GatedPass:
    """One forward pass under stacked gates.

    Args:
        n_stack: copies of the prompts in the batch.
        from_layer: first layer that is run.
        n_prompts: number of prompts, if the first layer's attention runs on one copy only.
        changes: for circuit edges, the patch of each source before `from_layer` minus its write.
        start: position of the first column; above 0 with a key-value cache.
    """

    n_stack: int
    from_layer: int = 0
    n_prompts: int | None = None
    changes: Float[Tensor, "source batch pos d_model"] | None = None
    start: int = 0


SiteGates = Real[Tensor, "..."] | Bool[Tensor, "..."] | ClosedEdges


class Site(ABC):
    """Where gates can sit, and how they act there.

    A new site defines the four abstract methods. The defaults of the others suit gates that act on
    activations; gates on what a part reads, as `CircuitEdges` has, need more.
    """

    order: Order
    """When gates act, or read what a source writes, relative to other hooks."""
    shares_attention = False
    """Whether gates act after attention, so that all settings attend alike in the first layer."""

    @abstractmethod
    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        """Shape of the gates, without a stack axis; -1 for any size."""

    @abstractmethod
    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        """The hook points that need a patch under these stacked gates, or by default under any."""

    @abstractmethod
    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        """The first layer affected by a change of gates, given where the gates differ."""

    @abstractmethod
    def hooks(self, adapter: Adapter, gates: Any, patch: PatchValues, now: GatedPass) -> list[Hook]:
        """The hooks that apply stacked gates to a model."""

    def check(self, adapter: Adapter, tokens: Tensor | None) -> None:  # noqa: B027
        """Raise a ValueError where gates here are not defined on a model, or on these prompts."""

    def keeps_all(self, adapter: Adapter, gates: Any) -> bool:
        """Whether these gates leave the model as it is."""
        return False

    def sources(self, adapter: Adapter) -> list[str]:
        """Hook points whose writes a pass that starts in a later layer has to know."""
        return []

    def of_stream(self, gates: Any) -> Any:
        """These gates, but open where they change only what the logits read."""
        return gates

    def read_logits(
        self, adapter: Adapter, gates: Any, patch: PatchValues, now: GatedPass, final: Tensor
    ) -> Tensor:
        """What the logits read, given the residual stream after the last layer."""
        return final


class _Activations(Site):
    """Gates over some axes of the activations at hook points, ordered as in the model."""

    axes: tuple[int, ...]
    order = Order.FIRST  # so that caches and user hooks see gated activations

    def layer(self, index: int) -> int:
        """The layer of an index along the first axis of the gates."""
        return index

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        found = differ.transpose(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist()
        return min(map(self.layer, found), default=adapter.n_layers)

    def hooks(self, adapter: Adapter, gates: Any, patch: PatchValues, now: GatedPass) -> list[Hook]:
        hooks: list[Hook] = []
        for index, name in enumerate(self.points(adapter)):
            closed = isinstance(gates, ClosedEdges)
            here = gates.in_layer(index) if closed else gates[:, index]
            layer = self.layer(index)
            makes_copies = layer == now.from_layer and now.n_prompts is not None
            if layer >= now.from_layer and (makes_copies or _acts(here)):
                hooks.append((name, self.order, partial(self._close, name, here, patch, now)))
        if hooks and (patch.values or isinstance(gates, ClosedEdges)):
            hooks.append(("cached_columns", Order.FIRST, partial(_note_start, now)))
        return hooks

    def _close(
        self,
        name: str,
        gates: Float[Tensor, "stack ..."] | ClosedEdges,
        patch: PatchValues,
        now: GatedPass,
        clean: Float[Tensor, "rows ..."],
    ) -> Float[Tensor, "stacked ..."]:
        if isinstance(gates, ClosedEdges):
            gates = gates.on(clean, now.start)
        shape = [len(gates), *[1] * (clean.ndim - 1)]
        for axis, size in zip(self.axes, gates.shape[1:], strict=True):
            if clean.shape[axis] != size:
                raise ValueError(
                    f"the gates on {name} have {size} entries along axis {axis}, where this run "
                    f"has {clean.shape[axis]}; gated prompts need the length that the gates are for"
                )
            shape[axis] = size
        if now.n_prompts == len(clean):
            clean = repeated(clean, now.n_stack)
        if len(clean) % len(gates):
            raise ValueError(
                f"expected as many copies of the prompts as there are settings of gates, "
                f"{len(gates)}; got {len(clean)} rows"
            )
        gates = gates.to(clean.dtype).reshape(shape)
        if len(gates) > 1:
            gates = gates.repeat_interleave(len(clean) // len(gates), dim=0)
        return gate(gates, clean, patch.at(name, clean, now.n_stack, now.start))


@dataclass(frozen=True)
class Heads(_Activations):
    """One gate per head, ``[layer, head]``, on the head's output at ``attn.hook_z``."""

    axes = (2,)
    shares_attention = True

    def check(self, adapter: Adapter, tokens: Tensor | None) -> None:
        check_gates(adapter)

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        return adapter.n_layers, adapter.n_heads

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        return [
            f"blocks.{layer}.attn.hook_z"
            for layer in range(adapter.n_layers)
            if gates is None or _acts(gates[:, layer])
        ]

    def hooks(self, adapter: Adapter, gates: Any, patch: PatchValues, now: GatedPass) -> list[Hook]:
        hooks = super().hooks(adapter, gates, patch, now)
        if patch.values and hooks:
            pattern = hooks[0][0].replace("hook_z", "hook_pattern")
            hooks.append((pattern, Order.FIRST, partial(_draw, patch, now)))
        return hooks


def _note_start(now: GatedPass, cached: Int[Tensor, ""]) -> None:
    """Record that a pass starts after the columns in a key-value cache."""
    now.start = int(cached)


def _draw(
    patch: PatchValues, now: GatedPass, pattern: Float[Tensor, "rows head query key"]
) -> None:
    """Draw the reference prompts of a new pass."""
    if not now.start:
        patch.draw(now.n_prompts or len(pattern) // now.n_stack)


@dataclass(frozen=True)
class AttentionEdges(_Activations):
    """One gate per attention edge, ``[layer, head, query, key]``; nothing is renormalised.

    Gates fit prompts of one length, or are given as `ClosedEdges`.
    """

    axes = (1, 2, 3)
    order = Order.LAST  # so that learned gates, which come first, cannot open an edge again

    def check(self, adapter: Adapter, tokens: Tensor | None) -> None:
        check_gates(adapter)

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        return adapter.n_layers, adapter.n_heads, -1, -1

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        return [f"blocks.{layer}.attn.hook_pattern" for layer in range(adapter.n_layers)]


@checked
@dataclass(frozen=True)
class HookPoints(_Activations):
    """Gates over chosen axes of the activations at some hook points, ``[hook point, *axes]``.

    Args:
        names: hook points whose activations have the same size along `axes`.
        axes: axes with one gate per index; the other axes share gates. Axis 0, the batch, cannot
            be gated; gates on axis 1, the position, fit prompts of one length.
        sizes: size along each of `axes`.
        spans: the span of every token of the prompts that are run, for gates on axis 1 that are per
            span instead of per position; see `PromptPairs.spans_of`.
    """

    names: tuple[str, ...]
    axes: tuple[int, ...]  # type: ignore[bad-override]
    sizes: tuple[AtLeastOne, ...]
    spans: Spans | None = None

    def __post_init__(self) -> None:
        if not self.names or len(self.axes) != len(self.sizes):
            raise ValueError(
                f"expected at least one hook point, and a size for each axis; got {self.names}, "
                f"axes {self.axes} and sizes {self.sizes}"
            )
        if len(self.names) * math.prod(self.sizes) > MOST:
            raise ValueError(f"expected at most {MOST:,} gates; got sizes {self.sizes}")
        spans = self.spans
        if spans is not None and (self.axes, self.sizes) != ((1,), (len(spans.names),)):
            raise ValueError(
                f"expected axis 1 alone, of size {len(spans.names)}, for gates per span; got axes "
                f"{self.axes} and sizes {self.sizes}"
            )

    def _close(
        self,
        name: str,
        gates: Float[Tensor, "stack ..."] | ClosedEdges,
        patch: PatchValues,
        now: GatedPass,
        clean: Float[Tensor, "rows ..."],
    ) -> Float[Tensor, "stacked ..."]:
        if self.spans is not None and isinstance(gates, Tensor):
            # Every prompt of every stack entry has a row of its own, as in the stacked batch.
            gates = gates[:, self.spans.at].flatten(0, 1)
        return super()._close(name, gates, patch, now, clean)

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        return len(self.names), *self.sizes

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        return list(self.names)

    def layer(self, index: int) -> int:
        """The layer of a hook point; 0 for one that is in no layer."""
        found = re.match(r"blocks\.(\d+)\.", self.names[index])
        return int(found[1]) if found else 0


def _acts(gates: Tensor | ClosedEdges) -> bool:
    """Whether some gate differs from 1, or is being trained."""
    if isinstance(gates, ClosedEdges):
        return bool(gates.layers)
    return gates.requires_grad or bool((gates != 1).any())

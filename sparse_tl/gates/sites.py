"""Sites: where gates can sit, and how they act there: ``gate * clean + (1 - gate) * patch``.

Gates may have a leading *stack* axis. The batch then holds as many copies of the prompts as the
stack has entries, one after the other, and each copy runs under its own gates.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.backend import (
    Adapter,
    Hook,
    Order,
    check_gates,
)
from sparse_tl.data import Spans
from sparse_tl.gates.patches import PatchValues, gate


@dataclass
class GatedPass:
    """One forward pass under stacked gates."""

    n_stack: int
    """Copies of the prompts in the batch."""
    from_layer: int = 0
    changes: Float[Tensor, "source batch pos d_model"] | None = None
    """For circuit edges, the patch of each source before `from_layer` minus its write."""
    start: int = 0
    """Position of the first column; above 0 with a key-value cache."""

    def note_start(self, cached: int) -> None:
        self.start = cached


Columns = int | slice | Sequence[int] | Callable[[int], bool]
"""Columns, from 0: one, a list, a slice, or a function that says whether a column is selected.

Negative columns count from the end of the tokens that are run.
"""


@dataclass(frozen=True)
class ClosedAttentionEdges:
    """Gates that are 0 at some attention edges and 1 at all others.

    Args:
        edges: layer, head, query and key of each closed edge.
        stack: stack entry in which each edge is closed; None for gates without a stack.
        n_stack: number of stack entries.
    """

    edges: Int[Tensor, "edge 4"]
    stack: Int[Tensor, " edge"] | None = None
    n_stack: int = 1

    @property
    def stack_shape(self) -> tuple[int, ...]:
        return () if self.stack is None else (self.n_stack,)

    @property
    def layers(self) -> list[int]:
        return self.edges[:, 0].unique().tolist()

    def on(
        self, layer: int, pattern: Float[Tensor, "rows head query key"], start: int
    ) -> Float[Tensor, "stack head query key"]:
        """The gates as a tensor, for a layer's pattern whose first query is in column `start`."""
        here = self.edges[:, 0] == layer
        _, head, query, key = self.edges[here].to(pattern.device).unbind(dim=1)
        n_heads, n_queries, n_keys = pattern.shape[1:]
        end = start + n_queries
        if int(query.max()) >= end:
            raise ValueError(
                f"query {int(query.max())} of an attention edge lies beyond the prompt of {end} "
                "tokens. A rule, query=slice(...), includes tokens still to be generated"
            )
        # With a key-value cache only the last queries run; a sliding window drops early keys.
        first = end - n_keys
        run = (query >= start) & (key >= first)
        stack = torch.zeros_like(query) if self.stack is None else self.stack[here].to(query.device)
        gates = pattern.new_ones(self.n_stack, n_heads, n_queries, n_keys)
        gates[stack[run], head[run], query[run] - start, key[run] - first] = 0
        return gates


@dataclass(frozen=True)
class ClosedByRule:
    """Gates that are 0 where a rule selects both query and key, in some heads, and 1 elsewhere."""

    heads: Sequence[tuple[int, int]]
    query: Columns
    key: Columns

    stack_shape = ()

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.heads})

    def on(
        self, layer: int, pattern: Float[Tensor, "rows head query key"], start: int
    ) -> Float[Tensor, "1 head query key"]:
        end = start + pattern.shape[2]
        queries = meant(self.query, start, start, end)
        keys = meant(self.key, end - pattern.shape[3], start, end)
        closed = (queries[:, None] & keys).to(pattern.device)
        gates = pattern.new_ones(1, *pattern.shape[1:])
        for head in (head for where, head in self.heads if where == layer):
            gates[0, head].masked_fill_(closed, 0)
        return gates


ClosedEdges = ClosedAttentionEdges | ClosedByRule
"""Gates on attention edges that fit prompts of any length."""


def meant(columns: Columns, first: int, start: int, end: int) -> Bool[Tensor, " column"]:
    """Whether a rule selects each column from `first` to `end`; `start` of `end` are cached.

    Raises:
        ValueError: a listed column lies outside the tokens that are run, or a column counts from
            the end, which moves with every generated token, in a run with a key-value cache.
    """
    if callable(columns):
        found = [column for column in range(first, end) if columns(column)]
    else:
        if isinstance(columns, slice):
            listed = [columns.start or 0, columns.stop or 0]
            found = list(range(end)[columns])
        else:
            found = listed = [columns] if isinstance(columns, int) else list(columns)
            outside = [column for column in listed if not -end <= column < end]
            if outside:
                raise ValueError(
                    f"position {outside[0]} lies outside the prompts of {end} tokens; tokens still "
                    "to be generated need a slice or a function, such as slice(15, None)"
                )
        if start and min(listed, default=0) < 0:
            raise ValueError(
                f"position {min(listed)} counts from the end, and with a key-value cache the end "
                "moves with every token: count from the start, or run without a cache"
            )
    chosen = torch.zeros(end, dtype=torch.bool)
    chosen[found] = True
    return chosen[first:]


SiteGates = Real[Tensor, "..."] | Bool[Tensor, "..."] | ClosedEdges


class Site(ABC):
    """Where gates can sit, and how they act there.

    A new site defines the four abstract methods. The defaults of the others suit gates that act on
    activations; gates on what a part reads, as `CircuitEdges` has, need more.
    """

    order: Order
    """When gates act, or read what a source writes, relative to other hooks."""
    keeps_changes = False
    """Whether a pass that starts in a later layer has to know what the gated points wrote."""

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

    def of_stream(self, gates: Any) -> Any:
        """These gates, but open where they change only what the logits read."""
        return gates


class _Activations(Site):
    """Gates over some axes of the activations at hook points, ordered as in the model."""

    axes: Sequence[int]
    spans: Spans | None = None
    order = Order.FIRST  # so that caches and user hooks see gated activations

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        found = differ.transpose(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist()
        names = self.points(adapter)
        return min((_layer(names[index]) for index in found), default=adapter.n_layers)

    def hooks(self, adapter: Adapter, gates: Any, patch: PatchValues, now: GatedPass) -> list[Hook]:
        hooks: list[Hook] = []
        for index, name in enumerate(self.points(adapter)):
            layer = _layer(name)
            if isinstance(gates, ClosedEdges):
                here, acts = partial(gates.on, layer), layer in gates.layers
            else:
                here, acts = gates[:, index], _acts(gates[:, index])
            if layer >= now.from_layer and acts:
                hooks.append((name, self.order, partial(self._close, name, here, patch, now)))
        if hooks and (patch.values or isinstance(gates, ClosedEdges)):
            hooks.append(("cached_columns", Order.FIRST, now.note_start))
        return hooks

    def _close(
        self,
        name: str,
        gates: Float[Tensor, "stack ..."] | Callable[..., Tensor],
        patch: PatchValues,
        now: GatedPass,
        clean: Float[Tensor, "rows ..."],
    ) -> Float[Tensor, "rows ..."]:
        if not isinstance(gates, Tensor):
            gates = gates(clean, now.start)
        elif self.spans is not None:
            # Every prompt of every stack entry has a row of its own, as in the stacked batch.
            gates = gates[:, self.spans.at].flatten(0, 1)
        shape = [len(gates), *[1] * (clean.ndim - 1)]
        axes = [axis + clean.ndim if axis < 0 else axis for axis in self.axes]
        if axes != sorted({*axes} & {*range(1, clean.ndim)}):
            raise ValueError(
                f"{self.axes} are not increasing axes, after the batch, of the activations at "
                f"{name}, of shape {tuple(clean.shape)}"
            )
        for axis, size in zip(axes, gates.shape[1:], strict=True):
            if clean.shape[axis] != size:
                raise ValueError(
                    f"the gates on {name} have {size} entries along axis {axis}, where this run "
                    f"has {clean.shape[axis]}"
                )
            shape[axis] = size
        if len(clean) % len(gates):
            raise ValueError(
                f"{len(clean)} rows are no copies of prompts for each of {len(gates)} settings of "
                "gates"
            )
        gates = gates.to(clean.dtype).reshape(shape)
        if len(gates) > 1:
            gates = gates.repeat_interleave(len(clean) // len(gates), dim=0)
        return gate(gates, clean, patch.at(name, clean, now.n_stack, now.start))


@dataclass(frozen=True)
class Heads(_Activations):
    """One gate per head, ``[layer, head]``, on the head's output at ``attn.hook_z``."""

    axes = (2,)

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

            def renew(cached: int) -> None:
                if not cached:  # a new pass has new reference prompts
                    patch.rows = None

            hooks.append(("cached_columns", Order.FIRST, renew))
        return hooks


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
        axes: increasing axes with one gate per index, negative ones from the end; the other axes
            share gates. Axis 0, the batch, cannot be gated; gates on axis 1, the position, fit
            prompts of one length.
        spans: the span of every token of the prompts that are run, for gates on axis 1 that are per
            span instead of per position; see `PromptPairs.spans_of`.
    """

    names: Sequence[str]
    axes: tuple[int, ...]  # type: ignore[bad-override]
    spans: Spans | None = None  # type: ignore[bad-override]

    def __post_init__(self) -> None:
        if not self.names or (self.spans is not None and self.axes != (1,)):
            raise ValueError(f"a site needs hook points, and axis 1 alone with spans; got {self}")

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        sizes = [-1] * len(self.axes) if self.spans is None else [len(self.spans.names)]
        return len(self.names), *sizes

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        return list(self.names)


def _layer(name: str) -> int:
    """The layer of a hook point; 0 for one that is in no layer."""
    found = re.match(r"blocks\.(\d+)\.", name)
    return int(found[1]) if found else 0


def _acts(gates: Tensor) -> bool:
    """Whether some gate differs from 1, or is being trained."""
    return gates.requires_grad or bool((gates != 1).any())

"""Where a gate can sit, and what closes there: ``gate * clean + (1 - gate) * patch``.

| site             | gates                         | hook points                                   |
|------------------|-------------------------------|-----------------------------------------------|
| `Heads`          | ``[layer, head]``             | ``attn.hook_z``                               |
| `AttentionEdges` | ``[layer, head, query, key]`` | ``attn.hook_pattern``                         |
| `CircuitEdges`   | ``[source, destination]``     | reads what sources write, writes what         |
|                  |                               | destinations read                             |
| `HookPoints`     | ``[hook point, *axes]``       | those that a user names                       |

1 keeps, 0 patches. Gates may have one more axis before these, the *stack*: then the batch holds as
many copies of the prompts as the stack has entries, one copy after the other, each under its own
gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from sparse_tl.gates.patches import PatchValues, gate
from sparse_tl.lens import Adapter, HookFunction, Order

Hooks = list[tuple[str, Order, HookFunction]]


@dataclass
class Pass:
    """One forward pass under stacked gates.

    Args:
        n_stack: copies of the prompts in the batch.
        from_layer: where it starts.
        n_prompts: where the first layer's attention sees the prompts only once: how many there are.
        changes: what the sources before `from_layer` write, minus the patch, for circuit edges.
        start: the position at which the pass starts; above 0 with a key-value cache.
    """

    n_stack: int
    from_layer: int = 0
    n_prompts: int | None = None
    changes: Float[Tensor, "source batch pos d_model"] | None = None
    start: int = 0


@runtime_checkable
class Site(Protocol):
    """A kind of place for gates."""

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        """Of the gates, without a stack axis; -1 where any size will do."""
        ...

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        """The hook points at which a patch is needed, under some stacked gates or any."""
        ...

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        """The first layer that differs between two settings, from where their gates differ."""
        ...

    def hooks(self, adapter: Adapter, gates: Any, patch: PatchValues, now: Pass) -> Hooks:
        """What puts stacked gates on a model."""
        ...


def n_stacked(site: Site, adapter: Adapter, gates: Tensor) -> int | None:
    """How many settings the gates hold; None without a stack axis.

    Raises:
        ValueError: gates of another shape.
    """
    shape = site.shape(adapter)
    found = tuple(gates.shape)
    inner = found[-len(shape) :]
    fits = len(inner) == len(shape) and all(s in (-1, f) for s, f in zip(shape, inner, strict=True))
    if not fits or len(found) > len(shape) + 1 or 0 in found:
        said = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise ValueError(
            f"expected gates of shape [{said}] at {site}, or with a stack axis before these; got "
            f"{list(found)}"
        )
    return found[0] if len(found) > len(shape) else None


@dataclass(frozen=True)
class Heads:
    """One gate for each head, ``[layer, head]``, on what it writes."""

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        return adapter.n_layers, adapter.n_heads

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        layers = range(adapter.n_layers)
        return [
            f"blocks.{layer}.attn.hook_z"
            for layer in layers
            if gates is None or gates.requires_grad or acts(gates[:, layer])
        ]

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        return first_of(differ.any(dim=-1).any(dim=0))

    def hooks(
        self,
        adapter: Adapter,
        gates: Float[Tensor, "stack layer head"],
        patch: PatchValues,
        now: Pass,
    ) -> Hooks:
        layers = [
            layer
            for layer in range(now.from_layer, adapter.n_layers)
            if gates.requires_grad
            or acts(gates[:, layer])
            or (layer == now.from_layer and now.n_prompts is not None)  # it makes the copies
        ]
        hooks: Hooks = []
        for layer in layers:
            name = f"blocks.{layer}.attn.hook_z"
            # First, so that a cache and the user's own hooks see what the heads write now.
            close = partial(self._close, name, gates[:, layer], patch, now)
            hooks.append((name, Order.FIRST, close))
        if patch.values and layers:
            pattern = f"blocks.{layers[0]}.attn.hook_pattern"
            hooks.append((pattern, Order.FIRST, partial(note_start, patch, now)))
        return hooks

    @staticmethod
    def _close(
        name: str,
        gates: Float[Tensor, "stack head"],
        patch: PatchValues,
        now: Pass,
        z: Float[Tensor, "rows pos head d_head"],
    ) -> Float[Tensor, "stacked pos head d_head"]:
        if now.n_prompts == len(z) and now.n_stack > 1:
            z = z.repeat(now.n_stack, 1, 1, 1)
        shown = patch.at(name, z, now.n_stack, now.start)
        return gate(by_row(gates, z)[:, None, :, None], z, shown)


@dataclass(frozen=True)
class HookPoints:
    """Gates over chosen axes of the activations at some hook points, ``[hook point, *axes]``.

    Args:
        names: of hook points whose activations have the same size along `axes`.
        axes: those that get a gate for each index; all others share it. Axis 0, the batch, cannot
            be gated; gates on axis 1, the position, fit prompts of one length.
        sizes: along the axes.
    """

    names: tuple[str, ...]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        return len(self.names), *self.sizes

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        return list(self.names)

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        return 0

    def hooks(
        self, adapter: Adapter, gates: Float[Tensor, "stack ..."], patch: PatchValues, now: Pass
    ) -> Hooks:
        return [
            (name, Order.FIRST, partial(self._close, name, gates[:, index], patch, now))
            for index, name in enumerate(self.names)
        ]

    def _close(
        self, name: str, gates: Tensor, patch: PatchValues, now: Pass, clean: Tensor
    ) -> Tensor:
        shape = [len(gates), *[1] * (clean.ndim - 1)]
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if clean.shape[axis] != size:
                raise ValueError(
                    f"the gates on {name} have {size} entries along axis {axis}, where this run "
                    f"has {clean.shape[axis]}; gated prompts need the length that the gates are for"
                )
            shape[axis] = size
        shown = patch.at(name, clean, now.n_stack)
        return gate(by_row(gates.reshape(shape), clean), clean, shown)


def note_start(
    patch: PatchValues, now: Pass, pattern: Float[Tensor, "rows head query key"]
) -> None:
    """Note where a pass starts, and draw what its prompts are patched with."""
    now.start = pattern.shape[3] - pattern.shape[2]
    if not now.start:
        patch.draw(now.n_prompts or len(pattern) // now.n_stack)


def by_row(gates: Float[Tensor, "stack ..."], rows: Tensor) -> Float[Tensor, "rows ..."]:
    """Each setting's gates for all of its prompts."""
    gates = gates.to(rows.dtype)
    if len(gates) == 1:
        return gates
    if len(rows) % len(gates):
        raise ValueError(
            f"expected as many copies of the prompts as there are settings of gates, "
            f"{len(gates)}; got {len(rows)} rows"
        )
    return gates.repeat_interleave(len(rows) // len(gates), dim=0)


def acts(gates: Tensor) -> bool:
    """Whether some gate is not 1."""
    return bool((gates != 1).any())


def first_of(differs: Tensor) -> int:
    """The first layer in which something differs; the number of layers if nothing does."""
    found = differs.nonzero()
    return int(found[0]) if len(found) else len(differs)

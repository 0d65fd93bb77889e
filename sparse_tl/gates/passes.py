"""Gates that every forward pass computes from the model's own activations.

Shared by gates on attention edges and on MLPs: how a pass sets and counts its gates, and how a
layer recomputed by activation checkpointing gets the same gates again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sparse_tl.calls.scopes import scope
from sparse_tl.gates.distributions import GateDistribution, GateMode, with_pressure
from sparse_tl.lens import Hook, Order

Counted = dict[str, Tensor]
"""Counts of one layer, keyed by field of `AttentionEdgeCounts`."""
KNOWN_PASSES = 8
"""Number of consecutive forward passes whose layers a backward pass can recompute."""


@dataclass
class GateSettings:
    """Settings of a forward pass: how gates are set, and what is counted.

    Args:
        mode: sampled, deterministic or open.
        generator: random generator of sampled gates.
        noise: scale of the noise of sampled gates.
        counts: list to which the pass appends its counts; None to count nothing.
        keep_gates: whether to keep every gate in `counts`, not only the totals.
        pressure: extra gradient of the expected count for confidently open gates, by
            `with_pressure`.
        edge_cost: cost per attention edge for `AttentionEdgeCounts.cost`; 1 by default.
        real: attention mask, 0 at padding; padding is not counted.
        by_blocks: whether long patterns are computed by blocks even if no gate has an effect; this
            changes results by rounding.
    """

    mode: GateMode = GateMode.DETERMINISTIC
    generator: torch.Generator | None = None
    noise: float = 1.0
    counts: list[Counted] | None = None
    keep_gates: bool = False
    pressure: float = 0.0
    edge_cost: Tensor | None = None
    real: Tensor | None = None
    by_blocks: bool = False

    @property
    def idle(self) -> bool:
        """Whether a pass neither closes nor counts any gate, nor computes patterns by blocks."""
        return self.does_nothing and not self.by_blocks

    @property
    def does_nothing(self) -> bool:
        """Whether a pass neither closes nor counts any gate."""
        return self.mode is GateMode.OPEN and self.counts is None


@dataclass(frozen=True, eq=False)
class _LayerPass:
    """What a layer needs to recompute its gates in a backward pass, with the same noise."""

    settings: GateSettings
    drawn_from: Tensor | None
    excerpt: Tensor

    def matches(self, excerpt: Tensor) -> bool:
        """Whether an excerpt of a layer's input equals the one from this pass."""
        return excerpt.shape == self.excerpt.shape and torch.allclose(
            self.excerpt, excerpt, equal_nan=True
        )


class ComputedGates(nn.Module):
    """Learnable gates of all layers, which every pass computes from the model's activations.

    Args:
        distribution: how gates are sampled and evaluated.
    """

    def __init__(self, distribution: GateDistribution) -> None:
        super().__init__()
        self.distribution = distribution
        self.settings = GateSettings()
        self._passes = defaultdict[int, deque[_LayerPass]](lambda: deque(maxlen=KNOWN_PASSES))

    def forget(self) -> None:
        """Drop the state of earlier passes."""
        self._passes.clear()

    def _settings_of(self, layer: int, read: Float[Tensor, "prompt ... n"]) -> GateSettings:
        """The settings of this pass, or of the pass that it recomputes.

        Activation checkpointing runs a layer again in the backward pass, possibly after the block
        that set the gate mode has ended. The layer then gets the same settings and the same noise.

        Args:
            layer: layer that is run.
            read: the layer's gate input, used to identify the pass.

        Raises:
            RuntimeError: the pass being recomputed is older than the last `KNOWN_PASSES`.
        """
        known = self._passes[layer]
        if torch._C._current_graph_task_id() == -1:
            now = self.settings
            if torch.is_grad_enabled():
                drawn_from = None if now.generator is None else now.generator.get_state()
                kept = _counting_anew(now)  # drop the counts: the pass may be over
                known.append(_LayerPass(kept, drawn_from, self._excerpt(read)))
            return now
        excerpt = self._excerpt(read)
        last = next((one for one in reversed(known) if one.matches(excerpt)), None)
        if last is None:
            raise RuntimeError(
                f"expected a backward pass after at most {KNOWN_PASSES} forward passes of a model "
                "with checkpointed activations; the gates of earlier passes are no longer known"
            )
        # A backward pass goes from last to first: among equal passes, this was the last.
        known.remove(last)
        known.appendleft(last)
        again = _counting_anew(last.settings)  # same computation; these counts are discarded
        if last.drawn_from is None:
            return again
        generator = torch.Generator(read.device)
        generator.set_state(last.drawn_from)
        return replace(again, generator=generator)

    def _excerpt(self, read: Float[Tensor, "prompt pos *more n"]) -> Tensor:
        """A layer's input at the last position of the first prompt, which identifies a pass."""
        return read.detach()[:1, ..., -1:, :].clone()

    def _opened(
        self, now: GateSettings, logits: Float[Tensor, "*gate"], possible: Bool[Tensor, "*#gate"]
    ) -> tuple[Bool[Tensor, "*gate"], Float[Tensor, "*gate"]]:
        """Which possible gates are open if deterministic, and their probabilities of being open."""
        if now.mode is GateMode.OPEN:
            possible = possible.expand_as(logits)
            return possible, possible.to(logits.dtype)
        probability = self.distribution.open_probability(logits)
        if now.pressure > 0:
            probability = with_pressure(probability, logits, now.pressure)
        return self.distribution.is_open(logits) & possible, probability * possible


@scope
def using(gates: Sequence[ComputedGates], **settings: Any) -> Iterator[None]:
    """Inside the block, override fields of the `GateSettings` of these gates."""
    before = [some.settings for some in gates]
    try:
        for some in gates:
            some.settings = replace(some.settings, **settings)
        yield
    finally:
        for some, own in zip(gates, before, strict=True):
            some.settings = own


def as_rows(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's arguments: a single prompt and its mask as a batch of one, tokens as int64."""

    def row(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value if value.is_floating_point() else value.long()
        return value[None] if value.ndim == 1 else value

    named = {
        name: row(value) if name in ("input", "attention_mask") else value
        for name, value in kwargs.items()
    }
    return (*map(row, args[:1]), *args[1:]), named


def layer_hooks(
    read: Sequence[str],
    gated: Sequence[str],
    act: Callable[[int, Tensor, Tensor], Tensor | None],
) -> list[Hook]:
    """Hooks that gate every layer: they read after all other hooks, and set values before them.

    Args:
        read: the hook point of the gates' input, by layer.
        gated: the hook point of what they act on, by layer.
        act: function of layer, input and value; returns the gated value, or None to keep it.
    """
    inputs: dict[int, Tensor] = {}

    def set_gated(layer: int, value: Tensor) -> Tensor | None:
        return act(layer, inputs.pop(layer), value)

    hooks: list[Hook] = []
    for layer, (before, after) in enumerate(zip(read, gated, strict=True)):
        hooks.append((before, Order.LAST, partial(inputs.__setitem__, layer)))
        hooks.append((after, Order.FIRST, partial(set_gated, layer)))
    return hooks


def _counting_anew(settings: GateSettings) -> GateSettings:
    return settings if settings.counts is None else replace(settings, counts=[])

"""Gates of all layers that every forward pass decides anew, by what the model computes in it.

What gates on attention edges and on MLPs share: how a pass sets them, how it counts them, and how a
layer that activation checkpointing runs again gets the gates that it had.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sparse_tl.gates.distributions import GateDistribution, GateMode, press

Counted = dict[str, Tensor]
"""What one layer counted, by the names of `AttentionEdgeCounts`."""
KNOWN_PASSES = 8
"""Forward passes in a row whose layers can be run again in one backward pass."""


@dataclass
class GateSettings:
    """How the gates of one forward pass are set, and what is counted.

    Args:
        mode: sampled, deterministic or open.
        generator: of the draws.
        noise: scales that of sampled gates.
        counts: where the pass writes down what it counts; None to count nothing.
        keep_gates: whether that has every gate, not only their counts.
        pressure: gradient that the expected count puts on confidently open gates; see `press`.
        edge_cost: what an attention edge counts in `AttentionEdgeCounts.cost`; 1 when left out.
        real: 0 at padding, which counts for nothing.
    """

    mode: GateMode = GateMode.DETERMINISTIC
    generator: torch.Generator | None = None
    noise: float = 1.0
    counts: list[Counted] | None = None
    keep_gates: bool = False
    pressure: float = 0.0
    edge_cost: Tensor | None = None
    real: Tensor | None = None

    @property
    def idle(self) -> bool:
        """Whether a pass neither closes nor counts anything."""
        return self.mode is GateMode.OPEN and self.counts is None


@dataclass(frozen=True, eq=False)
class _LayerPass:
    """What a layer's gates need to be computed again in a backward pass, with the same draws."""

    settings: GateSettings
    drawn_from: Tensor | None
    fingerprint: Tensor

    def shows(self, fingerprint: Tensor) -> bool:
        """Whether what a layer reads now is what it read in this pass."""
        return fingerprint.shape == self.fingerprint.shape and torch.allclose(
            self.fingerprint, fingerprint, equal_nan=True
        )


class PassGates(nn.Module):
    """Learnable gates of all layers, as each pass decides them.

    Args:
        distribution: how gates are sampled and evaluated.
    """

    def __init__(self, distribution: GateDistribution) -> None:
        super().__init__()
        self.distribution = distribution
        self.settings = GateSettings()
        self._passes = defaultdict[int, deque[_LayerPass]](lambda: deque(maxlen=KNOWN_PASSES))

    @contextmanager
    def using(self, **settings: Any) -> Iterator[None]:
        """Other `GateSettings` for the length of a block."""
        before = self.settings
        self.settings = replace(before, **settings)
        try:
            yield
        finally:
            self.settings = before

    def forget(self) -> None:
        """Drop what is kept of past passes."""
        self._passes.clear()

    def _settings_of(self, layer: int, read: Float[Tensor, "prompt ... n"]) -> GateSettings:
        """Those of this pass, or of the one that it repeats.

        Activation checkpointing runs a layer again in the backward pass, when the block that said
        how gates are set may be left: then they are set, and drawn, as they were.

        Args:
            layer: that is run.
            read: what decides its gates, by which passes are told apart.

        Raises:
            RuntimeError: a repetition of a pass that is not among the last ones.
        """
        known = self._passes[layer]
        if torch._C._current_graph_task_id() == -1:
            now = self.settings
            if torch.is_grad_enabled():
                drawn_from = None if now.generator is None else now.generator.get_state()
                kept = _counting_anew(now)  # the counts belong to the pass, which may be over
                known.append(_LayerPass(kept, drawn_from, _fingerprint(read)))
            return now
        found = _fingerprint(read)
        last = next((one for one in reversed(known) if one.shows(found)), None)
        if last is None:
            raise RuntimeError(
                f"expected a backward pass after at most {KNOWN_PASSES} forward passes of a model "
                "with checkpointed activations; the gates of an earlier pass are not known any more"
            )
        # A backward pass goes from the last pass to the first: of equal ones this was the last.
        known.remove(last)
        known.appendleft(last)
        again = _counting_anew(last.settings)  # the same sums, into a list that nobody reads
        if last.drawn_from is None:
            return again
        generator = torch.Generator(read.device)
        generator.set_state(last.drawn_from)
        return replace(again, generator=generator)

    def _opened(
        self, now: GateSettings, logits: Float[Tensor, "*gate"], possible: Bool[Tensor, "*gate"]
    ) -> tuple[Bool[Tensor, "*gate"], Float[Tensor, "*gate"]]:
        """Which deterministic gates are open, and with what probability each is, under pressure."""
        if now.mode is GateMode.OPEN:
            return possible, possible.to(logits.dtype)
        probability = self.distribution.open_probability(logits)
        if now.pressure > 0:
            probability = press(probability, logits, now.pressure)
        return self.distribution.is_open(logits) & possible, probability


def _counting_anew(settings: GateSettings) -> GateSettings:
    return settings if settings.counts is None else replace(settings, counts=[])


def _fingerprint(read: Float[Tensor, "prompt ... n"]) -> Tensor:
    return read.detach()[:1, ..., -1:, :].clone()

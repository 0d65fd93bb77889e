"""The differentiable passes of attribution: gradients of a metric at any hook points.

"eap" takes the gradient at the clean prompt; "eap-ig" its mean over inputs
``corrupted + k / steps (clean - corrupted)``, k = 1..steps, of the embeddings;
"eap-ig-activations" moves one layer's outputs at a time instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.circuits.pair_runs import PairRuns, read_mask
from sparse_tl.circuits.read_gradients import ReadGradients
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitGraph, Node
from sparse_tl.lens import (
    EMBEDDED,
    Adapter,
    destination_points,
    record,
    residual_points,
    source_points,
)
from sparse_tl.metrics import Metric, measure

Method = Literal["eap", "eap-ig", "eap-ig-activations"]


@dataclass
class GradientPass:
    """One differentiable forward pass, and which sources its gradients count for.

    Args:
        adapter: of the model.
        kept: what stood at the hook points, in the autograd graph.
        value: the metric, summed over pairs.
        again: the same metric with an activation replaced, to see whether it depends on that.
        change: the patch minus what is written, by hook point.
        share: what the pass counts.
        rows: the sources that it counts for.
    """

    adapter: Adapter
    kept: dict[str, Tensor]
    value: Float[Tensor, ""]
    again: Callable[[dict[str, Tensor]], Float[Tensor, ""]]
    change: dict[str, Tensor]
    share: float
    rows: slice

    def covers(self, graph: CircuitGraph, source: Node) -> bool:
        return graph.source_index(source) in range(*self.rows.indices(len(graph.sources)))

    def add_to(self, back: ReadGradients) -> None:
        """Add the gradients of this pass at every destination."""
        layers = range(self.adapter.n_layers)
        names = [n for i in layers for n in destination_points(i, self.adapter.graph.has_mlps)]
        gradients = self.gradients([*names, "final"])
        back.add(self.kept, gradients, gradients.pop("final"), self.share)

    def gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Of the metric's sum at some hook points; 0 where it does not depend on the value there.

        Raises:
            ValueError: a value on which it does depend, but of which autograd has lost sight.
        """
        wanted = [self.kept[name] for name in names]
        if not wanted:
            return {}
        apart = [tensor.requires_grad for tensor in wanted]
        found = iter(
            torch.autograd.grad(
                self.value,
                [tensor for tensor, has in zip(wanted, apart, strict=True) if has],
                allow_unused=True,
            )
        )
        gradients = [next(found) if has else None for has in apart]
        lost = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
        if lost:
            self._check_without_influence(lost)
        return {
            name: torch.zeros_like(value) if gradient is None else gradient
            for name, value, gradient in zip(names, wanted, gradients, strict=True)
        }

    def _check_without_influence(self, names: list[str]) -> None:
        """A gradient that is missing is 0 only if the metric does not move with the value."""
        generator = torch.Generator().manual_seed(0)
        for name in names:
            value = self.kept[name].detach()
            noise = torch.randn(value.shape, generator=generator).to(value)
            moved = self.again({name: value + noise}) - self.value.detach()
            if bool(moved.abs() > 1e-6 * (1 + self.value.detach().abs())):
                raise ValueError(
                    f"expected gradients of the metric at {name}; there is none, although the "
                    f"metric moves by {moved.item():.3g} with the value there. A hook on the model "
                    "replaces it by a tensor without gradients (detached, or made anew): remove "
                    "the hook, or let it compute with what it is given."
                )


def _lent(one: GradientPass) -> Iterator[GradientPass]:
    """A pass until the next one is asked for: two would double the memory."""
    yield one
    del one.kept, one.value


class Passes:
    """The passes that a method asks for; made once, run for every batch.

    With `heads_only` what says nothing about heads is not run.

    Raises:
        ValueError: an unknown method, or no steps.
    """

    def __init__(
        self,
        metric: Metric,
        method: Method | str,
        steps: int,
        runs: PairRuns,
        also: Sequence[str] = (),
        heads_only: bool = False,
    ) -> None:
        if method not in get_args(Method) or steps < 1:
            raise ValueError(
                f"expected a method of {get_args(Method)} and at least 1 step; got {method!r} and "
                f"{steps}"
            )
        self.metric, self.method, self.steps, self.runs = metric, method, steps, runs
        self.adapter, self.graph = runs.adapter, runs.adapter.graph
        self.heads_only = heads_only
        self.sources = source_points(self.graph.n_layers, self.graph.has_mlps)
        self.names = [*self.sources, *also]
        for layer in range(self.graph.n_layers):
            self.names += destination_points(layer, self.graph.has_mlps)
            self.names += residual_points(layer, self.graph.has_mlps)

    @property
    def count(self) -> int:
        """How many passes there are in all."""
        if self.method == "eap":
            return len(self.runs)
        layers = self.graph.n_layers * (1 + (self.graph.has_mlps and not self.heads_only))
        moved = 1 if self.method == "eap-ig" else layers + (not self.heads_only)
        return len(self.runs) * self.steps * moved

    def passes(self, index: int) -> Iterator[GradientPass]:
        """Those of one batch, the clean prompts first: that pass says what every source writes."""
        batch, patch = self.runs.batches[index], self.runs.values(index)
        kept, value = self._differentiable(batch, {})
        clean = {name: kept[name].detach() for name in self.sources}
        change = {name: -patch.change(name, written) for name, written in clean.items()}
        again = partial(self._value, batch)
        if self.method != "eap-ig-activations":
            share = 1.0 if self.method == "eap" else 1 / self.steps
            whole = slice(None)
            yield from _lent(GradientPass(self.adapter, kept, value, again, change, share, whole))
        del kept, value  # frees the autograd graph before the next pass
        for rows, name in self._moved():
            for k in range(self.steps, 0, -1):
                if name == EMBEDDED and self.method == "eap-ig" and k == self.steps:
                    continue  # the clean pass
                moved = {name: clean[name] + (1 - k / self.steps) * change[name]}
                found = self._differentiable(batch, moved)
                here = partial(self._value, batch, moved)
                one = GradientPass(self.adapter, *found, here, change, 1 / self.steps, rows)
                del found
                yield from _lent(one)

    def _moved(self) -> Iterator[tuple[slice, str]]:
        """What is interpolated: score rows and hook point."""
        if self.method == "eap":
            return
        if self.method == "eap-ig":
            yield slice(None), EMBEDDED
            return
        row = 0
        for name in self.sources:
            n_sources = self.graph.n_heads if name.endswith("hook_z") else 1
            if n_sources > 1 or name.endswith("hook_z") or not self.heads_only:
                yield slice(row, row + n_sources), name
            row += n_sources

    def _differentiable(
        self, batch: PromptPairs, replaced: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Float[Tensor, ""]]:
        read = read_mask(batch)
        kept, final = record(
            self.adapter, batch.clean, self.names, replaced=replaced, differentiable=True
        )
        kept["final"] = final
        with torch.enable_grad():
            logits = self.adapter.logits_at(final, read)
            value = measure(self.metric, logits, batch).sum()
        if not value.requires_grad:
            raise ValueError(
                "expected a metric with a gradient, such as a difference of logits; what it "
                "returned does not depend on the logits differentiably"
            )
        return kept, value

    @torch.no_grad()
    def _value(self, batch: PromptPairs, *replaced: dict[str, Tensor]) -> Float[Tensor, ""]:
        """The metric with some activations replaced."""
        values = {name: value for some in replaced for name, value in some.items()}
        if "final" in values:
            final = values["final"]
        else:
            _, final = record(self.adapter, batch.clean, (), replaced=values)
        return measure(self.metric, self.adapter.logits_at(final, read_mask(batch)), batch).sum()

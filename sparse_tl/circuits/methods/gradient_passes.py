"""Differentiable passes for attribution: gradients of a metric at any hook points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.pair_runs import PairRuns, read_mask
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import Heads, PatchValues
from sparse_tl.lens import EMBEDDED, Held, needed, record, relevance_rules
from sparse_tl.metrics import Metric, check_changed, is_changed, measure
from sparse_tl.parallel import ranks

Method = Literal["eap", "eap-ig", "eap-ig-activations", "relp"]


class Passes:
    """The passes that an attribution method needs; created once, run for every batch.

    Args:
        metric: metric function with one value per pair.
        method: attribution method, as in `attribute_circuit_edges`.
        steps: number of interpolation steps.
        runs: prompt pairs, and the patch of circuit edges.
        also: hook points to record in addition to those of sources and destinations.
        heads_only: leave out hook points that do not concern heads; heads then write at ``hook_z``.
    """

    def __init__(
        self,
        metric: Metric,
        method: Method,
        steps: int,
        runs: PairRuns,
        also: Sequence[str] = (),
        heads_only: bool = False,
    ) -> None:
        self.metric, self.method, self.steps, self.runs = metric, method, steps, runs
        self.adapter, self.also = runs.adapter, also
        layers = range(self.adapter.n_layers)
        heads = [self.adapter.heads_point(layer) for layer in layers]
        self.sources = self.adapter.source_points()
        if heads_only:
            heads = Heads().points(self.adapter)
            self.sources = [EMBEDDED, *heads]
        self.names = [*self.sources, *also]
        # As gates on them act: what heads and MLPs read, or what heads write at hook_z.
        self.first = self.sources if heads_only else []
        for layer in () if heads_only else layers:
            self.first += self.adapter.destination_points(layer)
            self.names += self.adapter.residual_points(layer)
        self.names += self.first
        self.rows: dict[str, slice] = {}
        """The sources that write at each hook point."""
        row = 0
        for name in self.sources:
            n_sources = self.adapter.n_heads if name in heads else 1
            self.rows[name] = slice(row, row + n_sources)
            row += n_sources
        self._changed = False
        self._moved: list[str] = []
        """The hook points whose values the passes interpolate between clean and patched."""
        if method == "eap-ig":
            self._moved = [EMBEDDED]
        elif method == "eap-ig-activations":
            self._moved = heads if heads_only else self.sources

    @property
    def count(self) -> int:
        """Number of passes over the batches of this rank."""
        return len(self.runs) * (self.steps * len(self._moved) or 1)

    def measured(
        self, final: Float[Tensor, "pair pos d_model"], batch: PromptPairs
    ) -> Float[Tensor, " pair"]:
        """The metric of each pair, given the final residual stream."""
        return measure(self.metric, self.adapter.logits_at(final, read_mask(batch)), batch)

    @autograd(False)
    def _changes(
        self, one: GradientPass, clean: Mapping[str, Tensor], other: Tensor | None
    ) -> bool:
        """Whether patching everything changes the metric of any pair.

        Where no other prompts are patched in, whose metric takes no pass: what any source writes.
        """
        if other is not None:
            return is_changed(one.values, self.measured(other, one.batch))
        return any(is_changed(clean[name], clean[name] + one.change[name]) for name in self.sources)

    def check_effect(self) -> None:
        """Check, after the passes of all batches, that there was an effect to attribute.

        Raises:
            NoEffectError: patching everything changes the metric of no pair.
        """
        check_changed(bool(ranks.summed(torch.tensor(float(self._changed)))))

    def rows_of(self, one: GradientPass) -> slice:
        """The sources that a pass contributes to."""
        return slice(None) if one.moved is None else self.rows[one.moved]

    def passes(self, index: int, shown: PatchValues | None = None) -> Iterator[GradientPass]:
        """The passes of one batch; `shown` holds the patches of the hook points in `also`."""
        batch, patch = self.runs.batches[index], self.runs.values(index)
        one = GradientPass(self, batch, held=patch.held)
        clean = {name: one.kept[name].detach() for name in (*self.sources, *self.also)}
        change = {name: -patch.change(name, clean[name]) for name in self.sources}
        if shown is not None:
            change |= {name: -shown.change(name, clean[name]) for name in self.also}
        one.change = change
        self._changed |= self._changes(one, clean, patch.final)
        single = self.method == "eap-ig-activations"
        if not single:
            one.share = 1 / self.steps if self.method == "eap-ig" else 1.0
            yield from _lent(one)
        del one  # frees the autograd graph before the next pass
        first = self.steps if single else self.steps - 1  # the clean pass is done
        for name in self._moved:
            for k in range(first, 0, -1):
                replaced = {name: clean[name] + (1 - k / self.steps) * change[name]}
                one = GradientPass(self, batch, replaced, held=patch.held)
                one.change, one.share, one.moved = change, 1 / self.steps, name if single else None
                yield from _lent(one)
                del one


class GradientPass:
    """One differentiable forward pass, and the sources that its gradients contribute to.

    Args:
        plan: the set of passes that this one belongs to.
        batch: prompt pairs.
        replaced: activations that replace the model's own.
        held: keys and values that the pass shares with that over the patched prompts.

    Attributes:
        kept: activations at the hook points, in the autograd graph.
        values: metric of each pair.
        value: their sum.
        change: patch minus clean activation, by hook point.
        matters: positions at which changes and gradients mean anything.
        share: weight of the pass.
        by_relevance: whether gradients follow the rules of relevance propagation.
        moved: the only hook point whose sources the pass contributes to; None for all.

    Raises:
        ValueError: the metric has no gradient.
    """

    change: dict[str, Tensor]
    share = 1.0
    moved: str | None = None

    def __init__(
        self,
        plan: Passes,
        batch: PromptPairs,
        replaced: dict[str, Tensor] | None = None,
        *,
        held: Held | None = None,
    ) -> None:
        self._plan, self.batch, self._replaced = plan, batch, replaced or {}
        held = None if plan.also else held  # attention patterns differ where prompts are alike
        read = read_mask(batch)
        self._options: dict[str, Any] = {"first": plan.first, "read": read, "held": held}
        self.matters = needed(plan.adapter, read, None if held is None else held.alike)
        self.by_relevance = plan.method == "relp"
        # First of all hooks: what is recorded after a norm has the gradient of the rules.
        with relevance_rules(plan.adapter) if self.by_relevance else nullcontext():
            self.kept, final = record(
                plan.adapter,
                batch.clean,
                plan.names,
                replaced=self._replaced,
                differentiable=True,
                **self._options,
            )
            self.kept["final"] = final
            with autograd(True):
                self.values = plan.measured(final, batch)
                self.value = self.values.sum()
        if not self.value.requires_grad:
            raise ValueError(
                "expected a metric with a gradient, such as a difference of logits; what it "
                "returned does not depend on the logits differentiably"
            )

    def counts_for(self, name: str) -> bool:
        """Whether the pass contributes to the sources at a hook point."""
        return self.moved in (None, name)

    def gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gradients of the summed metric at some hook points; 0 where the value has no influence.

        Raises:
            ValueError: the metric depends on a value that autograd cannot trace.
        """
        seen = {name: self.kept[name] for name in names if self.kept[name].requires_grad}
        found: dict[str, Tensor | None] = dict.fromkeys(names)
        if seen:
            computed = torch.autograd.grad(self.value, [*seen.values()], allow_unused=True)
            found |= zip(seen, computed, strict=True)
        self._check_without_influence([name for name, some in found.items() if some is None])
        return {
            name: torch.zeros_like(self.kept[name]) if some is None else some
            for name, some in found.items()
        }

    @autograd(False)
    def _check_without_influence(self, names: list[str]) -> None:
        """Check that the metric does not move with values whose gradient is missing."""
        generator, value = torch.Generator().manual_seed(0), self.value.detach()
        for name in names:
            shown = self.kept[name].detach()
            noisy = shown + torch.randn(shown.shape, generator=generator).to(shown)
            final = noisy
            if name != "final":
                replaced = {**self._replaced, name: noisy}
                plan, tokens = self._plan, self.batch.clean
                _, final = record(plan.adapter, tokens, (), replaced=replaced, **self._options)
            moved = self._plan.measured(final, self.batch).sum() - value
            if bool(moved.abs() > 1e-6 * (1 + value.abs())):
                raise ValueError(
                    f"expected gradients of the metric at {name}; there is none, although the "
                    f"metric moves by {moved.item():.3g} with the value there. A hook on the model "
                    "replaces it by a tensor without gradients (detached, or made anew): remove "
                    "the hook, or let it compute with what it is given."
                )


def _lent(one: GradientPass) -> Iterator[GradientPass]:
    """Yield a pass and free it when the next one is requested: two would double the memory."""
    yield one
    del one.kept, one.values, one.value

"""The passes of attribution: gradients of a metric at any hook points.

An `AttributionPlan` knows which passes a method takes, and runs them batch by batch; each is a
`GradientPass`. For small batches a pass runs several interpolation steps at once, as copies of the
prompts: larger matrix products are faster per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.devices import SizeByDevice
from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.pair_runs import PatchedPairs, read_mask
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import Heads, PatchValues
from sparse_tl.lens import (
    EMBEDDED,
    gate_hooks,
    hooks_besides,
    record,
    relevance_rules,
    repeated,
)
from sparse_tl.metrics import Metric, check_changed, is_changed, measure

Method = Literal["eap", "eap-ig", "eap-ig-activations", "relp"]

TOKENS_AT_ONCE = SizeByDevice(cpu=768, elsewhere=2**13)
"""Maximum number of tokens in a pass of several steps; a CPU keeps their activations in caches."""


class AttributionPlan:
    """The passes that an attribution method takes; created once, run for every batch.

    Args:
        metric: metric function with one value per pair.
        method: attribution method, as in `attribute_circuit_edges`.
        steps: number of interpolation steps.
        patched: prompt pairs, with the patch at the hook points of sources.
        also: hook points to record in addition to those of sources and destinations.
        heads_only: leave out hook points that do not concern heads; heads then write at ``hook_z``.
    """

    def __init__(
        self,
        metric: Metric,
        method: Method,
        steps: int,
        patched: PatchedPairs,
        also: Sequence[str] = (),
        heads_only: bool = False,
    ) -> None:
        self.metric, self.method, self.steps, self.patched = metric, method, steps, patched
        self.adapter, self.also = patched.adapter, also
        layers = range(self.adapter.n_layers)
        heads = [self.adapter.heads_point(layer) for layer in layers]
        if heads_only:
            heads = Heads().points(self.adapter)
        self.source_points = list(patched.points)
        self.names = [*self.source_points, *also]
        # Recorded where gates act: what heads read, or what heads write at hook_z.
        self.first = self.source_points if heads_only else []
        for layer in () if heads_only else layers:
            self.first += self.adapter.destination_points(layer)[:3]
            self.names += self.adapter.residual_points(layer)
        self.names += self.first
        self.written_at: dict[str, slice] = {}
        """The sources that write at each hook point."""
        first = 0
        for name in self.source_points:
            end = first + (self.adapter.n_heads if name in heads else 1)
            self.written_at[name], first = slice(first, end), end
        self._changed = False
        self._interpolated: list[str] = []
        """The hook points whose values the passes interpolate between clean and patched."""
        if method == "eap-ig":
            self._interpolated = [EMBEDDED]
        elif method == "eap-ig-activations":
            self._interpolated = heads if heads_only else self.source_points

    @property
    def count(self) -> int:
        """Number of interpolation steps over all batches."""
        return len(self.patched) * (self.steps * len(self._interpolated) or 1)

    def measured(
        self, final: Float[Tensor, "rows pos d_model"], batch: PromptPairs
    ) -> Float[Tensor, " rows"]:
        """The metric of each pair, given the final residual stream of copies of the prompts."""
        copies = len(final) // len(batch)
        logits = self.adapter.logits_at(final, repeated(read_mask(batch), copies))
        return torch.cat([measure(self.metric, one, batch) for one in logits.chunk(copies)])

    @autograd(False)
    def _changes(
        self, one: GradientPass, clean: Mapping[str, Tensor], other: Tensor | None
    ) -> bool:
        """Whether patching everything changes the metric of any pair.

        Without other prompts, whose metric takes no extra pass: whether any source's write changes.
        """
        if other is not None:
            return is_changed(one.values, self.measured(other, one.batch))
        return any(
            is_changed(clean[name], clean[name] + one.change[name]) for name in self.source_points
        )

    def check_effect(self) -> None:
        """Check, after the passes of all batches, that there was an effect to attribute.

        Raises:
            NoEffectError: patching everything changes the metric of no pair.
        """
        check_changed(self._changed)

    def sources_of(self, one: GradientPass) -> slice:
        """The sources that a pass contributes to."""
        return slice(None) if one.only is None else self.written_at[one.only]

    def passes(self, index: int, patches: PatchValues | None = None) -> Iterator[GradientPass]:
        """The passes of one batch; `patches` holds those of the hook points in `also`."""
        batch, patch = self.patched.batches[index], self.patched.record_patch(index)
        single, ig = self.method == "eap-ig-activations", self.method.startswith("eap-ig")
        share = 1 / self.steps if ig else 1.0
        one = GradientPass(self, batch, share)
        clean = {name: one.kept[name].detach() for name in (*self.source_points, *self.also)}
        change = {name: patch.change(name, clean[name]) for name in self.source_points}
        if patches is not None:
            change |= {name: patches.change(name, clean[name]) for name in self.also}
        one.change = change
        self._changed |= self._changes(one, clean, patch.final)
        if not single:
            yield from _lent(one)
        del one  # frees the autograd graph before the next pass
        first = self.steps if single else self.steps - 1  # the clean pass is done
        # Hooks may fit one copy of the prompts only.
        most = TOKENS_AT_ONCE.on(self.adapter.device)
        hooked = hooks_besides(self.adapter, gate_hooks(self.adapter))
        n = 1 if hooked else max(1, most // batch.clean.numel())
        for name in self._interpolated:
            for last in range(first, 0, -n):
                some = range(last, max(last - n, 0), -1)
                values = [clean[name] + (1 - k / self.steps) * change[name] for k in some]
                replaced = {name: torch.cat(values)}
                one = GradientPass(self, batch, share, replaced, copies=len(some))
                one.change, one.only = change, name if single else None
                yield from _lent(one)
                del one


class GradientPass:
    """A differentiable forward pass, and the sources that its gradients contribute to.

    Args:
        plan: the plan that this pass belongs to.
        batch: prompt pairs.
        share: weight of every interpolation step; gradients include it.
        replaced: activations that replace the model's own.
        copies: number of steps in this pass; each has a copy of the prompts, one after the other.

    Attributes:
        kept: activations at the hook points, in the autograd graph.
        values: metric of each pair, in each copy.
        value: their sum times the weight.
        change: patch minus clean activation, by hook point.
        by_relevance: whether gradients follow the rules of relevance propagation.
        only: the one hook point whose sources the pass contributes to; None for all.

    Raises:
        ValueError: the metric has no gradient.
    """

    change: dict[str, Tensor]
    only: str | None = None

    def __init__(
        self,
        plan: AttributionPlan,
        batch: PromptPairs,
        share: float,
        replaced: dict[str, Tensor] | None = None,
        *,
        copies: int = 1,
    ) -> None:
        self._plan, self.batch, self._replaced = plan, batch, replaced or {}
        self.copies, self._share = copies, share
        self._options: dict[str, Any] = {"first": plan.first, "copies": copies}
        self.by_relevance = plan.method == "relp"
        # Attached before all other hooks: what is recorded after a norm gets the rules' gradient.
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
                self.value = share * self.values.sum()
        if not self.value.requires_grad:
            raise ValueError(
                "expected a metric with a gradient, such as a difference of logits; what it "
                "returned does not depend on the logits differentiably"
            )

    def over_copies(self, value: Float[Tensor, "rows ..."]) -> Float[Tensor, "pair ..."]:
        """The sum over the copies of the prompts."""
        return value if self.copies == 1 else value.unflatten(0, (self.copies, -1)).sum(dim=0)

    def counts_for(self, name: str) -> bool:
        """Whether the pass contributes to the sources at a hook point."""
        return self.only in (None, name)

    def gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gradients of `value` at some hook points; 0 where the activation has no influence.

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
        """Check that the metric does not depend on activations whose gradient is missing."""
        generator, value = torch.Generator().manual_seed(0), self.value.detach()
        for name in names:
            activation = self.kept[name].detach()
            noise = torch.randn(activation.shape, generator=generator)
            noisy = activation + noise.to(activation)
            final = noisy
            if name != "final":
                replaced = {**self._replaced, name: noisy}
                plan, tokens = self._plan, self.batch.clean
                _, final = record(plan.adapter, tokens, (), replaced=replaced, **self._options)
            shift = self._share * self._plan.measured(final, self.batch).sum() - value
            if bool(shift.abs() > 1e-4 * (1 + value.abs())):  # two passes round differently
                raise ValueError(
                    f"expected gradients of the metric at {name}; there is none, although the "
                    f"metric moves by {shift.item():.3g} with the value there. A hook on the model "
                    "replaces it by a tensor without gradients (detached, or made anew): remove "
                    "the hook, or let it compute with what it is given."
                )


def _lent(one: GradientPass) -> Iterator[GradientPass]:
    """Yield a pass and free it when the next one is requested: two would double the memory."""
    yield one
    del one.kept, one.values, one.value

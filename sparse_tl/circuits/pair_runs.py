"""Prompt pairs in batches with their patches, shared by all analyses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import Adapter, HookedModel, adapt, check_pairs
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, GatedRun, Heads, Patch, PatchValues, Site
from sparse_tl.gates.patches import mean_activations, needs_reference
from sparse_tl.gates.run import clean_outputs
from sparse_tl.metrics import Metric, check_changed, divergence, is_changed, measure
from sparse_tl.progress import tracked

STATES_AT_ONCE = 2**28
"""Maximum number of values in the states of the runs that are kept."""
ROWS = 256
"""Maximum number of gate settings times prompts in one forward pass."""


def batches_of(adapter: Adapter, pairs: PromptPairs, batch_size: int) -> list[PromptPairs]:
    """Prompt pairs in batches on the model's device, after a check that they fit the model."""
    check_pairs(adapter, pairs)
    return [batch.to(adapter.device) for batch in pairs.split(batch_size)]


class PairRuns:
    """Prompt pairs in batches, with the values of a patch, to run under gates at one site.

    `patch` and `positions` are those of `attribute_circuit_edges`; positions become the spans of
    each batch. The values of the patch at hook points `also` are recorded as well.

    With `keep`, for searches that return to every batch, the runs of the first batches are kept,
    with their patches and states. Those of further batches are rebuilt whenever they are needed, so
    memory does not grow with the number of pairs.
    """

    def __init__(
        self,
        model: HookedModel,
        site: Site,
        pairs: PromptPairs,
        patch: Patch,
        batch_size: int,
        *,
        also: Sequence[str] = (),
        keep: bool = False,
        positions: Positions | None = None,
    ) -> None:
        if positions is not None:
            pairs = replace(pairs, spans=pairs.spans_of(positions))
        if patch == "resample":
            pairs = replace(pairs, corrupted=pairs.clean[_other_rows(pairs.positions.cpu())])
        self.model, self.adapter, self.site, self.patch = model, adapt(model), site, patch
        self.batches = batches_of(self.adapter, pairs, batch_size)
        self.points, self._by_span = [*also, *site.points(self.adapter)], positions is not None
        # A mean is shared by all batches; each has other prompts of its own.
        self._patch: Patch = "corrupted" if needs_reference(patch) else patch
        if patch == "mean":
            pairs.of_one_length()  # raises if they are not
            if len(pairs.forced.ends.unique()) > 1:
                raise ValueError(
                    'patch="mean" averages over prompts with answers by position: give answers of '
                    'one number of tokens, or patch="corrupted"'
                )
            clean = [batch.forced.clean for batch in self.batches]
            self._patch = mean_activations(self.adapter, clean, self.points, site.order)
        self._runs: dict[int, GatedRun] = {}
        self._n_kept = 0
        if keep:
            written = len(self.adapter.graph.sources) if site.keeps_changes else 0
            per_token = (3 * self.adapter.n_layers + written) * self.adapter.d_model
            n_tokens = max(batch.forced.clean.numel() for batch in self.batches)
            self._n_kept = max(1, STATES_AT_ONCE // (n_tokens * per_token))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[PromptPairs, GatedRun]]:
        for index, batch in enumerate(self.batches):
            yield batch, self.run(index)

    def record_patch(self, index: int) -> PatchValues:
        """Run the prompts that a batch is patched with, if any, and record their values."""
        patch, order, other = self._patch, self.site.order, None
        if patch == "corrupted":
            other = self.batches[index].forced.corrupted
        return PatchValues(self.adapter, self.points, patch, other, order=order)

    def run(self, index: int) -> GatedRun:
        """A `GatedRun` of one batch."""
        if index in self._runs:
            return self._runs[index]
        rows = self.batches[index].forced
        site: Any = self.site
        site = replace(site, spans=rows.spans) if self._by_span else site
        run = GatedRun(self.model, site, rows.clean, rows.read, self.record_patch(index))
        if index < self._n_kept:
            self._runs[index] = run
        return run

    @torch.no_grad()
    def everything_patched(self, run: GatedRun) -> Float[Tensor, "label vocab"]:
        """Logits of a batch with everything patched: of the corrupted run, under corrupted patches.

        With all heads patched, MLPs would still read the clean prompt.
        """
        final = run.patch.final
        heads = isinstance(self.site, Heads) and self.patch == "corrupted"
        if final is not None and (heads or isinstance(self.site, CircuitEdges)):
            return self.adapter.logits_at(final, run.read)
        return run.logits(torch.zeros(run.site.shape(self.adapter)))

    def has_effect(self, metric: Metric | Literal["kl"], batch: PromptPairs, run: GatedRun) -> bool:
        """Whether the patch changes the metric, or the predictions, of any pair of a batch.

        True for heads under a patch without other prompts: that no head matters is a valid result.
        """
        if run.patch.final is not None:
            patched = self.adapter.logits_at(run.patch.final, run.read)
        elif isinstance(self.site, Heads):
            return True
        else:
            patched = self.everything_patched(run)
        clean = value_of(metric, run.clean_logits, batch, run)
        return is_changed(clean, value_of(metric, patched, batch, run))

    def check_effect(self, metric: Metric | Literal["kl"], of: str = "") -> None:
        """Raise a NoEffectError if the patch changes no pair; `of` says of which pairs."""
        check_changed(any(self.has_effect(metric, batch, run) for batch, run in self), of)


def settings_at_once(n_prompts: int) -> int:
    """Number of gate settings to run in one forward pass on a batch of prompts."""
    return max(1, ROWS // n_prompts)


def closing_each(
    run: GatedRun, gates: Sequence[tuple[int, ...]], shape: Sequence[int]
) -> Iterator[Float[Tensor, "label vocab"]]:
    """Logits of a batch with one gate closed at a time, of those given by index, of `shape`."""
    n = settings_at_once(len(run.tokens))
    for start in range(0, len(gates), n):
        some = gates[start : start + n]
        settings = torch.ones(len(some), *shape)
        for setting, closed in zip(settings, some, strict=True):
            setting[closed] = 0
        yield from run.logits(settings)


def clean_logits(
    model: HookedModel, pairs: PromptPairs, batch_size: int, *, progress: bool = False
) -> Iterator[tuple[PromptPairs, Float[Tensor, "label vocab"]]]:
    """Logits of clean prompts at the positions read, batch by batch."""
    adapter = adapt(model)
    batches = batches_of(adapter, pairs, batch_size)
    with tracked("running prompts", len(batches), progress) as step:
        for batch in batches:
            yield batch, clean_outputs(adapter, batch.forced.clean, batch.forced.read)[1]
            step()


def value_of(
    metric: Metric | Literal["kl"], logits: Tensor, batch: PromptPairs, run: GatedRun
) -> Float[Tensor, " pair"]:
    """The metric of each pair of a batch, or the mean divergence from the clean run."""
    if isinstance(metric, str):
        return batch.forced.per_pair(divergence(logits, run.clean_logits))
    return measure(metric, logits, batch)


def _other_rows(ends: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
    """For every row, a random other row that ends in the same column."""
    generator, others = torch.Generator().manual_seed(0), torch.zeros_like(ends)
    for end in ends.unique().tolist():
        (alike,) = (ends == end).nonzero(as_tuple=True)
        n = len(alike)
        if n < 2:
            raise ValueError(
                'patch="resample" needs at least two prompt pairs of every length; there is '
                f"{n} of {end + 1} tokens. Leave it out, or give more pairs"
            )
        steps = torch.randint(1, n, (n,), generator=generator)
        others[alike] = alike[(torch.arange(n) + steps) % n]
    return others

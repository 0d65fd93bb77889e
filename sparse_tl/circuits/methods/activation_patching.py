"""Activation patching: run a prompt with the activations of another at one place at a time.

    effect[place] = (m(patched) - m(run)) / (m(other) - m(run))

1. Record the activations of the other prompts, and run the prompts without a patch.
2. For each layer, run copies of the prompts from that layer on, each with one place patched.
3. Measure the metric of each copy.

Running corrupted prompts with clean activations shows what suffices to restore the answer; running
clean prompts with corrupted activations shows what is necessary for it.

Reference: Meng et al., arXiv 2202.05262; Zhang and Nanda, arXiv 2309.16042.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import Adapter, HookedModel, adapt, check_gates, in_evaluation_mode
from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.prompt.tokens import token_texts
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import HookPoints
from sparse_tl.metrics import Metric, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd

At = Literal["resid_pre", "attn_out", "mlp_out", "z", "pattern"]
Side = Literal["clean", "corrupted"]
_HOOK_POINTS = {"z": "attn.hook_z", "pattern": "attn.hook_pattern"}
_HEAD_AXIS = {"z": 2, "pattern": 1}
"""The head axis of activations that are patched by head; others are patched by position."""


@dataclass(frozen=True, eq=False)
class ActivationPatching(Result):
    """The metric of prompts with one place patched, from `patch_activations`.

    Args:
        at: kind of the patched activations.
        into: prompts that are run, with activations of their counterparts.
        columns: tokens of the first clean prompt, names of spans, or numbers of heads.
        values: metric of each prompt pair with one place patched.
        clean: metric of the clean prompts.
        corrupted: metric of the corrupted prompts.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
        positions: kind of the places, unless they are heads: "tokens" or "spans".
    """

    at: str
    into: Side
    columns: Sequence[str]
    values: Float[Tensor, "layer column pair"]
    clean: Float[Tensor, " pair"]
    corrupted: Float[Tensor, " pair"]
    prompt_start: str | None = None
    positions: Positions = "tokens"

    @property
    def by_head(self) -> bool:
        """Whether places are heads instead of positions."""
        return self.at in _HEAD_AXIS

    @property
    def place(self) -> Literal["head", "position", "span"]:
        """What each column is."""
        if self.by_head:
            return "head"
        return "position" if self.positions == "tokens" else "span"

    @property
    def effect(self) -> Float[Tensor, "layer column"]:
        """``(m(patched) - m(run)) / (m(other) - m(run))``, each averaged over pairs first.

        0: the place has no effect; 1: it has the effect of all activations of the other prompts
        together. Below 0, its effect is the opposite; above 1, other places counteract it.

        Raises:
            NoEffectError: the metric of clean and corrupted prompts is the same.
        """
        run, other = self.clean, self.corrupted
        if self.into == "corrupted":
            run, other = other, run
        return explained_effect(self.values, other, run)

    def to_pandas(self) -> pd.DataFrame:
        """One row per place: layer, head, span or position and token, mean metric, effect."""
        import pandas as pd

        effect = self.effect
        n_layers, n_columns = effect.shape
        columns: dict[str, Sequence[int | str]] = {self.place: [*range(n_columns)] * n_layers}
        if not self.by_head:
            text = "token" if self.place == "position" else "span"
            columns[text] = [*self.columns] * n_layers
        table = pd.DataFrame({"layer": torch.arange(n_layers).repeat_interleave(n_columns)})
        table = table.assign(**columns, metric=self.values.mean(dim=-1).flatten().tolist())
        return table.assign(effect=effect.flatten().tolist())

    def _summary(self) -> pd.DataFrame:
        """The places with the largest effects."""
        return self.to_pandas().sort_values("effect", key=abs, ascending=False).head(20)

    def __repr__(self) -> str:
        n_layers, n_columns, n_pairs = self.values.shape
        places = f"{n_layers} layers x {n_columns} {self.place}s"
        return f"ActivationPatching({self.at} of {places}, into {n_pairs} {self.into} prompts)"


@checked
@in_evaluation_mode
@torch.no_grad()
def patch_activations(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    at: At = "resid_pre",
    *,
    into: Side = "corrupted",
    positions: Positions = "tokens",
    batch_size: AtLeastOne = 32,
    rows: AtLeastOne = 256,
    progress: bool = True,
) -> ActivationPatching:
    """The metric with the activations of one layer and position, or of one head, patched at a time.

    Other arguments are those of `attribute_circuit_edges`.

    Args:
        pairs: prompt pairs; all of one token length if positions are tokens or attention is
            bidirectional.
        at: activations to patch. By layer and position: "resid_pre", the residual stream that
            enters the layer; "attn_out" and "mlp_out", the outputs of its attention and its MLP.
            By layer and head, at all positions: "z", the head's output; "pattern", its attention
            pattern.
        into: prompts that are run. "corrupted": with clean activations, which restore the answer
            (denoising); "clean": with corrupted activations, which break it (noising).
        positions: "tokens" patches each column; "spans" patches each span of
            `PromptPairs.with_spans`, which aligns prompts of several lengths. Heads are patched at
            all positions.
        rows: maximum number of pairs times places in one forward pass.

    Raises:
        ValueError: `at` or `into` is unknown, prompts that need one length differ in length, spans
            are requested for heads or for pairs without spans, the model lacks the hook points, or
            the metric is not one finite number per pair.
        NoEffectError: the metric of clean and corrupted prompts is the same.
    """
    adapter, by_head = adapt(model), at in _HEAD_AXIS
    if by_head and positions == "spans":
        raise ValueError(
            f'{at!r} patches a head at all positions; positions="spans" needs "resid_pre", '
            '"attn_out" or "mlp_out"'
        )
    if not adapter.causal or not by_head and positions == "tokens":
        pairs = pairs.of_one_length()
    site, places = _site(adapter, at, pairs, positions)
    n_layers, n_columns = site.shape(adapter)
    swapped = replace(pairs, clean=pairs.corrupted, corrupted=pairs.clean)
    run_pairs = swapped if into == "corrupted" else pairs
    gated_at = None if by_head else positions
    runs = PairRuns(model, site, run_pairs, "corrupted", batch_size, positions=gated_at)
    run_alone, other = _unpatched(runs, metric)
    explained_effect(other, other, run_alone)  # raises before any patching
    by_batch: list[Tensor] = []
    total = n_layers * len(places) * len(runs)
    with tracked("patching activations", total, progress) as step:
        for batch, run in runs:
            unpatched = measure(metric, run.start_from(None), batch)
            values = unpatched.double()[:, None, None].repeat(1, n_layers, n_columns)
            for layer in range(n_layers):
                for patched in places.split(max(1, rows // len(batch))):
                    gates = torch.ones(len(patched), n_layers, n_columns)
                    gates[torch.arange(len(patched)), layer, patched] = 0
                    for column, logits in zip(patched.tolist(), run.logits(gates), strict=True):
                        values[:, layer, column] = measure(metric, logits, batch).double()
                        step()
            by_batch.append(values.cpu())
    values = torch.cat(by_batch).permute(1, 2, 0).contiguous()
    clean, corrupted = (other, run_alone) if into == "corrupted" else (run_alone, other)
    columns: Sequence[str] = [str(head) for head in range(n_columns)]
    if not by_head:
        names = pairs.spans_of(positions).names
        columns = token_texts(model, pairs.clean[0]) if positions == "tokens" else names
    return ActivationPatching(at, into, columns, values, clean, corrupted, pairs.start, positions)


def _site(
    adapter: Adapter, at: str, pairs: PromptPairs, positions: Positions
) -> tuple[HookPoints, Int[Tensor, " place"]]:
    """Where the gates on all places sit, and the places that can have an effect."""
    names = tuple(adapter.layer_points(_HOOK_POINTS.get(at, f"hook_{at}")))
    if at in _HEAD_AXIS:
        check_gates(adapter)
        n_heads = adapter.n_heads
        return HookPoints(names, (_HEAD_AXIS[at],), (n_heads,)), torch.arange(n_heads)
    spans = pairs.spans_of(positions)
    # In a causal model, both runs are equal before the first token that differs.
    may_differ = (pairs.clean != pairs.corrupted).cumsum(dim=1) >= int(adapter.causal)
    return HookPoints(names, (1,), (len(spans.names),)), spans.at[may_differ].unique().cpu()


def _unpatched(runs: PairRuns, metric: Metric) -> tuple[Tensor, Tensor]:
    """The metric of the prompts that are run, and of the prompts that the activations come from."""
    run_alone, other = list[Tensor](), list[Tensor]()
    for batch, run in runs:
        final = runs.adapter.final(batch.corrupted, read=run.read)
        run_alone.append(measure(metric, run.clean_logits, batch).cpu().double())
        logits = runs.adapter.logits_at(final, run.read)
        other.append(measure(metric, logits, batch).cpu().double())
    return torch.cat(run_alone), torch.cat(other)

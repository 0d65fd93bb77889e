"""Patching, run exactly: of circuit edges and heads, and of activations at one place at a time.

*Circuit edges and heads.* Attribution is exact to first order only. Where it fails depends on
method, model and task: EAP tends to fail at strong edges, EAP-IG at weak ones. So a sample of the
scores that is compared with exact effects has two halves, whose agreement is reported separately:
the strongest parts by |score|, which a circuit consists of, and random others.

*Activations.* Each layer is run from there on with copies of the prompts, each with one place
patched. Running corrupted prompts with clean activations shows what suffices to restore the answer;
running clean prompts with corrupted activations shows what is necessary for it.

Reference: Meng et al., arXiv 2202.05262; Zhang and Nanda, arXiv 2309.16042.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Seed, checked
from sparse_tl.backend import Adapter, HookedModel, adapt, check_gates, in_evaluation_mode
from sparse_tl.circuits.circuit import Scores, check_grid
from sparse_tl.circuits.evaluation import positions_of
from sparse_tl.circuits.pair_runs import PairRuns, clean_logits, closing_each
from sparse_tl.circuits.prompt.tokens import token_texts
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, HookPoints, Patch
from sparse_tl.graph import CircuitEdge, CircuitGraph, HeadGrid, Node, PositionedGraph
from sparse_tl.metrics import Metric, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import OfPrompts, Result

At = Literal["resid_pre", "attn_out", "mlp_out", "z", "pattern"]
Side = Literal["clean", "corrupted"]
_HOOK_POINTS = {"z": "attn.hook_z", "pattern": "attn.hook_pattern"}
_HEAD_AXIS = {"z": 2, "pattern": 1}
"""The head axis of activations that are patched by head; others are patched by position."""


@checked
@in_evaluation_mode
def patch_exactly(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    parts: Sequence[CircuitEdge | Node | str] | None = None,
    *,
    patch: Patch = "corrupted",
    positions: Positions | None = None,
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> pd.Series:
    """The change of the metric when one part is patched, ``m(patched) - m(clean)``, for each part.

    A pass starts at the layer of the patched part, and patches many parts side by side. Other
    arguments are those of `attribute_circuit_edges`.

    Args:
        parts: circuit edges and heads, or their names ("a0.h1->m1", "a0.h1"); all edges by
            default. A head is patched for all of its readers.
        positions: patch each edge at one position, as in `attribute_circuit_edges`. Parts are then
            edges at positions ("a0.h1->m1@3", "a0.h1->m1@END"); all of them by default.

    Returns:
        The mean change over pairs by part name, in units of the metric; negative: the part helps.

    Raises:
        ValueError: the model lacks a part, or the pairs lack the positions.
        NoEffectError: patching everything changes the metric of no pair.
    """
    graph = adapt(model).graph
    edges, heads = graph, graph.heads
    if positions is not None:
        edges = PositionedGraph(graph, pairs.spans_of(positions).names)
    names = [str(part) for part in (edges.names(edges.places) if parts is None else parts)]
    changes = torch.zeros(len(names), dtype=torch.float64)
    grids = [edges if "->" in name else heads for name in names]
    indices = [grid.index(name) for grid, name in zip(grids, names, strict=True)]
    layers = [grid.layer(index) for grid, index in zip(grids, indices, strict=True)]
    total = len(names) * len(pairs.split(batch_size))
    with torch.no_grad(), tracked("patching", total, progress) as step:
        for site, grid in ((CircuitEdges(), edges), (Heads(), heads)):
            # Group parts by layer: a pass starts at the first layer that differs.
            numbers = [i for i in range(len(names)) if grids[i] is grid]
            numbers.sort(key=layers.__getitem__)
            if not numbers:
                continue
            at = positions if grid is edges else None
            runs = PairRuns(model, site, pairs, patch, batch_size, positions=at)
            runs.check_effect(metric)
            for batch, run in runs:
                clean = measure(metric, run.start_from(None), batch)
                for _, group in groupby(numbers, key=layers.__getitem__):
                    patched = [*group]
                    shape = run.site.shape(run.adapter)
                    closed = closing_each(run, [indices[i] for i in patched], shape)
                    for i, logits in zip(patched, closed, strict=True):
                        values = measure(metric, logits, batch)
                        changes[i] += (values - clean).sum().cpu().double()
                        step()
    return pd.Series((changes / len(pairs)).tolist(), index=names)


@dataclass(frozen=True, eq=False)
class ScoreCheck(Result):
    """Scores and exact effects of a sample of parts, as means over prompt pairs.

    Args:
        method: name of the attribution method.
        noun: kind of the parts, such as "circuit edges".
        n_pairs: number of prompt pairs.
        table: one row per part, the largest miss first: its name (``part``), how it was chosen
            (``drawn``, "strongest" or "random"), its ``score``, the ``exact`` change of the metric
            when it alone is patched, and their difference (``miss``).
    """

    method: str
    noun: str
    n_pairs: int
    table: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """The table."""
        return self.table

    def agreement(self) -> pd.DataFrame:
        """One row for each half of the sample: how well scores agree with exact effects.

        Columns are the correlation of the values (``pearson``) and of their ranks (``spearman``),
        and, among the parts that have an effect, the share whose score has the same sign
        (``sign``). NaN if all values are equal, or no part has an effect.
        """
        rows = {}
        for drawn, half in self.table.groupby("drawn"):
            with_effect = half[half["exact"] != 0]
            same_sign = (with_effect["score"] * with_effect["exact"] > 0).mean()
            both = half[["score", "exact"]]
            correlations = {name: both.corr(name).iloc[0, 1] for name in ("pearson", "spearman")}
            rows[drawn] = {"parts": len(half), **correlations, "sign": same_sign}
        return pd.DataFrame.from_dict(rows, orient="index").sort_index(ascending=False)

    def __repr__(self) -> str:
        halves = [
            f"of the {row.parts:.0f} {name} r {row.pearson:.2f}, rank correlation "
            f"{row.spearman:.2f}, sign {row.sign:.0%}"
            for name, row in self.agreement().iterrows()
        ]
        return (
            f"ScoreCheck({self.noun} by {self.method} against exact patching on {self.n_pairs:,} "
            f"pairs: {'; '.join(halves)})"
        )


@checked
def check_scores(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    scores: Scores,
    *,
    n: AtLeastOne = 50,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    seed: Seed = 0,
    progress: bool = True,
) -> ScoreCheck:
    """The scores of a sample of parts, compared with exact patching of these parts.

    Model, metric, patch and errors are those of the scores; `pairs` are the pairs that were scored,
    or as many of them as there is time for.

    Args:
        scores: scores of circuit edges, by position or not, or of heads.
        n: number of parts in each half of the sample: the strongest, and random others.
        seed: random seed for the sample.
    """
    grid = scores.grid
    check_grid(adapt(model).graph, grid, CircuitGraph, PositionedGraph, HeadGrid)
    positions = positions_of(grid, pairs)
    order = scores.order()
    strongest, others = order[:n], order[n:]
    generator = torch.Generator().manual_seed(seed)
    drawn = others[torch.randperm(len(others), generator=generator)[:n]]
    names = grid.names(torch.cat([strongest, drawn]))
    options: dict[str, Any] = {"patch": patch, "positions": positions, "batch_size": batch_size}
    exact = patch_exactly(model, pairs, metric, names, **options, progress=progress)
    table = exact.rename_axis("part").reset_index(name="exact")
    table.insert(1, "drawn", ["strongest"] * len(strongest) + ["random"] * len(drawn))
    table.insert(2, "score", [scores[name] for name in names])
    table["miss"] = table["score"] - table["exact"]
    table = table.sort_values("miss", key=abs, ascending=False, kind="stable", ignore_index=True)
    return ScoreCheck(scores.method, grid.noun, len(pairs), table)


@dataclass(frozen=True, eq=False)
class ActivationPatching(OfPrompts):
    """The metric of prompts with one place patched, from `patch_activations`.

    Args:
        at: kind of the patched activations.
        into: prompts that are run, with activations of their counterparts.
        columns: tokens of the clean prompts, or a position such as "@3" where they differ; names of
            spans; or numbers of heads.
        values: metric of each prompt pair with one place patched.
        clean: metric of the clean prompts.
        corrupted: metric of the corrupted prompts.
        positions: kind of the places, unless they are heads: "tokens" or "spans".
    """

    at: str
    into: Side
    columns: Sequence[str]
    values: Float[Tensor, "layer column pair"]
    clean: Float[Tensor, " pair"]
    corrupted: Float[Tensor, " pair"]
    positions: Positions = "tokens"

    @property
    def place(self) -> Literal["head", "position", "span"]:
        """What each column is."""
        if self.at in _HEAD_AXIS:
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
        effect = self.effect
        places = pd.MultiIndex.from_product(
            [*map(range, effect.shape)], names=["layer", self.place]
        )
        table = places.to_frame(index=False)
        if self.place != "head":
            text = "token" if self.place == "position" else "span"
            table[text] = [*self.columns] * len(effect)
        metric = self.values.mean(dim=-1).flatten().tolist()
        return table.assign(metric=metric, effect=effect.flatten().tolist())

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

    Raises:
        ValueError: prompts that need one length differ in length, spans are requested for heads or
            for pairs without spans, or the model lacks the hook points.
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
    n_layers = adapter.n_layers
    n_columns = adapter.n_heads if by_head else len(pairs.spans_of(positions).names)
    swapped = replace(pairs, clean=pairs.corrupted, corrupted=pairs.clean)
    run_pairs = swapped if into == "corrupted" else pairs
    gated_at = None if by_head else positions
    runs = PairRuns(model, site, run_pairs, "corrupted", batch_size, positions=gated_at)

    def measured(side: PromptPairs) -> Float[Tensor, " pair"]:
        found = clean_logits(model, side, batch_size)
        values = [measure(metric, logits, batch) for batch, logits in found]
        return torch.cat(values).cpu().double()

    clean, corrupted = measured(pairs), measured(swapped)
    explained_effect(clean, clean, corrupted)  # raises before any patching
    by_batch: list[Tensor] = []
    total = n_layers * len(places) * len(runs)
    with tracked("patching activations", total, progress) as step:
        for batch, run in runs:
            unpatched = measure(metric, run.start_from(None), batch)
            values = unpatched.double()[:, None, None].repeat(1, n_layers, n_columns)
            for layer in range(n_layers):
                closed = closing_each(run, [(layer, c) for c in places], (n_layers, n_columns))
                for column, logits in zip(places, closed, strict=True):
                    values[:, layer, column] = measure(metric, logits, batch).double()
                    step()
            by_batch.append(values.cpu())
    values = torch.cat(by_batch).permute(1, 2, 0).contiguous()
    columns: Sequence[str] = [str(head) for head in range(n_columns)]
    if not by_head and positions == "spans":
        columns = pairs.spans_of(positions).names
    elif not by_head:
        rows = pairs.forced.clean
        differ = (rows != rows[0]).any(dim=0).nonzero()[:, 0].tolist()
        texts = enumerate(token_texts(model, rows[0]))
        columns = [f"@{column}" if column in differ else text for column, text in texts]
    found = at, into, columns, values, clean, corrupted, positions
    return ActivationPatching(*found, prompt_start=pairs.start)


def _site(
    adapter: Adapter, at: str, pairs: PromptPairs, positions: Positions
) -> tuple[HookPoints, list[int]]:
    """Where the gates on all places sit, and the places that can have an effect."""
    names = tuple(adapter.layer_points(_HOOK_POINTS.get(at, f"hook_{at}")))
    if at in _HEAD_AXIS:
        check_gates(adapter)
        return HookPoints(names, (_HEAD_AXIS[at],)), [*range(adapter.n_heads)]
    rows = replace(pairs, spans=pairs.spans_of(positions)).forced
    assert rows.spans is not None
    # In a causal model, both runs are equal before the first token that differs.
    may_differ = (rows.clean != rows.corrupted).cumsum(dim=1) >= int(adapter.causal)
    return HookPoints(names, (1,)), rows.spans.at[may_differ].unique().tolist()

"""Exact patching of one circuit edge or head at a time, and attribution scores compared with it.

Attribution is exact to first order only. Where it fails depends on method, model and task: EAP
tends to fail at strong edges, EAP-IG at weak ones. So a sample of the scores has two halves, whose
agreement is reported separately: the strongest parts by |score|, which a circuit consists of, and
random others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.calls.arguments import AtLeastOne, Seed, checked
from sparse_tl.circuits.circuit import check_grid
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.graph import CircuitEdge, CircuitGraph, HeadGrid, Node, PositionedGraph
from sparse_tl.metrics import Metric, check_changed, measure
from sparse_tl.progress import tracked
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


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
    rows: AtLeastOne = 256,
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
        rows: maximum number of pairs times parts in one forward pass.

    Returns:
        The mean change over pairs by part name, in units of the metric; negative: the part helps.

    Raises:
        ValueError: the model lacks a part, the patch is unknown, the metric is not one finite
            number per pair, or the pairs lack the positions.
        NoEffectError: patching everything changes the metric of no pair.
    """
    import pandas as pd

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
            numbers = sorted(
                (i for i in range(len(names)) if grids[i] is grid), key=layers.__getitem__
            )
            if not numbers:
                continue
            at = positions if grid is edges else None
            runs, changed = PairRuns(model, site, pairs, patch, batch_size, positions=at), False
            for batch, run in runs:
                clean = measure(metric, run.start_from(None), batch)
                changed = changed or runs.has_effect(metric, batch, run)
                for _, group in groupby(numbers, key=layers.__getitem__):
                    for patched in torch.tensor([*group]).split(max(1, rows // len(batch))):
                        gates = torch.ones(len(patched), *grid.exists.shape)
                        for gate, i in zip(gates, patched.tolist(), strict=True):
                            gate[indices[i]] = 0
                        for i, logits in zip(patched.tolist(), run.logits(gates), strict=True):
                            values = measure(metric, logits, batch)
                            changes[i] += (values - clean).sum().cpu().double()
                            step()
            check_changed(changed)
    return pd.Series((changes / len(pairs)).tolist(), index=names)


Drawn = Literal["strongest", "random"]
"""How a part was chosen for the sample."""


@dataclass(frozen=True, eq=False)
class ScoreCheck(Result):
    """Scores and exact effects of a sample of parts, as means over prompt pairs.

    Args:
        method: name of the attribution method.
        noun: kind of the parts, such as "circuit edges".
        n_pairs: number of prompt pairs.
        parts: names of the parts.
        drawn: how each part was chosen.
        score: scores, in units of the metric.
        exact: exact change of the metric when the part alone is patched.
    """

    method: str
    noun: str
    n_pairs: int
    parts: tuple[str, ...]
    drawn: tuple[Drawn, ...]
    score: Float[Tensor, " part"]
    exact: Float[Tensor, " part"]

    def to_pandas(self) -> pd.DataFrame:
        """One row per part, largest miss first: score, exact effect, and the miss (difference)."""
        import pandas as pd

        columns = {"part": self.parts, "drawn": self.drawn}
        table = pd.DataFrame({**columns, "score": self.score, "exact": self.exact})
        table["miss"] = table["score"] - table["exact"]
        order = table["miss"].abs().sort_values(ascending=False, kind="stable").index
        return table.loc[order].reset_index(drop=True)

    def agreement(self) -> pd.DataFrame:
        """One row for each half of the sample: how well scores agree with exact effects.

        Columns are the correlation of the values (``pearson``) and of their ranks (``spearman``),
        and, among the parts that have an effect, the share whose score has the same sign
        (``sign``). NaN if all values are equal, or no part has an effect.
        """
        import pandas as pd

        table, rows = self.to_pandas(), {}
        for drawn in get_args(Drawn):
            half = table.loc[table["drawn"] == drawn, ["score", "exact"]]
            if half.empty:
                continue
            with_effect = half[half["exact"] != 0]
            same_sign = (with_effect["score"] * with_effect["exact"] > 0).mean()
            correlations = {name: half.corr(name).iloc[0, 1] for name in ("pearson", "spearman")}
            rows[drawn] = {"parts": len(half), **correlations, "sign": same_sign}
        return pd.DataFrame.from_dict(rows, orient="index")

    def _summary(self) -> pd.DataFrame:
        return self.to_pandas().head(10)

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

    Args:
        model: model that was scored.
        pairs: prompt pairs that were scored, or as many of them as there is time for.
        metric: metric of the scores.
        scores: scores of circuit edges, by position or not, or of heads.
        n: number of parts in each half of the sample: the strongest, and random others.
        patch: patch of the scores, as in `attribute_circuit_edges`.
        batch_size: prompt pairs per forward pass.
        seed: random seed for the sample.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the scores are of attention edges or of another model, or as in
            `patch_exactly`.
        NoEffectError: patching everything changes the metric of no pair.
    """
    grid, positions = scores.grid, None
    check_grid(adapt(model).graph, grid, CircuitGraph, PositionedGraph, HeadGrid)
    if isinstance(grid, PositionedGraph):
        positions = "tokens" if grid.of_tokens else "spans"
    order = scores.order()
    strongest, others = order[:n], order[n:]
    generator = torch.Generator().manual_seed(seed)
    drawn = others[torch.randperm(len(others), generator=generator)[:n]]
    names = grid.names(torch.cat([strongest, drawn]))
    options: dict[str, Any] = {"patch": patch, "positions": positions, "batch_size": batch_size}
    exact = patch_exactly(model, pairs, metric, names, **options, progress=progress)
    kinds = ("strongest",) * len(strongest) + ("random",) * len(drawn)
    values = torch.tensor([scores[name] for name in names], dtype=torch.float64)
    measured = torch.tensor(exact.to_numpy())
    return ScoreCheck(scores.method, grid.noun, len(pairs), tuple(names), kinds, values, measured)

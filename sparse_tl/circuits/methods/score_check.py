"""How far attribution scores can be trusted: a sample of them, compared with exact patching.

Attribution is exact to first order only. Where it fails depends on method, model and task: EAP
tends to fail at strong edges, EAP-IG at weak ones. So the sample has two halves, whose agreement is
reported separately: the strongest parts by |score|, which a circuit consists of, and random others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Seed, checked
from sparse_tl.circuits.circuit import check_grid
from sparse_tl.circuits.methods.exact import patch_exactly
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import PromptPairs
from sparse_tl.gates import Patch
from sparse_tl.lens import HookedModel, adapt
from sparse_tl.metrics import Metric
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.parts.grids import HeadGrid
from sparse_tl.parts.positioned_graph import PositionedGraph
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd

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
        patch: patch of the scores.
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
    return ScoreCheck(
        scores.method,
        grid.noun,
        len(pairs),
        tuple(names),
        ("strongest",) * len(strongest) + ("random",) * len(drawn),
        torch.tensor([scores[name] for name in names], dtype=torch.float64),
        torch.tensor(exact.to_numpy()),
    )

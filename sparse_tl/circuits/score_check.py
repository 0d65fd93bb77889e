"""How far attribution scores can be trusted: compare a sample of them with exact patching.

Attribution is right to first order. Methods differ in where they fail, by model and by task: EAP at
strong edges, EAP-IG at weak ones. So the sample has two halves, and agreement is given for each:
the strongest parts by |score|, from which a circuit begins, and parts drawn at random from all
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Seed, checked
from sparse_tl.circuits.exact import patch_exactly
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import PromptPairs
from sparse_tl.gates import Patch
from sparse_tl.graph import CircuitGraph
from sparse_tl.grids import HeadGrid
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric
from sparse_tl.positioned_graph import PositionedGraph
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd

Drawn = Literal["strongest", "random"]
"""How a part came into the sample."""


@dataclass(frozen=True, eq=False)
class ScoreCheck(Result):
    """Scores of a sample of parts beside their exact effects, both means over prompt pairs.

    Args:
        method: name of the attribution method.
        noun: what the parts are, such as "circuit edges".
        n_pairs: number of prompt pairs.
        parts: names of the parts.
        drawn: how each came into the sample.
        score: scores, in units of the metric.
        exact: exact changes of the metric when the part alone is patched.
    """

    method: str
    noun: str
    n_pairs: int
    parts: tuple[str, ...]
    drawn: tuple[Drawn, ...]
    score: Float[Tensor, " part"]
    exact: Float[Tensor, " part"]

    def to_pandas(self) -> pd.DataFrame:
        """One row per part, the largest misses first: score, exact effect, and the difference."""
        import pandas as pd

        columns = {"part": self.parts, "drawn": self.drawn}
        table = pd.DataFrame({**columns, "score": self.score, "exact": self.exact})
        table["miss"] = table["score"] - table["exact"]
        order = table["miss"].abs().sort_values(ascending=False, kind="stable").index
        return table.loc[order].reset_index(drop=True)

    def agreement(self) -> pd.DataFrame:
        """How well scores agree with exact effects, one row for each half of the sample.

        The correlation of the values (``pearson``) and of their ranks (``spearman``), and the share
        of parts whose score has the sign of the exact effect (``sign``), of those that have an
        effect. NaN where all values are equal, or no part has an effect.
        """
        import pandas as pd

        table, rows = self.to_pandas(), {}
        for drawn in get_args(Drawn):
            both = table.loc[table["drawn"] == drawn, ["score", "exact"]]
            if both.empty:
                continue
            with_effect = both[both["exact"] != 0]
            same = (with_effect["score"] * with_effect["exact"] > 0).mean()
            by = {name: both.corr(name).iloc[0, 1] for name in ("pearson", "spearman")}
            rows[drawn] = {"parts": len(both), **by, "sign": same}
        return pd.DataFrame.from_dict(rows, orient="index")

    def _summary(self) -> pd.DataFrame:
        return self.to_pandas().head(10)

    def __repr__(self) -> str:
        found = [
            f"of the {row.parts:.0f} {name} r {row.pearson:.2f}, rank correlation "
            f"{row.spearman:.2f}, sign {row.sign:.0%}"
            for name, row in self.agreement().iterrows()
        ]
        return (
            f"ScoreCheck({self.noun} by {self.method} against exact patching on {self.n_pairs:,} "
            f"pairs: {'; '.join(found)})"
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
    """Patch a sample of the scored parts exactly, and compare.

    Args:
        model: model that was scored.
        pairs: prompt pairs that it was scored on, or as many of them as there is time for.
        metric: metric that was scored.
        scores: scores of circuit edges, at positions or not, or of heads.
        n: number of strongest parts, and of parts drawn at random from the others.
        patch: patch that was scored.
        batch_size: prompt pairs per forward pass.
        seed: random seed of the draw.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the scores are of attention edges, or of another model; or as in
            `patch_exactly`.
        NoEffectError: patching everything changes the metric of no pair.
    """
    site, positions = scores.site, None
    if isinstance(site, PositionedGraph):
        positions = "tokens" if site.of_tokens else "spans"
    elif not isinstance(site, CircuitGraph | HeadGrid):
        raise ValueError(f"expected scores of circuit edges or heads; got {scores!r}")
    order = scores.order()
    strongest, others = order[:n], order[n:]
    generator = torch.Generator().manual_seed(seed)
    chosen = others[torch.randperm(len(others), generator=generator)[:n]]
    names = site.names(torch.cat([strongest, chosen]))
    options: dict[str, Any] = {"patch": patch, "positions": positions, "batch_size": batch_size}
    exact = patch_exactly(model, pairs, metric, names, **options, progress=progress)
    return ScoreCheck(
        scores.method,
        site.noun,
        len(pairs),
        tuple(names),
        ("strongest",) * len(strongest) + ("random",) * len(chosen),
        torch.tensor([scores[name] for name in names], dtype=torch.float64),
        torch.tensor(exact.to_numpy()),
    )

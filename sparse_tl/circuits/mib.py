"""CPR and CMD, the scores of MIB's circuit localization track, at its circuit sizes.

Source: Mueller et al., *MIB: A Mechanistic Interpretability Benchmark*, arXiv 2504.13151, and
``evaluate_area_under_curve`` in its code (github.com/hannamw/MIB-circuit-track).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparse_tl.arguments import checked
from sparse_tl.circuits.effect import Evaluation
from sparse_tl.circuits.evaluation import evaluate
from sparse_tl.circuits.scores import Scores
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd

MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of all circuit edges that MIB's circuits keep at most."""


@dataclass(frozen=True, eq=False)
class MIBEvaluation(Result):
    """Circuits of MIB's sizes, cut from one set of scores by two rankings.

    With f(k) the faithfulness (`Evaluation.effect`) of the circuit that keeps a fraction k of the
    edges, and integrals from 0.001 to 1 by trapezoids between `MIB_FRACTIONS`:

    - ``CPR = integral f(k) dk``, with edges ranked by how much they help; larger is better.
    - ``CMD = integral |1 - f(k)| dk``, with edges ranked by absolute score; 0 is best.

    Edges without effect (`Circuit.connected`) do not count among ``sizes``; k is the fraction
    before they are dropped. MIB's code also drops edges without a path from the input where
    sources are patched by zeros or means; these edges have an effect there, and are kept here.

    Args:
        signed: the circuits that keep the edges that help most.
        absolute: the circuits that keep the edges with the largest absolute scores.
    """

    signed: Evaluation
    absolute: Evaluation

    @property
    def cpr(self) -> float:
        """MIB's circuit performance ratio, at most 0.999 unless a circuit outdoes the model.

        Raises:
            NoEffectError: the metric is the same with everything patched.
        """
        return _area(self.signed.effect)

    @property
    def cmd(self) -> float:
        """MIB's circuit-model distance; raises as `cpr` does."""
        return _area((1 - self.absolute.effect).abs())

    def to_pandas(self) -> pd.DataFrame:
        """One row per fraction, under both rankings: edges that count, and faithfulness with its
        95 % interval over pairs."""
        import pandas as pd

        columns: dict[str, Any] = {"fraction": MIB_FRACTIONS}
        for name in ("signed", "absolute"):
            found: Evaluation = getattr(self, name)
            low, high = found.interval()
            columns |= {f"{name}_size": found.sizes, f"{name}_faithfulness": found.effect}
            columns |= {f"{name}_low": low, f"{name}_high": high}
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        return f"MIBEvaluation(CPR {self.cpr:.3f}, CMD {self.cmd:.3f})"


@checked
def evaluate_mib(
    model: HookedModel, pairs: PromptPairs, metric: Metric, scores: Scores, **options: Any
) -> MIBEvaluation:
    """CPR and CMD of scores of circuit edges.

    With grouped-query attention, MIB counts an edge into k and v for every query head, this package
    one for every key-value head: fractions are then of fewer edges.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs, ideally other than those that the scores come from.
        metric: metric function with one value per pair; MIB's is `logit_difference`.
        scores: scores of the circuit edges.
        **options: further arguments of `evaluate`.

    Raises:
        ValueError: the scores are not of circuit edges, or as in `evaluate`.
    """
    n_edges = scores.top(0).graph.n_edges
    patch = options.get("patch", "corrupted")
    found: list[Evaluation] = []
    for signed in (True, False):
        tops = [scores.top(int(share * n_edges), signed=signed) for share in MIB_FRACTIONS]
        circuits = [circuit.connected(patch=patch) for circuit in tops]
        found.append(evaluate(model, pairs, metric, circuits, **options))
    return MIBEvaluation(*found)


def _area(heights: torch.Tensor) -> float:
    return torch.trapezoid(heights, torch.tensor(MIB_FRACTIONS, dtype=heights.dtype)).item()

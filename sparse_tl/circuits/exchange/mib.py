"""CPR and CMD, the two measures of MIB's circuit localization track.

Source: Mueller et al., *MIB: A Mechanistic Interpretability Benchmark*, arXiv 2504.13151, and
``evaluate_area_under_curve`` in its code (github.com/hannamw/MIB-circuit-track).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparse_tl.calls.arguments import checked
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
"""Maximum shares of all circuit edges that MIB's circuits keep."""


@dataclass(frozen=True, eq=False)
class MIBEvaluation(Result):
    """Evaluations of circuits of MIB's sizes, by two rankings of the same scores.

    With the faithfulness f(k) (`Evaluation.effect`) of the circuit that keeps a fraction k of the
    edges, integrated from 0.001 to 1 by trapezoids between `MIB_FRACTIONS`:

    - ``CPR = integral f(k) dk``, with edges ranked by how much they help; larger is better.
    - ``CMD = integral |1 - f(k)| dk``, with edges ranked by absolute score; 0 is best.

    ``sizes`` do not count edges without effect (`Circuit.connected`); k does. Under zero and mean
    patches, MIB's code also drops edges without a path from the input. Such edges have an effect
    there, and are kept here.

    Args:
        signed: evaluation of the circuits whose edges help most.
        absolute: evaluation of the circuits whose edges have the largest absolute scores.
    """

    signed: Evaluation
    absolute: Evaluation

    @property
    def cpr(self) -> float:
        """MIB's circuit performance ratio; above 0.999 only if some circuit outdoes the model.

        Raises:
            NoEffectError: the metric is the same with everything patched.
        """
        return _area(self.signed.effect)

    @property
    def cmd(self) -> float:
        """MIB's circuit-model distance; raises as `cpr` does."""
        return _area((1 - self.absolute.effect).abs())

    def to_pandas(self) -> pd.DataFrame:
        """One row per fraction: size, faithfulness and its 95 % interval, for both rankings."""
        import pandas as pd

        columns: dict[str, Any] = {"fraction": MIB_FRACTIONS}
        for name in ("signed", "absolute"):
            evaluation: Evaluation = getattr(self, name)
            low, high = evaluation.interval()
            columns |= {f"{name}_size": evaluation.sizes}
            columns |= {f"{name}_faithfulness": evaluation.effect}
            columns |= {f"{name}_low": low, f"{name}_high": high}
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        return f"MIBEvaluation(CPR {self.cpr:.3f}, CMD {self.cmd:.3f})"


@checked
def evaluate_mib(
    model: HookedModel, pairs: PromptPairs, metric: Metric, scores: Scores, **options: Any
) -> MIBEvaluation:
    """CPR and CMD of scores of circuit edges.

    With grouped-query attention, MIB counts one edge into k and one into v per query head, while
    this package counts one per key-value head, so a fraction is of fewer edges.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs, ideally not the ones that were scored.
        metric: metric function with one value per pair; MIB's is `logit_difference`.
        scores: scores of the circuit edges.
        **options: further arguments of `evaluate`.

    Raises:
        ValueError: the scores are not of circuit edges, or as in `evaluate`.
    """
    n_edges = scores.top(0).graph.n_edges
    patch = options.get("patch", "corrupted")
    evaluations: list[Evaluation] = []
    for signed in (True, False):
        top = [scores.top(int(share * n_edges), signed=signed) for share in MIB_FRACTIONS]
        circuits = [circuit.connected(patch=patch) for circuit in top]
        evaluations.append(evaluate(model, pairs, metric, circuits, **options))
    return MIBEvaluation(*evaluations)


def _area(heights: torch.Tensor) -> float:
    return torch.trapezoid(heights, torch.tensor(MIB_FRACTIONS, dtype=heights.dtype)).item()

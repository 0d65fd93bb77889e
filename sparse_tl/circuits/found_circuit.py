"""The result of `find_circuit`: the smallest circuit that was found, and all methods' curves."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.effect import Evaluation
from sparse_tl.circuits.faithfulness import Faithfulness
from sparse_tl.circuits.scores import Scores
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class FoundCircuit(Result):
    """The smallest circuit found that reaches an explained effect on held-out pairs.

    `figure` draws the curves; ``component_diagram(found.circuit, scores=found.scores)`` draws the
    circuit, which need not consist of the largest scores.

    Args:
        circuit: the circuit.
        method: the method that found it.
        at: explained effect that was asked for.
        searched: faithfulness of the circuit on the pairs of the search.
        held_out: its faithfulness on the held-out pairs.
        evaluations: every circuit that was run on the held-out pairs, of growing size, by method.
        seconds: time that each method took to rank the parts.
        scores: scores that the search started from: attribution, or exact effects for heads.
    """

    circuit: Circuit
    method: str
    at: float
    searched: Faithfulness
    held_out: Faithfulness
    evaluations: dict[str, Evaluation]
    seconds: dict[str, float]
    scores: Scores

    @property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of the circuit's explained effect over held-out pairs."""
        row = self.to_pandas().iloc[0]
        return row["low"], row["high"]

    def to_pandas(self) -> pd.DataFrame:
        """One row per method, the smallest circuit first.

        Columns give the size of the method's smallest circuit that reaches `at`, its explained
        effect on held-out pairs with an interval, and the seconds that the method took.
        """
        import pandas as pd

        rows = []
        for method, evaluation in self.evaluations.items():
            found = evaluation.to_pandas().iloc[reached(evaluation, self.at)]
            columns = {name: found[name] for name in ("explained_effect", "low", "high")}
            size = {"method": method, "size": int(found["size"])}
            rows.append({**size, **columns, "seconds": self.seconds[method]})
        return pd.DataFrame(rows).sort_values("size", kind="stable", ignore_index=True)

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" + self.circuit._repr_html_()

    def __repr__(self) -> str:
        first, *others = self.to_pandas().itertuples()
        next_best = f"; next best: {others[0].size:,} by {others[0].method}" if others else ""
        return (
            f"FoundCircuit({len(self.circuit):,} of {self.circuit.grid.n_parts:,} "
            f"{self.circuit.grid.noun}, by {self.method}, explain {first.explained_effect:.3f} "
            f"({first.low:.3f} to {first.high:.3f}) of the effect on {self.held_out.n_pairs:,} "
            f"held-out pairs, {self.at:g} asked for{next_best})"
        )


def reached(evaluation: Evaluation, level: float) -> int:
    """Index of the smallest circuit that reaches a level, as all larger ones do.

    The last circuit, which is the whole model, always does.
    """
    effects = evaluation.effect.tolist()
    return max((i + 1 for i, effect in enumerate(effects[:-1]) if effect < level), default=0)

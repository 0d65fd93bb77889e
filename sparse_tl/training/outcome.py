"""What came out of a post-training run, and the sentence that says so."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import pandas as pd

from sparse_tl.results import Result
from sparse_tl.training.constraint import TargetLoss
from sparse_tl.training.evaluation import HeldOut


@dataclass(frozen=True, eq=False)
class PostTraining(Result):
    """The outcome of a post-training run.

    Args:
        feasible: whether any validation evaluation met the target.
        target: the loss constraint.
        min_accuracy: the share of validation rows that had to be right beside it.
        dense: validation measurements of the dense model.
        sparse: validation measurements of the weights that were kept.
        best_step: the step that they come from.
        history: one row per step; validation columns are filled where it was evaluated.
    """

    feasible: bool
    target: TargetLoss
    min_accuracy: float
    dense: HeldOut
    sparse: HeldOut
    best_step: int
    history: pd.DataFrame

    @property
    def loss_increase(self) -> float:
        """Held-out loss over the dense model's, in nats."""
        return self.sparse.loss - self.dense.loss

    @property
    def times_fewer(self) -> float:
        """Possible edges over active ones; infinite when none is left."""
        active = self.sparse.active_attention_edges
        return self.sparse.possible_attention_edges / active if active else math.inf

    @property
    def verdict(self) -> str:
        """What came out, in a sentence."""
        edges = (
            f"{self.sparse.active_attention_edges:.2f} of "
            f"{self.sparse.possible_attention_edges:.0f} attention edges active per example "
            f"({self.times_fewer:.1f}x fewer) at validation loss "
            f"{self.sparse.loss:.4f} nats ({self.loss_increase:+.4f} over the dense model)"
        )
        target = f"Target {self.target} nats"
        if self.min_accuracy > 0:
            target += f" with {self.min_accuracy:.2%} of the examples right"
        if self.feasible:
            return f"{target} met at step {self.best_step}: {edges}."
        return (
            f"{target} NOT met by any validation evaluation; kept the weights with the "
            f"lowest validation loss, from step {self.best_step}: {edges}. Train for longer, start "
            "from a larger bias, or allow more loss."
        )

    def to_pandas(self) -> pd.DataFrame:
        """Dense and sparse side by side."""
        return pd.DataFrame({"dense": asdict(self.dense), "sparse": asdict(self.sparse)})

    def __repr__(self) -> str:
        return f"PostTraining({self.verdict})"

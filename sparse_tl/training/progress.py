"""Live progress of a training run, with its latest measurements."""

from __future__ import annotations

from sparse_tl.progress import ProgressBar

_LABELS = {
    "loss": "loss",
    "violation": "over",
    "lambda": "λ",
    "expected_per_token": "edges/token",
}


class TrainingProgress(ProgressBar):
    """A bar with the latest measurements beside it, in nats and attention edges per token.

    ``over`` is how far the loss lies above its target; ``best`` counts the active edges per token
    of the best held-out evaluation.
    """

    def step(self, step: int, row: dict[str, float], best: dict[str, float]) -> None:
        """Show the step, its measurements and the best held-out evaluation so far."""
        shown = [f"{label} {_short(row[name])}" for name, label in _LABELS.items() if name in row]
        if "held_out_active_attention_edges_per_token" in best:
            shown.append(f"best {_short(best['held_out_active_attention_edges_per_token'])}")
        self.update(step, ", ".join(shown))


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4g}"

"""Live progress of a training run, with its latest measurements."""

from __future__ import annotations

from types import TracebackType

from sparse_tl.progress import ProgressBar

_LABELS = {
    "loss": "loss",
    "violation": "over",
    "lambda": "λ",
    "expected_per_token": "edges/token",
}


class TrainingProgress:
    """A bar with the latest measurements beside it, in nats and attention edges per token.

    ``over`` is how far the loss lies above its target; ``best`` counts the active edges per token
    of the best held-out evaluation.

    Args:
        title: what is running.
        total: steps in all.
        done: steps done before, when a run is resumed.
        shown: False to stay silent.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, shown: bool = True) -> None:
        self._bar = ProgressBar(title, total, done=done, shown=shown)

    def __enter__(self) -> TrainingProgress:
        self._bar.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.__exit__(kind, error, traceback)

    def update(self, step: int, row: dict[str, float], best: dict[str, float]) -> None:
        """Show the step, its measurements and the best held-out evaluation so far."""
        shown = [f"{label} {_short(row[name])}" for name, label in _LABELS.items() if name in row]
        if "held_out_active_edges_per_token" in best:
            shown.append(f"best {_short(best['held_out_active_edges_per_token'])}")
        self._bar.update(step, ", ".join(shown))


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4g}"

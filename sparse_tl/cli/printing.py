"""The console of the command line, and tables that commands share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

if TYPE_CHECKING:
    from sparse_tl.training import DenseAndSparse, HeldOut  # slow import: not needed for help

# Control characters could be commands to the terminal; the others reorder or break lines.
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class _Console(Console):
    """A console that shows control characters in a text, as of file names, as escapes."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            shown = text if control else _UNPRINTABLE.sub(lambda c: ascii(c[0])[1:-1], text)
            yield Segment(shown, style, control)


console = _Console()
errors = _Console(stderr=True)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1
) -> None:
    """Print a table, whose first columns hold `names` and are aligned on the left."""
    drawn = Table(title=escape(title))
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index < names else "right")
    for row in rows:
        drawn.add_row(*map(escape, row))
    console.print(drawn)


def held_out(title: str, measured: Mapping[str, HeldOut], shown: Mapping[str, str]) -> None:
    """Print held-out measurements by model: the fields `shown`, with the titles of their rows."""
    models = list(measured.values())
    possible = models[0].possible_attention_edges
    rows = {**shown, "active_share": f"share of {possible:.0f} possible"}
    rows |= {"active_heads": "heads in use"}
    forms = {"accuracy": ".1%", "loss": ".5f", "active_share": ".2%", "active_heads": "d"}
    cells = [
        [name, *(format(getattr(model, field), forms.get(field, ",.2f")) for model in models)]
        for field, name in rows.items()
    ]
    table(title, ["", *measured], cells)


def texts(title: str, measured: Mapping[str, DenseAndSparse]) -> None:
    """Print held-out measurements of the dense and the sparse model on every text and task."""
    rows = []
    for name, both in measured.items():
        dense, sparse = both.dense, both.sparse
        edges = [side.active_attention_edges_per_token for side in (dense, sparse)]
        rows.append(
            [
                name,
                f"{dense.loss:.3f} → {sparse.loss:.3f}",
                "" if sparse.divergence is None else f"{sparse.divergence:.3f}",
                " → ".join(f"{n:,.1f}" if n < 100 else f"{n:,.0f}" for n in edges),
                f"{both.times_fewer:.1f}x",
                f"{dense.active_heads} → {sparse.active_heads}",
            ]
        )
    table(title, ["", "loss", "divergence", "edges/token", "fewer", "heads"], rows)


def comparison(metrics: Mapping[str, Any]) -> None:
    """Print the number of parts that each task needs, per model; medians over seeds."""
    import pandas as pd

    from sparse_tl.circuits.evaluation import multiplier_words
    from sparse_tl.jobs.folder import SIDES

    names = [side for side in SIDES if side in next(iter(metrics.values()))]
    fewer, shares = ["fewer"] * (len(names) > 1), ["accuracy"]
    if all("choice" in measured["dense"] for measured in metrics.values()):  # addition has none
        shares.append("choice")
    rows = []
    for task, measured in metrics.items():
        sides, by_seed = [measured[side] for side in names], measured["seeds"]
        row = [task, *(", ".join(f"{side[name]:.1%}" for side in sides) for name in shares)]
        for parts in ("heads", "circuit_edges"):
            row.append(_sizes([side[f"{parts}_at_0.9"] for side in sides]))
            if fewer:
                values = [numbers[f"multiplier_{parts}"] for numbers in by_seed.values()]
                row.append("; ".join(multiplier_words(pd.Series(values, dtype=float))))
        row.append(_sizes([side["circuit_edges_at_0.9_per_prompt"] for side in sides]))
        rows.append(row)
    n_seeds = max(len(measured["seeds"]) for measured in metrics.values())
    table(
        f"Parts needed for an explained effect of 0.9, {' and '.join(names)}"
        + (f": medians of {n_seeds} seeds (range)" if n_seeds > 1 else ""),
        ["", *shares, "heads", *fewer, "circuit edges", *fewer, "of one prompt"],
        rows,
    )
    for task, measured in metrics.items():
        for side in names:
            for key, verb in (("not_reached", "do not reach 0.9"), ("no_effect", "have no effect")):
                if count := measured[side][f"prompts_{key}"]:
                    prompts = f"{count} of {measured[side]['prompts']} single prompts"
                    console.print(f"{task}, {side}: {prompts} {verb}.", markup=False)


def _sizes(sizes: Sequence[float | None]) -> str:
    return ", ".join("not reached" if size is None else f"{size:.1f}" for size in sizes)

"""Where the command line prints, and the tables that commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from sparse_tl.training import HeldOut  # seconds that help need not wait for

console = Console()
errors = Console(stderr=True)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1
) -> None:
    """Print a table.

    Args:
        title: above it.
        columns: their headings.
        rows: cells as text.
        names: how many columns, from the left, hold names; the others hold numbers.
    """
    drawn = Table(title=escape(title))
    for place, column in enumerate(columns):
        drawn.add_column(column, justify="left" if place < names else "right")
    for row in rows:
        drawn.add_row(*map(escape, row))
    console.print(drawn)


def held_out(title: str, measured: Mapping[str, HeldOut], shown: Mapping[str, str]) -> None:
    """Print held-out measurements of the dense and the sparse model.

    Args:
        title: above the table.
        measured: by the name of the model.
        shown: the fields that have rows, with what the rows are called; the share of possible
            attention edges and the heads in use have one everywhere.
    """
    models = list(measured.values())
    possible = models[0].possible_attention_edges
    rows = {**shown, "active_share": f"share of {possible:.0f} possible"}
    rows |= {"active_heads": "heads in use"}
    forms = {"accuracy": ".1%", "loss": ".5f", "active_share": ".2%", "active_heads": "d"}
    cells = [
        [name, *(format(getattr(found, field), forms.get(field, ",.2f")) for found in models)]
        for field, name in rows.items()
    ]
    table(title, ["", *measured], cells)


def comparison(metrics: Mapping[str, Any]) -> None:
    """Print what each task needs, dense and sparse."""
    rows = []
    for task, measured in metrics.items():
        sides = (measured["dense"], measured["sparse"])
        row = [task, ", ".join(f"{side['accuracy']:.1%}" for side in sides)]
        for parts in ("heads", "circuit_edges"):
            sizes = [side[f"{parts}_at_0.9"] for side in sides]
            row.append(", ".join("not reached" if n is None else f"{n:.1f}" for n in sizes))
            factor = measured[f"multiplier_{parts}"]
            row.append("-" if factor is None else f"{factor:.1f}x")
        rows.append(row)
    table(
        "Parts needed for an explained effect of 0.9, dense and sparse",
        ["", "accuracy", "heads", "fewer", "circuit edges", "fewer"],
        rows,
    )

"""``sparse-tl doctor``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sparse_tl.cli.app import command
from sparse_tl.cli.options import MODEL, Device
from sparse_tl.cli.printing import console

COLOURS = {"fine": "green", "note": "yellow", "failed": "bold red"}


@command(
    "doctor",
    ("this machine", ""),
    ("a model, before work on it begins", "--model gpt2"),
)
def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also check this model: a hub name or a folder.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Check that this machine, and a model of your choice, can do what the other commands need.

    Shows versions, devices, the cache of built-in models, and whether gates work on a small model;
    of a model of yours also its hook points and what post-training it will take. The exit code is
    1 where something that is needed fails.
    """
    from sparse_tl.runs import run_doctor
    from sparse_tl.runs.diagnosis import MARKS

    found = run_doctor(model, device=device)
    width = max(len(check.name) for check in found.checks)
    for group, checks in found.groups.items():
        console.print(f"[bold]{escape(group)}[/]", highlight=False)
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column()
        rows.add_column(min_width=width)
        rows.add_column(overflow="fold")
        for check in checks:
            colour = COLOURS[check.state]
            advice = f"\n[{colour}]{escape(check.advice)}[/]" if check.advice else ""
            rows.add_row(
                f" [{colour}]{MARKS[check.state]}[/]",
                escape(check.name),
                escape(check.found) + advice,
            )
        console.print(rows, "")
    colour = "green" if found.healthy else "bold red"
    console.print(f"[{colour}]{escape(found.verdict)}[/]", highlight=False)
    if not found.healthy:
        raise typer.Exit(1)

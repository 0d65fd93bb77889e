"""``sparse-tl circuits``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparse_tl.cli.app import command
from sparse_tl.cli.options import METHOD, MODEL, Device, Out, Quiet, Restart, Seed, split_names
from sparse_tl.cli.printing import comparison, console


@command(
    "circuits",
    ("the built-in models, all four tasks", ""),
    ("two tasks only", "--tasks ioi,greater_than --out runs/two"),
    ("your own pair", "--model gpt2 --sparse runs/gpt2/sparse\n--tasks ioi --out runs/gpt2-ioi"),
)
def circuits(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The dense model: a hub name or a folder. Default: the built-in pair.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    sparse: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Of the sparse model that was made from it.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Of greater_than, ioi, docstring, ioi_long, with commas. Default: all.",
            rich_help_panel=MODEL,
        ),
    ] = "",
    pairs: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Prompt pairs per task: half score, half evaluate.",
            rich_help_panel=METHOD,
        ),
    ] = 128,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="eap, eap-ig or eap-ig-activations.", rich_help_panel=METHOD
        ),
    ] = "eap-ig",
    patch: Annotated[
        str,
        typer.Option(metavar="NAME", help="corrupted, mean or zero.", rich_help_panel=METHOD),
    ] = "corrupted",
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Prompt pairs per pass.", rich_help_panel=METHOD)
    ] = 32,
    out: Out = Path("runs/circuits"),
    seed: Seed = 0,
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Find which heads and edges do a task, in a dense model and in the sparse one made from it.

    Writes metrics.json, curves (.csv, .json), evaluations, scores, circuits, their diagrams, and
    the figures heads_kept and edges_kept (.html, .svg, .png). Without --model it takes the
    built-in task models; seeds that do not come with the package are trained first, and kept in
    the user's cache folder. Called again, it goes on where it stopped.
    """
    from sparse_tl.runs import run_circuits

    outcome = run_circuits(
        out,
        model=model,
        sparse=sparse,
        tasks=split_names(tasks),
        pairs=pairs,
        method=method,
        patch=patch,
        batch_size=batch_size,
        seed=seed,
        device=device,
        restart=restart,
        progress=not quiet,
    )
    comparison(outcome.metrics)
    console.print(f"See {out / 'heads_kept.html'} and {out / 'edges_kept.html'}", markup=False)

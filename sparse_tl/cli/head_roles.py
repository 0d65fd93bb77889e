"""``sparse-tl head-roles``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparse_tl.cli.app import command
from sparse_tl.cli.options import METHOD, MODEL, Device, Out, Quiet, Restart, Seed, split_names
from sparse_tl.cli.printing import console, table

ROLES = ("facilitation", "irrelevance", "interference")


@command(
    "head-roles",
    ("the built-in models on their tasks", ""),
    ("one task, as thoroughly as the paper", "--tasks ioi --seeds 10 --updates 500"),
    (
        "your own models",
        "--models gpt2,runs/gpt2/sparse\n--tasks syntax,math=gsm8k.jsonl --out runs/roles",
    ),
)
def head_roles(
    models: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Hub names or folders, with commas. Default: the built-in models.",
            rich_help_panel=MODEL,
        ),
    ] = "",
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="With commas; all by default. Built-in models: addition, greater_than, ioi, "
            "docstring, ioi_long. Others: syntax, common_sense, math, each with =SOURCE for a "
            "file, a folder or another dataset; text=SOURCE.",
            rich_help_panel=MODEL,
        ),
    ] = "",
    prompts: Annotated[
        int,
        typer.Option(metavar="N", help="Per task; a quarter is held out.", rich_help_panel=METHOD),
    ] = 256,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Gate matrices that are fitted together; the paper has 10.",
            rich_help_panel=METHOD,
        ),
    ] = 4,
    updates: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Of each of the three stages; the paper has 500.",
            rich_help_panel=METHOD,
        ),
    ] = 150,
    lambda_: Annotated[
        float,
        typer.Option(
            "--lambda", metavar="NATS", help="Pressure on the gates.", rich_help_panel=METHOD
        ),
    ] = 0.1,
    batch_size: Annotated[
        int,
        typer.Option(
            metavar="N", help="Prompts per update; the paper has 64.", rich_help_panel=METHOD
        ),
    ] = 32,
    accumulate: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Pieces of a batch, one after the other, to save memory.",
            rich_help_panel=METHOD,
        ),
    ] = 1,
    max_heads: Annotated[
        int,
        typer.Option(metavar="N", help="Heads that are ablated at most.", rich_help_panel=METHOD),
    ] = 50,
    out: Out = Path("runs/head-roles"),
    seed: Seed = 0,
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Find which heads help, do not matter, or harm, and what ablating them does.

    Fits causal head gates for every task and model. Writes the grid of ablation curves
    (ablation_grid.html, .svg, .png), metrics.json, scores.csv, curves.csv, and for each task and
    model its roles, the heatmap of its heads and the trajectories of their gates. Without --models
    it takes the built-in models; seeds that do not come with the package are trained first, and
    kept in the user's cache folder. Called again, it goes on where it stopped.
    """
    from sparse_tl.runs import run_head_roles

    outcome = run_head_roles(
        out,
        models=split_names(models),
        tasks=split_names(tasks),
        seeds=seeds,
        updates=updates,
        lambda_=lambda_,
        prompts=prompts,
        batch_size=batch_size,
        accumulate=accumulate,
        max_heads=max_heads,
        seed=seed,
        device=device,
        restart=restart,
        progress=not quiet,
    )
    table(
        f"Heads of each role, and nats per response when they (at most {max_heads}) are ablated",
        ["", "", *ROLES],
        [
            [task, side]
            + [f"{found[r]['heads']:.1f}, {found[r]['change_when_ablated']:+.2f}" for r in ROLES]
            for task, sides in outcome.metrics["tasks"].items()
            for side, found in sides.items()
        ],
        names=2,
    )
    seconds = outcome.metrics["seconds"]
    console.print(f"{seconds:.0f} seconds; see {out / 'ablation_grid.html'}", markup=False)

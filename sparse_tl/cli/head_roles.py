"""``sparse-tl head-roles``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sparse_tl.cli.app import call, command
from sparse_tl.cli.options import Device, Out, Quiet, Restart, Seed, setting, split_names, subject
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
        str, subject("NAMES", "Hub names or folders, with commas. Default: the built-in models.")
    ] = "",
    tasks: Annotated[
        str,
        subject(
            "NAMES",
            "With commas; all by default. Built-in models: addition, greater_than, ioi, "
            "docstring, ioi_long. Others: syntax, common_sense, math, each with =SOURCE for a "
            "file, a folder or another dataset; text=SOURCE.",
        ),
    ] = "",
    prompts: Annotated[int, setting("N", "Per task; a quarter is held out.")] = 256,
    seeds: Annotated[
        int, setting("N", "Gate matrices that are fitted together; the paper has 10.")
    ] = 4,
    updates: Annotated[int, setting("N", "Of each of the three stages; the paper has 500.")] = 150,
    lambda_: Annotated[float, setting("NATS", "Pressure on the gates.", "--lambda")] = 0.1,
    batch_size: Annotated[int, setting("N", "Prompts per update; the paper has 64.")] = 32,
    accumulate: Annotated[
        int, setting("N", "Pieces of a batch, one after the other, to save memory.")
    ] = 1,
    max_heads: Annotated[int, setting("N", "Heads that are ablated at most.")] = 50,
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
    given = locals() | {"models": split_names(models), "tasks": split_names(tasks)}
    outcome = call("run_head_roles", given)
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

"""``sparse-tl addition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparse_tl.cli.app import command
from sparse_tl.cli.options import METHOD, MODEL, Device, Out, Quiet, Restart, Seed
from sparse_tl.cli.printing import comparison, console, table


@command(
    "addition",
    ("the form that the README's figure shows", ""),
    ("the form that reads its own answer", "--form autoregressive --out runs/autoregressive"),
    ("another seed, in a folder of its own", "--seed 1 --out runs/addition-1"),
    (
        "a quick look, in a minute",
        "--dense-steps 40 --steps 40 --target-loss +0.5\n--out runs/quick",
    ),
)
def addition(
    form: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="autoregressive, or placeholder (answer columns carry '?').",
            rich_help_panel=MODEL,
        ),
    ] = "placeholder",
    target_loss: Annotated[
        str | None,
        typer.Option(
            metavar="NATS",
            help="Per answer character: 0.01, or +0.01 over the dense model.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    dense_steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps of the dense model at most.", rich_help_panel=METHOD),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps of post-training.", rich_help_panel=METHOD),
    ] = None,
    out: Out = Path("runs/addition"),
    seed: Seed = 0,
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Train a model that adds two-digit numbers, make its attention sparse, and draw both.

    Writes the models (dense/, sparse/), metrics.json, history.csv, the base-vs-sparse figure
    (addition.html, .svg, .png) and what each digit needs (circuits/). Called again, it goes on
    where it stopped or reuses what is done.
    """
    from sparse_tl.runs import run_addition

    outcome = run_addition(
        out,
        form=form,  # type: ignore[arg-type]
        seed=seed,
        dense_steps=dense_steps,
        steps=steps,
        target_loss=target_loss,
        device=device,
        restart=restart,
        progress=not quiet,
    )
    metrics = outcome.metrics
    dense, sparse = metrics["dense"], metrics["sparse"]
    possible = dense["possible_attention_edges"]
    shown = {
        "sums exactly right": lambda m: f"{m['held_out_accuracy']:.1%}",
        "loss (nats per answer character)": lambda m: f"{m['held_out_loss']:.5f}",
        "active attention edges per sum": lambda m: f"{m['active_attention_edges']:.2f}",
        f"share of {possible:.0f} possible": lambda m: (
            f"{m['active_attention_edges'] / possible:.2%}"
        ),
        "heads in use": lambda m: str(m["active_heads"]),
    }
    table(
        f"Addition, {form}, seed {seed}: 1,000 held-out sums",
        ["", "dense", "sparse"],
        [[name, show(dense), show(sparse)] for name, show in shown.items()],
    )
    console.print(outcome.verdict, markup=False)
    if metrics["circuits"]:
        comparison(metrics["circuits"])
    for reason in metrics["no_circuits"]:
        console.print(f"No circuit: {reason}", markup=False)
    console.print(f"{metrics['seconds']:.0f} seconds; see {out / 'addition.html'}", markup=False)

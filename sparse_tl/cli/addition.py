"""``sparse-tl addition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sparse_tl.cli.app import call, command
from sparse_tl.cli.options import Device, Out, Quiet, Restart, Seed, setting, subject
from sparse_tl.cli.printing import comparison, console, held_out


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
        str, subject("NAME", "autoregressive, or placeholder (answer columns carry '?').")
    ] = "placeholder",
    target_loss: Annotated[
        str | None, setting("NATS", "Per answer character: 0.01, or +0.01 over the dense model.")
    ] = None,
    dense_steps: Annotated[int | None, setting("N", "Steps of the dense model at most.")] = None,
    steps: Annotated[int | None, setting("N", "Steps of post-training.")] = None,
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
    outcome = call("run_addition", locals())
    metrics = outcome.metrics
    held_out(
        f"Addition, {form}, seed {seed}: 1,000 held-out sums",
        outcome.held_out,
        {
            "accuracy": "sums exactly right",
            "loss": "loss (nats per answer character)",
            "active_attention_edges": "active attention edges per sum",
        },
    )
    console.print(outcome.verdict, markup=False)
    if metrics["circuits"]:
        comparison(metrics["circuits"])
    for reason in metrics["no_circuits"]:
        console.print(f"No circuit: {reason}", markup=False)
    console.print(f"{metrics['seconds']:.0f} seconds; see {out / 'addition.html'}", markup=False)

"""``sparse-tl circuits``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sparse_tl.cli.app import call, command
from sparse_tl.cli.options import Device, Out, Quiet, Restart, Seed, setting, split_names, subject
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
        subject("NAME", "The dense model: a hub name or a folder. Default: the built-in pair."),
    ] = None,
    sparse: Annotated[
        Path | None, subject("FOLDER", "Of the sparse model that was made from it.")
    ] = None,
    tasks: Annotated[
        str,
        subject("NAMES", "Of greater_than, ioi, docstring, ioi_long, with commas. Default: all."),
    ] = "",
    pairs: Annotated[int, setting("N", "Prompt pairs per task: half score, half evaluate.")] = 128,
    method: Annotated[str, setting("NAME", "eap, eap-ig or eap-ig-activations.")] = "eap-ig",
    patch: Annotated[str, setting("NAME", "corrupted, mean or zero.")] = "corrupted",
    batch_size: Annotated[int, setting("N", "Prompt pairs per pass.")] = 32,
    out: Out = Path("runs/circuits"),
    seed: Seed = 0,
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Find which heads and circuit edges do a task, in a dense model and in its sparse one.

    Writes metrics.json, curves.csv, evaluations, scores, circuits, their diagrams, and
    the figures heads_kept and circuit_edges_kept (.html, .svg, .png). Without --model it takes the
    built-in task models; seeds that do not come with the package are trained first, and kept in
    the user's cache folder. Called again, it goes on where it stopped.
    """
    outcome = call("run_circuits", locals() | {"tasks": split_names(tasks)})
    comparison(outcome.metrics)
    console.print(f"See heads_kept.html and circuit_edges_kept.html in {out}", markup=False)

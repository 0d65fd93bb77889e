"""Options shared by several commands, and the groups in which the help shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SUBJECT = "Input"
RUN = "Run"
TASK_NAMES = "greater_than, ioi, docstring, ioi_long, subject_verb, anaphor, induction, capitals"


def subject(metavar: str, help: str) -> Any:
    """An option that names the input of a command."""
    return typer.Option(metavar=metavar, help=help, rich_help_panel=SUBJECT)


def setting(metavar: str, help: str, *names: str) -> Any:
    """A setting of the method; named after the parameter unless `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Settings")


def run(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """An option of the run itself."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=RUN, **more)


def checked_device(device: str | None) -> str | None:
    """Check the device and return it unchanged.

    Raises:
        typer.BadParameter: the device does not exist or is not available.
    """
    if device is not None:
        from sparse_tl.lens.core.devices import checked_device as check  # slow: not needed for help

        try:
            check(device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return device


def split_names(names: str | None) -> list[str]:
    """Split a comma-separated list of names; without a list, there are none.

    Raises:
        typer.BadParameter: the list is empty.
    """
    parts = [name.strip() for name in (names or "").split(",") if name.strip()]
    if names is not None and not parts:
        raise typer.BadParameter(f"expected a list, separated by commas; got {names!r}")
    return parts


def split_seeds(seeds: str) -> tuple[int, ...]:
    """Split a comma-separated list of seeds.

    Raises:
        typer.BadParameter: the list is empty or has an entry other than a whole number from 0.
    """
    parts = split_names(seeds)
    if not all(seed.isascii() and seed.isdigit() for seed in parts):
        raise typer.BadParameter(f"expected --seeds as whole numbers, such as 0,1,2; got {seeds!r}")
    return tuple(map(int, parts))


MODEL = "smollm2 (see sparse-tl get), hub name, folder or GGUF file."
DenseModel = Annotated[str, subject("NAME", f"A dense model: {MODEL}")]
DenseOrBuiltIn = Annotated[
    str | None, subject("NAME", f"The dense model: {MODEL} Default: the built-in pair.")
]
Models = Annotated[
    list[str] | None,
    subject("NAME", f"Dense or sparse: {MODEL} Repeatable. Default: the built-in pair."),
]
CheckedModel = Annotated[
    str | None, subject("NAME", f"Also check this model, dense or sparse: {MODEL}")
]
Texts = Annotated[
    list[str] | None,
    subject(
        "SOURCE",
        "Text file, dataset (name or name:configuration), or own (text that the model generates). "
        "Default: own. Repeatable.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    subject("NAME", f"Task to preserve: {TASK_NAMES}. Repeatable."),
]
CircuitTasks = Annotated[
    str | None,
    subject(
        "NAMES",
        f"Comma-separated: {TASK_NAMES}. Default: the first four, those of the built-in models.",
    ),
]
RoleTasks = Annotated[
    str | None,
    subject(
        "NAMES",
        "Comma-separated; default: all. Built-in models: addition, greater_than, ioi, docstring, "
        "ioi_long. Others: syntax, common_sense, math, each with =SOURCE for a file, folder or "
        f"other dataset; text=SOURCE; {TASK_NAMES}.",
    ),
]
HeldOutText = Annotated[
    list[str] | None, subject("SOURCE", "Text that is only evaluated, not trained on. Repeatable.")
]
TargetLoss = Annotated[
    str | None,
    subject(
        "NATS",
        "Per token, on every text and task: kl+0.05 (divergence from the dense model, the "
        "default), +0.05 (over its loss) or 2.5 (a loss).",
    ),
]
TargetEdges = Annotated[
    str | None,
    subject(
        "EDGES",
        "Instead of a target loss: attention edges per token, the mean over texts and tasks, such "
        "as 300, or 100x for a hundred times fewer than in the dense model.",
    ),
]
Gates = Annotated[str, setting("KIND", "What gates read: share (attention probability) or score.")]
InitialThreshold = Annotated[
    float | None, setting("SHARE", "Initial threshold of share gates; 0.005 by default.")
]
InitialBias = Annotated[float | None, setting("B", "Initial bias of score gates; 4 by default.")]
Boundaries = Annotated[
    str, setting("NAME", "Where a document ends: predict the next, skip that loss, or split there.")
]
Trained = Annotated[
    str | None,
    setting(
        "NAME",
        "What to train besides the gates: lora (adapters), all, qk, or gates (nothing else). "
        "Default: lora.",
    ),
]
CheckpointActivations = Annotated[
    bool, setting("", "Recompute activations to save memory.", "--checkpoint-activations")
]
Lora = Annotated[int, setting("RANK", "Rank of the low-rank adapters.")]
Shard = Annotated[bool, setting("", "Shard the weights across ranks.", "--shard")]
WeightsDtype = Annotated[
    str | None,
    setting("NAME", "Weights: float32, or bfloat16 with float32 copies of those trained."),
]
Out = Annotated[Path, run("FOLDER", "Output folder.")]
Seed = Annotated[int, run("N", "Random seed for weights, data order and gate noise.")]
Device = Annotated[
    str | None,
    run(
        "NAME",
        "cpu, cuda, cuda:1 or mps. Default: a GPU if there is one.",
        callback=checked_device,
    ),
]
Restart = Annotated[bool, run("", "Set an earlier run in --out aside first.", "--restart")]
Quiet = Annotated[bool, run("", "No progress bars.", "--quiet")]

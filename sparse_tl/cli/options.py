"""Options that several commands share, and the groups that the help shows them in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

RUN = "The run"


def subject(metavar: str, help: str) -> Any:
    """An option that says what a command works on."""
    return typer.Option(metavar=metavar, help=help, rich_help_panel="What it works on")


def setting(metavar: str, help: str, *names: str) -> Any:
    """An option that says how it is done; its name is the parameter's unless it has `names`."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="How it is done")


def run(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """An option of the run itself."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=RUN, **more)


def checked_device(device: str | None) -> str | None:
    """The device as it was given.

    Raises:
        typer.BadParameter: no such device, or not on this machine.
    """
    if device is not None:
        import torch  # seconds that help and mistyped options need not wait for

        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise typer.BadParameter(
                f"expected a device that PyTorch can use here, such as cpu or cuda; got "
                f"{device!r} ({reason}). `sparse-tl doctor` lists what there is."
            ) from error
    return device


def split_names(names: str) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def split_seeds(seeds: str) -> tuple[int, ...]:
    """The numbers of a list with commas.

    Raises:
        typer.BadParameter: something that is no whole number from 0, or nothing.
    """
    found = split_names(seeds)
    if not found or not all(seed.isascii() and seed.isdigit() for seed in found):
        raise typer.BadParameter(f"expected --seeds as whole numbers, such as 0,1,2; got {seeds!r}")
    return tuple(map(int, found))


Out = Annotated[Path, run("FOLDER", "Folder for everything that the run writes.")]
Seed = Annotated[int, run("N", "Seed of weights, data order and gate noise.")]
Device = Annotated[
    str | None,
    run(
        "NAME",
        "cpu, cuda, cuda:1, mps; a GPU if there is one when left out.",
        callback=checked_device,
    ),
]
Restart = Annotated[bool, run("", "Remove an earlier run in --out first.", "--restart")]
Quiet = Annotated[bool, run("", "No progress bars.", "--quiet")]

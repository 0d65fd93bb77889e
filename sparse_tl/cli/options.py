"""Options that several commands share, and the groups that the help shows them in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL = "What it works on"
METHOD = "How it is done"
RUN = "The run"


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


Out = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER", help="Folder for everything that the run writes.", rich_help_panel=RUN
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", help="Seed of weights, data order and gate noise.", rich_help_panel=RUN
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=checked_device,
        help="cpu, cuda, cuda:1, mps; a GPU if there is one when left out.",
        rich_help_panel=RUN,
    ),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart", metavar="", help="Remove an earlier run in --out first.", rich_help_panel=RUN
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", metavar="", help="No progress bars.", rich_help_panel=RUN)
]

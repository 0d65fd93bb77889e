"""Options of commands, made from the settings of their jobs, and those that commands share."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from sparse_tl.runs.jobs import COMMAS, RUN, option_name


def option(metavar: str, help: str, panel: str, *names: str, **more: Any) -> Any:
    """An option in a panel of the help; named after the parameter unless `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """A setting as a parameter of a command, for Typer."""
    kind, default, extra = _kind(field.annotation), field.default, field.json_schema_extra
    if field.is_required():
        default = inspect.Parameter.empty
    elif COMMAS in field.metadata:
        kind, default = str, ",".join(map(str, default)) or None
    elif kind is list[str]:
        default = None
    metavar = "" if kind is bool else str(field.title)
    shown = option(metavar, str(field.description), cast(Any, extra)["panel"], option_name(name))
    annotation = Annotated[kind | None, shown]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def _kind(annotation: Any) -> Any:
    """What the terminal reads for a setting: a number, a flag, texts or a text."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return list[str]
    if origin is Annotated or NoneType in inside and len(inside) == 2:
        return _kind(inside[0])
    return annotation if annotation in (bool, int, float) else str


def checked_device(device: str | None) -> str | None:
    """Check the device and return it unchanged.

    Raises:
        typer.BadParameter: the device does not exist or is not available.
    """
    if device is not None:
        from sparse_tl.lens import checked_device as check  # slow: not needed for help

        try:
            check(device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return device


Out = Annotated[Path, option("FOLDER", "Output folder.", RUN)]
Device = Annotated[
    str | None,
    option(
        "NAME",
        "cpu, cuda, cuda:1 or mps. Default: a GPU if there is one.",
        RUN,
        callback=checked_device,
    ),
]
Restart = Annotated[bool, option("", "Set an earlier run in --out aside first.", RUN, "--restart")]
Quiet = Annotated[bool, option("", "No progress bars.", RUN, "--quiet")]

"""Options of commands, made from the settings of their jobs, and those that commands share."""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from sparse_tl.runs.jobs import COMMAS, RUN, option_name


def option(metavar: str, help: str, panel: str, *names: str, **more: Any) -> Any:
    """An option in a panel of the help; named after the parameter unless `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def panel(field: FieldInfo) -> str:
    """The panel of the help that shows a setting."""
    extra: Any = field.json_schema_extra
    return extra["panel"]


def field_option(name: str, field: FieldInfo) -> tuple[Any, Any]:
    """The annotation and the default of a setting's option, for Typer."""
    kind, default = _kind(field.annotation), field.get_default()
    if COMMAS in field.metadata:
        kind, default = str, ",".join(map(str, default))
    elif kind is list[str]:
        default = None
    shown = option(str(field.title), str(field.description), panel(field), option_name(name))
    if field.is_required():
        default = ...
    return Annotated[kind | None, shown], default or None if kind is str else default


def _kind(annotation: Any) -> Any:
    """What the terminal reads for a setting: a number, a flag, texts or a text."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0])
    if origin is tuple:
        return list[str]
    kinds = [kind for kind in inside if kind is not NoneType]
    if len(kinds) == len(inside) - 1 == 1:
        return _kind(kinds[0])
    return annotation if annotation in (bool, int, float) else str


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


Device = Annotated[
    str | None,
    option(
        "NAME",
        "cpu, cuda, cuda:1 or mps. Default: a GPU if there is one.",
        RUN,
        callback=checked_device,
    ),
]
Restart = Annotated[bool, option("", "Remove an earlier run in --out first.", RUN, "--restart")]
Quiet = Annotated[bool, option("", "No progress bars.", RUN, "--quiet")]

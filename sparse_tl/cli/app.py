"""The application that commands register with, their options, and the layout of their help."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from sparse_tl.cli.printing import console
from sparse_tl.jobs.settings import COMMAS, RUN, Job, option_name

_EXAMPLES: dict[str | None, str] = {
    None: """
 [bold]First steps[/]
   [cyan]sparse-tl doctor[/]                        what works on this machine
   [cyan]sparse-tl addition[/]                      two models and their figure
   [cyan]sparse-tl post-train --help[/]             your own model, on your own text"""
}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
LARGEST_KEPT = 2**25
"""In bytes, glibc's maximum. Larger blocks return to the system as soon as they are freed."""


def _untyped(option: Any, panel: str | None = None) -> Any:
    """``--help`` without the type that some versions of Typer show next to flags."""
    if option is not None:
        option.metavar, option.rich_help_panel = "", panel
    return option


class _Group(TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        return _untyped(super().get_help_option(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands]  # in order of registration

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        console.print(_EXAMPLES[None], highlight=False, soft_wrap=True)


class _Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _untyped(super().get_help_option(ctx), panel=RUN)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        # Typer's epilog is not used: its line breaks depend on the version.
        console.print(_EXAMPLES[self.name], highlight=False, soft_wrap=True)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def option(metavar: str, help: str, panel: str, *names: str, **more: Any) -> Any:
    """An option in a panel of the help; named after the parameter unless `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def checked_device(device: str | None) -> str | None:
    """The device; a usage error if PyTorch cannot use it."""
    if device is not None:
        from sparse_tl.calls.devices import check_device  # slow: not needed for help

        try:
            check_device(device)
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


def command(name: str, *examples: tuple[str, str]) -> Callable[[Any], Any]:
    """Register a function as a command; its docstring becomes the help.

    Each example is a description, and arguments, whose line breaks are kept.
    """
    lines = ["", " [bold]Examples[/]"]
    for description, arguments in examples:
        line = f"sparse-tl {name} {arguments}".rstrip().replace("\n", " \\\n       ")
        lines.append(f"   [dim]# {escape(description)}[/]\n   [cyan]{escape(line)}[/]")
    _EXAMPLES[name] = "\n".join(lines)

    def register(function: Any) -> Any:
        # Each paragraph as one line, for terminals of any width.
        paragraphs = escape(inspect.getdoc(function) or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        app.command(name, cls=_Command, help=text)(function)
        return function

    return register


def job_command(kind: type[Job], *examples: tuple[str, str]) -> Callable[[Any], Any]:
    """Register a function as the command of a job, with an option for each of its settings.

    The function gets the job, its output folder, and the other arguments of the job's function.
    """
    settings = [_parameter(name, field) for name, field in kind.model_fields.items()]

    def register(function: Any) -> Any:
        def run(
            *,
            out: Out = Path("runs") / kind.command,
            device: Device = None,
            restart: Restart = False,
            quiet: Quiet = False,
            **given: Any,
        ) -> None:
            how = {"device": device, "restart": restart, "progress": not quiet}
            function(kind(**given), out, how)

        *shared, _ = inspect.signature(run, eval_str=True).parameters.values()
        signature = inspect.Signature([*settings, *shared])
        run.__doc__, run.__signature__ = kind.__doc__, signature  # type: ignore[attr-defined]
        command(kind.command, *examples)(run)
        return function

    return register


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
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


def call(function: Callable[..., Any], job: Job, out: Path, how: dict[str, Any]) -> Any:
    """Run a job's function, and return its result."""
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if n_processes > 1 and job.command != "post-train":
        raise ValueError(f"only post-train runs on several processes; got {n_processes}")
    keep_freed_memory()
    outcome = function(out, job, **how)
    if n_processes > 1:
        from sparse_tl.backend import processes  # slow import

        processes().destroy_process_group()
    return outcome


def keep_freed_memory() -> None:
    """Keep freed blocks in the process, if its C library is glibc.

    By default they return to the system after each operation, and every page is mapped and zeroed
    again for the next one: a fifth of the time of a small model's training step on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _version(requested: bool) -> bool:
    if requested:
        from sparse_tl import __version__

        console.print(f"sparse_tl {__version__}", highlight=False)
        raise typer.Exit
    return requested


@app.callback(
    help="Make a transformer's attention sparse without hurting its loss, and see what is left."
)
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", is_eager=True, callback=_version, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            metavar="",
            help="Show the traceback of errors. Works before or after the command name.",
        ),
    ] = False,
) -> None:
    """Options of all commands; `main` reads ``--debug``, at any position."""

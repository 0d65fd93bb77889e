"""The application: its console, what turns settings into options, and how a command ends."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from sparse_tl.jobs.settings import COMMAS, RUN, Job, option_name

if TYPE_CHECKING:
    import pandas as pd  # slow import: not needed for help

PACKAGE = Path(__file__).resolve().parent.parent
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
LARGEST_KEPT = 2**25
"""In bytes, glibc's maximum. Larger blocks return to the system as soon as they are freed."""
_EXAMPLES: dict[str | None, str] = {}
console, errors = Console(), Console(stderr=True)


class _Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        # Typer's epilog is not used: its line breaks depend on the version.
        console.print(_EXAMPLES[self.name], highlight=False, soft_wrap=True)


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def option(metavar: str, help: str, panel: str, *names: str, **more: Any) -> Any:
    """An option in a panel of the help; named after the parameter unless `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


Out = Annotated[Path, option("FOLDER", "Output folder.", RUN)]
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

    The function gets the job and its output folder.
    """
    settings = {name: _parameter(name, field) for name, field in kind.model_fields.items()}
    device, restart, _ = (settings.pop(name) for name in Job.model_fields)

    def register(function: Any) -> Any:
        def run(
            *, out: Out = Path("runs") / kind.command, quiet: Quiet = False, **given: Any
        ) -> None:
            job = kind(progress=not quiet, **given)
            keep_freed_memory()
            function(job, out)

        folder, bars, _ = inspect.signature(run, eval_str=True).parameters.values()
        signature = inspect.Signature([*settings.values(), folder, device, restart, bars])
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


def _version(requested: bool) -> bool:
    if requested:
        from sparse_tl import __version__

        console.print(f"sparse_tl {__version__}", highlight=False)
        raise typer.Exit
    return requested


@app.callback(
    help="Make a transformer's attention sparse without hurting its loss, and see what is left. "
    "First steps: sparse-tl doctor, what works on this machine; sparse-tl addition, two models and "
    "their figure; sparse-tl post-train --help, your own model on your own text."
)
def _options(
    version: Annotated[
        bool, option("", "Show the version.", RUN, "--version", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[
        bool, option("", "Show the traceback of errors, also after a command.", RUN, "--debug")
    ] = False,
) -> None:
    """Options of all commands; `main` reads ``--debug``, at any position."""


def keep_freed_memory() -> None:
    """Keep freed blocks in the process, if its C library is glibc.

    By default they return to the system after each operation, and every page is mapped and zeroed
    again for the next one: a fifth of the time of a small model's training step on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def show(title: str, table: pd.DataFrame) -> None:
    """Print a table as in a notebook: names on the left, numbers on the right, "-" for NaN."""
    import pandas as pd

    if not isinstance(table.index, pd.RangeIndex):
        table = table.reset_index(names="")
    drawn = Table(title=escape(title), show_edge=False)
    shown = table.apply(lambda column: column.map(_cell, na_action=None))
    for index, (name, cells) in enumerate(shown.items()):
        words = all(isinstance(cell, str) for cell in table.iloc[:, index])
        longest = max(map(len, cells))
        least = longest if longest <= 12 else 8  # longer ones are broken in a narrow terminal
        how: Any = {"justify": "left" if words else "right", "min_width": least}
        drawn.add_column(escape(str(name).replace("_", " ")), overflow="fold", **how)
    for row in shown.itertuples(index=False):
        drawn.add_row(*map(escape, row))
    console.print(drawn)


def _cell(value: Any) -> str:
    from sparse_tl.results import short

    text = short(value) if isinstance(value, float) else str(value)
    return "-" if text in ("nan", "None") else text


def main() -> None:
    """Run the command line.

    Exit codes: 0, 1 after an error, 2 for invalid input, 130 after Ctrl-C. ``--debug``, at any
    position, shows the traceback of an error. With several ranks, only the first prints results;
    every rank prints its own errors.
    """
    rank = int(os.environ.get("RANK", "0"))
    console.quiet = rank > 0
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _show_warning
            # Typer may turn Ctrl-C into exit code 130 itself, and returns codes instead of exiting.
            code = app(args=arguments, prog_name="sparse-tl", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except typer.Exit as stop:
        code = stop.exit_code
    except Exception as error:
        if debug:
            errors.print(traceback.format_exc(), markup=False, highlight=False, soft_wrap=True)
        message, code = _explained(error)
        title = f"Error on rank {rank}" if rank else "Error"
        if message:  # otherwise help was printed, for a command without arguments
            # A message may contain brackets, which rich must not parse as markup.
            said = f"[bold red]{title}:[/] {escape(message)}"
            errors.print(said, highlight=False, soft_wrap=True)
    if code == 130 and not rank:
        errors.print("Stopped. Progress is saved; run the same command again to resume.")
    if code:
        sys.exit(code)


def _explained(error: Exception) -> tuple[str, int]:
    """What went wrong, whose fault it is and what to do; and the exit code."""
    from sparse_tl.arguments import is_out_of_memory, reason

    usage: Any = error
    if hasattr(usage, "exit_code"):  # some versions of Typer have their own copy of Click's errors
        message, context = usage.format_message(), getattr(usage, "ctx", None)
        path = "sparse-tl" if context is None else context.command_path
        end = "" if message.endswith(("?", ".")) else "."
        return f"{message}{end} See `{path} --help`." if message else "", usage.exit_code
    raised = traceback.extract_tb(error.__traceback__)
    is_ours = bool(raised) and PACKAGE in Path(raised[-1].filename).resolve().parents
    for_users = is_ours and isinstance(error, (ValueError, ImportError, MemoryError))
    if for_users or isinstance(error, OSError):
        return str(error), 2 if isinstance(error, ValueError) else 1
    if is_out_of_memory(error):
        return (
            f"{reason(error)} Use a smaller --batch-size (with a larger --accumulate where the "
            "command has it), a smaller --window or model, or another --device."
        ), 1
    return (
        f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:600]}. This is a bug "
        "in sparse_tl or in a library that it uses, not in your command. --debug shows where it "
        "failed. Please report it with the traceback and the output of `sparse-tl doctor`."
    ), 1


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a single line, without Python's source code excerpt."""
    if not console.quiet:
        text = f"[bold yellow]Warning:[/] {escape(str(message))}"
        errors.print(text, highlight=False, soft_wrap=True)

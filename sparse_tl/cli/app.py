"""The application that commands register with, and the layout of their help."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from sparse_tl.cli.memory import keep_freed_memory
from sparse_tl.cli.options import Device, Out, Quiet, Restart, parameter
from sparse_tl.cli.printing import console
from sparse_tl.runs.jobs import RUN, Job

_EXAMPLES: dict[str | None, str] = {
    None: """
 [bold]First steps[/]
   [cyan]sparse-tl doctor[/]                        what works on this machine
   [cyan]sparse-tl addition[/]                      two models and their figure
   [cyan]sparse-tl post-train --help[/]             your own model, on your own text"""
}


class _Group(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands]  # in order of registration

    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        console.print(_EXAMPLES[None], highlight=False, soft_wrap=True)


class _Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx), panel=RUN)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        # Typer's epilog is not used: its line breaks depend on the version.
        console.print(_EXAMPLES[self.name], highlight=False, soft_wrap=True)


def _plain(option: Any, panel: str | None = None) -> Any:
    """``--help`` without the type that some versions of Typer show next to flags."""
    if option is not None:
        option.metavar, option.rich_help_panel = "", panel
    return option


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def command(name: str, *examples: tuple[str, str]) -> Callable[[Any], Any]:
    """Register a function as a command; its docstring becomes the help.

    Args:
        name: name of the command.
        examples: (description, arguments) of each example; line breaks in arguments are kept.
    """
    lines = ["", " [bold]Examples[/]"]
    for description, arguments in examples:
        line = f"sparse-tl {name} {arguments}".rstrip().replace("\n", " \\\n       ")
        lines.append(f"   [dim]# {escape(description)}[/]\n   [cyan]{escape(line)}[/]")
    _EXAMPLES[name] = "\n".join(lines)

    def register(function: Any) -> Any:
        app.command(name, cls=_Command, help=_unwrapped(inspect.getdoc(function) or ""))(function)
        return function

    return register


def job_command(kind: type[Job], *examples: tuple[str, str]) -> Callable[[Any], Any]:
    """Register a function as the command of a job, with an option for each of its settings.

    The function gets the job, its output folder, and the other arguments of the job's function.
    """
    settings = [parameter(name, field) for name, field in kind.model_fields.items()]

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


def call(function: Callable[..., Any], job: Job, out: Path, how: dict[str, Any]) -> Any:
    """Run a job's function, and return its result."""
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if n_processes > 1 and job.command != "post-train":
        raise ValueError(f"only post-train runs on several processes; got {n_processes}")
    keep_freed_memory()
    outcome = function(out, **dict(job), **how)
    if n_processes > 1:
        from sparse_tl.lens import processes  # slow import

        processes().destroy_process_group()
    return outcome


def _unwrapped(text: str) -> str:
    """Join each paragraph into one line, for terminals of any width."""
    return "\n\n".join(" ".join(part.split()) for part in escape(text).split("\n\n"))


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

"""The entry point of the command line: exit codes, Ctrl-C, and one-paragraph error messages."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from sparse_tl.calls.out_of_memory import is_out_of_memory, reason
from sparse_tl.cli.app import app
from sparse_tl.cli.printing import console, errors

PACKAGE = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run the command line.

    Exit codes: 0, 1 after an error, 2 for invalid usage, 130 after Ctrl-C. ``--debug``, at any
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
        code = _explain(error, debug)
    if code == 130 and not rank:
        errors.print("Stopped. Progress is saved; run the same command again to resume.")
    if code:
        sys.exit(code)


def _explain(error: Exception, debug: bool) -> int:
    """Print what went wrong, whose fault it is and what to do; return the exit code."""
    usage: Any = error
    if hasattr(usage, "exit_code"):  # some versions of Typer have their own copy of Click's errors
        message = usage.format_message()
        if message:  # otherwise help was printed, for a command without arguments
            context = getattr(usage, "ctx", None)
            path = "sparse-tl" if context is None else context.command_path
            sentence = message if message.endswith(("?", ".")) else f"{message}."
            _print_error(f"{sentence} See `{path} --help`.")
        return usage.exit_code
    if _is_expected(error):
        _print_error(str(error))
    elif is_out_of_memory(error):
        _print_error(
            f"{reason(error)} Use a smaller --batch-size (with a larger --accumulate where the "
            "command has it), a smaller --window or model, or another --device."
        )
    else:
        hint = "" if debug else "Run the same command with --debug to see where it failed. "
        _print_error(
            f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:600]}. This is a "
            "bug in sparse_tl or in a library that it uses, not in your command. "
            f"{hint}Please report it with the traceback and the output of `sparse-tl doctor`."
        )
    return 1


def _is_expected(error: Exception) -> bool:
    """Whether the message was written for users or comes from the operating system."""
    if isinstance(error, OSError):
        return True
    raised = traceback.extract_tb(error.__traceback__)
    is_ours = bool(raised) and PACKAGE in Path(raised[-1].filename).resolve().parents
    return is_ours and isinstance(error, (ValueError, ImportError, MemoryError))


def _print_error(message: str) -> None:
    # A message may contain brackets, which rich must not parse as markup.
    rank = int(os.environ.get("RANK", "0"))
    title = f"Error on rank {rank}" if rank else "Error"
    errors.print(f"[bold red]{title}:[/] {escape(message)}", highlight=False, soft_wrap=True)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a single line, without Python's source code excerpt."""
    if not console.quiet:
        text = f"[bold yellow]Warning:[/] {escape(str(message))}"
        errors.print(text, highlight=False, soft_wrap=True)

"""Makes the table of every architecture in docs/architectures.md, each line found by running it.

    python docs/every_architecture.py

The checks are in `tests/architecture_checks/capabilities.py`; every model is made on the spot,
small and random. A second process makes one model after the other and writes down each line at
once; where that process dies, its death is the line, and another one goes on. With ``--lines`` a
run that was interrupted is resumed, and lines that are in the file are not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from inspect import getdoc
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from sparse_tl.storage.files import atomic_file  # noqa: E402

PAGE = Path(__file__).with_name("architectures.md")
TITLE = "## Every architecture that a bridge knows"
PACKAGES = ("transformer-lens", "transformers", "torch")


def names() -> list[str]:
    """Every architecture that TransformerLens has an adapter for."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

    return sorted(SUPPORTED_ARCHITECTURES, key=str.lower)


def written(lines: Path) -> dict[str, str]:
    """The lines in a file, by architecture."""
    if not lines.exists():
        return {}
    return dict(json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines())


def work(wanted: list[str], lines: Path) -> None:
    """Make the lines of some architectures, one after the other."""
    import torch
    from architecture_checks.capabilities import refusals, row
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    for name in wanted:
        line = row(name, refusals(name))
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, line]) + "\n")
        print(line, file=sys.stderr, flush=True)


def work_in_processes(wanted: list[str], lines: Path) -> None:
    """Let other processes make lines until all are made."""
    while left := [name for name in wanted if name not in written(lines)]:
        command = [sys.executable, __file__, *left, "--lines", str(lines), "--work"]
        code = subprocess.run(command, check=False).returncode
        dead = next((name for name in left if name not in written(lines)), None)
        if dead is not None:
            with lines.open("a", encoding="utf-8") as file:
                line = f"| `{dead}` | nothing | CRASH: the process ends with code {code} |"
                file.write(json.dumps([dead, line]) + "\n")


def section(lines: dict[str, str]) -> str:
    """The section of the page."""
    from architecture_checks.capabilities import CAPABILITIES

    text = [
        TITLE,
        "",
        "`python docs/every_architecture.py` generates this section from a small random model of",
        "every architecture that TransformerLens's bridge has an adapter for. It lists each by the",
        "name of its class, with what is refused, in the words that users see; `sparse-tl doctor",
        "--model` says the same. Made with "
        f"{', '.join(f'{name} {version(name)}' for name in PACKAGES)}.",
        "",
        *(f"- **{title}**: {_sentences(check)}" for title, check in CAPABILITIES.items()),
        "",
        "| | works | refused |",
        "|---|---|---|",
        *(lines[name] for name in sorted(lines, key=str.lower)),
    ]
    return "\n".join([*text, ""])


def _sentences(check: object) -> str:
    return " ".join((getdoc(check) or "").split())


def main(
    wanted: Annotated[list[str] | None, typer.Argument(help="Architectures; all if none.")] = None,
    lines: Annotated[Path | None, typer.Option(help="File of lines that are made.")] = None,
    worker: Annotated[bool, typer.Option("--work", help="Only make lines.", hidden=True)] = False,
) -> None:
    if worker and lines is not None:
        work(wanted or names(), lines)
        return
    with tempfile.TemporaryDirectory() as folder:
        lines = lines or Path(folder, "lines.jsonl")
        work_in_processes(wanted or names(), lines)
        before, _, old = PAGE.read_text(encoding="utf-8").partition(TITLE)
        kept = {line.split("`")[1]: line for line in old.splitlines() if line.startswith("| `")}
        found = {name: line for name, line in kept.items() if name in names()} | written(lines)
    with atomic_file(PAGE) as temporary:
        temporary.write_text(before + section(found), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

"""``sparse-tl doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from sparse_tl.cli.app import command
from sparse_tl.cli.options import Device, subject
from sparse_tl.cli.printing import console


@command(
    "doctor",
    ("this machine", ""),
    ("a model, before work on it begins", "--model gpt2"),
)
def doctor(
    model: Annotated[
        str | None, subject("NAME", "Also check this model: a hub name or a folder.")
    ] = None,
    device: Device = None,
) -> None:
    """Check that this machine, and a model of your choice, can do what the other commands need.

    Shows versions, devices, the cache of built-in models, and whether gates work on a small model
    and on yours. The exit code is 1 where something that is needed fails.
    """
    from sparse_tl.runs import run_doctor

    checks = run_doctor(model, device=device)
    failed = [check.name for check in checks if not check.works]
    lines = [f"{'✓' if check.works else '✗'} {check.name}: {check.found}" for check in checks]
    verdict = f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}."
    lines.append(verdict if failed else "All that is needed works.")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)

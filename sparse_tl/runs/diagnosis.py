"""What `run_doctor` found: checks in groups, with what to do where something is amiss."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Literal

State = Literal["fine", "note", "failed"]
MARKS: dict[State, str] = {"fine": "✓", "note": "•", "failed": "✗"}
"""How a state is written: a note is worth knowing, and nothing fails without it being mended."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        group: of things that belong together.
        name: of the thing.
        state: "fine"; "note", where something optional is not there; "failed" otherwise.
        found: what was found.
        advice: what to do about it.
    """

    group: str
    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks, in the order in which they were made; prints itself, also in a notebook."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.state == "failed")

    @property
    def groups(self) -> dict[str, tuple[Check, ...]]:
        """The checks of each group."""
        return {group: tuple(checks) for group, checks in groupby(self.checks, lambda c: c.group)}

    @property
    def verdict(self) -> str:
        """What came out, in a sentence."""
        if self.healthy:
            return "All that is needed works."
        names = ", ".join(check.name for check in self.failed)
        return f"{len(self.failed)} of {len(self.checks)} checks failed: {names}."

    def __repr__(self) -> str:
        lines = []
        for group, checks in self.groups.items():
            lines.append(group)
            for check in checks:
                advice = f" -> {check.advice}" if check.advice else ""
                lines.append(f"  {MARKS[check.state]} {check.name}: {check.found}{advice}")
        return "\n".join([*lines, self.verdict])

    def _repr_html_(self) -> str:
        rows = []
        for group, checks in self.groups.items():
            rows.append(
                '<tr><th colspan="3" style="text-align:left;padding-top:0.8em">'
                f"{escape(group)}</th></tr>"
            )
            for check in checks:
                weight = "bold" if check.state == "failed" else "normal"
                advice = f"<br><em>{escape(check.advice)}</em>" if check.advice else ""
                rows.append(
                    f'<tr style="font-weight:{weight};text-align:left;vertical-align:top">'
                    f"<td>{MARKS[check.state]}</td>"
                    f'<td style="text-align:left;white-space:nowrap">{escape(check.name)}</td>'
                    f'<td style="text-align:left">{escape(check.found)}{advice}</td></tr>'
                )
        return f"<table>{''.join(rows)}</table><p>{escape(self.verdict)}</p>"

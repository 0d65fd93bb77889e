"""The table of every architecture in docs/architectures.md says what is found."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from architecture_checks.capabilities import refusals, row
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
LINES = {line.split("`")[1]: line for line in TEXT.splitlines() if line.startswith("| `")}
MADE_WITH = all(f"{name} {version(name)}" in TEXT for name in ("transformer-lens", "transformers"))
pytestmark = pytest.mark.skipif(not MADE_WITH, reason="the page was made with other versions")


@pytest.mark.parametrize("name", sorted(SUPPORTED_ARCHITECTURES))
def test_a_line_says_what_is_found(name: str) -> None:
    """But for numbers, which may differ from machine to machine in their last digits."""
    found, said = (
        re.sub(r"\d+\.\d+(e-\d+)?", "#", line) for line in (row(name, refusals(name)), LINES[name])
    )
    assert found == said

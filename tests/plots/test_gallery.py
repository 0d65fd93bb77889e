"""The gallery leads to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_case

GALLERY = Path(__file__).parents[2] / "docs/gallery"
PAGE = (GALLERY / "index.md").read_text(encoding="utf-8")


def test_links_lead_to_files_and_all_files_are_linked() -> None:
    linked = set(re.findall(r'(?:src|srcset)="(.*?)"|\]\((.*?)\)', PAGE))
    files = {first or second for first, second in linked}
    assert files == {path.name for path in GALLERY.iterdir()} - {"index.md"}

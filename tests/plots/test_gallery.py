"""The gallery: every figure is there in both themes, and the page leads to files that exist."""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_case

GALLERY = Path(__file__).parents[2] / "docs/gallery"
PAGE = (GALLERY / "index.md").read_text(encoding="utf-8")
NAMES = re.findall(r'<img src="(\w+)\.png"', PAGE)


def test_every_figure_has_a_section_of_its_own() -> None:
    script = (GALLERY.parent / "gallery.py").read_text(encoding="utf-8")
    made = re.findall(r"^def (\w+)\(runs: Path\) -> Figure:", script, re.MULTILINE)
    assert made == NAMES
    assert PAGE.count("\n## ") == PAGE.count("```python") == PAGE.count("Measured: ") == len(NAMES)


def test_links_lead_to_files_and_all_files_are_linked() -> None:
    linked = set(re.findall(r'(?:src|srcset)="(.*?)"|\]\((.*?)\)', PAGE))
    files = {first or second for first, second in linked}
    assert files == {path.name for path in GALLERY.iterdir()} - {"index.md"}


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_of_one_size_and_small(name: str) -> None:
    box = ElementTree.parse(GALLERY / f"{name}.svg").getroot().get("viewBox", "").split()
    for suffix in ("", "_dark"):
        png = (GALLERY / f"{name}{suffix}.png").read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        assert len(png) <= 250_000
        assert width / height == pytest.approx(float(box[2]) / float(box[3]), rel=0.01)


def test_pages_are_small() -> None:
    pages = list(GALLERY.glob("*.html"))
    assert len(pages) >= 4
    assert all(page.stat().st_size <= 300_000 for page in pages)
    assert sum(path.stat().st_size for path in GALLERY.iterdir()) <= 4_000_000

"""What the notebooks promise before they are run: `make test` does not run them, `.ci/run` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.every_case

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@each
def test_stored_outputs_are_small_pictures_and_tables(path: Path) -> None:
    outputs = [output for cell in _code_cells(path) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size <= 400_000
    for output in outputs:
        assert output["output_type"] != "error"
        html = "".join(output.get("data", {}).get("text/html", ""))
        assert "<script" not in html and "sparse-tl-auto" not in html


@each
def test_every_cell_was_run_in_order(path: Path) -> None:
    cells = _code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))

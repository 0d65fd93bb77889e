"""Run the notebooks and store them as they should look on a code-hosting page: ``make notebooks``.

Arguments are paths of notebooks, all by default, and ``NAME=VALUE`` for the variables of cells that
are tagged "parameters": what to take in place of what they name, where that cannot be fetched.

There scripts do not run and large outputs are not shown, so every figure is stored as a picture;
whoever runs a notebook gets the interactive one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from parameters import give

PICTURES = """
import base64, io, tempfile
from pathlib import Path

from PIL import Image

from sparse_tl.explorer import CircuitExplorer
from sparse_tl.plots import AttentionView, CircuitDiagram, ComponentDiagram, GridFigure

def _picture(self, *_, **__):
    with tempfile.TemporaryDirectory() as folder:
        drawn = Image.open(self.save(Path(folder) / "figure.png", scale=1.0)).convert("RGB")
    file = io.BytesIO()
    # Less than half the size, and no colour off by more than a reader can see.
    few = drawn.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
    few.save(file, "png", optimize=True)
    content = base64.b64encode(file.getvalue()).decode()
    return {"image/png": content, "text/plain": repr(self)}

def _show(self):
    from IPython.display import display
    display(self.figure())

for kind in (AttentionView, CircuitDiagram, ComponentDiagram, GridFigure):
    kind._repr_mimebundle_ = _picture
# It displays a style for live figures too.
del GridFigure._ipython_display_
CircuitExplorer._ipython_display_ = _show
"""
LARGEST = 400_000
"""Bytes of a stored notebook at most."""


def store(path: Path, parameters: dict[str, str]) -> None:
    """Run one notebook and write it with its outputs; its own parameters stay as they are.

    Raises:
        CellExecutionError: a cell failed; the file stays as it was.
        ValueError: the outputs are too large.
    """
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    give(notebook, parameters)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(PICTURES))
    options = {"timeout": 1800, "resources": {"metadata": {"path": path.parent}}}
    NotebookClient(notebook, coalesce_streams=True, **options).execute()  # progress: its last line
    del notebook.cells[0]
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
    notebook.metadata.pop("widgets", None)
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.metadata.pop("execution", None)
        # Warnings and notes on standard error name files of this machine.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            if "image/png" in output.get("data", {}):
                output.data.pop("text/html", None)
    text = nbformat.writes(notebook)
    if len(text) > LARGEST:
        raise ValueError(f"expected {path.name} to have at most {LARGEST} bytes; got {len(text)}")
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if "=" not in argument]
    parameters = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    for name in given or sorted(map(str, Path(__file__).parent.glob("*.ipynb"))):
        print(name, flush=True)
        store(Path(name), parameters)

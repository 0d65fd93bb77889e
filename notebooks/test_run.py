"""Every notebook runs from end to end; `make check` sees to it, `make test` does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parameters import give

pytestmark = [pytest.mark.every_case, pytest.mark.long]

FOLDER = Path(__file__).parent
_PROMPT = "Then , Jessica and John went to the office . John gave a basketball to"
FEW = {
    **{"N_PAIRS": 4, "N_OTHERS": 4, "STEPS": 4, "UPDATES": 4, "WINDOW": 32},
    # In the words of the small models.
    "TEXT": "Then , {} and {} went to the office . {} gave a basketball to",
    **dict.fromkeys(("AGREEMENT", "CAPITAL", "IOI"), (_PROMPT, ("Jessica", "John"))),
    **dict.fromkeys(("NUMBER_HEADS", "COUNTRY_HEADS"), ["a0.h0"]),
    **{"NAME_HEADS": [["a0.h0"]], "CORRUPTED": _PROMPT.replace("John gave", "Jessica gave")},
    **{"TEXTS": [_PROMPT], "N_NODES": 20, "N_CHECKED": 4},
    **dict.fromkeys(("KEYS_TO_VERB", "PLURAL_NOUN"), {}),
}
START = """
import sys
from functools import partial, partialmethod
import sparse_tl
import sparse_tl.zoo
sys.path.append("../tests")
from tiny import small_task_models
sparse_tl.load_task_models = small_task_models
sparse_tl.load_language_models = small_task_models
sparse_tl.load_language_model = lambda small=small_task_models: small()[0]
sparse_tl.AdditionTask.split = partialmethod(sparse_tl.AdditionTask.split, validation=64, test=256)
sparse_tl.AdditionTask.pairs = (
    lambda task, digit, n, pairs=sparse_tl.AdditionTask.pairs: pairs(task, digit, min(n, 24))
)
sparse_tl.zoo.task_accuracy = partial(sparse_tl.zoo.task_accuracy, n=8)
%reset -f
"""
"""Smaller models than the built-in ones, fewer sums and prompts, and none of the last notebook's
names."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One for all notebooks: to start it and to import torch takes longer than some of them."""
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra: notebooks)")
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=FOLDER)
    yield manager
    manager.shutdown_kernel()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path: Path, kernel: Any) -> None:
    nbformat = pytest.importorskip("nbformat", reason="extra: notebooks")
    nbclient = pytest.importorskip("nbclient", reason="extra: notebooks")
    notebook = nbformat.read(path, as_version=4)
    give(notebook, FEW)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(START))
    nbclient.NotebookClient(notebook, km=kernel, timeout=1500).execute()

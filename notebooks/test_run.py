"""Every notebook runs from end to end; `make check` sees to it, `make test` does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in import give, small_gpt2

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One for all notebooks: to start it and to import torch takes longer than some of them."""
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra: notebooks)")
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=FOLDER)
    yield manager
    manager.shutdown_kernel()


@pytest.fixture(scope="module")
def parameters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small, and on this machine, in place of what a notebook would fetch."""
    return small_gpt2(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path: Path, kernel: Any, parameters: dict[str, str]) -> None:
    nbformat = pytest.importorskip("nbformat", reason="extra: notebooks")
    nbclient = pytest.importorskip("nbclient", reason="extra: notebooks")
    notebook = nbformat.read(path, as_version=4)
    give(notebook, parameters)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # of the last one's names
    nbclient.NotebookClient(notebook, km=kernel, timeout=300).execute()

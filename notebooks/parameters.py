"""Parameters of notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def give(notebook: Any, parameters: Mapping[str, Any]) -> None:
    """Set the variables of the cell that is tagged "parameters", if there is one."""
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())

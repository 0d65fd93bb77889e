"""The explorer's script and style: those of the circuit diagram, and its own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from sparse_tl.plots.interactive_html import SCRIPTS
from sparse_tl.plots.palette import DARK_FILTER


def _read(package: str, names: Sequence[str], suffix: str) -> str:
    folder = resources.files(f"sparse_tl.{package}")
    return "\n".join((folder / f"{name}.{suffix}").read_text(encoding="utf-8") for name in names)


SCRIPT = "\n".join(
    [
        _read("plots", SCRIPTS["circuit_diagram"], "js"),
        _read("explorer", ["explorer_parts", "explorer"], "js"),
    ]
)

STYLE = "\n".join(
    [
        _read("plots", ["interactive_figure"], "css"),
        _read("explorer", ["explorer"], "css"),
        f".sparse-tl-explorer[data-dark] {{ filter: {DARK_FILTER}; }}\n",
    ]
)

# JupyterLab writes "model not found" where the live view was.
NO_LIVE_VIEW = (
    ".jp-OutputArea-child:has([data-saved-explorer]) + "
    ".jp-OutputArea-child:not(:has(.sparse-tl-explorer)) { display: none; }"
)

"""Draw results with a package that is registered at run time.

Figures are made from results, so results cannot import them; the root package calls `draw_with`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_package: str | None = None


def draw_with(package: str) -> None:
    """Register the package whose `figure` draws results; it is imported for the first figure."""
    global _package
    _package = package


def draw(result: Any, **style: Any) -> Any:
    """A result as a figure.

    Raises:
        TypeError: there is no figure for this type of result.
    """
    assert _package is not None, "the root package calls draw_with"
    return import_module(_package).figure(result, **style)

"""Results: saved as folders of JSON and safetensors, read again, printed as tables."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from sparse_tl.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    read_tensors,
    recover_folder,
    write_json,
    write_tensors,
)

if TYPE_CHECKING:
    import pandas as pd

Result = TypeVar("Result", bound="Saved")


class Saved:
    """A result that can be saved; it says what of it goes into JSON and what into tensors."""

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        raise NotImplementedError

    @classmethod
    def _restored(cls: type[Result], said: dict[str, Any], tensors: dict[str, Tensor]) -> Result:
        raise NotImplementedError

    def save(self, folder: str | Path) -> Path:
        """Write a folder of safetensors and JSON; whole or not at all.

        Raises:
            ValueError: the folder holds something else, which would be deleted.
        """
        folder = Path(folder)
        recover_folder(folder)
        check_replaceable(folder, "result.json", "result.safetensors")
        if (folder / "result.json").exists():
            _said(folder, type(self).__name__)
        said, tensors = self._content()
        with atomic_folder(folder) as temporary:
            write_tensors(temporary / "result.safetensors", tensors)
            write_json(temporary / "result.json", {"kind": type(self).__name__, **said})
        return folder

    @classmethod
    def load(cls: type[Result], folder: str | Path) -> Result:
        """Read what `save` wrote.

        Raises:
            ValueError: another folder, or a damaged one.
        """
        folder = Path(folder)
        recover_folder(folder)
        said = _said(folder, cls.__name__)
        tensors = read_tensors(folder / "result.safetensors")
        try:
            return cls._restored(said, tensors)
        except KeyError as error:
            raise ValueError(
                f"expected a whole {cls.__name__} in {folder}; it lacks {error}"
            ) from error


def _said(folder: Path, kind: str) -> dict[str, Any]:
    if not (folder / "result.json").is_file():
        raise ValueError(f"expected a saved {kind} in {folder}; there is no result.json")
    said = read_json(folder / "result.json")
    found = said.get("kind") if isinstance(said, dict) else None
    if found != kind:
        raise ValueError(f"expected a saved {kind} in {folder}; it holds {found or 'no result'}")
    return said


def table_html(
    table: pd.DataFrame, said: str = "", *, digits: str = ".4g", index: bool = False
) -> str:
    """Words and a table as HTML; all texts are escaped.

    Args:
        table: the numbers.
        said: a sentence above it.
        digits: how numbers are written.
        index: whether the rows have names of their own.
    """
    words = f"<p>{escape(said)}</p>" if said else ""
    # Counts stay readable: 123,457 and not 1.235e+05.
    return words + table.to_html(
        float_format=lambda x: format(x, ",.0f" if abs(x) >= 1e4 else digits),
        border=0,
        index=index,
    )

"""Checksums of every folder that the package writes, in a file ``SHA256SUMS``.

The file has the format of ``sha256sum``, which can also check it: ``sha256sum -c SHA256SUMS``. All
other files stay plain safetensors and JSON. A folder without checksums, such as one from a hub or
from an earlier version, is read unchecked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

SUMS_FILE = "SHA256SUMS"
_LARGEST = 2**20
"""Largest number of bytes in a list of checksums; no folder of the package comes near it."""


def write_sums(
    folder: Path, names: Iterable[str] | None = None, others: Mapping[str, str] | None = None
) -> None:
    """Write the checksums of a folder's files, keeping those that it already lists.

    Args:
        folder: folder of the files.
        names: names of the files; all files by default.
        others: known checksums, by name, of files that will be added to the folder.
    """
    if names is None:
        names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    written = {name: _sum(folder / name) for name in {*names} - {SUMS_FILE}}
    sums = {**(others or {}), **read_sums(folder), **written}
    lines = [f"{value}  {name}\n" for name, value in sorted(sums.items())]
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8", newline="\n")


def read_sums(folder: Path) -> dict[str, str]:
    """The checksums of a folder's files, by name; empty if it has no list.

    Raises:
        ValueError: the list is damaged.
    """
    file = folder / SUMS_FILE
    if not file.is_file():
        return {}
    with file.open("rb") as opened:
        content = opened.read(_LARGEST + 1).decode("utf-8", errors="replace")
    lines = [re.fullmatch(r"([0-9a-f]{64})  ([^/\\]+)", line) for line in content.splitlines()]
    if len(content) > _LARGEST or not all(lines):
        raise ValueError(f"expected a list of checksums, as sha256sum writes it, in {file}; {_ASK}")
    return {line[2]: line[1] for line in lines if line}


def check_sums(folder: str | Path) -> None:
    """Check that the files whose checksums a folder lists are as they were written.

    Raises:
        ValueError: a file is damaged, changed or missing; the message names it.
    """
    folder = Path(folder)
    for name, value in read_sums(folder).items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"expected {file}, which {SUMS_FILE} beside it lists; it is missing")
        if _sum(file) != value:
            raise ValueError(
                f"expected {file} as it was written; it has another SHA-256 than {SUMS_FILE} "
                f"beside it lists. {_ASK}"
            )


_ASK = (
    "It was damaged, or changed by hand: use a copy, or write it again. If you made the change, "
    f"remove {SUMS_FILE}"
)


def _sum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

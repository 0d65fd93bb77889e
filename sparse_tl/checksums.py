"""What is read back is what was written: a ``SHA256SUMS`` in every folder that the package writes.

It has the format of ``sha256sum``, which can check it too: ``sha256sum -c SHA256SUMS``. All other
files stay plain safetensors and JSON. A folder without it, such as one from a hub or of an earlier
version, is read unchecked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

SUMS_FILE = "SHA256SUMS"
_LARGEST = 2**20
"""Bytes of a list of checksums; no folder of the package comes near it."""


def write_sums(
    folder: Path, names: Iterable[str] | None = None, others: Mapping[str, str] | None = None
) -> None:
    """Write the checksums of some files of a folder, by default of all, to those that it has.

    Args:
        folder: folder to add the list to.
        names: names of the files.
        others: known checksums by name, of files that will be beside them.
    """
    if names is None:
        names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    found = {name: _sum(folder / name) for name in {*names} - {SUMS_FILE}}
    sums = {**(others or {}), **read_sums(folder), **found}
    lines = [f"{value}  {name}\n" for name, value in sorted(sums.items())]
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8", newline="\n")


def read_sums(folder: Path) -> dict[str, str]:
    """The checksums of a folder's files by name; none if it has no list of them.

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
    """Check that all files of a folder are as they were written, where it has their checksums.

    Raises:
        ValueError: a file is damaged, changed or gone; the message names it.
    """
    folder = Path(folder)
    for name, value in read_sums(folder).items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"expected {file}, which {SUMS_FILE} beside it names; there is none")
        if _sum(file) != value:
            raise ValueError(
                f"expected {file} as it was written; it has another SHA-256 than {SUMS_FILE} "
                f"beside it says. {_ASK}"
            )


_ASK = (
    "It was damaged, or changed by hand: take a copy, or write it anew. If the change is yours, "
    f"remove {SUMS_FILE}"
)


def _sum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

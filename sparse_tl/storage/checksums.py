"""Checksums of every folder that the package writes, in a file ``SHA256SUMS``.

The file has the format of ``sha256sum``, which can also check it: ``sha256sum -c SHA256SUMS``. All
other files stay plain safetensors and JSON. A folder without checksums, such as one from a hub or
from an earlier version, is read unchecked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\\0]{1,255})")  # no file has a longer name


def write_sums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the checksums of all files in a folder.

    Args:
        folder: folder of the files.
        known: checksums, by name, to list without computing them; their files may be elsewhere.
    """
    sums = dict(known or {})
    for file in folder.iterdir():
        if file.is_file() and file.name not in {*sums, SUMS_FILE}:
            sums[file.name] = checksum(file)
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
    content = file.read_text(encoding="utf-8", errors="replace")
    lines = [_LINE.fullmatch(line) for line in content.split("\n") if line]
    if not all(lines):
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
        if checksum(file) != value:
            raise ValueError(
                f"expected {file} as it was written; its SHA-256 differs from the one in "
                f"{SUMS_FILE} beside it. {_ASK}"
            )


_ASK = (
    "It was damaged, or changed by hand: use a copy, or write it again. If you made the change, "
    f"remove {SUMS_FILE}"
)


def checksum(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

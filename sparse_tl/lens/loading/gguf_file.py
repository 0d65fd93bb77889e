"""Find and check GGUF files before transformers reads them.

A GGUF file consists of a header and tensor data. The header has metadata (architecture, sizes,
vocabulary, chat template) and a table of the tensors. Tensors that the model does not use, which
transformers would silently ignore, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from transformers import modeling_gguf_pytorch_utils

from sparse_tl.calls.scopes import scope

# Earlier versions of transformers build other tokenizers: without BOS, or of unknown kinds.
_NEEDED = Requirement("gguf>=0.17.1"), Requirement("transformers>=5.23")
_MAGIC = b"GGUF"
NAME = "model.gguf"
"""Name under which transformers sees the file."""


class Header(NamedTuple):
    """The header of a GGUF file.

    Args:
        fields: metadata by name; the vocabulary is left empty.
        sizes: number of weights in each tensor.
    """

    fields: dict[str, Any]
    sizes: dict[str, int]

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file has a vocabulary."""
        return "tokenizer.ggml.tokens" in self.fields


def find_gguf(place: Path) -> Path | None:
    """The GGUF file at a path or in a folder, or None.

    Raises:
        ValueError: the folder has several.
    """
    if not place.is_dir():
        return place if place.suffix == ".gguf" or _has_magic(place) else None
    found = sorted(place.glob("*.gguf"))
    if len(found) > 1:
        raise ValueError(
            f"expected one GGUF file in {place}; found {[file.name for file in found[:5]]}. Give "
            "the path of the one to load"
        )
    return found[0] if found else None


def _has_magic(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC


def _version(package: Requirement) -> str:
    try:
        return metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return "none"


def read_header(file: Path) -> Header:
    """Read and check the header of a GGUF file, without reading its tensors.

    Raises:
        ImportError: a package that is needed to read such files is missing or too old.
        ValueError: the file is missing or damaged, or is one part of several.
    """
    for needed in _NEEDED:
        if (found := _version(needed)) == "none" or found not in needed.specifier:
            raise ImportError(
                f"expected {needed} to read {file}; {found} is installed. pip install '{needed}'"
            )
    from gguf import GGUFReader

    whole = f"expected a whole GGUF file at {file}"
    try:
        reader = GGUFReader(file)
        fields = {name: _value(name, field) for name, field in reader.fields.items()}
    except (IndexError, KeyError, OSError, OverflowError, RecursionError, ValueError) as error:
        raise ValueError(f"{whole}; it is damaged ({error})") from error
    if (parts := fields.get("split.count", 1)) not in (0, 1):
        raise ValueError(
            f"{whole}; it is one of {parts!s:.80} parts. Join them first: "
            "llama-gguf-split --merge FIRST_PART OUT"
        )
    if not isinstance(fields.get("general.architecture"), str):
        raise ValueError(f"{whole}; its metadata does not name an architecture")
    return Header(fields, {tensor.name: int(tensor.n_elements) for tensor in reader.tensors})


def _value(name: str, field: Any) -> Any:
    """A metadata value; for the vocabulary, which is large, an empty one."""
    return () if name.startswith("tokenizer.") and len(field.data) > 1 else field.contents()


@scope
def without_bar() -> Iterator[None]:
    """Hide the progress bar of dequantisation, for which transformers has no setting."""
    reader: Any = modeling_gguf_pytorch_utils
    shown = reader.tqdm
    reader.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        reader.tqdm = shown


def check_taken(header: Header, kind: str, needed: int) -> None:
    """Check that a model of some kind, which needs so many weights, uses the whole file.

    Raises:
        ValueError: it would leave out tensors.
    """
    if needed != (held := sum(header.sizes.values())):
        raise ValueError(
            f"transformers' {kind} takes {needed:,} of its {held:,} weights, so that it would be a "
            "different model from the file's"
        )

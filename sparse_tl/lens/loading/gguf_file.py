"""Find and check GGUF files before transformers reads them.

A GGUF file consists of a header and tensor data. The header has metadata (architecture, sizes,
vocabulary, chat template) and a table of the tensors: name, shape, type and offset. Nothing in it
is code, but readers trust its counts and sizes. So the header is checked first:

1. Magic number and version; not one part of a split file.
2. Every count and length fits in the rest of the file, and is at most what real models need.
3. Every tensor lies within the file, and none overlaps another.

Tensors that the model does not use, which transformers would silently ignore, are refused too.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import transformers
from packaging.requirements import Requirement
from transformers import modeling_gguf_pytorch_utils

from sparse_tl.calls.scopes import scope

# Earlier versions of transformers build other tokenizers: without BOS, or of unknown kinds.
_NEEDED = Requirement("gguf>=0.17.1"), Requirement("transformers>=5.23")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The metadata's number types, in the notation of `struct`."""
_TEXT, _ARRAY = 8, 9
_MOST_NAMES = 2**16  # metadata fields, or tensors
_MOST_ENTRIES = 2**21  # of all arrays together; Gemma's vocabulary takes 0.8 million
_LONGEST = 2**20  # bytes of a text
_ALIGNMENT = 32
NAME = "model.gguf"
"""Name under which transformers sees the file."""


class Header(NamedTuple):
    """The header of a GGUF file.

    Args:
        fields: metadata by name. Arrays are tuples; those of texts are left empty.
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
    try:
        with file.open("rb") as opened:
            return _header(_Bytes(opened))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"expected a whole GGUF file at {file}; {error}") from error


class _Bytes:
    """A file read from its start, never beyond its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, os.fstat(file.fileno()).st_size
        self.entries = 0

    def take(self, count: int) -> bytes:
        found = self.file.read(count)
        if len(found) < count:
            raise ValueError(f"its {self.size:,} bytes end within the header")
        return found

    def numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        (length,) = self.numbers("Q")
        if length > _LONGEST:
            raise ValueError(f"a text in it would have {length:,} bytes")
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        """A metadata value; for an array of texts, which would be large, an empty one."""
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            inner, length = self.numbers("IQ")
            self.entries += length
            if inner == _ARRAY or self.entries > _MOST_ENTRIES:
                raise ValueError(f"it has arrays of arrays, or of {self.entries:,} entries")
            if inner == _TEXT:
                for _ in range(length):
                    self.text()
                return ()
            return self.numbers(f"{length}{_number(inner)}")
        return self.numbers(_number(kind))[0]


def _number(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"its metadata has a value of type {kind}, which GGUF does not know")
    return _NUMBERS[kind]


def _header(data: _Bytes) -> Header:
    if data.file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it does not begin with the letters GGUF")
    (version,) = data.numbers("I")
    if version not in _VERSIONS:
        raise ValueError(
            f"it is of version {version}; {' and '.join(map(str, _VERSIONS))} are read"
        )
    n_tensors, n_fields = data.numbers("QQ")
    if max(n_tensors, n_fields) > _MOST_NAMES:
        raise ValueError(f"it would have {n_tensors:,} tensors and {n_fields:,} metadata fields")
    fields = dict(_unique(_fields(data, n_fields), "metadata field"))
    parts = fields.get("split.count", 1)
    if parts not in (0, 1):
        raise ValueError(
            f"it is one of {parts!s:.80} parts. Join them first: "
            "llama-gguf-split --merge FIRST_PART OUT"
        )
    if not isinstance(fields.get("general.architecture"), str):
        raise ValueError("its metadata does not name an architecture")
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(
            f"its tensors would be aligned to {alignment!r:.80} bytes, which is not a power of two"
        )
    table = dict(_unique(_tensors(data, n_tensors), "tensor"))
    end = start = -(-data.file.tell() // alignment) * alignment
    for name, (offset, n_bytes, _) in sorted(table.items(), key=lambda item: item[1]):
        if start + offset < end or offset % alignment:
            raise ValueError(f"the tensor {name[:80]!r} would begin within another one")
        end = start + offset + n_bytes
        if end > data.size:
            raise ValueError(
                f"the tensor {name[:80]!r} would end at byte {end:,} of {data.size:,}. The file "
                "is cut off, or one part of several"
            )
    return Header(fields, {name: size for name, (_, _, size) in table.items()})


def _unique(pairs: Iterator[tuple[str, Any]], what: str) -> Iterator[tuple[str, Any]]:
    seen = set[str]()
    for name, value in pairs:
        if name in seen:
            raise ValueError(f"it has the {what} {name[:80]!r} twice")
        seen.add(name)
        yield name, value


def _fields(data: _Bytes, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        name, (kind,) = data.text(), data.numbers("I")
        yield name, data.value(kind)


def _tensors(data: _Bytes, count: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Offset, bytes and number of weights of each tensor."""
    from gguf import GGML_QUANT_SIZES

    for _ in range(count):
        name, (n_axes,) = data.text(), data.numbers("I")
        if not 1 <= n_axes <= 4:
            raise ValueError(f"the tensor {name[:80]!r} would have {n_axes:,} axes")
        shape = data.numbers(f"{n_axes}Q")
        kind, offset = data.numbers("IQ")
        if kind not in GGML_QUANT_SIZES:
            raise ValueError(
                f"the tensor {name[:80]!r} is of type {kind}, which gguf does not know"
            )
        together, n_bytes = GGML_QUANT_SIZES[kind]  # weights and bytes per block
        if not all(shape) or shape[0] % together:
            raise ValueError(
                f"the tensor {name[:80]!r} has shape {shape}, which does not divide into blocks of "
                "its type"
            )
        size = math.prod(shape)
        yield name, (offset, size // together * n_bytes, size)


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


def gguf_options(config: Any) -> dict[str, Any]:
    """Options that make transformers read plain weights from a GGUF file."""
    # Otherwise transformers may keep quantised blocks, and run code from a hub on them.
    whole = transformers.GgufConfig(dequantize=True)
    return {"gguf_file": NAME, "config": config, "quantization_config": whole}


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

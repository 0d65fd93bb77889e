"""Folders from strangers: everything that can be wrong in a file of each kind, generated."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MARKUP = "<script>alert(1)</script>[bold red]\x1b[31m'\"&"
WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "text": "x",
    "markup": MARKUP,
    "minus one": -1,
    "zero": 0,
    "half": 0.5,
    "largest": 1e308,
    "nan": float("nan"),
    "infinity": float("inf"),
    "huge": 10**20,
    "million": 10**6,
    "empty list": [],
    "empty object": {},
    "long text": "x" * 10**6,
    "outside": "../../secret.json",
    "root": "/etc/passwd",
}
ADDED: dict[str, Any] = {
    "auto_map": {
        "AutoConfig": "code.C",
        "AutoModelForCausalLM": "code.M",
        "AutoTokenizer": "code.T",
    },
    "trust_remote_code": True,
    "tokenizer_name": "../elsewhere",
    "tokenizer_class": "code.T",
    "__class__": "os.system",
    "_name_or_path": "../elsewhere",
    "tokenizer_file": "../../secret.json",
    MARKUP: MARKUP,
}


@dataclass(frozen=True)
class Case:
    """One thing that is wrong in a folder.

    Args:
        what: where and how.
        spoil: makes it so, in a copy of the folder.
    """

    what: str
    spoil: Callable[[Path], None]


def cases(folder: Path) -> Iterator[Case]:
    """Everything that can be wrong in a folder of valid files."""
    files = [
        file for file in sorted(folder.rglob("*")) if file.is_file() and file.stat().st_size < 10**7
    ]
    for file in files:
        name = file.relative_to(folder).as_posix()
        for what, change in _OF_ANY.items():
            yield Case(f"{name}: {what}", partial(_of_file, change, name))
        if file.suffix == ".json":
            yield from _of_json(name, json.loads(file.read_text(encoding="utf-8")))
        if file.suffix == ".safetensors":
            for what, spoil in _OF_TENSORS.items():
                yield Case(f"{name}: {what}", partial(_of_file, spoil, name))
    for what, add in _BESIDE.items():
        yield Case(f"beside: {what}", add)


def sample(folder: Path, n: int, draw: random.Random) -> list[Case]:
    """Some cases, as many of each kind of file and of what is wrong as there can be."""
    every: dict[str, list[Case]] = {}
    for case in cases(folder):
        name, _, what = case.what.partition(": ")
        every.setdefault(f"{name} {what.split(' = ')[-1]}", []).append(case)
    groups = [*every.values()]
    draw.shuffle(groups)
    chosen: list[Case] = []
    while len(chosen) < n and any(groups):
        for group in groups:
            if group and len(chosen) < n:
                chosen.append(group.pop(draw.randrange(len(group))))
    return chosen


def _of_file(change: Callable[[Path], None], name: str, folder: Path) -> None:
    change(folder / name)


def _of_json(name: str, content: Any) -> Iterator[Case]:
    for path, value in _values(content, ()):
        said = ".".join(map(str, path)) or "all"
        for what, wrong in {**WRONG, "itself as text": str(value), "in a list": [value]}.items():
            if type(wrong) is not type(value) or wrong != value:
                yield Case(f"{name}: {said[:60]} = {what}", partial(_put, name, path, wrong))
        if path:
            yield Case(f"{name}: {said[:60]} = gone", partial(_put, name, path, ...))
        if isinstance(value, dict):
            for key, wrong in ADDED.items():
                if key not in value:
                    yield Case(
                        f"{name}: {said[:60]} = added {key[:20]}",
                        partial(_put, name, (*path, key), wrong),
                    )


def _values(content: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, content
    if isinstance(content, dict):
        for key in [*content][:60]:
            yield from _values(content[key], (*path, key))
    elif isinstance(content, list):
        for index in range(min(2, len(content))):
            yield from _values(content[index], (*path, index))


def _put(name: str, path: tuple[Any, ...], value: Any, folder: Path) -> None:
    """Replace a value of a JSON file, or remove it."""
    content = {"": json.loads((folder / name).read_text(encoding="utf-8"))}
    place: Any = content
    *way, last = ("", *path)
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (folder / name).write_text(json.dumps(content[""]), encoding="utf-8")


def _linked(target: str | Path) -> Callable[[Path], None]:
    def link(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return link


def _written(content: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(content) and None


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


class Payload:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ('touch "$MARKER"',)


_OF_ANY: dict[str, Callable[[Path], None]] = {
    "of no bytes": _written(b""),
    "nested": _written(b"[" * 10**6),
    "nested objects": _written(b'{"a":' * 10**5),
    "no UTF-8": _written(b'{"a": "\xff\xfe"}'),
    "UTF-16": _written('{"a": 1}'.encode("utf-16")),
    "a number of many digits": _written(b"9" * 10**5),
    "pickled": lambda file: file.write_bytes(pickle.dumps(Payload())) and None,
    "pickled by torch": lambda file: torch.save(Payload(), file),
    "a directory": _directory,
    "gone": Path.unlink,
    "a link to itself": lambda file: _linked(file)(file),
    "a link to nothing": _linked("nothing"),
    "a link outside": _linked("../../secret.json"),
    "a link to the folder": _linked("."),
}


def _header(content: Any, length: int | None = None, rest: bytes = b"") -> Callable[[Path], None]:
    said = content if isinstance(content, bytes) else json.dumps(content).encode()
    return _written(struct.pack("<Q", len(said) if length is None else length) + said + rest)


def _tensor(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"bias": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def _changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        tensors = load_file(file)
        name = max(tensors, key=lambda some: (tensors[some].numel(), some))
        save_file({**tensors, name: change(tensors[name]).contiguous()}, file, {"format": "pt"})

    return write


def _renamed(file: Path) -> None:
    tensors = load_file(file)
    save_file({f"../{name}": tensor for name, tensor in tensors.items()}, file, {"format": "pt"})


def _more(file: Path) -> None:
    save_file({**load_file(file), MARKUP: torch.zeros(3)}, file, {"format": "pt"})


_OF_TENSORS: dict[str, Callable[[Path], None]] = {
    "a header of 2^63 bytes": _header({}, 2**63),
    "a header of a terabyte": _header({}, 2**40),
    "a nested header": _header(b'{"a":' * 10**5),
    "a shape of 10^18": _header(_tensor([10**18], [0, 4]), rest=b"1234"),
    "a shape that overflows": _header(_tensor([2**33, 2**33], [0, 4]), rest=b"1234"),
    "a shape that fits nothing": _header(_tensor([-1], [0, 4]), rest=b"1234"),
    "offsets beyond the end": _header(_tensor([10**9], [0, 4 * 10**9]), rest=b"1234"),
    "an unknown dtype": _header(_tensor([1], [0, 4], "F7"), rest=b"1234"),
    "no tensors": _header({}),
    "NaN": _changed(lambda tensor: torch.full_like(tensor, float("nan"), dtype=torch.float32)),
    "infinity": _changed(
        lambda tensor: torch.full_like(tensor, -float("inf"), dtype=torch.float32)
    ),
    "whole numbers": _changed(lambda tensor: tensor.to(torch.int64)),
    "complex numbers": _changed(lambda tensor: tensor.to(torch.complex64)),
    "another shape": _changed(lambda tensor: tensor.flatten()[None]),
    "a longer tensor": _changed(lambda tensor: torch.cat([tensor, tensor])),
    "other names": _renamed,
    "one more": _more,
}
CODE = """
import os
from pathlib import Path
Path(os.environ["MARKER"]).touch()
from transformers import LlamaConfig as C, LlamaForCausalLM as M, PreTrainedTokenizerFast as T
"""


def _code(folder: Path) -> None:
    for name in ("code.py", "modeling.py", "custom_generate/generate.py", "__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CODE)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            for key, value in ADDED.items():
                _put(name, (key,), value, folder)


def _pickles(folder: Path) -> None:
    for name in ("pytorch_model.bin", "model.pt", "tensors.pt", "result.pt", "training_args.bin"):
        torch.save({"weights": Payload()}, folder / name)


def _pickles_alone(folder: Path) -> None:
    _pickles(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()


def _index(weight_map: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for file in folder.glob("model*.safetensors"):
            shutil.move(file, folder / "model-00001-of-00001.safetensors")
        content = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return write


def _adapter(folder: Path) -> None:
    content = {"base_model_name_or_path": "../elsewhere", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(content))


_BESIDE: dict[str, Callable[[Path], None]] = {
    "code": _code,
    "pickles": _pickles,
    "pickles alone": _pickles_alone,
    "an index that goes up": _index({"a": "../../secret.safetensors"}),
    "an index of absolute paths": _index({"a": "/etc/passwd"}),
    "an index of numbers": _index({"a": 3}),
    "an index of lists": _index([["a"]]),
    "an index of markup": _index({MARKUP: MARKUP}),
    "an adapter": _adapter,
    "a link to /": lambda folder: (folder / "more").symlink_to("/"),
}

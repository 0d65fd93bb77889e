"""Results: frozen dataclasses that can be saved, loaded, tabulated and drawn.

A saved result is a folder: tensors in a safetensors file, all other fields in result.json. Loading
follows the declared types of the fields: nothing is unpickled, and only declared classes are
created.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    TypeVar,
    get_args,
    get_type_hints,
)

import pandas as pd
import torch
from jaxtyping import jaxtyped
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core.core_schema import CoreSchema, is_instance_schema
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.storage.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    read_tensors,
    recover_folder,
    write_json,
    write_tensors,
)

Kind = TypeVar("Kind", bound="Result")

SCHEMA = 1
"""Format version of saved results."""

NONE: Mapping[str, Tensor] = {}
RESULT_FILE, _TENSORS_FILE = "result.json", "result.safetensors"


class NonFiniteError(ValueError):
    """A number that was measured, or read, is NaN or infinite."""


class Result:
    """Base class of all frozen dataclasses that analyses return.

    Fields may be tensors, numbers, strings, None, sequences and dictionaries of these, DataFrames,
    and other dataclasses. Their types must be resolvable at run time (pandas may be imported for
    type checkers only, as ``pd``).
    """

    finite: ClassVar[bool] = True
    """Whether NaN and infinity are refused; some results use them for what was not measured."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return is_instance_schema(cls)  # its fields are not validated again

    def __post_init__(self) -> None:
        for name, value in vars(self).items() if self.finite else ():
            if isinstance(value, Tensor | float) and not torch.as_tensor(value).isfinite().all():
                raise NonFiniteError(
                    f"{name} of {type(self).__name__} has numbers that are NaN or infinite. Check "
                    "the model's weights and the metric on every prompt."
                )

    @checked
    def save(self, folder: str | Path) -> Path:
        """Write a folder of safetensors and JSON, completely or not at all.

        Raises:
            ValueError: the folder holds something else, which would be deleted.
        """
        folder, kind = Path(folder), type(self)
        check_replaceable(folder, RESULT_FILE, _TENSORS_FILE)
        if (folder / RESULT_FILE).exists():
            _content(folder, kind)
        tensors: dict[str, Tensor] = {}
        content = _as_json(self, "", tensors)
        with atomic_folder(folder) as temporary:
            write_json(temporary / RESULT_FILE, {"schema": SCHEMA, **content})
            write_tensors(temporary / _TENSORS_FILE, tensors)
        return folder

    @classmethod
    @checked
    def load(cls: type[Kind], folder: str | Path) -> Kind:
        """Load a result that `save` wrote.

        Raises:
            ValueError: the folder holds no result, one of another kind, or a damaged one.
        """
        folder = Path(folder)
        recover_folder(folder)
        content = _content(folder, cls)
        tensors = read_tensors(folder / _TENSORS_FILE)
        try:
            return from_fields(cls, content, "", tensors)
        except ValueError as error:
            raise ValueError(f"the {cls.__name__} in {folder} is damaged: {error}") from error

    def to_pandas(self) -> pd.DataFrame:
        """One row with the fields that are numbers or strings."""
        result: Any = self
        values = {field.name: getattr(self, field.name) for field in fields(result)}
        return pd.DataFrame([{k: v for k, v in values.items() if isinstance(v, str | int | float)}])

    def figure(self, **style: Any) -> Any:
        """The result as a figure; keywords as in `sparse_tl.plots.figure`."""
        return import_module("sparse_tl.plots").figure(self, **style)  # drawn above this layer

    def _summary(self) -> pd.DataFrame:
        """The table shown in notebooks."""
        return self.to_pandas().head(20)

    def _repr_html_(self) -> str:
        return table_html(self._summary(), repr(self))


@dataclass(frozen=True, eq=False)
class OfPrompts(Result):
    """Base class of results of prompts.

    Args:
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    prompt_start: str | None = field(default=None, kw_only=True)


def table_html(table: pd.DataFrame, sentence: str = "") -> str:
    """A sentence and a table as HTML, with all text escaped.

    Args:
        table: table to show; its index is shown if it has names.
        sentence: sentence above the table.
    """
    words = f"<p>{escape(sentence)}</p>" if sentence else ""
    named = not isinstance(table.index, pd.RangeIndex)
    return words + table.to_html(float_format=short, border=0, index=named)


def short(number: Any) -> str:
    """Four digits of a number, and all of a large one: 123,457 instead of 1.235e+05."""
    return format(number, ",.0f" if abs(number) >= 1e4 else ",.4g")


def _content(folder: Path, kind: type) -> dict[str, Any]:
    """The fields in a folder's JSON, which must be a result of the given kind."""
    if not (folder / RESULT_FILE).is_file():
        raise ValueError(f"{folder} holds no saved {kind.__name__}: there is no {RESULT_FILE}")
    content = read_json(folder / RESULT_FILE)
    content = content if isinstance(content, dict) else {}
    saved, schema = content.get("kind"), content.get("schema")
    if saved != kind.__name__ or schema != SCHEMA:
        raise ValueError(
            f"{folder} holds no saved {kind.__name__} of schema {SCHEMA}, but {saved} of schema "
            f"{schema}"
        )
    return content.get("fields", {})


def _as_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; tensors are collected in `tensors` and replaced by their names."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return name
    if isinstance(value, pd.DataFrame):
        columns: dict[str, Any] = {str(column): value[column] for column in value}
        return {
            column: {"dtype": str(series.dtype), "values": _as_json(series.tolist(), column, {})}
            for column, series in columns.items()
        }
    if is_dataclass(value):
        by_name = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"kind": type(value).__name__, "fields": _as_json(by_name, name, tensors)}
    if isinstance(value, Mapping):
        return {key: _as_json(item, _under(name, key), tensors) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(item, _under(name, i), tensors) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # not valid JSON as a number; float() parses it
    return value


def from_fields(
    kind: type, content: Mapping[str, Any], name: str = "", tensors: Mapping[str, Tensor] = NONE
) -> Any:
    """A result, from its fields as JSON and their tensors.

    Raises:
        ValueError: a field is missing, unknown, or of the wrong type.
    """
    names, declared, kinds, tables = _declared(kind)
    if different := {*names} ^ content.keys():
        raise ValueError(f"it lacks, or has unknown, {sorted(different)!s:.200}")
    values = [
        _table(content[key])
        if key in tables
        else _restored(content[key], _under(name, key), tensors, kinds)
        for key in names
    ]
    try:
        with jaxtyped("context"):  # axes with the same name have the same size
            return kind(**dict(zip(names, declared.validate_python(values), strict=True)))
    except ValidationError as error:
        (place, *_), said = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise ValueError(f"{_under(name, names[int(place)])}: {said}") from error


@cache
def _declared(kind: type) -> tuple[list[str], Any, dict[str, type], list[str]]:
    """A dataclass's fields, a check of all their values, the dataclasses in it, and its tables."""
    hints = get_type_hints(kind, localns={"pd": pd})
    hints = {field.name: hints[field.name] for field in fields(kind)}
    rules = ConfigDict(arbitrary_types_allowed=True)
    check: TypeAdapter[Any] = TypeAdapter(tuple[*hints.values()], config=rules)  # type: ignore[misc]
    kinds = {some.__name__: some for hint in hints.values() for some in _dataclasses(hint)}
    return [*hints], check, kinds, [name for name, hint in hints.items() if hint is pd.DataFrame]


def _dataclasses(hint: Any) -> Iterator[type]:
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for inside in get_args(hint):
        yield from _dataclasses(inside)


def _restored(
    value: Any, name: str, tensors: Mapping[str, Tensor], kinds: Mapping[str, type]
) -> Any:
    """The value that `_as_json` was given, as far as this shows; lists become tuples."""
    if isinstance(value, list):
        parts = enumerate(value)
        return tuple(_restored(part, _under(name, i), tensors, kinds) for i, part in parts)
    if not isinstance(value, dict):
        return tensors.get(name, value) if value == name else value
    if value.keys() == {"kind", "fields"} and value["kind"] in kinds:
        return from_fields(kinds[value["kind"]], value["fields"], name, tensors)
    return {key: _restored(v, _under(name, key), tensors, kinds) for key, v in value.items()}


def _table(columns: Mapping[str, Any]) -> pd.DataFrame:
    try:
        return pd.DataFrame(
            {key: pd.Series(col["values"], dtype=col["dtype"]) for key, col in columns.items()}
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{columns!r:.99} are no columns of a dtype and values") from error


def _under(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)

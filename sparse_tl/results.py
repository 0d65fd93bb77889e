"""Results: frozen dataclasses that can be saved, loaded, tabulated and drawn.

A saved result is a folder: tensors in a safetensors file, all other fields in result.json. Loading
follows the declared types of the fields: nothing is unpickled, and only declared classes are
created.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    no_type_check,
)

import pandas as pd
import torch
from jaxtyping import AbstractArray, jaxtyped
from pydantic_core.core_schema import CoreSchema, is_instance_schema
from torch import Tensor

from sparse_tl.calls.arguments import checked
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


def table_html(table: pd.DataFrame, sentence: str = "") -> str:
    """A sentence and a table as HTML, with all text escaped.

    Args:
        table: table to show; its index is shown if it has names.
        sentence: sentence above the table.
    """
    words = f"<p>{escape(sentence)}</p>" if sentence else ""
    # Keep counts readable: 123,457 instead of 1.235e+05.
    return words + table.to_html(
        float_format=lambda x: format(x, ",.0f" if abs(x) >= 1e4 else ".4g"),
        border=0,
        index=not isinstance(table.index, pd.RangeIndex),
    )


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


@no_type_check  # a checked call would reset the axis sizes bound so far
def _restored(declared: Any, value: Any, name: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `_as_json` was given, checked against the declared type."""
    origin, of = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return _restored(_chosen(of, value), value, name, tensors)
    if _is_kind(declared, value):
        return from_fields(declared, value["fields"], name, tensors)
    if origin in (tuple, list, Sequence) and isinstance(value, list):
        kinds = of if origin is tuple and of[-1] is not Ellipsis else of[:1] * len(value)
        if len(kinds) == len(value):
            parts = enumerate(zip(kinds, value, strict=True))
            items = [_restored(kind, v, _under(name, i), tensors) for i, (kind, v) in parts]
            return items if origin is list else tuple(items)
    if origin in (dict, Mapping) and isinstance(value, dict):
        kind, items = of[0], value.items()  # keys, int or str, are strings in JSON
        return {kind(key): _restored(of[1], v, _under(name, key), tensors) for key, v in items}
    if origin is Literal and value in of:
        return value
    if declared is pd.DataFrame and isinstance(value, dict):
        return _table(value)
    if declared is float and isinstance(value, int | str) and not isinstance(value, bool):
        return float(value)
    if isinstance(declared, type) and not is_dataclass(declared):
        if isinstance(value, str) and issubclass(declared, Tensor | AbstractArray):
            value = tensors.get(value, value)
        if isinstance(value, declared) and not (declared is int and isinstance(value, bool)):
            return value
    raise ValueError(f"{name:.200} is {value!r:.80}, not {declared}")


def from_fields(
    kind: type, content: Mapping[str, Any], name: str = "", tensors: Mapping[str, Tensor] = NONE
) -> Any:
    """A result, from its fields as JSON and their tensors.

    Raises:
        ValueError: a field is missing, unknown, or of the wrong type.
    """
    declared = get_type_hints(kind, localns={"pd": pd})
    if different := {field.name for field in fields(kind)} ^ content.keys():
        raise ValueError(f"it lacks, or has unknown, {sorted(different)!s:.200}")
    with jaxtyped("context"):  # axes with the same name have the same size
        restored = {
            key: _restored(declared[key], value, _under(name, key), tensors)
            for key, value in content.items()
        }
    return kind(**restored)


def _chosen(kinds: tuple[Any, ...], value: Any) -> Any:
    """The member of a union that a value was written from."""
    if value is None:
        return NoneType
    others = [kind for kind in kinds if kind is not NoneType]
    same = [kind for kind in others if isinstance(kind, type) and isinstance(value, kind)]
    return next((kind for kind in others if _is_kind(kind, value)), (same or others)[0])


def _is_kind(declared: Any, value: Any) -> bool:
    if not (is_dataclass(declared) and isinstance(declared, type) and isinstance(value, dict)):
        return False
    return value.get("kind") == declared.__name__ and isinstance(value.get("fields"), dict)


def _table(columns: Mapping[str, Any]) -> pd.DataFrame:
    try:
        return pd.DataFrame(
            {key: pd.Series(col["values"], dtype=col["dtype"]) for key, col in columns.items()}
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{columns!r:.99} are no columns of a dtype and values") from error


def _under(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)

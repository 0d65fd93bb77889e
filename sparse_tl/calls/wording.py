"""Phrases of error messages: the values that an annotation accepts, and the given value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "text",
}
WORDS |= {NoneType: "None", Path: "a path", Any: "anything"}
_SEVERAL = {int: "whole numbers", float: "finite numbers", str: "texts", Path: "paths"}
_BOUNDS = {Ge: "from", Gt: "above", Le: "to", Lt: "below"}
_LONGEST = 80
"""Maximum number of characters of a value in a message."""


def in_words(annotation: Any) -> str:
    """The values that an annotation accepts, in words."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [
            f"{_BOUNDS[type(bound)]} {getattr(bound, type(bound).__name__.lower()):,}"
            for bound in annotation.__metadata__
        ]
        return " ".join([in_words(inside[0]), *limits])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(in_words(kind) for kind in inside))
    if origin is Literal:
        return " or ".join(repr(value) for value in inside)
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is None:
        return getattr(annotation, "__name__", str(annotation))
    if issubclass(origin, Callable):
        return "a function"
    if origin is tuple and Ellipsis not in inside:
        return f"({', '.join(map(in_words, inside))})"
    kind = {Iterable: "an iterable", Mapping: "a mapping"}.get(origin, "a list")
    members = (member for member in inside if member is not Ellipsis)
    return f"{kind} of {' to '.join(map(_several, members))}"


def _several(annotation: Any) -> str:
    """The members of a list, in words."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    words = in_words(annotation)
    return words.replace(WORDS[bare], _SEVERAL[bare], 1) if bare in _SEVERAL else words


def shown(value: Any) -> str:
    """A value for a message: tensors by type and shape, models by type, all others truncated."""
    if is_array(value):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a {type(value).__name__} of {kind} and shape {tuple(value.shape)}"
    if _is_model(value):
        return f"a {type(value).__name__}"
    if isinstance(value, Mapping) and any(map(_is_model, value.values())):
        named = (f"{key!r}: {type(one).__name__}" for key, one in value.items())
        return f"{{{', '.join(named)}}}"[:_LONGEST]
    try:
        text = repr(value)
    except Exception:  # a user's repr may fail
        text = "one whose repr fails"
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{text} ({type(value).__name__})"


def _is_model(value: Any) -> bool:
    """Whether a value is a torch module, whose repr fills pages."""
    return hasattr(type(value), "named_parameters")


def is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")

"""What messages say: annotations as what they accept, and values as what came."""

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
"""Characters of a value in a message."""


def in_words(annotation: Any) -> str:
    """What an annotation accepts, in words."""
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
    return f"{kind} of {' to '.join(_several(some) for some in inside if some is not Ellipsis)}"


def _several(annotation: Any) -> str:
    """What the members of a list are, in words."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    said = in_words(annotation)
    return said.replace(WORDS[bare], _SEVERAL[bare], 1) if bare in _SEVERAL else said


def shown(value: Any) -> str:
    """A value as messages show it: tensors by type and shape, models by type, all else clipped."""
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
    except Exception:  # a value's own repr is not ours to trust
        text = "one whose repr fails"
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{text} ({type(value).__name__})"


def _is_model(value: Any) -> bool:
    """Whether it is a torch module, whose repr fills pages."""
    return hasattr(type(value), "named_parameters")


def is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")

"""Malformed arguments, made from signatures: what a parameter accepts says what it does not.

`examples` has a valid value for every parameter without a default; from the annotation of each
parameter follow values of another type or out of range, and from a valid value those that no type
tells: tokens outside the vocabulary or the context, a metric that returns NaN, parts of another
model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from annotated_types import Ge, Gt, Le, Lt
from jaxtyping import AbstractArray
from torch import Tensor

import sparse_tl as stl

HUGE = 10**20


def parameters(function: Any) -> dict[str, Any]:
    """The annotation of each parameter by name; Any where it cannot be resolved."""
    plain = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    scope = getattr(plain, "__globals__", {})
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name == "self":
            continue
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, {**vars(inspect.getmodule(plain) or stl), **scope})
            except NameError:
                annotation = Any
        found[name] = annotation
    return found


def required(function: Any) -> list[str]:
    """Names of the parameters without a default."""
    every = inspect.signature(function).parameters.values()
    return [p.name for p in every if p.name in parameters(function) and p.default is p.empty]


def wrong_types(annotation: Any) -> Iterator[tuple[str, Any]]:
    """Values that an annotation does not accept, each with a word for it."""
    kinds = list(_alternatives(annotation))
    plain = {kind for kind, _ in kinds}
    if Any in plain:
        return
    yield "an object", object()
    if NoneType not in plain:
        yield "None", None
    numbers, text = {int, float} & plain, bool({str, Path} & plain)
    if not text:
        yield "text", "nonsense"
    if not numbers and Iterable not in plain:
        yield "a number", 3
    if not plain & {Sequence, tuple, list, Iterable} and not any(map(_is_array, plain)):
        yield "a list", [1, 2]
    if bool in plain:
        yield "a text for a flag", "yes"
    for kind, bounds in kinds:
        if kind is int and float not in plain:
            yield "half a number", 1.5
            yield "a flag", True
        if kind is int and not text and float not in plain:
            yield "a text of digits", "3"
        if kind is float:
            yield "NaN", math.nan
            yield "infinity", math.inf
        for bound in bounds:
            yield f"beyond {bound}", _beyond(bound)
        if _is_array(kind):
            yield "lists for a tensor", [[1, 2], [3, 4]]
            yield "a tensor of texts' type", torch.zeros(1, 1, 1, 1, 1, 1, 1, dtype=torch.complex64)
        if kind is Sequence or kind is tuple:
            yield "a list of objects", [object()]
        if kind is Mapping:
            yield "a mapping of objects", {object(): object()}
    if Literal in plain and str not in plain:
        yield "a typo", "nonsens"


def unfit(value: Any) -> Iterator[tuple[str, Any]]:
    """Values of the right type that fit no model or no question."""
    if isinstance(value, stl.PromptPairs):
        yield "pairs outside the vocabulary", replace(value, clean=value.clean + 10**6)
        yield "pairs of negative tokens", replace(value, corrupted=value.corrupted - 10**6)
        yield "answers outside the vocabulary", replace(value, answers=value.answers + 10**6)
        longer = {name: getattr(value, name).repeat(1, 40) for name in ("clean", "corrupted")}
        yield "pairs beyond the context", replace(value, **longer)
    elif isinstance(value, stl.TokenBatch):
        yield "rows outside the vocabulary", replace(value, tokens=value.tokens + 10**6)
        yield "labels outside the vocabulary", replace(value, labels=value.labels + 10**6)
        names = ("tokens", "labels", "loss_mask")
        longer = {name: getattr(value, name).repeat(1, 40) for name in names}
        yield "rows beyond the context", replace(value, **longer)
    elif isinstance(value, stl.TargetDataset):
        for said, rows in unfit(value.rows):
            yield said, stl.TargetDataset(rows)
    elif isinstance(value, Tensor) and value.dtype == torch.long and value.ndim:
        yield "tokens outside the vocabulary", value + 10**6
        yield "negative tokens", value - 10**6
        yield "tokens beyond the context", value.repeat(*(1,) * (value.ndim - 1), 40)
        yield "no tokens", value[..., :0]
    elif isinstance(value, stl.Scores):
        yield "scores of another model", _of_another(value)
    elif isinstance(value, stl.Circuit):
        yield "a circuit of another model", stl.Circuit(_graph(), _graph().exists)
    elif inspect.isfunction(value) and "pairs" in inspect.signature(value).parameters:
        yield "a metric of NaN", lambda logits, pairs: logits.sum((-1,)) * math.nan
        yield "a metric of one number", lambda logits, pairs: logits.sum()
        yield "a metric of text", lambda logits, pairs: "3 nats"
    elif isinstance(value, list | tuple) and value:
        yield "an empty list", []


def _graph() -> stl.CircuitGraph:
    return stl.CircuitGraph(7, 3, 3)


def _of_another(scores: stl.Scores) -> stl.Scores:
    return stl.Scores(_graph(), torch.zeros(_graph().exists.shape), scores.method)


def _alternatives(
    annotation: Any, bounds: Sequence[Any] = ()
) -> Iterator[tuple[Any, Sequence[Any]]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0], annotation.__metadata__)
    elif origin in (Union, UnionType):
        for kind in get_args(annotation):
            yield from _alternatives(kind, bounds)
    elif origin is Literal:
        yield from ((kind, ()) for kind in {type(v) for v in get_args(annotation)} - {str})
        yield Literal, ()
    else:
        yield origin or annotation, bounds


def _is_array(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, AbstractArray | Tensor)


def _beyond(bound: Any) -> Any:
    match bound:
        case Ge(low):
            return low - 1
        case Gt(low):
            return low
        case Le(high):
            return high + 1 if isinstance(high, int) and high > 1 else high + 0.5
        case Lt(high):
            return high
    raise AssertionError(bound)


Case = tuple[str, str, Any]


def cases(function: Any, valid: Mapping[str, Any]) -> Iterator[Case]:
    """(parameter, what is wrong, value), for every parameter.

    Only a function that is given a model can tell what does not fit one.
    """
    for name, annotation in parameters(function).items():
        for said, value in wrong_types(annotation):
            yield name, said, value
        if type(valid.get(name)).__module__.startswith(("sparse_tl.", "transformer_lens.")):
            yield name, "a class for an instance", type(valid[name])
        if {"model", "models", "sparse"} & set(valid):
            for said, value in unfit(valid.get(name)):
                yield name, said, value

"""Every public analysis of prompts, found by its signature, and the ways to call it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pandas as pd
import torch

import sparse_tl
from sparse_tl import PromptPairs, TargetDataset, evaluate, fit_head_gates, logit_difference
from sparse_tl.backend import adapt
from sparse_tl.circuits import Scores


@cache
def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The type of every parameter; of what only type checkers import, its text."""
    names = {**vars(typing), **vars(sys.modules[function.__module__])}
    found = {}
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # built in
        return {}
    for name, parameter in parameters.items():
        found[name] = parameter.annotation
        if isinstance(parameter.annotation, str):
            try:
                found[name] = eval(parameter.annotation, names)
            except NameError:
                continue
    return found


def _mentions(kind: Any, wanted: type) -> bool:
    return kind is wanted or any(_mentions(part, wanted) for part in typing.get_args(kind))


def taking(wanted: type) -> dict[str, Callable[..., Any]]:
    """Every public function or class that takes a model and something of this type, by name."""
    rooms = [name for _, name, _ in pkgutil.iter_modules(sparse_tl.__path__) if name != "__main__"]
    modules = [sparse_tl, *(importlib.import_module(f"sparse_tl.{name}") for name in rooms)]
    found = {}
    for module in modules:
        for name in getattr(module, "__all__", None) or vars(module):
            some = getattr(module, name)
            if name.startswith("_") or not callable(some) or not hasattr(some, "__qualname__"):
                continue
            if some.__module__.partition(".")[0] != "sparse_tl":
                continue
            types = _annotations(some)
            if "model" in types and any(_mentions(kind, wanted) for kind in types.values()):
                found[name] = some
    return found


def of_prompts() -> dict[str, Callable[..., Any]]:
    """Every analysis of pairs or targets, by name; the others take pairs as prompts alone."""
    found = {**taking(PromptPairs), **taking(TargetDataset)}
    others = ("gated", "ablate_heads", "GatedRun", "continuations")
    return {name: function for name, function in found.items() if name not in others}


def choices(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The defaults; every other patch; and every other value of options that have names."""
    types, defaults = {**_annotations(function)}, _defaults(function)
    if "options" in types:  # those of `evaluate`
        types |= {"patch": _annotations(evaluate)["patch"]}
        defaults |= {"patch": _defaults(evaluate)["patch"]}
    if "settings" in types:
        types.pop("settings")
    defaults.pop("metric", None)  # `call` passes another
    names = {
        option: [name for name in _names(kind) if name != defaults.get(option)]
        for option, kind in types.items()
    }
    patches = [{}, *({"patch": name} for name in names.pop("patch", []))]
    yield from patches
    for option, some in names.items():
        for name in some:
            if option == "positions":  # where columns matter most
                yield from ({option: name, **patch} for patch in patches)
            else:
                yield {option: name}


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: value.default for name, value in inspect.signature(function).parameters.items()}


def _names(kind: Any) -> Sequence[str]:
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    return [name for part in typing.get_args(kind) for name in _names(part)]


def call(function: Callable[..., Any], model: Any, pairs: PromptPairs, **options: Any) -> Any:
    """The result of an analysis of pairs, with what it needs besides."""
    types, graph = _annotations(function), adapt(model).graph
    values = torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(0))
    edges = Scores(graph, values.double().where(graph.exists, 0.0), "by hand")
    places = torch.arange(graph.heads.n_parts).view(graph.heads.exists.shape)
    heads = Scores(graph.heads, places.double(), "by hand")
    needed: dict[str, Any] = {
        "metric": logit_difference,
        "scores": heads if function.__name__ == "evaluate_heads" else edges,
        "circuits": [edges.top(20), edges.top(40)],
        "sizes": [2, 4] if function.__name__ == "evaluate_heads" else [20, 40],
        "parts": None if "positions" in options else ["a0.h1", "a1.h0", "a0.h0->a1.h1<k>"],
        "size": 12,
        "mlp": "m0",
        "steps": 2,
        "length": 4,
        "progress": False,
        "batch_size": 4,
    }
    if "dataset" in types or "retain" in types:
        data = TargetDataset.from_pairs(pairs)
        needed |= {"dataset": data, "retain": data, "forget": data, "max_heads": 2}
        several = {"seeds": 1, "updates": 2, "progress": False}
        if "roles" in types:
            needed["roles"] = fit_head_gates(model, data, held_out=data, **several)
        else:
            options = {**several, **options}
    passed = {name: needed[name] for name in types if name in needed}
    if _names(types.get("parts")):  # a kind of parts, not a list
        passed.pop("parts")
        passed |= {"held_out": pairs, "at": 0.5}  # half of few pairs are few, and 0.9 takes longer
    if "threshold" in types:
        passed |= {"threshold": 0.05, "size": None, "start": edges.top(20)}
    if "pairs" in types:
        passed["pairs"] = pairs
    return function(model, **{**passed, **options})


def check_same(one: Any, other: Any) -> None:
    """Check that two results hold the same numbers, to float precision; not the time they took."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, equal_nan=True)
    elif isinstance(one, float):
        check_same(torch.tensor(one), torch.tensor(other))
    elif isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other, rtol=1e-9, atol=1e-11)
    elif isinstance(one, pd.Series):
        pd.testing.assert_series_equal(one, other, rtol=1e-9, atol=1e-11)
    elif is_dataclass(one):
        for field in fields(one):
            if field.name != "seconds":
                check_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        check_same(list(one.values()), list(other.values()))
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            check_same(*pair)
    else:
        assert one == other

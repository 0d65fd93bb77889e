"""Shapes and types are checked at run time where a test first meets them, not in every turn.

pytest's ``--jaxtyping-packages`` puts jaxtyping's checks on every function of the package, at its
definition and for each of its calls. Both cost more than the calls themselves: three quarters of
the time of the tests of circuits. So a function gets its checks with its first call, and in each
test they hold for its first calls alone; a function that is defined anew in every turn of a loop
counts as one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import jaxtyping
import pytest
from jaxtyping._storage import _shape_storage

CALLS, NESTED_CALLS = 2, 1
"""So many calls of a function are checked in each test."""
_checked: Counter[CodeType] = Counter()
_enough = set[CodeType]()
"""Functions of which as many were; apart, since most calls ask for nothing else."""
_jaxtyped = jaxtyping.jaxtyped


def _first_calls_checked(function: Any, *, typechecker: Any) -> Any:
    """In place of `jaxtyping.jaxtyped`, as the import hook writes it above each definition."""
    if function.__module__ in ("sparse_tl.contexts", "sparse_tl.arguments"):
        return function  # nothing may come between their steps; sizes of axes are of several
    if not hasattr(function, "__code__"):
        return _jaxtyped(function, typechecker=typechecker)
    code = function.__code__
    most = NESTED_CALLS if "<locals>" in function.__qualname__ else CALLS
    checking: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if code in _enough:
            sizes = getattr(_shape_storage, "memo_stack", None)
            if not sizes:
                return function(*args, **kwargs)
            _shape_storage.memo_stack = []  # what it asks of a shape is its own
            try:
                return function(*args, **kwargs)
            finally:
                _shape_storage.memo_stack = sizes
        _checked[code] += 1
        if _checked[code] == most:
            _enough.add(code)
        if not checking:
            checking.append(_jaxtyped(function, typechecker=typechecker))
        return checking[0](*args, **kwargs)

    return call


def _instead(function: Any = None, *, typechecker: Any = None) -> Any:
    if function == "context":
        return _jaxtyped(function)
    if function is None:
        return functools.partial(_first_calls_checked, typechecker=typechecker)
    return _first_calls_checked(function, typechecker=typechecker)


jaxtyping.jaxtyped = _instead


def checks_end() -> None:
    """In this process, no call is checked any more, as for users."""
    global _enough
    _enough = _All()


class _All(set[CodeType]):
    def __contains__(self, code: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def checks_begin_anew() -> Iterator[None]:
    _checked.clear()
    _enough.clear()
    yield

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

CALLS, NESTED_CALLS = 2, 1
"""So many calls of a function are checked in each test."""
_checked: Counter[CodeType] = Counter()
_jaxtyped = jaxtyping.jaxtyped
_SIZES_OF_ITS_OWN = _jaxtyped("context")


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
        if _checked[code] >= most:
            with _SIZES_OF_ITS_OWN:  # as in a checked call: what it asks of a shape is its own
                return function(*args, **kwargs)
        _checked[code] += 1
        if not checking:
            checking.append(_jaxtyped(function, typechecker=typechecker))
        return checking[0](*args, **kwargs)

    return call


def _instead(function: Any = None, *, typechecker: Any = None) -> Any:
    if function == "context":
        return _SIZES_OF_ITS_OWN
    if function is None:
        return functools.partial(_first_calls_checked, typechecker=typechecker)
    return _first_calls_checked(function, typechecker=typechecker)


jaxtyping.jaxtyped = _instead


def checks_end() -> None:
    """In this process, no call is checked any more, as for users."""
    global _checked
    _checked = _Enough()


class _Enough(Counter[CodeType]):
    def __missing__(self, key: CodeType) -> int:
        return CALLS


@pytest.fixture(autouse=True)
def checks_begin_anew() -> Iterator[None]:
    _checked.clear()
    yield

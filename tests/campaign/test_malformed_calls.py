"""Every public function, class and method is called with arguments that it cannot take.

Each call must end in a ValueError or TypeError of the package's own before any long work. A value
that is accepted although no type allows it is a failure too.
"""

from __future__ import annotations

import inspect
import os
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from examples import of_object, public_calls, valid_arguments
from malformed import cases, parameters

import sparse_tl

PACKAGE = Path(sparse_tl.__file__).parent
LONGEST = 10
"""Seconds that a refusal may take."""
AT_MOST = int(os.environ.get("SPARSE_TL_CAMPAIGN", "3"))
"""Malformed calls of each function; 0 for all."""
BRIEF = {"progress": False, "steps": 1, "updates": 2, "seeds": 1, "checkpoint": None}

_CALLS = dict(public_calls())


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """ "refused", or what happened instead."""
    try:
        with _limit(LONGEST):
            found = function(**arguments)
            if isinstance(found, AbstractContextManager):
                with found:
                    pass
            if isinstance(found, sparse_tl.explore):
                return f"accepted {found.exploration!r}"  # it says in the notebook what is wrong
    except TimeoutError:
        return f"took more than {LONGEST} s"
    except (ValueError, TypeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if PACKAGE in Path(frame.filename).parents and "expected" in str(error):
            return "refused"
        return f"{type(error).__name__} from {frame.filename}:{frame.lineno}: {str(error)[:120]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return "accepted"


def _brief(function: Any) -> dict[str, Any]:
    """Settings that keep a valid call short and quiet."""
    every = inspect.signature(function).parameters.values()
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in every)
    brief = {key: value for key, value in BRIEF.items() if key in parameters(function)}
    return {**brief, "progress": False} if passes_on and "model" in parameters(function) else brief


@pytest.mark.parametrize("name", _CALLS)
def test_malformed_arguments_are_refused(name: str, tmp_path: Path, unchecked_types: None) -> None:
    function = of_object(name, _CALLS[name])
    valid = valid_arguments(name, function, tmp_path)
    brief = _brief(function)
    every = list(cases(function, valid))
    if AT_MOST:
        every = random.Random(name).sample(every, min(AT_MOST, len(every)))
    wrong: Counter[str] = Counter()
    for parameter, said, value in every:
        outcome = _outcome(function, {**brief, **valid, parameter: value})
        if outcome != "refused":
            wrong[f"{parameter}, {said}: {outcome}"] += 1
    assert not wrong, f"{len(wrong)} of {len(every)}:\n" + "\n".join(wrong)


def test_the_valid_arguments_are_valid(tmp_path: Path) -> None:
    """Else everything would be refused for another reason."""
    for name, plain in _CALLS.items():
        if name == "shard_model":  # needs several processes
            continue
        function = of_object(name, plain)
        function(**{**_brief(function), **valid_arguments(name, function, tmp_path)})

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

import numpy as np
import pytest
import torch
from calls import CALLS
from examples import of_object, public_calls, valid_arguments
from malformed import cases, parameters
from tiny import tiny_model

import sparse_tl

pytestmark = pytest.mark.every_case

PACKAGE = Path(sparse_tl.__file__).parent
LONGEST = 60
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
    if passes_on and "model" in parameters(function):
        brief["progress"] = False
    if passes_on and "seeds" in brief:
        brief["updates"] = BRIEF["updates"]
    return brief


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[str]]:
    """Counts the cases, and prints them where all are run."""
    counted: Counter[str] = Counter()
    yield counted
    if not AT_MOST:
        print(f"malformed calls of {len(_CALLS)} functions, classes and methods: {dict(counted)}")


@pytest.mark.long
@pytest.mark.parametrize("name", _CALLS)
def test_malformed_arguments_are_refused(
    name: str, tmp_path: Path, unchecked_types: None, totals: Counter[str]
) -> None:
    """Cases follow from annotations and examples: a parameter without an example fails here."""
    function = of_object(name, _CALLS[name])
    valid = valid_arguments(name, function, tmp_path)
    brief = _brief(function)
    every = list(cases(function, valid))
    known = [some for some in parameters(function).values() if some is not Any]
    assert every or not known, "its annotations do not say what it does not take"
    if AT_MOST:
        every = random.Random(name).sample(every, min(AT_MOST, len(every)))
    wrong: list[str] = []
    for parameter, said, value in every:
        outcome = _outcome(function, {**brief, **valid, parameter: value})
        totals["refused" if outcome == "refused" else "not refused"] += 1
        if outcome != "refused":
            wrong.append(f"{parameter}, {said}: {outcome}")
    assert not wrong, f"{len(wrong)} of {len(every)}:\n" + "\n".join(wrong)


def _random_states() -> dict[str, str]:
    torch_state = torch.get_rng_state().tolist()
    states = {"torch": torch_state, "NumPy": np.random.get_state(), "Python": random.getstate()}
    return {kind: repr(state) for kind, state in states.items()}


@contextmanager
def _random_state_kept(name: str) -> Iterator[None]:
    torch.manual_seed(123)  # a call that seeds would hardly choose this one
    torch.rand(1)
    before = _random_states()
    yield
    after = _random_states()
    changed = [kind for kind in before if before[kind] != after[kind]]
    assert not changed, f"{name} changes the random state of {changed}"


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*_CALLS} - {"shard_model"}))  # it needs several processes
def test_valid_calls_run_and_keep_the_random_state(
    name: str, tmp_path: Path, unchecked_types: None
) -> None:
    """Were they not valid, everything would be refused for another reason.

    The checks of types that pytest switches on draw which members of a list they look at.
    """
    function = of_object(name, _CALLS[name])
    arguments = {**_brief(function), **valid_arguments(name, function, tmp_path)}
    seeds: list[dict[str, int]] = [{}]
    if "seed" in parameters(function) and "cache" not in parameters(function):  # no builds
        seeds.append({"seed": 7})
    for seed in seeds:
        with _random_state_kept(name):
            found = function(**{**arguments, **seed})
            if isinstance(found, AbstractContextManager):
                with found:
                    pass


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_analyses_keep_the_random_state(name: str, tmp_path: Path, unchecked_types: None) -> None:
    call, model = CALLS[name], tiny_model()
    subject = sparse_tl.SparseTransformer(model) if call.sparse else model
    with _random_state_kept(name):
        call.run(subject, tmp_path)

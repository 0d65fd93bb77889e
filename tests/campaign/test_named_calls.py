"""Malformed calls that once were accepted, or ended in a traceback from the depths, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import QUIET, N, pairs, rows, targets
from tiny import tiny_model

import sparse_tl as stl

pytestmark = pytest.mark.usefixtures("unchecked_types")


def _post_train(**settings: Any) -> Any:
    how = {"target_loss": 9.0, "steps": 1, "validation": rows(), **QUIET, **settings}
    stream = stl.ShuffledStream(rows(), 4, 0)
    return stl.post_train(stl.SparseTransformer(tiny_model()), stream, **how)


def _without_numbers() -> Any:
    model = tiny_model()
    for parameter in model.parameters():
        parameter.data.mul_(math.nan)
    return model


def _gated(reference: torch.Tensor) -> None:
    with stl.gated(tiny_model(), stl.Heads(), torch.ones(2, 2), "mean", reference=reference):
        pass


def _filled(value: int) -> torch.Tensor:
    return torch.full((N, 1), value)


ACDC: dict[str, Any] = {"threshold": 0.1, **QUIET}
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "wrong answers of -100": (
        lambda: replace(pairs(), wrong=_filled(-100)),
        r"tokens from 0 as wrong, or -1 as padding; pair 0 has \[-100\]",
    ),
    "answers of -5": (lambda: replace(pairs(), answers=_filled(-5)), "tokens from 0 as answers"),
    "a name for a metric": (
        lambda: stl.acdc(tiny_model(), pairs(), metric="logit_diff", **ACDC),  # type: ignore
        "a function or 'kl' for metric; got 'logit_diff'",
    ),
    "a typo in start=": (
        lambda: stl.acdc(tiny_model(), pairs(), start="circuit_edge", **ACDC),  # type: ignore
        "'circuit_edges' or 'heads' for start; got 'circuit_edge'",
    ),
    "float tokens": (
        lambda: stl.TargetDataset.from_windows(torch.rand(3, 5)),
        "for windows; got a Tensor of float32",
    ),
    "float tokens in lists": (
        lambda: stl.TargetDataset.from_tokens([[1.5, 2.7]], [(1, 2)]),  # type: ignore
        r"a list of a list of whole numbers .* \(at index 0, 0\)",
    ),
    "a bias of NaN": (
        lambda: stl.SparseTransformer(tiny_model(), initial_bias=math.nan),
        "finite number from -10,000 to 10,000 for initial_bias; got nan",
    ),
    "a bias without bounds": (
        lambda: stl.SparseTransformer(tiny_model(), initial_bias=1e20),
        "for initial_bias; got 1e",
    ),
    "an empty reference": (lambda: _gated(pairs().clean[:0]), "at least one token"),
    "a reference of no tokens": (lambda: _gated(pairs().clean[:, :0]), "at least one token"),
    "a text for texts": (
        lambda: stl.token_windows("12+34=46", stl.AdditionTask(), 8),
        "an iterable of texts for documents; got '12",
    ),
    "too many seeds": (
        lambda: stl.fit_head_gates(tiny_model(), targets(), seeds=10**9, **QUIET),
        "at most 10,000, each once; got 1000000000",
    ),
    "too many steps": (
        lambda: _post_train(steps=10**20),
        "from 1 to 1,000,000,000 for steps; got 100000000000000000000",
    ),
    "too many layers": (lambda: stl.CircuitGraph(10**7, 2, 2), "at most 1,000,000,000 circuit"),
    "too many gates": (lambda: stl.HookPoints(("a",), (1, 2), (10**9, 9)), "1,000,000,000 gates"),
    "an unknown device": (
        lambda: stl.load_addition_models(device="abacus"),
        r"expected a device that PyTorch can use here, such as cpu or cuda; got 'abacus'",
    ),
    "a device that is not here": (
        lambda: stl.load_addition_models(device="meta"),
        "that PyTorch can use here",
    ),
    "logits of NaN, lens": (
        lambda: stl.logit_lens(_without_numbers(), pairs().clean[0]),
        "logits are numbers; .* predicts NaN",
    ),
    "logits of NaN, trace": (
        lambda: stl.trace_attention(_without_numbers(), pairs().clean[0]),
        "logits are numbers",
    ),
    "logits of NaN, attribution": (
        lambda: stl.attribute_logits(_without_numbers(), pairs(), **QUIET),
        "numbers|NaN|nan",
    ),
    "a loss of NaN": (
        lambda: stl.evaluate_held_out(_without_numbers(), rows()),
        "logits are numbers",
    ),
}
RATES: list[Any] = [-1.0, 0.0, math.nan, math.inf, 1e300, {"*": -1.0}, {"*": math.nan}, {}, "1e-3"]


@pytest.mark.parametrize("name", CALLS)
def test_calls_by_name(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("rate", RATES, ids=str)
def test_learning_rates(rate: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="expected .*(above 0|texts)"):
        _post_train(learning_rate=rate)

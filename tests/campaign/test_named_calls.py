"""Malformed calls that once were accepted, or ended in a traceback from the depths, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import QUIET, N, pairs, rows, targets
from examples import tokenizer
from tiny import tiny_model

import sparse_tl as stl

pytestmark = pytest.mark.usefixtures("unchecked_types")


def _post_train(**settings: Any) -> Any:
    how = {"target_loss": 9.0, "steps": 1, "validation": rows(), **QUIET, **settings}
    stream = how.pop("stream", stl.ShuffledStream(rows(), 4, 0))
    return stl.post_train(stl.SparseTransformer(tiny_model()), stream, **how)


def _stream(tokens: torch.Tensor) -> stl.ShuffledStream:
    return stl.ShuffledStream(stl.TokenBatch.next_token(tokens), 4)


def _without_numbers() -> Any:
    model = tiny_model()
    for parameter in model.parameters():
        parameter.data.mul_(math.nan)
    return model


def _gated(reference: torch.Tensor) -> None:
    with stl.gated(tiny_model(), stl.Heads(), torch.ones(2, 2), "mean", reference=reference):
        pass


def _gate(site: Any, value: float = 1.0) -> None:
    with stl.gated(tiny_model(), site, torch.full((2, 2), value)):
        pass


def _edges() -> stl.Scores:
    graph = stl.CircuitGraph(2, 2, 2)
    return stl.Scores(graph, torch.zeros(graph.exists.shape), "none")


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
    "a class for a site": (
        lambda: _gate(stl.Heads),
        "Site for site; got <class 'sparse_tl.gates.sites.Heads'>",
    ),
    "edges for heads": (
        lambda: stl.evaluate_heads(tiny_model(), pairs(), stl.logit_difference, _edges(), **QUIET),
        "expected heads of the model's own",
    ),
    "gates of NaN": (lambda: _gate(stl.Heads(), math.nan), "gates from 0 to 1; some are NaN"),
    "pieces of no pairs": (lambda: pairs().split(0), "from 1 to .* for size; got 0"),
    "pieces of no rows": (lambda: rows().split(0), "from 1 to .* for size; got 0"),
    "logits of other prompts": (
        lambda: pairs().read(torch.zeros(N, 5, 13)),
        r"logits of 3 prompts of 6 tokens; got a Tensor of float32 and shape \(3, 5, 13\)",
    ),
    "no position to read": (
        lambda: stl.GatedRun(tiny_model(), stl.Heads(), pairs().clean, pairs().clean < 0),
        "at least one position to read",
    ),
    "a rank that is none": (lambda: rows().shard(2, 2), r"a rank in 0\.\.1; got 2"),
    "a mask of other numbers": (
        lambda: replace(rows(), attention_mask=torch.full_like(rows().tokens, 2)),
        "0 at padding and 1 elsewhere as attention_mask",
    ),
    "a step before the first": (
        lambda: stl.ShuffledStream(rows(), 4).batch(-1),
        "from 0 to .* for step; got -1",
    ),
    "bytes for texts": (
        lambda: stl.token_windows([b"12+34"], tokenizer(), 2),  # type: ignore
        r"documents that are texts; got b'12\+34'",
    ),
    "no separator": (
        lambda: stl.read_documents([], separator=""),
        "a separator of at least one character",
    ),
    "a token that is no number of a token": (
        lambda: stl.TargetDataset.from_tokens([[1, 10**30]], [(1, 2)]),
        r"to 1,000,000,000 .* \(at index 0, 1\)",
    ),
    "a file for a folder": (
        lambda: stl.save_model(tiny_model(), __file__),
        "expected a folder, or an unused name; .* is a file",
    ),
    "adapters as large as weights": (
        lambda: stl.add_lora(tiny_model(), 10**6),
        "a rank of at most 16, d_model; got 1000000",
    ),
    "rows to train on that are too long": (
        lambda: _post_train(stream=_stream(torch.zeros(12, 40, dtype=torch.long))),
        "at most 16 tokens, the model's context; got 40",
    ),
    "rows to train on of another vocabulary": (
        lambda: _post_train(stream=_stream(rows().tokens + 50)),
        r"tokens in 0\.\.12; got",
    ),
    "too many pairs": (
        lambda: stl.IOITask().pairs(tiny_model(), 10**8),
        "from 1 to 1,000,000 for n; got 100000000",
    ),
    "too many seeds": (
        lambda: stl.fit_head_gates(tiny_model(), targets(), seeds=10**9, **QUIET),
        "expected 1 to 10,000 different seeds from 0; got 1000000000",
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

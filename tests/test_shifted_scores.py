"""Counts of attention edges stay what they are where a constant is added to rows of scores.

Softmax does not see such a constant, and real models have them. Every public function that returns
counts or attention edges is called here: a new one fails `test_every_function_is_here`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from tiny import HAS_HOOKED, tiny_model
from torch import Tensor

import sparse_tl as stl
from sparse_tl.backend import deferred
from sparse_tl.explorer import Exploration
from sparse_tl.gates.sparse import blockwise
from sparse_tl.metrics import logit_difference
from sparse_tl.plots import figure
from sparse_tl.training import evaluate_held_out

ROOMS = ("gates", "circuits", "training", "head_roles", "plots", "explorer", "zoo", "jobs")
COUNTS = "AttentionEdgeCounts|HeldOut|PostTraining|AttentionGraph"
LENGTH, VOCABULARY, HEAD = 12, 13, (1, 0)
"""Sizes of the prompts, more tokens than a head has dimensions, and the head that is shifted."""
SHIFTS = [1e5, -1e5, -6_000.0, -110_000.0]
QUIET: dict[str, Any] = {"progress": False}


def _tokens(rows: int = 3) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def _real() -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor([LENGTH, 9, 4])[:, None]).long()


def _pairs() -> stl.PromptPairs:
    clean, corrupted = _tokens(), _tokens().flip(1)
    answers = torch.arange(3)[:, None]
    return stl.PromptPairs(clean, corrupted, answers, answers + 5, torch.full((3,), LENGTH - 1))


def _rows() -> stl.TokenBatch:
    return stl.TokenBatch.next_token(_tokens(6))


@contextmanager
def _wrapped(model: Any, bias: Tensor | None, **options: Any) -> Iterator[stl.SparseTransformer]:
    """Under score gates with a bias, or share gates without."""
    start = {"initial_threshold": 0.15} if bias is None else {"initial_bias": 0.0}
    sparse = stl.SparseTransformer(model, **start, **options)
    if bias is not None:
        sparse.gates.bias.data.copy_(bias)
    try:
        yield sparse
    finally:
        sparse.unwrap()


def _counted(counts: stl.AttentionEdgeCounts) -> dict[str, Any]:
    found = {name: value for name, value in vars(counts).items() if value is not None}
    return {name: value.detach() for name, value in found.items()}


def _run(model: Any, bias: Tensor | None) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    with _wrapped(model, bias, mlps=True) as sparse, torch.no_grad():
        blocks = sparse.sampled(noise=0.0), sparse.opened(), nullcontext()
        for way, block in zip(("sampled", "opened", "kept"), blocks, strict=True):
            with block:
                options = {"keep_gates": way == "kept", "attention_mask": _real()}
                counts = sparse.run_with_counts(_tokens(), **options)[1]
            found |= {f"{way}: {name}": value for name, value in _counted(counts).items()}
    return found


def _trained(model: Any, bias: Tensor | None) -> Mapping[str, Any]:
    """One step whose rate is nearly 0: what it reports of edges before and after."""
    with _wrapped(model, bias) as sparse:
        how = {"steps": 1, "validation": _rows(), "learning_rate": 1e-12, "target_loss": 99.0}
        outcome = stl.post_train(sparse, stl.ShuffledStream(_rows(), 6, 0), **how, **QUIET)
    found: dict[str, Any] = {f"dense: {k}": v for k, v in outcome.dense.numbers.items()}
    found |= {f"sparse: {k}": v for k, v in outcome.sparse.numbers.items()}
    return found | {"expected": outcome.history["expected_per_token"].dropna().tolist()}


def _traced(model: Any, bias: Tensor | None) -> Mapping[str, Any]:
    graphs = {"dense": stl.trace_attention(model, _tokens()[0])}
    with _wrapped(model, bias) as sparse:
        graphs["sparse"] = stl.trace_attention(sparse, _tokens()[0])
    found: dict[str, Any] = {}
    for name, graph in graphs.items():
        found |= {f"{name}: said": repr(graph), f"{name}: gates": graph.gates}
        captions = re.findall(r"of ([\d,]+) attention edges", str(figure(graph)))
        assert captions
        found[f"{name}: captions"] = [int(number) for number in captions]
    return found


def _explored(model: Any, bias: Tensor | None) -> Mapping[str, Any]:
    return {"gates": Exploration(model, _tokens()[0]).models["Model"].now.graph.gates}


def _held_out(model: Any, bias: Tensor | None) -> Mapping[str, Any]:
    found = {f"dense: {k}": v for k, v in evaluate_held_out(model, _rows()).numbers.items()}
    with _wrapped(model, bias) as sparse:
        numbers = evaluate_held_out(sparse, _rows()).numbers
    return found | {f"sparse: {name}": value for name, value in numbers.items()}


def _attributed(model: Any, bias: Tensor | None) -> Mapping[str, Any]:
    scores = stl.attribute_attention_edges(model, _pairs(), logit_difference, steps=2, **QUIET)
    return {"parts": scores.grid.n_parts, "exists": scores.grid.exists, "values": scores.values}


def _opened(model: Any, bias: Tensor | None) -> Mapping[str, Any]:
    with _wrapped(model, bias) as sparse:
        table = sparse.open_attention_edges(_tokens(), attention_mask=_real())
    return {"edges": sorted(map(tuple, table.to_numpy().tolist()))}


def _all(model: Any, bias: Tensor | None) -> Mapping[str, Any]:
    with _wrapped(model, bias) as sparse:
        return _counted(sparse.count_attention_edges(_tokens(), attention_mask=_real()))


Call = Callable[[Any, Tensor], Mapping[str, Any]]
CALLS: dict[str, Call] = {
    "gates.SparseTransformer.run_with_counts": _run,
    "gates.SparseTransformer.count_attention_edges": _all,
    "gates.SparseTransformer.open_attention_edges": _opened,
    "training.evaluate_held_out": _held_out,
    "training.post_train": _trained,
    "circuits.trace_attention": _traced,
    "circuits.attribute_attention_edges": _attributed,
    "explorer.Exploration.models": _explored,
}
"""What each function counts on a model whose gates have these biases."""
OTHERS = {
    "zoo.Recipe.sparsify",  # returns what `post_train` does
}
"""Functions that find and count no edges by themselves."""


def _functions() -> Iterator[tuple[str, Any]]:
    for room in ROOMS:
        for name, value in vars(importlib.import_module(f"sparse_tl.{room}")).items():
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("sparse_tl"):
                continue
            if inspect.isclass(value) and not issubclass(value, stl.results.Result):
                own = [kind for kind in value.__mro__ if kind.__module__.startswith("sparse_tl")]
                for method, run in chain.from_iterable(vars(kind).items() for kind in own):
                    if inspect.isfunction(run):
                        yield f"{room}.{name}.{method}", run
            elif inspect.isfunction(value):
                yield f"{room}.{name}", value


def test_every_function_is_here() -> None:
    found = set()
    for name, function in _functions():
        returned = str(inspect.signature(function).return_annotation)
        listed = "attention_edge" in name and not re.search(
            "None|Iterator|AbstractContext", returned
        )
        if not name.rsplit(".", 1)[1].startswith("_") and (listed or re.search(COUNTS, returned)):
            found.add(name)
    assert found == {*CALLS, *OTHERS} - {"explorer.Exploration.models"}  # an attribute


@pytest.fixture(params=["whole", "by blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How attention is computed: as whole patterns, or a few queries at a time."""
    if request.param == "by blocks":
        monkeypatch.setattr(deferred, "LONG", LENGTH)
        monkeypatch.setattr(blockwise, "QUERIES_AT_ONCE", 5)
    return request.param


def _liftable(shift: float) -> Any:
    """A model in which a key's bias adds a constant to all scores of one head.

    The first entry of that head's queries is 1 for every token, and that of its keys the same
    number for every token: 0, or as much as adds `shift` to the scores.
    """
    model: Any = tiny_model("float64")
    layer, head = HEAD
    attention, d_head = model.blocks[layer].attn, model.cfg.d_head
    with torch.no_grad():
        for slot, value in (("Q", 1.0), ("K", shift * d_head**0.5)):
            if HAS_HOOKED:
                getattr(attention, f"W_{slot}")[head, :, 0] = 0
                getattr(attention, f"b_{slot}")[head, 0] = value
            else:
                split = getattr(attention, slot.lower()).original_component
                split.weight[head * d_head] = 0
                split.bias[head * d_head] = value
    return model


def _same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, str):
            assert found[name] == value, name
            continue
        parts = (torch.as_tensor(some, dtype=torch.float64) for some in (found[name], value))
        torch.testing.assert_close(
            *parts, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", CALLS)
def test_a_head_that_a_bias_shifts(name: str, way: str) -> None:
    """With a gate bias that is as much lower, nothing at all has changed."""
    bias = torch.full((2, 2), 0.3, dtype=torch.float64)
    expected = CALLS[name](_liftable(0.0), bias)
    for shift in SHIFTS:
        lower = bias.clone()
        lower[HEAD] -= shift
        _same(CALLS[name](_liftable(shift), lower), expected)


@pytest.mark.parametrize("name", CALLS)
def test_share_gates_of_a_head_that_a_bias_shifts(name: str, way: str) -> None:
    """Nothing at all has changed, and nothing had to be lowered."""
    expected = CALLS[name](_liftable(0.0), None)
    for shift in SHIFTS:
        _same(CALLS[name](_liftable(shift), None), expected)


WHERE: dict[str, Callable[[int], Any]] = {
    "a row": lambda layer: (slice(None), 0, -2),
    "a head": lambda layer: (slice(None), 1) if layer else slice(0, 0),
    "a prompt": lambda layer: 0,
    "a model": lambda layer: ...,
}
"""Which scores ``[prompt, head, query, key]`` of a layer are shifted."""


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("gates", ["share", "score"])
def test_scores_that_a_hook_shifts(name: str, where: str, gates: str) -> None:
    """Score gates are so open that they stay open; a hook on scores keeps them from blocks."""
    model, wide = _liftable(0.0), torch.full((2, 2), 1e7, dtype=torch.float64)
    bias = wide if gates == "score" else None
    expected = CALLS[name](model, bias)

    def add(layer: int, shift: float, scores: Tensor, hook: Any) -> Tensor:
        added = torch.zeros_like(scores)
        added[WHERE[where](layer)] = shift
        return scores + added

    for shift in SHIFTS:
        for layer in range(2):
            point = f"blocks.{layer}.attn.hook_attn_scores"
            model.add_hook(point, partial(add, layer, shift), is_permanent=True)
        _same(CALLS[name](model, bias), expected)
        model.reset_hooks(including_permanent=True)

"""Analyses under hooks of the user's own measure the model that has the change built in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from random_models import random_pairs, shaken
from torch import Tensor

from sparse_tl import (
    SparseTransformer,
    acdc,
    attribute_attention_edges,
    attribute_circuit_edges,
    attribute_heads,
    attribute_logits,
    circuit_sizes_per_prompt,
    evaluate,
    evaluate_heads,
    gated,
    logit_difference,
    logit_lens,
    patch_activations,
    patch_exactly,
    prune_circuit_edges,
    steer,
    trace_attention,
)
from sparse_tl.backend import Model
from sparse_tl.circuits import Circuit
from sparse_tl.gates import CircuitEdges
from sparse_tl.graph import CircuitGraph

Build = Callable[..., Model]
Hook = Callable[..., Any]
PAIRS = random_pairs(n=4, at=5)
GRAPH = CircuitGraph(3, 2, 2)
PARTS = [
    *("input->m1", "input->a1.h0<q>", "m0->a1.h1<k>", "a0.h1->m1", "m0->a2.h0<v>", "a1.h0->m2"),
    *("m1->logits", "a1.h1->logits", "a1.h0->a2.h1<q>", "a0.h0->a1.h1<v>"),
]
"""Edges into layer 1, out of it, and past it."""
ALL_HEADS = GRAPH.heads.exists
Q = {"progress": False}


def circuits() -> list[Circuit]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2, *GRAPH.exists.shape, generator=generator)
    return [
        Circuit(GRAPH, (mask < share) & GRAPH.exists)
        for mask, share in zip(drawn, (0.1, 0.6), strict=True)
    ]


def numbers(found: Any) -> Tensor:
    return torch.tensor(found.to_numpy())


def sizes(model: Model) -> Tensor:
    options: dict[str, Any] = {"method": "eap", "sizes": [0, 10, 40, 90], "level": 0.5, **Q}
    return circuit_sizes_per_prompt(model, PAIRS, logit_difference, **options).sizes


# Of edges, for which the residual stream has to be a sum; and others.
OF_EDGES: dict[str, Callable[[Model], Tensor]] = {
    "exact": lambda m: numbers(patch_exactly(m, PAIRS, logit_difference, PARTS, batch_size=3, **Q)),
    "eap": lambda m: attribute_circuit_edges(m, PAIRS, logit_difference, method="eap", **Q).values,
    "eap-ig": lambda m: attribute_circuit_edges(m, PAIRS, logit_difference, steps=2, **Q).values,
    "acdc": lambda m: numbers(
        acdc(m, PAIRS, metric=logit_difference, threshold=0.1, start=circuits()[0], **Q).history[
            "moved"
        ]
    ),
    "evaluate": lambda m: evaluate(m, PAIRS, logit_difference, circuits(), **Q).values,
    "resample": lambda m: (
        evaluate(m, PAIRS, logit_difference, circuits(), patch="resample", **Q).values
    ),
    "sizes": sizes,
    "prune": lambda m: prune_circuit_edges(m, PAIRS, size=20, steps=3, **Q).scores.values,
}
OTHERS: dict[str, Callable[[Model], Tensor]] = {
    "heads": lambda m: numbers(
        patch_exactly(m, PAIRS, logit_difference, ["a0.h1", "a1.h0", "a2.h1"], **Q)
    ),
    "evaluate_heads": lambda m: (
        evaluate_heads(
            m,
            PAIRS,
            logit_difference,
            attribute_heads(m, PAIRS, logit_difference, **Q),
            [1, 3],
            **Q,
        ).values
    ),
    "eap of heads": lambda m: attribute_heads(m, PAIRS, logit_difference, steps=2, **Q).values,
    "zero": lambda m: attribute_heads(m, PAIRS, logit_difference, patch="zero", **Q).values,
    "attention": lambda m: attribute_attention_edges(m, PAIRS, logit_difference, **Q).values,
    "trace": lambda m: trace_attention(m, PAIRS.clean[0], attribution=True).attribution,  # type: ignore[dict-item]
    "removal": lambda m: trace_attention(m, PAIRS.clean[0], max_effects=100).effect,  # type: ignore[dict-item]
    "lens": lambda m: logit_lens(m, PAIRS.clean[0], answer=3).probability,
} | {
    at: lambda m, at=at: patch_activations(m, PAIRS, logit_difference, at, batch_size=3, **Q).values
    for at in ("resid_pre", "attn_out", "mlp_out", "z", "pattern")
}


@pytest.fixture
def build(build_tiny: Build) -> Callable[[], Model]:
    return lambda: shaken(build_tiny(n_layers=3, dtype="float64"))


def vector(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def weights(model: Any, layer: int, part: str) -> tuple[Tensor, Tensor]:
    """A projection, with its outputs or, for o, its inputs on the last axis, and its bias."""
    block = model.blocks[layer]
    if hasattr(block.attn, "W_Q") and not hasattr(block.attn, "q"):  # a HookedTransformer
        if part == "mlp":
            return block.mlp.W_out, block.mlp.b_out
        name = part.upper()
        return getattr(block.attn, f"W_{name}"), getattr(block.attn, f"b_{name}")
    module = block.mlp.out if part == "mlp" else getattr(block.attn, part)
    inner = module.original_component
    return inner.weight, inner.bias


@torch.no_grad()
def with_bias(model: Model, layer: int, part: str, change: Tensor) -> Model:
    _, bias = weights(model, layer, part)
    bias.add_(change.view(bias.shape))
    return model


@torch.no_grad()
def scaled(model: Model, layer: int, part: str, factor: float) -> Model:
    for some in weights(model, layer, part):
        some.mul_(factor)
    return model


ADDED: dict[str, tuple[str, int, str, tuple[int, ...]]] = {
    "resid_pre": ("blocks.1.hook_resid_pre", 0, "mlp", (16,)),
    "resid_post": ("blocks.0.hook_resid_post", 0, "mlp", (16,)),
    "last": ("blocks.2.hook_resid_post", 2, "mlp", (16,)),
    "attn_out": ("blocks.1.hook_attn_out", 1, "o", (16,)),
    "mlp_out": ("blocks.1.hook_mlp_out", 1, "mlp", (16,)),
    "q": ("blocks.1.attn.hook_q", 1, "q", (2, 8)),
    "k": ("blocks.1.attn.hook_k", 1, "k", (2, 8)),
    "v": ("blocks.1.attn.hook_v", 1, "v", (2, 8)),
}
"""Where a vector is added: the hook point, and the bias that does the same."""


@contextmanager
def hooking(model: Any, name: str, function: Hook) -> Iterator[None]:
    with model.hooks(fwd_hooks=[(name, function)]):
        yield


def add(change: Tensor) -> Hook:
    return lambda value, hook: value + change


def add_in_place(change: Tensor) -> Hook:
    def function(value: Tensor, hook: Any) -> Tensor:
        value += change
        return value

    return function


def check(found: Tensor, expected: Tensor, analysis: str) -> None:
    close = {
        "rtol": 1e-6,
        "atol": 1e-9,
        "equal_nan": True,
    }  # no size of a pair's circuit reached it
    torch.testing.assert_close(found, expected, **close, msg=analysis)


WAYS: dict[str, Callable[[Model, str, Tensor], AbstractContextManager[None]]] = {
    "steer": steer,
    "own": lambda model, name, change: hooking(model, name, add(change)),
    "in place": lambda model, name, change: hooking(model, name, add_in_place(change)),
}


@pytest.mark.long
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("point", list(ADDED))
def test_a_vector_added_by_a_hook_is_a_bias(
    build: Callable[[], Model], point: str, way: str
) -> None:
    name, layer, part, size = ADDED[point]
    model, change = build(), vector(*size)
    built_in = with_bias(build(), layer, part, change)
    refused = OF_EDGES if way == "steer" and point in "qkv" else {}  # it comes before gates there
    for analysis, run in (OF_EDGES | OTHERS).items():
        if way == "in place" and analysis == "trace" and point in "qkv":
            continue
        with WAYS[way](model, name, change):
            if analysis in refused:
                with pytest.raises(ValueError, match=f"changes {point} of layer 1"):
                    run(model)
                continue
            found = run(model)
        check(found, run(built_in), analysis)


SCALED = {"attn.hook_q": "q", "attn.hook_k": "k", "attn.hook_v": "v", "hook_mlp_out": "mlp"}


@pytest.mark.long
@pytest.mark.parametrize("point", list(SCALED))
def test_a_factor_within_a_head_or_an_mlp_is_one_of_its_weights(
    build: Callable[[], Model], point: str
) -> None:
    model, name = build(), f"blocks.1.{point}"
    built_in = scaled(build(), 1, SCALED[point], 0.4)
    for analysis, run in (OF_EDGES | OTHERS).items():
        with hooking(model, name, lambda value, hook: 0.4 * value):
            found = run(model)
        check(found, run(built_in), analysis)


# ---- hooks under which edges have no meaning -----------------------------------------------------

UNDEFINED: dict[str, tuple[str, Hook]] = {
    "a factor on the stream": ("blocks.1.hook_resid_pre", lambda value, hook: 0.5 * value),
    "a projection": ("blocks.2.hook_resid_pre", lambda value, hook: value - value.mean(-1, True)),
    "a factor on what attention writes": ("blocks.1.hook_attn_out", lambda value, hook: 2 * value),
    "a position without a past": (
        "blocks.1.hook_resid_pre",
        lambda value, hook: torch.cat([value[:, :2], 0 * value[:, 2:]], dim=1),
    ),
    "a normalisation of another kind": (
        "blocks.1.ln1.hook_normalized",
        lambda value, hook: value + 1,
    ),
}


@pytest.mark.parametrize("case", list(UNDEFINED))
def test_edges_that_carry_something_else_are_refused(build: Callable[[], Model], case: str) -> None:
    model, (name, function) = build(), UNDEFINED[case]
    OF_EDGES["evaluate"](model)  # checked without the hook
    for run in OF_EDGES.values():
        with hooking(model, name, function), pytest.raises(ValueError, match="a hook on it chang"):
            run(model)
    with hooking(model, name, function), pytest.raises(ValueError, match="a hook on it changes"):
        gates = torch.zeros(GRAPH.exists.shape)
        with gated(model, CircuitEdges(), gates, "corrupted", reference=PAIRS.corrupted):
            pass
    # Under a hook that is known, too, and also beneath the gates of a sparse model.
    with gated(model, CircuitEdges(), torch.ones(GRAPH.exists.shape)):
        pass
    sparse = SparseTransformer(model, initial_bias=0.0)
    OF_EDGES["exact"](sparse)  # type: ignore[arg-type]
    with hooking(model, name, function), pytest.raises(ValueError, match="a hook on it changes"):
        OF_EDGES["exact"](sparse)  # type: ignore[arg-type]


@torch.no_grad()
def test_everything_else_is_measured_under_a_factor(build: Callable[[], Model]) -> None:
    """By plain hooks, one place at a time."""
    model: Any = build()
    name = "blocks.1.hook_resid_pre"
    halve = (name, lambda value, hook: 0.5 * value)
    with hooking(model, *halve):
        found = patch_activations(model, PAIRS, logit_difference, "mlp_out", **Q).values
        heads = numbers(patch_exactly(model, PAIRS, logit_difference, ["a1.h0", "a2.h1"], **Q))
    kept: dict[str, Tensor] = {}
    keep = lambda value, hook: kept.__setitem__("clean", value)  # noqa: E731
    for layer in range(3):
        out = f"blocks.{layer}.hook_mlp_out"
        model.run_with_hooks(PAIRS.clean, fwd_hooks=[halve, (out, keep)])
        for column in range(PAIRS.clean.shape[1]):

            def put(value: Tensor, hook: Any, column: int = column) -> Tensor:
                value = value.clone()
                value[:, column] = kept["clean"][:, column]
                return value

            logits = model.run_with_hooks(PAIRS.corrupted, fwd_hooks=[halve, (out, put)])
            expected = logit_difference(logits[range(4), PAIRS.positions], PAIRS)
            torch.testing.assert_close(found[layer, column], expected, rtol=1e-9, atol=1e-9)
    plain = logit_difference(
        model.run_with_hooks(PAIRS.clean, fwd_hooks=[halve])[range(4), PAIRS.positions], PAIRS
    )
    for (layer, head), change in zip([(1, 0), (2, 1)], heads, strict=True):
        z = f"blocks.{layer}.attn.hook_z"
        model.run_with_hooks(PAIRS.corrupted, fwd_hooks=[halve, (z, keep)])

        def put_head(value: Tensor, hook: Any, head: int = head) -> Tensor:
            value = value.clone()
            value[:, :, head] = kept["clean"][:, :, head]
            return value

        logits = model.run_with_hooks(PAIRS.clean, fwd_hooks=[halve, (z, put_head)])
        expected = logit_difference(logits[range(4), PAIRS.positions], PAIRS)
        torch.testing.assert_close(change, (expected - plain).mean(), rtol=1e-9, atol=1e-9)


def test_components_that_do_not_add_up_are_refused(build: Callable[[], Model]) -> None:
    model = build()
    total = attribute_logits(model, PAIRS, **Q).total
    with steer(model, "blocks.1.hook_mlp_out", vector(16)):
        moved = attribute_logits(model, PAIRS, **Q).total
    built_in = with_bias(build(), 1, "mlp", vector(16))
    torch.testing.assert_close(moved, attribute_logits(built_in, PAIRS, **Q).total)
    assert not torch.allclose(moved, total)
    for name in ("blocks.1.hook_resid_pre", "ln_final.hook_normalized"):
        with steer(model, name, vector(16)), pytest.raises(ValueError, match="add up to the logit"):
            attribute_logits(model, PAIRS, **Q)


# ---- hooks that several settings in a pass cannot have ------------------


def test_hooks_that_look_at_other_rows_are_refused(build: Callable[[], Model]) -> None:
    model = build()
    apart = lambda value, hook: value - value.mean(dim=0)  # noqa: E731
    with hooking(model, "blocks.1.hook_mlp_out", apart):
        for run in (OTHERS["heads"], OTHERS["attn_out"]):
            with pytest.raises(ValueError, match="act on each row and layer by itself"):
                run(model)


def test_hooks_that_carry_values_between_layers_are_refused(build: Callable[[], Model]) -> None:
    """In a pass from a later layer on, they would carry what another batch left behind."""
    model: Any = build()
    kept: dict[str, Tensor] = {}
    hooks = [
        ("blocks.0.hook_resid_pre", lambda value, hook: kept.__setitem__("skipped", value)),
        ("blocks.2.hook_mlp_out", lambda value, hook: value + kept["skipped"][: len(value)]),
    ]
    expected = evaluate(model, PAIRS, logit_difference, circuits()[0], **Q).clean
    with model.hooks(fwd_hooks=hooks):
        found = evaluate(model, PAIRS, logit_difference, Circuit(GRAPH.heads, ALL_HEADS), **Q)
        assert not torch.allclose(found.clean, expected)
        with pytest.raises((ValueError, RuntimeError)):
            acdc(model, PAIRS, metric=logit_difference, threshold=0.1, start="heads", batch_size=2)

"""Dropping edges from a circuit before it is measured changes no number, under any patch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import run_patched_each
from random_models import random_pairs

from sparse_tl import (
    AdditionTask,
    Circuit,
    PromptPairs,
    Scores,
    acdc,
    attribute_circuit_edges,
    evaluate,
    evaluate_circuit_edges,
    evaluate_mib,
    load_addition_models,
    logit_difference,
)
from sparse_tl.backend import Model, adapt, record
from sparse_tl.circuits.export import MIB_FRACTIONS
from sparse_tl.graph import CircuitGraph, PositionedGraph

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


PATCHES = pytest.mark.parametrize("name", ["corrupted", "resample", "mean", "zero", "tensors"])


def patch_of(model: Model, pairs: PromptPairs, name: str) -> Any:
    """The patch of this name, or tensors that no run of the model writes."""
    if name != "tensors":
        return name
    adapter = adapt(model)
    written, _ = record(adapter, pairs.corrupted, adapter.source_points())
    generator = torch.Generator().manual_seed(3)
    return {
        point: value + torch.randn(value.shape, generator=generator).to(value)
        for point, value in written.items()
    }


def random_scores(graph: CircuitGraph) -> Scores:
    values = torch.randn(graph.exists.shape, generator=torch.Generator().manual_seed(0))
    return Scores(graph, values.double() * graph.exists, "random")


def values_of(model: Model, pairs: PromptPairs, circuits: list[Circuit], patch: Any) -> Any:
    return evaluate(model, pairs, logit_difference, circuits, patch=patch, progress=False).values


@pytest.mark.long
@PATCHES
def test_connected_drops_what_has_no_effect_under_its_patch(model: Model, name: str) -> None:
    pairs, graph = random_pairs(at=5), adapt(model).graph
    patch = patch_of(model, pairs, name)
    generator = torch.Generator().manual_seed(1)
    for site in (graph, PositionedGraph(graph, pairs.spans_of("tokens").names)):
        circuits = [
            Circuit(
                site, site.exists & (torch.rand(site.exists.shape, generator=generator) < share)
            )
            for share in (0.05, 0.1, 0.2, 0.4)
        ]
        joined = [circuit.connected(patch=patch) for circuit in circuits]
        assert sum(map(len, joined)) < sum(map(len, circuits))
        whole = values_of(model, pairs, circuits, patch)
        torch.testing.assert_close(values_of(model, pairs, joined, patch), whole, **CLOSE)
        by_paths = [circuit.connected(patch="corrupted") for circuit in circuits]
        moved = (values_of(model, pairs, by_paths, patch) - whole).abs().max() > 1e-3
        # Under zeros, a model without biases writes 0 where it reads 0.
        assert name == "zero" or moved == (name in ("mean", "tensors"))


@pytest.mark.long
@PATCHES
def test_circuits_are_measured_as_they_were_scored(model: Model, name: str) -> None:
    pairs, scores = random_pairs(at=5), random_scores(adapt(model).graph)
    patch, sizes = patch_of(model, pairs, name), (3, 6, 12, 20)
    options = {"patch": patch, "progress": False}
    curve = evaluate_circuit_edges(model, pairs, logit_difference, scores, sizes, **options)
    whole = values_of(model, pairs, [scores.top(size) for size in sizes], patch)
    by_size = dict(zip(curve.sizes, curve.values, strict=True))
    for size, values in zip(sizes, whole, strict=True):
        kept = len(scores.top(size).connected(patch=patch))
        torch.testing.assert_close(by_size[kept], values, **CLOSE)
    found = evaluate_mib(model, pairs, logit_difference, scores, **options)
    shares = [int(share * scores.grid.n_parts) for share in MIB_FRACTIONS]
    for signed, measured in ((True, found.signed), (False, found.absolute)):
        circuits = [scores.top(size, signed=signed) for size in shares]
        whole = values_of(model, pairs, circuits, patch)
        torch.testing.assert_close(measured.values, whole, **CLOSE)
    searched = acdc(model, pairs, threshold=0.3, metric=logit_difference, **options)
    value = values_of(model, pairs, [searched.circuit], patch).mean().item()
    assert abs(value - searched.searched.values.mean().item()) < 1e-9


@pytest.mark.long
def test_mib_under_mean_patches_on_a_trained_model() -> None:
    """The circuit of 5 %, with the edges that no path from the input leads to."""
    dense, _ = load_addition_models()
    pairs = AdditionTask("placeholder").pairs("tens", 6)
    options: dict[str, Any] = {"patch": "mean", "progress": False}
    scores = attribute_circuit_edges(dense, pairs, logit_difference, method="eap-ig", **options)
    found = evaluate_mib(dense, pairs, logit_difference, scores, **options).signed
    graph, size = adapt(dense).graph, int(0.05 * scores.grid.n_parts)
    top = scores.top(size, signed=True)
    masks = torch.stack([scores.top(0).mask, top.mask, top.connected().mask, graph.exists])
    none, circuit, connected, clean = (
        logit_difference(logits, pairs).mean()
        for logits in run_patched_each(dense, graph, pairs, masks, "mean")
    )
    expected = ((circuit - none) / (clean - none)).item()
    assert abs(found.effect[MIB_FRACTIONS.index(0.05)].item() - expected) < 1e-4
    assert abs((circuit - connected).item()) > 0.1, "unconnected edges make a difference here"

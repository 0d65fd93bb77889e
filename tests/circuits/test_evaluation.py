"""The model under a circuit: equal to the slow oracle, with the right ends, and nothing left."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from analyses import call, taking
from oracle import run_patched
from random_models import random_pairs, shaken
from torch import Tensor

from sparse_tl import TargetDataset, fit_head_gates
from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import (
    Circuit,
    Evaluation,
    Scores,
    attribute_circuit_edges,
    evaluate,
    evaluate_circuit_edges,
    evaluate_heads,
    log_sizes,
)
from sparse_tl.circuits.evaluation import effect_draws
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import CircuitEdges, Heads
from sparse_tl.graph import CircuitGraph, HeadGrid
from sparse_tl.head_roles import HeadRoles
from sparse_tl.metrics import logit_difference, measure

Build = Callable[..., Model]


def _some_edges(graph: CircuitGraph, share: float = 0.5, seed: int = 0) -> Circuit:
    generator = torch.Generator().manual_seed(seed)
    return Circuit(
        graph, graph.exists & (torch.rand(graph.exists.shape, generator=generator) < share)
    )


def _metric_of(logits: Tensor, pairs: PromptPairs) -> Tensor:
    return measure(logit_difference, logits, pairs).double()


@pytest.mark.parametrize("patch", ["corrupted", "mean", "zero"])
def test_edge_circuits_equal_the_slow_oracle(model: Model, patch: Any) -> None:
    graph = adapt(model).graph
    pairs = random_pairs(at=4 if patch == "mean" else None)  # of one length
    shares = enumerate((0.03, 0.2, 0.5, 0.9))  # from sources that are patched to some that are kept
    circuits = [_some_edges(graph, share, seed) for seed, share in shares]
    found = evaluate(
        model, pairs, logit_difference, circuits, patch=patch, batch_size=2, progress=False
    )
    for circuit, values in zip(circuits, found.values, strict=True):
        slow = run_patched(model, graph, pairs, circuit.mask, patch)
        torch.testing.assert_close(values, _metric_of(slow, pairs), rtol=1e-9, atol=1e-9)
    assert found.values.std() > 0.01


def test_single_precision_equals_the_slow_oracle(build_tiny: Build, pairs: PromptPairs) -> None:
    model = build_tiny("grouped")
    circuit = _some_edges(adapt(model).graph)
    found = evaluate(model, pairs, logit_difference, circuit, progress=False)
    slow = run_patched(model, adapt(model).graph, pairs, circuit.mask)
    torch.testing.assert_close(found.values[0], _metric_of(slow, pairs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_half_precision_stays_near(
    build_tiny: Build, pairs: PromptPairs, dtype: Any, near: float
) -> None:
    model = shaken(build_tiny())
    precise = attribute_circuit_edges(model, pairs, logit_difference)
    curve = evaluate_circuit_edges(model, pairs, logit_difference, precise)
    rough = attribute_circuit_edges(model.to(dtype), pairs, logit_difference)
    largest = precise.values.abs().max()
    assert (rough.values - precise.values).abs().max() < near * largest
    again = evaluate_circuit_edges(model, pairs, logit_difference, precise)
    torch.testing.assert_close(again.effect, curve.effect, rtol=0, atol=near)


def test_head_circuits_equal_plain_hooks(model: Model, pairs: PromptPairs) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(model.cfg.n_layers, model.cfg.n_heads, generator=generator) < 0.5
    kept = Circuit(HeadGrid(*mask.shape), mask)
    found = evaluate(model, pairs, logit_difference, kept, progress=False)
    _, cache = model.run_with_cache(pairs.corrupted)

    def exchange(z: Tensor, hook: Any) -> Tensor:
        keep = mask[hook.layer()][None, None, :, None]
        return torch.where(keep, z, cache[hook.name])

    logits = model.run_with_hooks(
        pairs.clean, fwd_hooks=[(lambda name: name.endswith("hook_z"), exchange)]
    )
    expected = _metric_of(pairs.read(logits), pairs)
    torch.testing.assert_close(found.values[0], expected.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first_layer", [1, 2])
def test_a_pass_may_start_where_gates_first_differ(
    model: Model, pairs: PromptPairs, first_layer: int
) -> None:
    """Settings in a stack, and passes that start late, are as one whole pass for each setting."""
    graph = adapt(model).graph
    masks = torch.stack([_some_edges(graph, share).mask for share in (0.2, 0.5, 0.9)])
    for column, destination in enumerate(graph.destinations):
        if destination.node.kind != "logits" and destination.node.layer < first_layer:
            masks[:, :, column] = graph.exists[:, column]
    heads = torch.ones(3, model.cfg.n_layers, model.cfg.n_heads)
    heads[:, first_layer:, 0] = torch.rand(3, model.cfg.n_layers - first_layer)
    for site, gates in ((CircuitEdges(), masks), (Heads(), heads)):
        for _, run in PairRuns(model, site, pairs, "corrupted", 3):
            with torch.no_grad():
                whole = torch.stack([run.logits(setting) for setting in gates])
                run.start_from(gates[0])  # and pass on from there
                torch.testing.assert_close(run.logits(gates), whole, rtol=1e-9, atol=1e-9)


def test_the_gates_have_the_gradient_of_finite_differences(
    model: Model, pairs: PromptPairs
) -> None:
    graph = adapt(model).graph
    run = PairRuns(model, CircuitEdges(), pairs, "corrupted", 5).run(0)
    generator = torch.Generator().manual_seed(2)
    gates = torch.rand(2, *graph.exists.shape, generator=generator, dtype=torch.float64)
    value = run.logits(gates.requires_grad_())[:, :, 0].sum()
    (gradient,) = torch.autograd.grad(value, gates)
    direction = torch.randn(gates.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        ends = [run.logits(gates + sign * 1e-5 * direction)[:, :, 0].sum() for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-8)
    assert not gradient[:, ~graph.exists].any(), "what is no edge has no effect"


def test_circuits_grow_with_the_scores(build_tiny: Build, pairs: PromptPairs) -> None:
    model = build_tiny()
    graph = adapt(model).graph
    scores = Scores(graph, graph.exists * torch.rand(graph.exists.shape), "random")
    found = evaluate_circuit_edges(model, pairs, logit_difference, scores, progress=False)
    joined = {len(scores.top(size).connected()) for size in log_sizes(graph.n_edges)}
    assert found.sizes == tuple(sorted(joined)) and len(joined) > 3
    assert found.sizes[0] == 0 and found.sizes[-1] == graph.n_edges == found.total
    by_head = evaluate_heads(
        model,
        pairs,
        logit_difference,
        Scores(graph.heads, torch.rand(2, 2), "random"),
        progress=False,
    )
    assert by_head.sizes == tuple(range(5))
    table = by_head.to_pandas()
    assert (table["low"] <= table["explained_effect"]).all()
    assert (table["explained_effect"] <= table["high"]).all()


def test_errors_of_pairs_cancel_in_the_effect_and_not_in_the_deviation() -> None:
    values = torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, -1.0]])
    found = Evaluation((2, 1, 0), 2, values, torch.tensor([2.0, 2.0]), torch.tensor([1.0, -1.0]))
    table = found.to_pandas()
    assert table["explained_effect"].tolist() == [1.0, 1.0, 0.0]
    assert table["deviation"].tolist() == [0.5, 0.0, 1.0]


CIRCUITS = ("circuits", "readers", "start")
RESULTS = {name: f for kind in (Scores, Circuit, HeadRoles) for name, f in taking(kind).items()}


@pytest.fixture(scope="module")
def two_models(build_tiny: Build) -> list[Model]:
    return [build_tiny(n_layers=n, n_heads=n, d_model=8 * n) for n in (4, 2)]


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(RESULTS))
def test_results_of_another_model(two_models: list[Model], pairs: PromptPairs, name: str) -> None:
    model, other = two_models
    graph = adapt(other).graph
    grid = graph.heads if name == "evaluate_heads" else graph
    scores = Scores(grid, grid.exists.double(), "by hand")
    results: dict[str, Any] = {"scores": scores, **dict.fromkeys(CIRCUITS, scores.top(4))}
    if name == "prune_circuit_edges":
        results["start"] = scores
    if name == "ablation_curve":
        data = TargetDataset.from_pairs(pairs)
        several = {"seeds": 1, "updates": 2, "progress": False}
        results["roles"] = fit_head_gates(other, data, held_out=data, **several)
    options = {key: results[key] for key in results if key in signature(RESULTS[name]).parameters}
    assert options
    with pytest.raises(ValueError, match="of the model's own|the model has HeadGrid.4 layers"):
        call(RESULTS[name], model, pairs, **options)


def test_intervals_leave_out_draws_without_an_effect() -> None:
    """One pair of three has no effect: draws of it alone have no ratio."""
    clean = torch.tensor([2.0, 4.0, 0.0]).double()
    found = Evaluation((0, 1, 2), 2, torch.stack([0 * clean, clean / 2, clean]), clean, 0 * clean)
    low, high = found.interval()
    assert low.tolist() == pytest.approx([0, 0.5, 1]) and high.tolist() == pytest.approx(
        [0, 0.5, 1]
    )


def test_an_interval_holds_the_ratios_of_all_draws_of_two_pairs() -> None:
    """Of two pairs there are three draws: one twice, the other twice, or both."""
    clean = torch.tensor([3.0, 1.0]).double()
    values = torch.tensor([1.5, 0.9], dtype=torch.float64)  # 0.5 and 0.9 of the effect
    low, high = Evaluation((1,), 2, values[None], clean, 0 * clean).interval()
    assert (low.item(), high.item()) == pytest.approx((0.5, 0.9))
    drawn = effect_draws(values, clean, 0 * clean)
    shares = [(drawn - ratio).abs().lt(1e-9).double().mean().item() for ratio in (0.5, 0.6, 0.9)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.05)


def test_the_interval_of_a_size_is_that_of_the_pairs_alone() -> None:
    """One pair reaches 0.9 at a size of 10, the other at 100, and both together between them."""
    clean = torch.ones(2, dtype=torch.float64)
    values = torch.tensor([[0, 0], [0.9, 0], [1, 0.9]], dtype=torch.float64)
    found = Evaluation((1, 10, 100), 100, values, clean, 0 * clean)
    assert found.size_interval(0.9) == pytest.approx((10, 100))
    short = Evaluation((1, 10), 100, values[:2], clean, 0 * clean)
    assert short.size_interval(0.9) == (pytest.approx(10), None)
    with pytest.raises(ValueError, match="effect: .* equal to 1; got 90"):
        found.size_interval(90)

"""What a search reports is a run of the circuit that it returns, checked with the slow oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from finite_differences import derivative
from oracle import run_patched
from random_models import random_pairs, shaken
from torch import Tensor

from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import Circuit, Scores, acdc, evaluate, prune_circuit_edges
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import HardConcreteGate
from sparse_tl.metrics import logit_difference

QUIET: dict[str, Any] = {"progress": False, "batch_size": 2}


def _by_hand(model: Model, pairs: PromptPairs, mask: Tensor, metric: Any) -> tuple[float, float]:
    """Divergence and explained effect, from logits of plain hooks."""
    graph = adapt(model).graph
    circuit, clean, nothing = (
        run_patched(model, graph, pairs, some)
        for some in (mask, graph.exists, torch.zeros_like(graph.exists))
    )

    def lost(logits: Tensor) -> Tensor:
        expected = clean.softmax(-1)
        return (expected * (clean.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean()

    divergence = lost(circuit).item()
    if metric == "kl":
        return divergence, 1 - divergence / lost(nothing).item()
    done, whole, none = (metric(some, pairs).mean() for some in (circuit, clean, nothing))
    return divergence, ((done - none) / (whole - none)).item()


@pytest.mark.long
@pytest.mark.parametrize("metric", ["kl", logit_difference])
@pytest.mark.parametrize("search", ["pruning", "acdc"])
def test_the_circuit_that_is_returned_was_run(build_tiny: Any, search: str, metric: Any) -> None:
    """Even after a search that is too short to find anything, and on pairs that it has not seen."""
    model = shaken(build_tiny(dtype="float64"))
    graph, pairs = adapt(model).graph, random_pairs()
    seen, others = pairs.select(slice(0, 3)), pairs.select(slice(3, None))
    options = {"metric": metric, **QUIET}
    if search == "pruning":
        found = prune_circuit_edges(model, seen, size=graph.n_edges // 3, steps=4, **options)
    else:
        drawn = torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(0))
        start = Scores(graph, drawn * graph.exists, "random").top(40)
        found = acdc(model, seen, threshold=1e-2, start=start, **options)
    assert 0 < len(found.circuit) <= found.n_kept < graph.n_edges
    assert torch.equal(found.circuit.connected().mask, found.circuit.mask)
    assert f"effect {found.searched.effect.item():.3f}, on {len(seen)} pairs" in repr(found)
    held_out = evaluate(model, others, metric, found.circuit, progress=False)
    for report, where in ((found.searched, seen), (held_out, others)):
        divergence, effect = _by_hand(model, where, found.circuit.mask, metric)
        assert report.effect.item() == pytest.approx(effect, rel=1e-7, abs=1e-9)
        assert (report.sizes, report.total) == ((len(found.circuit),), graph.n_edges)
        nats = evaluate(model, where, "kl", found.circuit, progress=False)
        assert nats.values.mean().item() == pytest.approx(divergence, rel=1e-7)
        if metric == "kl":
            torch.testing.assert_close(report.values, nats.values, rtol=1e-9, atol=1e-12)


def test_heads_that_are_returned_were_run(build_tiny: Any) -> None:
    """The other heads write what they write in the corrupted run; "no effect" is that run."""
    model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
    seen, others = pairs.select(slice(0, 3)), pairs.select(slice(3, None))
    options = {"metric": logit_difference, "start": "heads", **QUIET}
    found = acdc(model, seen, size=2, **options)
    assert found.n_kept == len(found.circuit) == 2

    def logits(tokens: Tensor, where: PromptPairs, mask: Tensor) -> Tensor:
        _, corrupted = model.run_with_cache(where.corrupted)
        hooks = []
        for layer, head in (~mask).nonzero().tolist():

            def put(z: Tensor, hook: Any, head: int = head) -> Tensor:
                z[:, :, head] = corrupted[hook.name][:, :, head]
                return z

            hooks.append((f"blocks.{layer}.attn.hook_z", put))
        return where.read(model.run_with_hooks(tokens, fwd_hooks=hooks))

    held_out = evaluate(model, others, logit_difference, found.circuit, progress=False)
    for report, where in ((found.searched, seen), (held_out, others)):
        every = torch.ones_like(found.circuit.mask)
        done, whole, none = (
            logit_difference(logits(tokens, where, mask), where).mean()
            for tokens, mask in (
                (where.clean, found.circuit.mask),
                (where.clean, every),
                (where.corrupted, every),
            )
        )
        effect = ((done - none) / (whole - none)).item()
        assert report.effect.item() == pytest.approx(effect, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("part", [4, 2])
def test_the_last_steps_of_pruning_run_the_circuit_that_is_returned(
    build_tiny: Any, part: int
) -> None:
    model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
    size = adapt(model).graph.n_edges // part
    found = prune_circuit_edges(model, pairs, size=size, steps=100, progress=False)
    assert found.n_kept == size == len(found.circuit)
    last = found.history["divergence"].iloc[-3:].tolist()
    assert last == pytest.approx([found.searched.values.mean().item()] * 3, rel=0.02)


def test_a_size_beyond_all_edges_is_refused_before_the_search(
    build_tiny: Any, sampled: list[Tensor]
) -> None:
    model = build_tiny()
    size = adapt(model).graph.n_edges + 1
    with pytest.raises(ValueError, match=f"0..{size - 1}; it is {size}"):
        prune_circuit_edges(model, random_pairs(), size=size, **QUIET)
    assert not sampled


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of all gates that are sampled."""
    found: list[Tensor] = []
    sample = HardConcreteGate.sample

    def recorded(gate: HardConcreteGate, logits: Tensor, *more: Any) -> Tensor:
        found.append(logits.detach().double())
        return sample(gate, logits, *more)

    monkeypatch.setattr(HardConcreteGate, "sample", recorded)
    return found


def _n_open(logits: Tensor) -> float:
    """Expected number of gates above 0: where sigmoid((logit + noise) / (2 / 3)) is above 1/12."""
    return torch.sigmoid(logits + 2 / 3 * math.log(11)).sum().item()


def test_so_many_gates_are_open_as_every_step_of_pruning_asks_for(
    build_tiny: Any, sampled: list[Tensor]
) -> None:
    """From where gates start to the size at 60 % of the run, linearly in the log odds."""
    model, pairs, size = build_tiny(), random_pairs(), 12
    found = prune_circuit_edges(model, pairs, size=size, steps=20, progress=False)
    assert [_n_open(logits) for logits in sampled] == pytest.approx(
        found.history["expected"].tolist(), rel=1e-5
    )
    shares = found.history["expected"].to_numpy() / adapt(model).graph.n_edges
    first, last = 3 + 2 / 3 * math.log(11), math.log(size / (adapt(model).graph.n_edges - size))
    odds = np.interp(np.arange(20), [0, 12], [first, last])
    assert np.log(shares / (1 - shares)) == pytest.approx(odds, abs=1e-4)
    assert found.history["noise"].tolist() == pytest.approx(
        [1] * 13 + [n / 8 for n in range(7, 0, -1)]
    )
    assert -found.scores.values.sum().item() == pytest.approx(size, rel=1e-5)


def test_the_gradient_of_pruning_is_that_at_constant_size(
    build_tiny: Any, sampled: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By central differences of the oracle's divergence, with the shift found by bisection."""
    model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
    graph, gradients = adapt(model).graph, []
    step = torch.optim.Adam.step

    def recorded(optimizer: torch.optim.Adam, *more: Any) -> Any:
        (logits,) = optimizer.param_groups[0]["params"]
        gradients.append(logits.grad.clone())
        return step(optimizer, *more)

    monkeypatch.setattr(torch.optim.Adam, "step", recorded)
    drawn = torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(1)).double()
    start = Scores(graph, drawn * graph.exists, "random")
    options = {"size": graph.n_edges // 2, "start": start, "initial_logit": 1.0}
    prune_circuit_edges(model, pairs, steps=1, seed=3, progress=False, **options)
    (gradient,), (logits,) = gradients, sampled
    size, clean = _n_open(logits), run_patched(model, graph, pairs, graph.exists)

    def lost() -> Tensor:
        low, high = -30.0, 30.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (low, middle) if _n_open(logits + middle) > size else (middle, high)
        generator = torch.Generator().manual_seed(3)
        gates = torch.zeros(graph.exists.shape, dtype=torch.float64)
        gates[graph.exists] = HardConcreteGate().sample(logits + low, generator)
        found = run_patched(model, graph, pairs, gates)
        expected = clean.softmax(-1)
        return (expected * (clean.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean()

    largest = gradient.abs().max().item()
    for place in range(0, len(logits), 18):
        by_hand = derivative(lost, logits, place)
        assert gradient[place].item() == pytest.approx(by_hand, abs=1e-6 * largest), place


def test_edges_on_no_path_are_dropped(build_tiny: Any) -> None:
    model, pairs = build_tiny(), random_pairs()
    graph = adapt(model).graph
    path = ["input->a0.h0<v>", "a0.h0->m1", "m1->logits"]
    lost = ["input->a0.h1<q>", "a1.h0->logits", "m0->a1.h1<k>"]
    wanted = Circuit.of(graph, path + lost)
    start = Scores(graph, wanted.mask.double(), "by hand")
    settings: dict[str, Any] = {"start": start, "steps": 1, "learning_rate": 1e-6, **QUIET}
    found = prune_circuit_edges(model, pairs, size=6, **settings)
    assert {str(edge) for edge in found.circuit.edges} == set(path)
    assert "6 with those without effect" in repr(found)


def test_there_may_be_no_effect_to_explain(build_tiny: Any) -> None:
    """That no head matters is a valid result of ACDC, without an explained effect."""
    model, pairs = build_tiny(), random_pairs()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O.zero_()
    found = acdc(model, pairs, threshold=1e-4, start="heads", patch="zero", **QUIET)
    assert len(found.circuit) == 0 and found.searched.values.abs().max() < 1e-6
    assert "metric 0, no effect to explain, on 5 pairs" in repr(found)

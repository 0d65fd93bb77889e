"""`find_circuit` finds planted circuits, and never searches on held-out pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import explained, run_patched_each
from planted import PLANTED, Planted
from random_models import random_pairs, shaken
from torch import Tensor

from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import (
    Circuit,
    Evaluation,
    FoundCircuit,
    Scores,
    attribute_circuit_edges,
    evaluate_circuit_edges,
    find_circuit,
    pair_runs,
)
from sparse_tl.circuits.evaluation import evaluated
from sparse_tl.circuits.methods import search, selection
from sparse_tl.circuits.methods.search import reached
from sparse_tl.circuits.methods.selection import SearchedPairs
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import CircuitEdges
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import NoEffectError, logit_difference

Build = Callable[..., Model]
QUIET: dict[str, Any] = {"progress": False}
PARTS = pytest.mark.parametrize("parts", ["circuit_edges", "heads"])


@pytest.fixture(scope="module")
def small(build_tiny: Build) -> Model:
    return shaken(build_tiny(dtype="float64"))


@pytest.fixture(scope="module")
def many() -> PromptPairs:
    pairs = random_pairs()
    return pairs.select(torch.arange(8) % len(pairs))


@pytest.fixture(scope="module")
def found_on_many(small: Model, many: PromptPairs) -> FoundCircuit:
    return find_circuit(small, many, logit_difference, at=0.6, held_out=many, **QUIET)


@pytest.fixture(scope="module")
def scores_on_many(small: Model, many: PromptPairs) -> Scores:
    return attribute_circuit_edges(small, many, logit_difference, by_pair=True, **QUIET)


def _same(one: FoundCircuit, other: FoundCircuit) -> None:
    assert one.method == other.method
    assert torch.equal(one.circuit.mask, other.circuit.mask)
    for method, evaluation in one.evaluations.items():
        assert evaluation.sizes == other.evaluations[method].sizes
        torch.testing.assert_close(evaluation.values, other.evaluations[method].values)


def _strongest(scores: Scores) -> Scores:
    """The scores that rank edges: the mean over pairs of the absolute score."""
    return replace(scores, values=scores.values.abs().mean(dim=0))


@pytest.mark.parametrize("name", ["inhibition", "lock"])
def test_planted_circuits_are_found(name: str) -> None:
    planted = PLANTED[name]()
    found = find_circuit(
        planted.model, planted.pairs, planted.metric, held_out=planted.pairs, **QUIET
    )
    assert {str(edge) for edge in found.circuit.edges} == planted.edges
    assert found.method == "eap-ig"  # with nothing to add to
    assert found.held_out.effect.item() == pytest.approx(1, abs=1e-6)


def test_a_smaller_circuit_than_the_planted_one() -> None:
    """Of induction, patched queries and patched keys match again, at the same place."""
    planted: Planted = PLANTED["induction"]()
    found = find_circuit(
        planted.model, planted.pairs, planted.metric, held_out=planted.pairs, **QUIET
    )
    assert {str(edge) for edge in found.circuit.edges} == {"input->a1.h0<v>", "a1.h0->logits"}
    mask = found.circuit.mask
    effect = explained(planted.model, planted.graph, planted.pairs, planted.metric, mask)
    assert effect == pytest.approx(1, abs=1e-6)
    # With patched queries but not keys, the ranking's 4 edges have no effect; 5 have it all.
    by_method = found.to_pandas().set_index("method")["size"]
    assert by_method.to_dict() == {"selection": 2, "eap-ig": 5}


@pytest.mark.long
def test_what_is_returned_was_run_on_both_halves(small: Model, many: PromptPairs) -> None:
    """Effects and sizes are those of the slow oracle."""
    searched, others = many.select(slice(0, 5)), many.select(slice(5, None))
    found = find_circuit(small, searched, logit_difference, at=0.6, held_out=others, **QUIET)
    graph, mask = adapt(small).graph, found.circuit.mask
    for pairs, said in ((searched, found.searched), (others, found.held_out)):
        effect = explained(small, graph, pairs, logit_difference, mask)
        assert said.effect.item() == pytest.approx(effect, rel=1e-6)
        assert (said.sizes, len(said.clean)) == ((len(found.circuit),), len(pairs))
    row = found.to_pandas().iloc[0]
    assert not found.stopped
    assert (row["method"], row["size"]) == (found.method, len(found.circuit))
    assert row["explained_effect"] == pytest.approx(found.held_out.effect.item())
    assert row["explained_effect"] >= 0.6
    assert row["low"] <= row["explained_effect"] <= row["high"]
    for evaluation in found.evaluations.values():
        assert evaluation.sizes[-1] == graph.n_edges
        assert evaluation.effect[-1].item() == pytest.approx(1)


@pytest.mark.long
@PARTS
def test_no_ranking_sees_held_out_pairs(
    small: Model, many: PromptPairs, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other held-out pairs may choose other sizes."""
    rankings = list[Scores]()
    shrink = search._Judged.shrink

    def recorded(own: Any, *args: Any) -> Any:
        rankings.append(own.scores)
        return shrink(own, *args)

    monkeypatch.setattr(search._Judged, "shrink", recorded)
    searched, others = many.select(slice(0, 4)), many.select(slice(4, None))
    poisoned = replace(others, clean=others.corrupted, corrupted=others.clean)
    seen = list[dict[str, Tensor]]()
    for held_out in (others, poisoned):
        how = {"at": 0.6, "parts": parts, "held_out": held_out, **QUIET}
        find_circuit(small, searched, logit_difference, **how)
        seen.append({scores.method: scores.values for scores in rankings})
        rankings.clear()
    methods = ["eap-ig"] + ["exact"] * (parts == "heads")
    for method in methods:
        assert torch.equal(seen[0][method], seen[1][method])


@pytest.mark.long
def test_sizes_are_close_to_each_other_where_the_level_is_reached(
    small: Model, many: PromptPairs, found_on_many: FoundCircuit, scores_on_many: Scores
) -> None:
    scores = _strongest(scores_on_many)
    coarse = evaluate_circuit_edges(small, many, logit_difference, scores, **QUIET)
    first = reached(coarse, 0.6)
    below, above = coarse.sizes[first - 1 : first + 1]
    evaluation = found_on_many.evaluations["eap-ig"]
    between = [size for size in evaluation.sizes if below < size < above]
    assert len(between) > 1
    first = reached(evaluation, 0.6)
    lower, size = evaluation.sizes[first - 1 : first + 1]
    assert below <= lower < size <= above
    tops = map(scores.top, range(scores.grid.n_parts))
    every = {len(circuit.connected(patch="corrupted")) for circuit in tops}
    assert not {some for some in every - {*evaluation.sizes} if lower < some < size}


@pytest.mark.long
def test_halves_are_drawn_from_all_pairs(small: Model, many: PromptPairs) -> None:
    seen: list[tuple[int, ...]] = []

    def recorded(logits: Tensor, pairs: PromptPairs) -> Tensor:
        seen.extend(map(tuple, pairs.clean.tolist()))
        return logit_difference(logits, pairs)

    unlike = many.select(slice(0, 5))
    how = {"at": 0.5, "parts": "heads", "seed": 1, **QUIET}
    one = find_circuit(small, unlike, recorded, **how)
    assert set(seen) == set(map(tuple, unlike.clean.tolist()))
    assert (len(one.searched.clean), len(one.held_out.clean)) == (3, 2)
    _same(one, find_circuit(small, unlike, logit_difference, **how))


@pytest.mark.long
@PARTS
def test_batches_and_stacks_change_nothing(
    small: Model, many: PromptPairs, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"at": 0.6, "parts": parts, **QUIET}
    one = find_circuit(small, many, logit_difference, batch_size=32, **how)
    monkeypatch.setattr(pair_runs, "ROWS", 1)
    _same(one, find_circuit(small, many, logit_difference, batch_size=2, **how))


def test_a_small_circuit_is_not_found_if_a_larger_one_of_its_ranking_falls_short() -> None:
    """Its effect, near 1 on few pairs by chance, would not be near 1 on others."""
    graph = CircuitGraph(2, 2, 2)
    scores = Scores(graph, graph.exists.double(), "eap-ig")
    effects = [2.5, 0.5, 0.48, 0.46, 0.92, 0.85, 1.05, 0.99, 1.05, 0.95, 1.0]
    ranked = Evaluation(
        tuple(range(1, 12)),
        graph.n_parts,
        torch.tensor(effects)[:, None].double() + 1,
        torch.full((1,), 2.0).double(),
        torch.ones(1).double(),
    )
    circuit, evaluations = scores.top(7), {"eap-ig": ranked}
    found = FoundCircuit(
        circuit, "eap-ig", 0.9, ranked, ranked, evaluations, {"eap-ig": 0.0}, scores
    )
    assert found.to_pandas()["size"].tolist() == [7]


@pytest.mark.long
def test_a_search_that_has_no_time_left_gives_what_it_has(small: Model, many: PromptPairs) -> None:
    how = {"at": 0.6, "held_out": many, "seconds": 1e-9, **QUIET}
    found = find_circuit(small, many, logit_difference, **how)
    assert found.held_out.effect.item() >= 0.6
    assert [*found.evaluations] == ["eap-ig"]
    assert found.stopped and "the time limit ended the search" in repr(found)


@pytest.fixture
def searched(small: Model) -> SearchedPairs:
    """Several batches of pairs of a model, and all edges."""
    runs = PairRuns(small, CircuitEdges(), random_pairs(), "corrupted", 2, keep=True)
    return SearchedPairs(runs, logit_difference)


def test_gradients_under_a_circuit_are_finite_differences_of_the_slow_oracle(
    small: Model, searched: SearchedPairs
) -> None:
    pairs, graph = random_pairs(), adapt(small).graph
    scores = attribute_circuit_edges(small, pairs, logit_difference, **QUIET)
    mask = scores.top(graph.n_edges // 3).connected().mask
    gradient, _ = searched.gradient(mask)
    closed = (graph.exists & ~mask).nonzero()
    step, found = 1e-5, list[float]()
    places = closed[:: max(1, len(closed) // 30)].tolist()
    gates = mask.double().repeat(len(places), 2, 1, 1)
    for of_place, place in zip(gates, places, strict=True):
        of_place[0][tuple(place)] += step
        of_place[1][tuple(place)] -= step
    logits = run_patched_each(small, graph, pairs, gates.flatten(0, 1))
    with torch.no_grad():
        clean, corrupted = (pairs.read(small(some)) for some in (pairs.clean, pairs.corrupted))
    whole = (logit_difference(clean, pairs) - logit_difference(corrupted, pairs)).mean()
    ends = torch.stack([logit_difference(each, pairs).mean() for each in logits]) / whole
    for place, (up, down) in zip(places, ends.view(-1, 2).tolist(), strict=True):
        found.append((up - down) / (2 * step))
        assert gradient[tuple(place)].item() == pytest.approx(found[-1], rel=1e-5, abs=1e-8)
    assert sum(abs(value) > 1e-4 for value in found) > 10


def test_standard_errors_of_gradients_are_those_over_single_pairs(
    small: Model, searched: SearchedPairs
) -> None:
    exists, alone = searched.graph.exists, list[Tensor]()
    mask = exists & (torch.rand(exists.shape, generator=torch.Generator().manual_seed(0)) > 0.5)
    gradient, error = searched.gradient(mask)
    whole = (searched.clean - searched.none).mean()
    for pair in random_pairs().split(1):
        runs = PairRuns(small, CircuitEdges(), pair, "corrupted", 1)
        of_one = SearchedPairs(runs, logit_difference)
        of_pair, none = of_one.gradient(mask)
        assert not none.any()
        alone.append(of_pair * (of_one.clean - of_one.none) / whole)
    found = torch.stack(alone)
    torch.testing.assert_close(gradient, found.mean(dim=0))
    torch.testing.assert_close(error, found.std(dim=0) / len(found) ** 0.5)
    assert error.any()


def test_forward_selection_adds_what_raises_the_effect_most(searched: SearchedPairs) -> None:
    """Each circuit contains the one before; the last explains all, unless the gradients end."""
    scores = attribute_circuit_edges(searched.runs.model, random_pairs(), logit_difference, **QUIET)
    circuit = scores.top(searched.graph.n_parts // 4).connected()
    start, effect = circuit.mask, searched.effects([circuit])[0]
    first, *larger = found = searched.larger(circuit, effect, 1.0, lambda: False)
    assert first == (circuit, effect)
    assert effect < 1
    gain, error = searched.gradient(start)
    gain = (gain - error).masked_fill(start | ~searched.graph.exists, 0)
    best = gain.flatten().argsort(descending=True)[
        : int((larger[0][0].mask & ~start).count_nonzero())
    ]
    assert (larger[0][0].mask & ~start).flatten()[best].all()
    for (some, _), (more, _) in pairwise(found):
        assert not (some.mask & ~more.mask).any()
    for some, value in larger[::4]:
        assert value == pytest.approx(searched.effects([some])[0])
    gradients = len([value for _, value in found[1:] if value < 1])
    assert found[-1][1] >= 1 or gradients >= selection.ROUNDS


@pytest.mark.long
def test_edges_whose_effects_cancel_over_the_pairs_of_a_search_are_ranked_by_their_size(
    small: Model, many: PromptPairs, found_on_many: FoundCircuit, scores_on_many: Scores
) -> None:
    torch.testing.assert_close(found_on_many.scores.values, scores_on_many.mean())
    found, strongest = found_on_many.evaluations["eap-ig"], _strongest(scores_on_many)
    again = evaluate_circuit_edges(small, many, logit_difference, strongest, found.sizes, **QUIET)
    effects = dict(zip(found.sizes, found.effect.tolist(), strict=True))
    assert len(again.sizes) > 5
    for size, effect in zip(again.sizes, again.effect.tolist(), strict=True):
        if size in effects:
            assert effects[size] == pytest.approx(effect)


@pytest.mark.parametrize("others", [2, 4, 6])
@pytest.mark.parametrize("selected", ["few", "all"])
def test_a_search_ends_in_its_time(
    small: Model,
    many: PromptPairs,
    monkeypatch: pytest.MonkeyPatch,
    others: int,
    selected: str,
) -> None:
    """At a second for each circuit that is run on four pairs, and four times that for gradients.

    If all circuits seem good on the pairs of the search, all are run on the held-out ones.
    """
    now, gradients = [0.0], list[float]()

    def slow_evaluated(runs: PairRuns, *args: Any) -> Evaluation:
        now[0] += len(args[1]) * sum(map(len, runs.batches)) / 4
        return evaluated(runs, *args)

    def slow_gradient(own: SearchedPairs, mask: Tensor) -> tuple[Tensor, Tensor]:
        now[0] += len(own.clean)
        gradients.append(now[0])
        return gradient(own, mask)

    def slow_effects(own: SearchedPairs, circuits: list[Circuit]) -> list[float]:
        now[0] += len(circuits) * len(own.clean) / 4
        return effects(own, circuits) if selected == "few" else [1.0] * len(circuits)

    gradient, effects = SearchedPairs.gradient, SearchedPairs.effects
    monkeypatch.setattr(SearchedPairs, "gradient", slow_gradient)
    monkeypatch.setattr(SearchedPairs, "effects", slow_effects)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(search, "evaluated", slow_evaluated)
    monkeypatch.setattr(search, "time", clock)
    how = {"at": 0.6, "held_out": many.select(slice(0, others)), **QUIET}
    for seconds in (30, 120):
        now[0] = 0.0
        find_circuit(
            small, many.select(slice(others, None)), logit_difference, seconds=seconds, **how
        )
        assert now[0] <= seconds + others / 4  # a circuit that begins in time is run to its end
    assert gradients or selected == "few"


def test_what_cannot_be_searched(small: Model, many: PromptPairs) -> None:
    with pytest.raises(ValueError, match="at least two are needed"):
        find_circuit(small, many.select(slice(0, 1)), logit_difference, **QUIET)
    nothing = replace(many, corrupted=many.clean)
    with pytest.raises(NoEffectError, match="for no searched pair"):
        find_circuit(small, nothing, logit_difference, held_out=many, **QUIET)
    with pytest.raises(NoEffectError, match="for no held-out pair"):
        find_circuit(small, many, logit_difference, held_out=nothing, **QUIET)

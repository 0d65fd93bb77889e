"""Answers of several tokens: every number is that of rows made by hand, one answer at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from analyses import call, check_same, of_prompts
from finite_differences import derivative
from oracle import mask_of, run_patched, slow_scores
from random_models import random_pairs, shaken
from torch import Tensor

from sparse_tl import (
    attribute_attention_edges,
    attribute_circuit_edges,
    attribute_heads,
    evaluate,
    find_circuit,
    neuron_effects,
    patch_activations,
    patch_exactly,
    prune_circuit_edges,
)
from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import Circuit, accuracy, attribute_logits, measure_skill
from sparse_tl.circuits.pair_runs import PairRuns, clean_logits
from sparse_tl.data.pairs import NO_TOKEN, PromptPairs
from sparse_tl.gates import CircuitEdges
from sparse_tl.metrics import (
    Metric,
    answer_log_probabilities,
    answer_logit,
    log_probability,
    logit_difference,
    margin,
    probability_difference,
)

N = NO_TOKEN
NO_WRONG = torch.full((3, 0, 3), N)
Build = Callable[..., Model]
Run = Callable[[PromptPairs], Tensor]
"""From pairs with answers of one token to their logits."""


def _pairs() -> PromptPairs:
    """Three pairs of 6, 5 and 4 tokens; answers of one to three, some of which begin alike."""
    generator = torch.Generator().manual_seed(3)
    clean, corrupted = torch.randint(13, (2, 3, 6), generator=generator)
    answers = [[[5, 6, N], [5, 7, 8]], [[9, N, N], [N, N, N]], [[1, 2, 3], [4, N, N]]]
    wrong = [[[5, 8, N], [2, 1, N]], [[3, 4, 1], [N, N, N]], [[6, N, N], [1, 2, 4]]]
    ends = torch.tensor([5, 4, 3])
    return PromptPairs(clean, corrupted, torch.tensor(answers), torch.tensor(wrong), ends)


def _by_hand(run: Run, pairs: PromptPairs) -> list[tuple[list[Tensor], list[Tensor]]]:
    """The log-probabilities of each pair's right and wrong answers."""
    return [
        (
            [_summed(run, one) for one in _of_answers(pairs, row, pairs.answers)],
            [_summed(run, one) for one in _of_answers(pairs, row, pairs.wrong)],
        )
        for row in range(len(pairs))
    ]


def _of_answers(pairs: PromptPairs, row: int, side: Tensor) -> list[PromptPairs]:
    """For each answer, a pair for each of its tokens, which reads the logits before it."""
    end, made = int(pairs.positions[row]) + 1, []
    for padded in side[row].tolist():
        answer = [token for token in padded if token != N]
        if answer:
            both = (
                torch.tensor([[*some[row, :end].tolist(), *answer[:-1]]] * len(answer))
                for some in (pairs.clean, pairs.corrupted)
            )
            labels = torch.tensor(answer)[:, None]
            at = torch.arange(end - 1, end - 1 + len(answer))
            made.append(PromptPairs(*both, labels, labels[:, :0], at))
    return made


def _summed(run: Run, pairs: PromptPairs) -> Tensor:
    return run(pairs).log_softmax(dim=-1).gather(1, pairs.answers).sum()


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


METRICS: dict[Metric, Callable[[list[Tensor], list[Tensor]], Tensor]] = {
    logit_difference: lambda right, wrong: _mean(right) - _mean(wrong),
    margin: lambda right, wrong: _mean(right) - torch.stack(wrong).max(),
    log_probability: lambda right, wrong: torch.stack(right).exp().sum().log(),
    probability_difference: lambda right, wrong: (
        torch.stack(right).exp().sum() - torch.stack(wrong).exp().sum()
    ),
}


def _expected(metric: Metric, by_hand: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
    return torch.stack([METRICS[metric](*sides) for sides in by_hand])


# ---- metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@torch.no_grad()
def test_probabilities_of_whole_answers(build_tiny: Build, kind: str) -> None:
    """In float32, in batches with padding, against one row and one answer at a time."""
    model, pairs = build_tiny(kind), _pairs()
    ((_, logits),) = clean_logits(model, pairs, batch_size=8)
    by_hand = _by_hand(lambda one: one.read(model(one.clean)), pairs)
    for side, values in enumerate(answer_log_probabilities(logits, pairs)):
        for row, expected in enumerate(by_hand):
            given = values[row][values[row] != -torch.inf]
            torch.testing.assert_close(given, torch.stack(expected[side]), atol=1e-5, rtol=0)
    for metric in METRICS:
        expected = _expected(metric, by_hand)
        torch.testing.assert_close(metric(logits, pairs), expected, atol=1e-5, rtol=0)
    skill = measure_skill(model, pairs, logit_difference, batch_size=2, progress=False)
    assert skill.right.tolist() == [bool(max(right) > max(wrong)) for right, wrong in by_hand]
    assert skill.chance == pytest.approx((2 / 4 + 1 / 2 + 2 / 4) / 3)
    expected = _expected(logit_difference, by_hand).double()
    torch.testing.assert_close(skill.clean, expected, atol=1e-5, rtol=0)


def test_what_is_generated_greedily_is_right(build_tiny: Build) -> None:
    model, pairs = build_tiny(), _pairs()
    answers, wrong = [], torch.full((3, 1, 3), N)
    for row, end in enumerate((pairs.positions + 1).tolist()):
        tokens = pairs.clean[row, :end].tolist()
        for _ in range(3):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        answers.append([tokens[-3:]])
    greedy = torch.tensor(answers)
    assert accuracy(model, _changed(pairs, greedy, wrong)) == 1
    greedy[1, 0, 2] = (greedy[1, 0, 2] + 1) % 13
    assert accuracy(model, _changed(pairs, greedy, wrong), batch_size=2) == pytest.approx(2 / 3)


def _changed(pairs: PromptPairs, answers: Tensor, wrong: Tensor) -> PromptPairs:
    return PromptPairs(pairs.clean, pairs.corrupted, answers, wrong, pairs.positions)


def test_one_token_is_the_case_of_length_one(build_tiny: Build) -> None:
    """A third axis changes nothing, bit by bit; nor do pairs with a longer answer beside them."""
    model, pairs = build_tiny(dtype="float64"), _pairs()
    flat = _changed(pairs, torch.tensor([[5, 7], [9, N], [1, 4]]), torch.tensor([[2], [3], [6]]))
    deep = _changed(pairs, flat.answers[..., None], flat.wrong[..., None])
    pad = torch.full((3, 2, 2), N)
    wide = _changed(
        pairs,
        torch.cat([deep.answers, pad], dim=2),
        torch.cat([deep.wrong, pad[:, :1]], dim=2),
    )
    for metric in (*METRICS, answer_logit):
        found, same, alike = (
            attribute_circuit_edges(model, some, metric, progress=False).values
            for some in (flat, deep, wide)
        )
        assert torch.equal(found, same)
        torch.testing.assert_close(alike, found, atol=1e-12, rtol=1e-9)
    assert len(flat.forced.clean) == 3 and torch.equal(flat.forced.clean, pairs.clean)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(of_prompts()))
def test_every_analysis_takes_them_or_says_why_not(
    build_tiny: Build, name: str, unchecked_types: None
) -> None:
    """An axis for one token changes no number; answers of more tokens are run, or refused."""
    function, model = of_prompts()[name], shaken(build_tiny(dtype="float64"))
    some = random_pairs(6)
    prompts, at = (some.clean, some.corrupted), torch.full((6,), 5)

    def with_more(*more: int) -> PromptPairs:
        answers, wrong = (
            torch.stack([side, *(torch.where(side == N, N, token) for token in more)], dim=2)
            for side in (some.answers, some.wrong)
        )
        return PromptPairs(*prompts, answers, wrong, at)

    flat = PromptPairs(*prompts, some.answers, some.wrong, at)
    check_same(call(function, model, flat), call(function, model, with_more()))
    longer = with_more(3, 4)
    if name in ("attribute_logits", "head_behaviour"):
        with pytest.raises(ValueError, match="answers of a single token"):
            call(function, model, longer)
    else:
        call(function, model, longer)


# ---- attribution ---------------------------------------------------------------------------------


def test_attribution_is_exact_on_a_linear_model(linear: Model) -> None:
    """With the logits of whole answers, summed over tokens: log-probabilities are not linear."""

    def summed_logits(logits: Tensor, pairs: PromptPairs) -> Tensor:
        picked = logits[pairs.forced.where, pairs.tokens.clamp(min=0)]
        sums = picked.where(pairs.tokens != N, 0).sum(dim=2)
        return sums[:, :2].sum(dim=1) - sums[:, 2:].sum(dim=1)

    pairs = _pairs()
    for method in ("eap", "eap-ig"):
        scores = attribute_circuit_edges(linear, pairs, summed_logits, method=method)
        exact = patch_exactly(linear, pairs, summed_logits, batch_size=2, progress=False)
        found = torch.tensor([scores[edge] for edge in exact.index])
        torch.testing.assert_close(found, torch.tensor([*exact]), atol=1e-9, rtol=1e-9)
        assert found.abs().max() > 1e-3
        by_position = attribute_circuit_edges(
            linear, pairs.by_length()[0], summed_logits, method=method, positions="tokens"
        )
        alone = attribute_circuit_edges(linear, pairs.by_length()[0], summed_logits, method=method)
        torch.testing.assert_close(by_position.values.sum(dim=0), alone.values)
        assert by_position.grid.positions == tuple("012345")
    by_pair = attribute_circuit_edges(linear, pairs, summed_logits, by_pair=True, batch_size=2)
    torch.testing.assert_close(by_pair.values.mean(dim=0), scores.values)
    for row in range(3):
        one = attribute_circuit_edges(linear, pairs.select(slice(row, row + 1)), summed_logits)
        torch.testing.assert_close(by_pair.values[row], one.values)


@pytest.mark.long
@pytest.mark.parametrize(("method", "steps"), [("eap", 1), ("eap-ig", 3)])
def test_attribution_adds_up_over_answers_and_their_tokens(
    build_tiny: Build, method: Any, steps: int
) -> None:
    """The scores of a sum of log-probabilities are sums of scores, each of one row by hand."""
    model, pairs = build_tiny(dtype="float64"), _pairs()
    graph = adapt(model).graph
    expected = torch.zeros(graph.exists.shape, dtype=torch.float64)
    for k in range(1, steps + 1):
        for sign, side in ((1, pairs.answers), (-1, pairs.wrong)):
            for row in range(3):
                answers = _of_answers(pairs, row, side)
                for one in answers:
                    of_token = slow_scores(model, graph, one, log_probability, k / steps)
                    expected += sign * of_token * len(one) / len(answers) / steps / 3
    found = attribute_circuit_edges(
        model, pairs, logit_difference, method=method, steps=steps, batch_size=2, progress=False
    )
    torch.testing.assert_close(found.values, expected.where(graph.exists, 0), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("metric", METRICS)
def test_gradients_are_finite_differences(build_tiny: Build, metric: Metric) -> None:
    """EAP's score of an edge is minus the derivative of the metric by the edge's gate at 1."""
    model, pairs = build_tiny(dtype="float64"), _pairs()
    scores = attribute_circuit_edges(model, pairs, metric, method="eap", progress=False)
    ((batch, run),) = PairRuns(model, CircuitEdges(), pairs, "corrupted", 8)
    gates = torch.ones(run.site.shape(run.adapter), dtype=torch.float64)
    for place in scores.order()[::17].tolist():
        slope = derivative(lambda: metric(run.logits(gates), batch).mean(), gates, tuple(place))
        assert scores.values[tuple(place)].item() == pytest.approx(-slope, rel=1e-5, abs=1e-9)


def test_heads_attention_and_neurons(build_tiny: Build) -> None:
    """Each answer on its own: scores of a log-probability are the sums of those of its tokens."""
    model, pairs = build_tiny(dtype="float64"), _pairs()
    whole = _changed(pairs, torch.tensor([[[5, 7, 8]], [[9, 2, N]], [[1, 2, 3]]]), NO_WRONG)
    by_hand = [_of_answers(whole, row, whole.answers)[0] for row in range(3)]
    options: dict[str, Any] = {"metric": log_probability, "method": "eap", "progress": False}
    heads = attribute_heads(model, whole, **options).values
    expected = sum(attribute_heads(model, one, **options).values * len(one) for one in by_hand)
    torch.testing.assert_close(heads, expected / 3)
    edges = attribute_attention_edges(model, whole, **options).values
    for row, one in enumerate(by_hand):
        alone = attribute_attention_edges(model, one, **options).values.sum(dim=0)
        n = one.clean.shape[1]
        torch.testing.assert_close(edges[row, ..., :n, :n], alone)
        assert not edges[row, ..., n:, :].any()
    neurons = neuron_effects(model, whole, log_probability, "m0", n=8, progress=False)
    alone = [neuron_effects(model, one, log_probability, "m0", n=8) for one in by_hand]
    parts = [each.score * len(one) / 3 for each, one in zip(alone, by_hand, strict=True)]
    torch.testing.assert_close(neurons.score, torch.stack(parts).sum(dim=0))


# ---- exact patching, evaluation, search ----------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("metric", METRICS)
def test_circuits_and_patches_are_those_of_the_oracle(build_tiny: Build, metric: Metric) -> None:
    model, pairs = build_tiny(dtype="float64"), _pairs()
    graph = adapt(model).graph
    masks = torch.rand(2, *graph.exists.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    masks &= graph.exists
    found = evaluate(model, pairs, metric, [Circuit(graph, mask) for mask in masks], batch_size=2)
    runs: list[Run] = [
        lambda one, mask=mask: run_patched(model, graph, one, mask) for mask in masks
    ]
    runs += [lambda one: one.read(model(one.clean)), lambda one: one.read(model(one.corrupted))]
    for run, values in zip(runs, (*found.values, found.clean, found.none), strict=True):
        torch.testing.assert_close(values, _expected(metric, _by_hand(run, pairs)).detach())
    edges = ["a0.h0->m1", "m0->a1.h1<q>"]
    effects = patch_exactly(model, pairs, metric, edges, batch_size=2, progress=False)
    for edge, effect in effects.items():
        mask = graph.exists & ~mask_of(graph, [edge])
        by_hand = _by_hand(lambda one, mask=mask: run_patched(model, graph, one, mask), pairs)
        assert effect == pytest.approx((_expected(metric, by_hand) - found.clean).mean().item())


def test_resampled_prompts_keep_their_own_answers(build_tiny: Build) -> None:
    pairs = _pairs()
    pairs = _changed(pairs, pairs.answers, pairs.wrong).select(torch.tensor([0, 0, 0]))
    clean = torch.randint(13, (3, 6), generator=torch.Generator().manual_seed(1))
    pairs = PromptPairs(clean, clean, pairs.answers, pairs.wrong, pairs.positions)
    (batch,) = PairRuns(build_tiny(), CircuitEdges(), pairs, "resample", 8).batches
    rows, other = pairs.forced, batch.forced.corrupted
    assert torch.equal(other[:, 6:], rows.clean[:, 6:])
    source = (other[:, None, :6] == clean).all(dim=2).int().argmax(dim=1)
    assert (source != rows.pair).all()
    assert torch.equal(other[:, :6], clean[source])
    with pytest.raises(ValueError, match="answers of one number of tokens"):
        PairRuns(build_tiny(), CircuitEdges(), pairs, "mean", 8)
    alike = _changed(pairs, torch.tensor([[[1, 2, N]]] * 3), NO_WRONG)
    PairRuns(build_tiny(), CircuitEdges(), alike, "mean", 8)


def test_a_circuit_of_answers_of_two_tokens() -> None:
    """``x a b y z a`` goes on with b, and then with y: the planted circuit of induction does it."""
    from planted import induction

    planted = induction(length=7)
    tokens = planted.pairs
    follows = torch.stack(
        [
            row[int((row[:-1] == int(answer)).nonzero()[0]) + 1]
            for row, answer in zip(tokens.clean, tokens.answers, strict=True)
        ]
    )
    answers = torch.stack([tokens.answers[:, 0], follows], dim=1)[:, None]
    wrong = torch.cat([tokens.wrong, tokens.answers], dim=1)[:, None]
    pairs = _changed(tokens, answers, wrong)
    found = find_circuit(planted.model, pairs, logit_difference, held_out=pairs, progress=False)
    assert {str(edge) for edge in found.circuit.edges} == planted.edges
    assert found.held_out.effect.item() > 0.95
    assert accuracy(planted.model, pairs) == 1
    pruned = prune_circuit_edges(planted.model, pairs, size=5, steps=20, metric=logit_difference)
    assert {str(edge) for edge in pruned.circuit.edges} <= planted.edges


def test_activation_patching(build_tiny: Build) -> None:
    """All of the residual stream of one column, at one layer, by hooks by hand."""
    model, pairs = build_tiny(dtype="float64"), _pairs().by_length()[2]
    maps = patch_activations(model, pairs, log_probability, "resid_pre", progress=False)
    assert maps.values.shape == (2, 8, 1)  # 6 columns of the prompt, and 2 of answers

    def run(one: PromptPairs, column: int) -> Tensor:
        _, cache = model.run_with_cache(one.clean)

        def patch(value: Tensor, hook: Any) -> Tensor:
            value = value.clone()
            value[:, column] = cache["blocks.1.hook_resid_pre"][:, column]
            return value

        hooks = [("blocks.1.hook_resid_pre", patch)] if column < one.clean.shape[1] else []
        return one.read(model.run_with_hooks(one.corrupted, fwd_hooks=hooks))

    for column in range(8):
        by_hand = _by_hand(partial(run, column=column), pairs)
        torch.testing.assert_close(maps.values[1, column], _expected(log_probability, by_hand))


# ---- what is refused -----------------------------------------------------------------------------


def test_one_answer_may_not_begin_with_another() -> None:
    with pytest.raises(ValueError, match=r"row 0: an answer begins with another one, \[5, 6\]"):
        _changed(_pairs(), _pairs().answers, torch.tensor([[[5, 6, 1]]] * 3))


def test_what_reads_one_token(build_tiny: Build) -> None:
    model, pairs = build_tiny(), _pairs()
    for act in (
        lambda: attribute_logits(model, pairs, progress=False),
        lambda: attribute_circuit_edges(model, pairs, answer_logit, progress=False),
    ):
        with pytest.raises(ValueError, match="answers of a single token"):
            act()
    with pytest.raises(ValueError, match="those of 4 prompts of 8 tokens"):
        pairs.read(torch.zeros(3, 6, 13))
    behind = torch.tensor([[[5, N, 6]]] * 3)
    with pytest.raises(ValueError, match="row 0: `answers` has a token that .* follows padding"):
        _changed(pairs, behind, NO_WRONG)


def test_an_answer_that_cannot_be_predicted_counts_in_means() -> None:
    """A logit of -inf is that of an answer, not of a place without one."""
    columns = [torch.tensor([row]) for row in ([1, 2], [1, 3], [0, 1], [2])]
    pairs = PromptPairs(*columns, torch.tensor([1]))
    logits = torch.tensor([[1.0, -torch.inf, 0.5, 0.0]])
    for metric in (logit_difference, margin):
        assert metric(logits, pairs).tolist() == [-torch.inf]

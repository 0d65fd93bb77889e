"""Prompt pairs refuse what they cannot mean, and metrics are what their names say."""

from __future__ import annotations

import math

import jaxtyping
import pytest
import torch
from torch import Tensor

from sparse_tl.data.pairs import NO_TOKEN, PromptPairs, single_token
from sparse_tl.metrics import (
    Metric,
    divergence,
    explained_effect,
    log_probability,
    logit_difference,
    margin,
    measure,
    probability_difference,
)

WORDS = ["<s>", "the", "cat", "dog", "sat", "ran", "far"]


def _tokenize(text: str) -> list[int]:
    return [0, *(WORDS.index(word) for word in text.split())]


def _pairs() -> PromptPairs:
    return PromptPairs.from_texts(
        _tokenize,
        clean=["the cat", "the dog sat"],
        corrupted=["the dog", "the cat sat"],
        answers=[["sat"], ["far", "ran"]],
        wrong=[["far", "ran"], ["cat"]],
    )


def test_prompts_are_padded_on_the_right_and_read_at_their_end() -> None:
    pairs = _pairs()
    assert pairs.clean.tolist() == [[0, 1, 2, 0], [0, 1, 3, 4]]
    assert pairs.positions.tolist() == [2, 3]
    assert pairs.answers.tolist() == [[4, NO_TOKEN], [6, 5]]
    logits = torch.randn(2, 4, 7)
    assert torch.equal(pairs.read(logits), torch.stack([logits[0, 2], logits[1, 3]]))
    pieces = pairs.split(1)
    assert [len(piece) for piece in pieces] == [1, 1]
    assert torch.equal(pieces[1].wrong, pairs.wrong[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corrupted": ["the dog ran", "the cat sat"]}, "equal token length; pair 0 has 3 and 4"),
        ({"answers": [["sat"], ["ran far"]]}, "single token; 'ran far' has 2"),
        ({"answers": [["sat"], [""]]}, "single token; '' has 0"),
        ({"answers": [["sat"], []]}, "an answer for every pair; pair 1 has none"),
        ({"answers": ["sat", "far"]}, r"list of texts .* pair 0 has 'sat', .* Write \['sat'\]"),
        ({"wrong": [["far"], "cat"]}, r"in wrong; pair 1 has 'cat'"),
        ({"answers": [["sat"]]}, "as many clean as corrupted"),
    ],
)
def test_texts_that_are_no_pairs(change: dict[str, list], message: str) -> None:
    texts = {
        "clean": ["the cat", "the dog sat"],
        "corrupted": ["the dog", "the cat sat"],
        "answers": [["sat"], ["far"]],
        "wrong": [["far"], ["cat"]],
    }
    with pytest.raises(ValueError, match=message):
        PromptPairs.from_texts(_tokenize, **{**texts, **change})


def test_tensors_that_are_no_pairs() -> None:
    pairs = _pairs()
    with pytest.raises(ValueError, match="at least one prompt pair"):
        pairs.select(slice(0, 0))
    with pytest.raises(ValueError, match=r"positions in 0\.\.3; pair 1 has 4"):
        PromptPairs(pairs.clean, pairs.corrupted, pairs.answers, pairs.wrong, torch.tensor([0, 4]))
    assert single_token(_tokenize, "cat", start=1) == 2


def test_answers_at_several_positions_are_several_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for a user
    pairs, both = _pairs(), torch.tensor([[1, 2], [2, 3]])
    with pytest.raises(ValueError, match=r"one position per pair; .*\(2, 2\).*repeat the prompt"):
        PromptPairs(pairs.clean, pairs.corrupted, pairs.answers, pairs.wrong, both)


@pytest.mark.parametrize("metric", [logit_difference, log_probability, margin])
def test_a_model_that_predicts_other_tokens_than_it_reads(metric: Metric) -> None:
    """Answers are output tokens: below d_vocab_out all is well, from there on it is refused."""
    pairs = _pairs()
    assert measure(metric, torch.randn(2, 7), pairs).shape == (2,)
    with pytest.raises(ValueError, match="among the 5 tokens that the model predicts; got token 6"):
        measure(metric, torch.randn(2, 5), pairs)


def test_metrics_by_hand() -> None:
    pairs = _pairs()
    logits = torch.tensor([[0.0, 0, 0, 0, 3, 1, 2], [0.0, 0, 5, 0, 0, 4, 2]], dtype=torch.float64)
    assert logit_difference(logits, pairs).tolist() == pytest.approx([3 - 1.5, 3 - 5])
    assert margin(logits, pairs).tolist() == pytest.approx([3 - 2, 3 - 5])
    first = [math.exp(x) for x in (0, 0, 0, 0, 3, 1, 2)]
    share = [x / sum(first) for x in first]
    assert probability_difference(logits, pairs)[0].item() == pytest.approx(
        share[4] - share[5] - share[6]
    )
    assert log_probability(logits, pairs)[0].item() == pytest.approx(math.log(share[4]))
    second = [math.exp(x) for x in (0, 0, 5, 0, 0, 4, 2)]
    both = (second[6] + second[5]) / sum(second)
    assert log_probability(logits, pairs)[1].item() == pytest.approx(math.log(both))
    assert divergence(logits, logits).tolist() == [0, 0]
    uniform = torch.zeros_like(logits)
    expected = sum(p * (math.log(p) + math.log(7)) for p in share)
    assert divergence(uniform, logits)[0].item() == pytest.approx(expected)


def test_metrics_that_are_none() -> None:
    pairs, logits = _pairs(), torch.zeros(2, 7)
    bad: list[tuple[Tensor, str]] = [
        (torch.zeros(2, 1), r"shape \(2,\), one value per pair; got \(2, 1\)"),
        (torch.tensor([0.0, math.nan]), "finite metric; pair 1 has nan"),
    ]
    for values, message in bad:
        with pytest.raises(ValueError, match=message):
            measure(lambda logits, pairs, values=values: values, logits, pairs)


def test_explained_effect_averages_before_it_divides() -> None:
    clean, corrupted = torch.tensor([4.0, 2.0]), torch.tensor([0.0, 1.0])
    circuits = torch.tensor([[4.0, 2.0], [0.0, 1.0], [4.0, 1.0]])
    effects = explained_effect(circuits, clean, corrupted)
    assert effects.tolist() == pytest.approx([1.0, 0.0, 4 / 5])
    with pytest.raises(ValueError, match="no effect to explain"):
        explained_effect(circuits, clean, clean.flip(0))

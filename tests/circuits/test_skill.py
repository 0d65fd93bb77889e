"""How well a model does a task, and from where on it does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sparse_tl.backend import Model
from sparse_tl.circuits import Skill, accuracy, measure_skill
from sparse_tl.data import PromptPairs
from sparse_tl.metrics import logit_difference


@pytest.fixture
def pairs() -> PromptPairs:
    """Of two lengths, with one to three right answers, and two wrong ones or one."""
    generator = torch.Generator().manual_seed(0)
    clean, corrupted = torch.randint(13, (2, 20, 6), generator=generator)
    options = torch.stack([torch.randperm(13, generator=generator)[:5] for _ in range(20)])
    answers, wrong = options[:, :3].clone(), options[:, 3:].clone()
    answers[::2, 1:] = -1
    wrong[::3, 1] = -1
    return PromptPairs(clean, corrupted, answers, wrong, torch.tensor([5, 3]).repeat(10), start="")


def test_what_is_measured_is_what_the_model_predicts(
    build_tiny: Callable[..., Model], pairs: PromptPairs
) -> None:
    model = build_tiny()
    found = measure_skill(model, pairs, logit_difference, batch_size=7)
    top, right, clean, corrupted, chance = [], [], [], [], []
    for row in range(20):
        end = int(pairs.positions[row])
        answers = [token for token in pairs.answers[row].tolist() if token >= 0]
        wrong = [token for token in pairs.wrong[row].tolist() if token >= 0]
        with torch.no_grad():
            logits = model(pairs.clean[row : row + 1, : end + 1])[0, -1]
            others = model(pairs.corrupted[row : row + 1, : end + 1])[0, -1]
        top.append(int(logits.argmax()) in answers)
        right.append(bool(logits[answers].max() > logits[wrong].max()))
        chance.append(len(answers) / len(answers + wrong))
        for side, some in ((clean, logits), (corrupted, others)):
            side.append((some[answers].mean() - some[wrong].mean()).item())
    assert found.right.tolist() == right
    assert found.accuracy == sum(top) / 20 == accuracy(model, pairs)
    assert found.choice == pytest.approx(sum(right) / 20)
    assert found.chance == pytest.approx(sum(chance) / 20)
    assert found.clean.tolist() == pytest.approx(clean, abs=1e-5)
    assert found.corrupted.tolist() == pytest.approx(corrupted, abs=1e-5)


def _skill(right: int, n: int, *, chance: float = 0.5, change: float = 3.0) -> Skill:
    """One whose metric is 2, give or take 1, and falls by `change`."""
    clean = 2 + torch.tensor([1.0, -1.0]).repeat(n // 2)
    corrupted = torch.full((n,), 2 - change)
    return Skill(0.5, torch.arange(n) < right, chance, clean.double(), corrupted.double())


def test_a_choice_is_two_standard_errors_above_chance_and_a_tenth() -> None:
    # Of 64 choices at random, the standard error is 1/16: more than 0.5 + 2/16 is needed.
    assert _skill(40, 64).needed == 0.625
    assert "prefers a right answer" in _skill(40, 64).lack and not _skill(41, 64).lack
    # Of 400 it is 0.025, and a tenth is more.
    assert _skill(240, 400).needed == pytest.approx(0.6)
    sentence = "60.0% of 400 prompts, where chance is 50.0% and more than 60.0%"
    assert sentence in _skill(240, 400).lack
    assert not _skill(241, 400).lack
    assert _skill(20, 64, chance=1 / 11).needed == pytest.approx(1 / 11 + 0.1)


def test_the_corruption_lowers_the_metric_by_two_standard_errors_and_a_tenth() -> None:
    # The change of 64 pairs has a standard error of 0.126: 0.2, a tenth of 2, is less than two.
    assert "must lower the metric by more than 0.252" in _skill(64, 64, change=0.25).lack
    assert not _skill(64, 64, change=0.26).lack
    assert "by more than 0.2," in _skill(400, 400, change=0.19).lack
    assert not _skill(400, 400, change=0.21).lack
    for change in (0.0, -1.0):
        assert _skill(64, 64, change=change).lack
    for n in (2, 4):  # all right by chance one time in four, or sixteen
        assert "prompts cannot show that the model does this task" in _skill(n, n).lack
    assert not _skill(6, 6).lack


def test_a_pair_without_a_wrong_answer(
    build_tiny: Callable[..., Model], pairs: PromptPairs
) -> None:
    wrong = pairs.wrong.clone()
    wrong[4] = -1
    with pytest.raises(ValueError, match="pair 4 has no wrong answer"):
        measure_skill(build_tiny(), replace(pairs, wrong=wrong), logit_difference)

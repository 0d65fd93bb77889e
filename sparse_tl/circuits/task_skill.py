"""How well a model does a task, and whether it does it at all.

*Accuracy* is the share of clean prompts that the model continues by a right answer, if it always
takes the most likely token. *Choice* is the share in which a right answer, as a whole, is more
likely than every wrong one, and *chance* is what a random choice among right and wrong answers
would give. A model does a task if

1. its choice is above chance by more than two standard errors of a random choice, and by at least
   `MARGIN`; and
2. corrupting the prompts lowers the mean metric by more than two standard errors, and by at least a
   share `MARGIN` of it. This excludes models that prefer right answers whatever the prompt says: a
   model that always answers 99 makes every choice of Greater-Than right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import HookedModel, in_evaluation_mode
from sparse_tl.circuits.pair_runs import clean_logits
from sparse_tl.data import PromptPairs
from sparse_tl.metrics import Metric, check_wrong, chooses_right, is_right, measure
from sparse_tl.results import OfPrompts

MARGIN = 0.1
"""Minimum difference that counts, however many prompts there are."""
STANDARD_ERRORS = 2
"""Minimum difference that counts, in standard errors."""


@dataclass(frozen=True, eq=False)
class Skill(OfPrompts):
    """How well a model does a task.

    Args:
        accuracy: share of clean prompts that the model continues by a right answer.
        right: whether the most likely of all right and wrong answers is right, per clean prompt.
        chance: mean share of right answers among all answers.
        clean: metric of each clean prompt.
        corrupted: metric of each corrupted prompt.
    """

    accuracy: float
    right: Bool[Tensor, " pair"]
    chance: float
    clean: Float[Tensor, " pair"]
    corrupted: Float[Tensor, " pair"]

    @property
    def choice(self) -> float:
        """The share of prompts, 0 to 1, in which a right answer beats every wrong one."""
        return self.right.double().mean().item()

    @property
    def needed(self) -> float:
        """The choice that a model must exceed to do the task."""
        error = math.sqrt(self.chance * (1 - self.chance) / len(self.right))
        return self.chance + max(MARGIN, STANDARD_ERRORS * error)

    @property
    def lack(self) -> str:
        """Why the model does not do the task, as a sentence; empty if it does."""
        if self.needed >= 1:
            return (
                f"{len(self.right)} prompts cannot show that the model does this task, since "
                "chance may get all of them right: give more pairs, or more wrong answers"
            )
        if self.choice <= self.needed:
            return (
                "the model does not do this task: it prefers a right answer to the wrong ones in "
                f"{self.choice:.1%} of {len(self.right)} prompts, where chance is "
                f"{self.chance:.1%} and more than {self.needed:.1%} is needed, so there is no "
                "circuit to find"
            )
        change, metric = self.clean - self.corrupted, self.clean.mean().item()
        error = change.std().item() / math.sqrt(len(change))
        least = max(MARGIN * abs(metric), STANDARD_ERRORS * error)
        if not change.mean().item() > least:
            return (
                f"the model does not do this task: corrupting its {len(self.right)} prompts must "
                f"lower the metric by more than {least:.4g}, but changes it from {metric:.4g} to "
                f"{self.corrupted.mean().item():.4g}, so there is no circuit to find"
            )
        return ""

    @property
    def numbers(self) -> dict[str, float]:
        """Accuracy, choice, and chance."""
        return {"accuracy": self.accuracy, "choice": self.choice, "chance": self.chance}

    def __str__(self) -> str:
        return (
            f"{self.accuracy:.1%} of {len(self.right)} prompts right; choice {self.choice:.1%}, "
            f"chance {self.chance:.1%}"
        )

    def __repr__(self) -> str:
        return f"Skill({self}{'; not done' if self.lack else ''})"


@checked
@in_evaluation_mode
@torch.no_grad()
def measure_skill(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Skill:
    """How well a model does a task, from two forward passes per batch.

    The arguments are those of `attribute_circuit_edges`; pairs have wrong answers.

    Raises:
        ValueError: a pair has no wrong answer, or the metric is not one finite number per pair.
    """
    check_wrong(pairs)
    swapped = replace(pairs, clean=pairs.corrupted, corrupted=pairs.clean)
    measures = is_right, chooses_right, partial(measure, metric)
    on_clean, on_corrupted = (
        [
            tuple(of(logits, batch).cpu() for of in measures)
            for batch, logits in clean_logits(model, side, batch_size, progress=progress)
        ]
        for side in (pairs, swapped)
    )
    top, right, clean = map(torch.cat, zip(*on_clean, strict=True))
    _, _, corrupted = map(torch.cat, zip(*on_corrupted, strict=True))
    clean, corrupted = clean.double(), corrupted.double()
    share = top.double().mean().item()
    return Skill(share, right, pairs.chance, clean, corrupted, prompt_start=pairs.start)


@checked
@in_evaluation_mode
@torch.no_grad()
def accuracy(model: HookedModel, pairs: PromptPairs, *, batch_size: AtLeastOne = 32) -> float:
    """The share of clean prompts, 0 to 1, that a model continues by an answer: its most likely
    next token, or tokens one after the other, are those of the answer.

    `measure_skill` also says how often an answer is more likely than every wrong answer, and
    compares this with chance.
    """
    runs = clean_logits(model, pairs, batch_size)
    right = [is_right(logits, batch).cpu() for batch, logits in runs]
    return torch.cat(right).double().mean().item()

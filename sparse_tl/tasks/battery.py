"""A battery of skills that no task asks for: what post-training may lose without a trace.

It has agreement, in templates that the tasks do not use, and *completions*: ``The opposite of hot
is`` is continued by *cold*, and not by *hot* or *up*. A completion has no corrupted counterpart;
both prompts of its pairs are the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any

from sparse_tl.calls.arguments import checked
from sparse_tl.data.pairs import PairTexts, tokens_of_pairs
from sparse_tl.metrics import Metric, logit_difference
from sparse_tl.tasks.agreement import AnaphorTask, SubjectVerbTask
from sparse_tl.tasks.words import Task, WordTask, content


@checked
@dataclass(frozen=True, kw_only=True)
class CompletionTask(WordTask):
    """Complete a text with a right word rather than a wrong one.

    Args:
        templates: texts with ``{}`` where a row's own texts go.
        rows: texts for a template, then the right words and the wrong ones, as in
            ``("hot", "cold", "hot|up")``.
        gap: text between prompt and word.
    """

    metric: Metric = field(default=logit_difference, repr=False)
    templates: Sequence[str] = field(repr=False)
    rows: Sequence[Sequence[str]] = field(repr=False)
    gap: str = " "

    @property
    def prompts(self) -> list[PairTexts]:
        """The prompts of all templates, with their answers."""
        made = []
        for template, (*texts, right, wrong) in product(self.templates, self.rows):
            text = template.format(*texts)
            answers, others = (
                tuple(f"{self.gap}{word}" for word in words.split("|")) for words in (right, wrong)
            )
            made.append(PairTexts(text, text, answers, others))
        return made

    def words(self, tokenizer: Any) -> dict[str, list[PairTexts]]:
        """The prompts whose answers are all single tokens."""
        usable = []
        for prompt in self.prompts:
            with suppress(ValueError):
                usable += [prompt for _ in tokens_of_pairs(tokenizer, [prompt], ())]
        if not usable:
            raise ValueError(
                f"no prompt of {self.name} has answers that are single tokens under this tokenizer"
            )
        return {"prompts": usable}

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt; none is drawn again before all others."""
        prompts = self.words(tokenizer)["prompts"]
        return cycle(rng.sample(prompts, len(prompts))).__next__


_KINDS = {"verbs": SubjectVerbTask, "anaphors": AnaphorTask, "completions": CompletionTask}
BATTERY: tuple[Task, ...] = tuple(
    kind(**family | {"templates": tuple(family["templates"])})
    for key, kind in _KINDS.items()
    for family in content("battery", key)
)
"""The families of prompts that `measure_skills` measures."""

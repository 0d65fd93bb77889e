"""Induction: random tokens, repeated except for the last one, which is the answer.

``A B C D A B C`` is continued by D, which followed C before. The corrupted prompt has another token
in place of the first C, so the token after it cannot be looked up. Tokens are drawn from the full
vocabulary, except special ones, so the task works for every tokenizer, and for models without one.

Reference: Olsson et al., *In-context Learning and Induction Heads*, arXiv 2209.11895.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le

from sparse_tl.arguments import Seed, checked
from sparse_tl.backend import HookedModel
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.data.prompts import ordinary_tokens, start_of_prompts
from sparse_tl.tasks.task import Pairs, Task, draw_distinct


@checked
@dataclass(frozen=True, kw_only=True)
class InductionTask(Task):
    """Continue random tokens that are repeated.

    Args:
        length: number of tokens, all different, before the repetition.
    """

    name: str = "induction"
    title: str = "Induction"
    length: Annotated[int, Ge(2), Le(100_000)] = 16

    def pairs(
        self,
        model: HookedModel,
        n: Pairs,
        *,
        seed: Seed = 0,
        prepend_bos: bool | None = None,
        chat: bool = False,
    ) -> PromptPairs:
        """Clean and corrupted prompts; the wrong answers are the other repeated tokens.

        Arguments as in other tasks; the model may have no tokenizer.

        Raises:
            ValueError: the vocabulary is too small, or prompts cannot start as requested.
        """
        start, start_text = start_of_prompts(model, prepend_bos, chat=chat)
        known = ordinary_tokens(model)
        if len(known) <= self.length:
            raise ValueError(
                f"the vocabulary has {len(known)} tokens without special ones, too few to repeat "
                f"{self.length} and replace one. Give the task a smaller `length`."
            )
        rng = random.Random(seed)

        def draw() -> tuple[tuple[int, ...], ...]:
            *before, last, answer, other = rng.sample(known, self.length + 1)
            again = (*before, last)
            corrupted = (*start, *before, other, answer, *again)
            return (*start, *again, answer, *again), corrupted, (answer,), again

        sides = map(torch.tensor, zip(*draw_distinct(draw, n), strict=True))
        clean, corrupted, answers, wrong = sides
        end = torch.full((n,), clean.shape[1] - 1)
        return PromptPairs(clean, corrupted, answers, wrong, end, start=start_text)

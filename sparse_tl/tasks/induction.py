"""Induction: random tokens, repeated except for the last one, which is the answer.

``A B C D A B C`` is continued by D, which followed C before. The corrupted prompt has another token
in place of the first C, so the token after it cannot be looked up. Tokens are drawn from the full
vocabulary, except special ones, so the task works for every tokenizer, and for models without one.

Reference: Olsson et al., *In-context Learning and Induction Heads*, arXiv 2209.11895.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Le

from sparse_tl.backend import HookedModel
from sparse_tl.calls.arguments import Seed, checked
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.data.prompts import Tokens, ordinary_tokens, start_of_prompts
from sparse_tl.metrics import Metric, logit_difference
from sparse_tl.tasks.words import Pairs, Task, draw_distinct


class _Repeated(NamedTuple):
    clean: Tokens
    corrupted: Tokens
    answer: int
    wrong: Tokens


@checked
@dataclass(frozen=True, kw_only=True)
class InductionTask(Task):
    """Continue random tokens that are repeated.

    Args:
        length: number of tokens, all different, before the repetition.
    """

    name: str = "induction"
    title: str = "Induction"
    metric: Metric = field(default=logit_difference, repr=False)
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

        Args:
            model: model whose vocabulary is used, with or without a tokenizer.
            n: number of pairs.
            seed: random seed for the draws.
            prepend_bos: whether prompts start with the BOS token; by default as the model's own do.
            chat: whether each prompt begins the assistant's answer in a chat, written by the
                tokenizer's own template.

        Raises:
            ValueError: the vocabulary is too small, the model has no tokenizer for the requested
                start of prompts, the tokenizer lacks the chat template, both `prepend_bos` and
                `chat` are given, or `n` is out of range.
        """
        start, start_text = start_of_prompts(model, prepend_bos, chat=chat)
        known = ordinary_tokens(model)
        if len(known) <= self.length:
            raise ValueError(
                f"expected a vocabulary of more than {self.length} tokens, since that many "
                f"different tokens are repeated and one is replaced; it has {len(known)} without "
                "special tokens. Give the task a smaller `length`."
            )
        rng = random.Random(seed)

        def draw() -> _Repeated:
            *before, last, answer, other = rng.sample(known, self.length + 1)
            again = (*before, last)
            return _Repeated(
                (*start, *again, answer, *again),
                (*start, *before, other, answer, *again),
                answer,
                again,
            )

        clean, corrupted, answers, wrong = map(
            torch.tensor, zip(*draw_distinct(draw, n), strict=True)
        )
        end = torch.full((n,), clean.shape[1] - 1)
        return PromptPairs(clean, corrupted, answers[:, None], wrong, end, start=start_text)

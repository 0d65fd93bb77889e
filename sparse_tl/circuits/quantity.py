"""The quantity whose changes are the effects of parts: a metric of the predictions of one prompt.

Any metric of prompt pairs will do. A prompt has no answers of its own: unless they are given, they
are what the model predicts and its runner-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.circuits.prompt import Token, output_number
from sparse_tl.data import PromptPairs
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric, log_probability

Answers = Token | Sequence[Token]
"""A token for all targets, or one for each."""


@dataclass(frozen=True)
class Quantity:
    """A metric, and the tokens that it judges.

    Args:
        metric: metric function.
        answer: the right answers; by default what the model predicts.
        wrong: the wrong answers; by default the likeliest other token, also where this one is the
            answer itself.
    """

    metric: Metric = log_probability
    answer: Answers | None = None
    wrong: Answers | None = None

    def pairs(
        self,
        model: HookedModel,
        tokens: Int[Tensor, " pos"],
        read_at: Sequence[int],
        logits: Float[Tensor, "target vocab"],
    ) -> PromptPairs:
        """The prompt with its answers, once for every target; nothing is corrupted.

        Args:
            model: dense or sparse model.
            tokens: tokens of the prompt.
            read_at: column at which each target is predicted.
            logits: the model's logits there.

        Raises:
            ValueError: an answer is not one output of the model, or their number is not that of
                the targets.
        """
        logits = logits.detach().cpu()
        answers = _numbers(model, self.answer, "answer", logits.argmax(dim=-1))
        others = logits.scatter(-1, answers[:, None], -torch.inf).argmax(dim=-1)
        wrong = _numbers(model, self.wrong, "wrong", others)
        wrong = torch.where(wrong == answers, others, wrong)
        prompts = tokens.expand(len(answers), -1)
        positions = torch.tensor(list(read_at))
        return PromptPairs(prompts, prompts, answers[:, None], wrong[:, None], positions)


def _numbers(
    model: HookedModel, given: Answers | None, name: str, default: Int[Tensor, " target"]
) -> Int[Tensor, " target"]:
    if given is None:
        return default
    each = [given] * len(default) if isinstance(given, Token) else given
    if len(each) != len(default):
        raise ValueError(
            f"expected one token as {name}=, or one for each of {len(default)} positions; got "
            f"{len(each)}"
        )
    return torch.tensor([output_number(model, token) for token in each])


LOG_PROBABILITY = Quantity()
"""Of what the model predicts."""

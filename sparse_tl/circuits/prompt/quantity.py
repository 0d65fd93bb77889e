"""The quantity whose changes are the effects of parts on a single prompt.

It is a metric of prompt pairs. A single prompt has no answers; unless they are given, the answer is
the token that the model predicts, and the wrong answer its runner-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.circuits.prompt.tokens import Token, output_number
from sparse_tl.data import PromptPairs
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric, log_probability

Answers = Token | Sequence[Token]
"""One token for all targets, or one token per target."""


@dataclass(frozen=True)
class Quantity:
    """A metric, with the answers that it is computed for.

    Args:
        metric: metric function.
        answer: the right answers; by default, the model's predictions.
        wrong: the wrong answers; by default, and where one equals the answer, the most likely token
            other than the answer.
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
        """The prompt as one pair per target, with its answers; the corrupted prompt is the same.

        Args:
            model: dense or sparse model.
            tokens: tokens of the prompt.
            read_at: column at which each target is predicted.
            logits: the model's logits there.

        Raises:
            ValueError: an answer is not one output of the model, or there is not one answer per
                target.
        """
        logits = logits.detach().cpu()
        answers = _numbers(model, self.answer, "answer", logits.argmax(dim=-1))
        runners_up = logits.scatter(-1, answers[:, None], -torch.inf).argmax(dim=-1)
        wrong = _numbers(model, self.wrong, "wrong", runners_up)
        wrong = torch.where(wrong == answers, runners_up, wrong)
        prompts = tokens.expand(len(answers), -1)
        positions = torch.tensor(list(read_at))
        return PromptPairs(prompts, prompts, answers[:, None], wrong[:, None], positions)


def _numbers(
    model: HookedModel, given: Answers | None, name: str, default: Int[Tensor, " target"]
) -> Int[Tensor, " target"]:
    if given is None:
        return default
    tokens = [given] * len(default) if isinstance(given, Token) else given
    if len(tokens) != len(default):
        raise ValueError(
            f"expected one token as {name}=, or one for each of {len(default)} positions; got "
            f"{len(tokens)}"
        )
    return torch.tensor([output_number(model, token) for token in tokens])


LOG_PROBABILITY = Quantity()
"""The log-probability of the model's prediction."""

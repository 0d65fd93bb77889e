"""Prompts as tokens of a model, the texts of its tokens and outputs, and what is measured there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import HookedModel, adapt, check_tokens
from sparse_tl.data import PromptPairs, prompts
from sparse_tl.data.prompts import Encoder, check_known, single_token, start_of_prompts
from sparse_tl.metrics import Metric, log_probability

Prompt = str | Int[Tensor, " pos"]
"""Text or tokens."""
Token = str | int
"""Text or number of a token."""
LISTED = 5
"""Number of tokens in each list of those that a part promotes or suppresses."""
_AT_ONCE = 64
_CONTEXT = 16
"""Number of tokens before an answer that say how its text is tokenised."""
Answers = Token | Sequence[Token]
"""One token for all targets, or one token per target."""


def prompt_tokens(
    model: HookedModel, prompt: Prompt, *, longest: int | None = None
) -> Int[Tensor, " _"]:
    """The tokens of a prompt, or the first `longest`, checked against the model, on the CPU."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(
                f"the model has no tokenizer for the text {prompt!r}: pass tokens, and the texts "
                "of the columns as labels="
            )
        if not prompt:
            raise ValueError("the prompt is empty")
        check_known(model.tokenizer, prompt)
        start, _ = start_of_prompts(model)
        tokens = torch.tensor([*start, *Encoder(model.tokenizer)(prompt)])
    else:
        tokens = prompt
    tokens = tokens[:longest]
    check_tokens(adapt(model), tokens)
    return tokens.cpu()


def token_texts(model: HookedModel, tokens: Int[Tensor, " pos"]) -> list[str]:
    """The text of each token, as figures show it; its number if the model has no tokenizer."""
    if model.tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    return prompts.decode_tokens(model.tokenizer, tokens.tolist())


def text_around(
    model: HookedModel, tokens: Int[Tensor, " pos"], position: int
) -> tuple[str, str, str]:
    """The text of a prompt before a token, of the token, and after it."""
    numbers = tokens.tolist()
    before, token, after = numbers[:position], numbers[position], numbers[position + 1 :]
    if model.tokenizer is None:
        return "".join(f"{n} " for n in before), str(token), "".join(f" {n}" for n in after)
    decode = model.tokenizer.decode
    end = len(decode(numbers[: position + 1]))
    text = prompts.added_text(model.tokenizer, before, [token])
    return decode(before), text, decode(numbers)[end:]


def output_text(model: HookedModel, output: int, before: Int[Tensor, " pos"]) -> str:
    """The text of a model output: that of its token, or its number if outputs are not tokens.

    It may complete a character that the tokens before it begin.
    """
    return _output_texts(model)(before.tolist(), output)


def _output_texts(model: HookedModel) -> Callable[[list[int], int], str]:
    adapter = adapt(model)
    if model.tokenizer is None or adapter.d_vocab_out != adapter.d_vocab:
        return lambda before, output: str(output)
    return partial(prompts.next_text, model.tokenizer)


@torch.no_grad()
def read_out(
    model: HookedModel,
    added: Float[Tensor, "row d_model"],
    residual: Float[Tensor, "#row d_model"],
) -> tuple[list[list[str]], list[list[str]]]:
    """The texts of the outputs whose logits a summand of the final residual stream raises most, and
    lowers most; the whole stream sets the scale of the final norm."""
    (weight, _), norm = adapt(model).unembedding(), adapt(model).final_norm
    found: tuple[list[list[str]], list[list[str]]] = [], []
    text = partial(_output_texts(model), [])
    for rows in norm.share(added, residual).to(weight).split(_AT_ONCE):
        logits = rows @ weight
        for texts, values in zip(found, (logits, -logits), strict=True):
            for row in values.topk(min(LISTED, values.shape[1])).indices.tolist():
                texts.append([*map(text, row)])
    return found


def output_number(model: HookedModel, answer: Token, before: Int[Tensor, " pos"]) -> int:
    """The number of a model output, from its number or the text of its token after some others."""
    if isinstance(answer, str):
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise ValueError(f"the model has no tokenizer: give {answer!r} as a number")
        check_known(tokenizer, answer)
        prompt = tokenizer.decode(before[-_CONTEXT:].tolist(), skip_special_tokens=True)
        answer = single_token(Encoder(tokenizer), answer, prompt)
    n_outputs = adapt(model).d_vocab_out
    if not 0 <= answer < n_outputs:
        raise ValueError(f"answer {answer} is not an output of the model, 0..{n_outputs - 1}")
    return answer


@dataclass(frozen=True)
class Quantity:
    """A metric, whose changes are the effects of parts, with the answers that it is computed for.

    By default, the log-probability of the model's prediction.

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

        The model's logits are those at `read_at`, the column at which each target is predicted.
        """
        logits = logits.detach().cpu()
        before = [tokens[: column + 1] for column in read_at]
        answers = _numbers(model, self.answer, logits.argmax(dim=-1), before)
        runners_up = logits.scatter(-1, answers[:, None], -torch.inf).argmax(dim=-1)
        wrong = _numbers(model, self.wrong, runners_up, before)
        wrong = torch.where(wrong == answers, runners_up, wrong)
        prompts = tokens.expand(len(answers), -1)
        positions = torch.tensor(list(read_at))
        return PromptPairs(prompts, prompts, answers[:, None], wrong[:, None], positions)


def _numbers(
    model: HookedModel,
    given: Answers | None,
    default: Int[Tensor, " target"],
    before: Sequence[Tensor],
) -> Int[Tensor, " target"]:
    if given is None:
        return default
    tokens = [given] * len(default) if isinstance(given, Token) else given
    if len(tokens) != len(default):
        raise ValueError(f"{len(tokens)} answers for {len(default)} positions: give one for each")
    return torch.tensor([output_number(model, *both) for both in zip(tokens, before, strict=True)])

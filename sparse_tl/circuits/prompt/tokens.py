"""Prompts as tokens of a model, and the texts of its tokens and outputs."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.data import prompts
from sparse_tl.data.prompts import Encoder, check_known, prepends_bos, prompt_start, single_token
from sparse_tl.lens import HookedModel, adapt, check_tokens

Prompt = str | Int[Tensor, " pos"]
"""Text or tokens."""
Token = str | int
"""Text or number of a token."""


def prompt_tokens(model: HookedModel, prompt: Prompt) -> Int[Tensor, " pos"]:
    """The tokens of a prompt, checked against the model, on the CPU.

    Raises:
        ValueError: the model cannot run the prompt.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(
                f"expected the tokens of the prompt, since the model has no tokenizer; got the "
                f"text {prompt!r}; texts of the columns can be given as labels="
            )
        if not prompt:
            raise ValueError("expected a prompt; got an empty text")
        check_known(model.tokenizer, prompt)
        start = prompt_start(model.tokenizer, prepends_bos(model))
        tokens = torch.tensor([*start, *Encoder(model.tokenizer)(prompt)])
    else:
        tokens = prompt
    if tokens.ndim != 1 or len(tokens) == 0:
        raise ValueError(f"expected the tokens of one prompt; got shape {tuple(tokens.shape)}")
    check_tokens(adapt(model), tokens)
    return tokens.cpu()


def token_texts(model: HookedModel, tokens: Int[Tensor, " pos"]) -> list[str]:
    """The text of each token, as figures show it; its number if the model has no tokenizer."""
    if model.tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    return prompts.token_texts(model.tokenizer, tokens.tolist())


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
    text = prompts.added_text(model.tokenizer, before, token)
    return decode(before), text, decode(numbers)[end:]


def output_text(model: HookedModel, output: int, before: Int[Tensor, " pos"]) -> str:
    """The text of a model output: that of its token, or its number if outputs are not tokens.

    Args:
        model: dense or sparse model.
        output: number of the output.
        before: tokens before the output, since it may complete a character that they begin.
    """
    adapter = adapt(model)
    if model.tokenizer is None or adapter.d_vocab_out != adapter.d_vocab:
        return str(output)
    return prompts.next_text(model.tokenizer, before.tolist(), output)


def output_number(model: HookedModel, answer: Token) -> int:
    """The number of a model output.

    Args:
        model: dense or sparse model.
        answer: number of the output, or text of its token, including a leading space.

    Raises:
        ValueError: the text is not one token, or the model has no such output.
    """
    if isinstance(answer, str):
        if model.tokenizer is None:
            raise ValueError(
                f"expected the number of the answer, since the model has no tokenizer; got "
                f"{answer!r}"
            )
        check_known(model.tokenizer, answer)
        answer = single_token(Encoder(model.tokenizer), answer)
    n_outputs = adapt(model).d_vocab_out
    if not 0 <= answer < n_outputs:
        raise ValueError(f"expected an answer in 0..{n_outputs - 1}; got {answer}")
    return answer

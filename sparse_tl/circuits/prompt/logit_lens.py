"""The logit lens: what the model would predict if it ended before a layer.

    logits[layer, pos] = unembed(norm(residual stream that enters the layer))

with the model's final norm and unembedding; after the last layer, these are the model's logits.

Reference: nostalgebraist, "interpreting GPT: the logit lens", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.arguments import checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.prompt.tokens import (
    Prompt,
    Token,
    output_number,
    output_text,
    prompt_tokens,
    token_texts,
)
from sparse_tl.data.prompts import Encoder, check_known, continued
from sparse_tl.lens import HookedModel, adapt, check_numbers, in_evaluation_mode, record
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class LogitLens(Result):
    """Predictions of one prompt by layer and position, from `logit_lens`.

    Each row is a residual stream; the last row, after the last layer, is the model's prediction.

    Args:
        tokens: text of each position.
        answer: text of the token whose probability is tracked.
        probability: probability of the answer as the next token.
        top: text of the most likely next token.
        top_probability: probability of that token.
    """

    tokens: Sequence[str]
    answer: str
    probability: Float[Tensor, "row pos"]
    top: Sequence[Sequence[str]]
    top_probability: Float[Tensor, "row pos"]

    @property
    def rows(self) -> tuple[str, ...]:
        """The name of each row: the layer that reads the residual stream, or "final"."""
        return (*map(str, range(len(self.top) - 1)), "final")

    def to_pandas(self) -> pd.DataFrame:
        """One row per layer and position: token, top token, and both probabilities."""
        import pandas as pd

        n_positions = len(self.tokens)
        return pd.DataFrame(
            {
                "layer": [row for row in self.rows for _ in self.tokens],
                "position": list(range(n_positions)) * len(self.rows),
                "token": list(self.tokens) * len(self.rows),
                "top": [text for row in self.top for text in row],
                "top_probability": self.top_probability.flatten().tolist(),
                "probability": self.probability.flatten().tolist(),
            }
        )

    def _summary(self) -> pd.DataFrame:
        """The top tokens by layer, the last layer first, and position."""
        import pandas as pd

        columns = [f"{position} {token!r}" for position, token in enumerate(self.tokens)]
        rows = [[name, *row] for name, row in zip(self.rows, self.top, strict=True)]
        return pd.DataFrame(rows[::-1], columns=["layer", *columns])

    def __repr__(self) -> str:
        shown = ", ".join(f"{p:.2g}" for p in self.probability[:, -1].tolist())
        return f"LogitLens({self.answer!r} after {self.tokens[-1]!r}, by layer: {shown})"


@checked
@in_evaluation_mode
@autograd(False)
def logit_lens(model: HookedModel, prompt: Prompt, *, answer: Token | None = None) -> LogitLens:
    """The most likely token at each layer and position, and the probability of an answer.

    Args:
        model: dense or sparse model; left unchanged.
        prompt: text or tokens.
        answer: token to track, as text or number; by default the model's prediction after the
            prompt. If prompt and answer are both texts, they are tokenised as one, so that a space
            at the end of the prompt can become part of the answer's token.

    Raises:
        ValueError: the model cannot run the prompt, or the answer is not exactly one token after
            the prompt.
    """
    adapter, tokens = adapt(model), prompt_tokens(model, prompt)
    if isinstance(answer, str) and isinstance(prompt, str):
        tokens, answer = _read_answer(model, prompt, tokens, answer)
    names = adapter.layer_points("hook_resid_pre")
    kept, final = record(adapter, tokens[None].to(adapter.device), names)
    streams = [*(kept[name] for name in names), final]
    logits = adapter.logits(final)[0, -1]
    check_numbers(adapter, logits)
    tracked = int(logits.argmax()) if answer is None else output_number(model, answer)
    probability, top, top_probability = [], [], []
    prefixes = [tokens[: position + 1] for position in range(len(tokens))]
    for stream in streams:  # one at a time: a vocabulary can have 250,000 tokens
        probabilities = adapter.logits(stream)[0].float().softmax(dim=-1)
        probability.append(probabilities[:, tracked].cpu())
        top_probability.append(probabilities.max(dim=-1).values.cpu())
        best = zip(probabilities.argmax(dim=-1).tolist(), prefixes, strict=True)
        top.append([output_text(model, token, prefix) for token, prefix in best])
    return LogitLens(
        token_texts(model, tokens),
        output_text(model, tracked, tokens),
        torch.stack(probability),
        top,
        torch.stack(top_probability),
    )


def _read_answer(
    model: HookedModel, prompt: str, tokens: Int[Tensor, " pos"], answer: str
) -> tuple[Int[Tensor, " read"], int]:
    """The tokens of a prompt, and the token with which the answer continues it."""
    encode = Encoder(model.tokenizer)
    check_known(model.tokenizer, answer)
    before, token = continued(encode, prompt, answer)
    start = tokens[: len(tokens) - len(encode(prompt))]
    return torch.cat([start, tokens.new_tensor(before)]), token

"""The logit lens: what the model would predict if it ended at a layer.

    logits[layer, pos] = unembed(norm(residual stream that enters the layer))

with the final norm and unembedding of the model itself; after the last layer, these are its own
logits.

Reference: nostalgebraist, "interpreting GPT: the logit lens", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.circuits.prompt import (
    Prompt,
    Token,
    output_number,
    output_text,
    prompt_tokens,
    token_texts,
)
from sparse_tl.data.known_text import check_known
from sparse_tl.data.prompts import Encoder, continued
from sparse_tl.lens import HookedModel, adapt, check_numbers, in_evaluation_mode, record
from sparse_tl.results import Result
from sparse_tl.scopes import autograd

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class LogitLens(Result):
    """Predictions of one prompt by layer and position, from `logit_lens`.

    The last row is the residual stream after the last layer: the model's own prediction.

    Args:
        tokens: text of each position.
        answer: token whose probability is tracked, as text.
        probability: probability of the answer at each position.
        top: most likely token, as text.
        top_probability: its probability.
    """

    tokens: Sequence[str]
    answer: str
    probability: Float[Tensor, "row pos"]
    top: Sequence[Sequence[str]]
    top_probability: Float[Tensor, "row pos"]

    @property
    def rows(self) -> tuple[str, ...]:
        """Name of each row: the layer that reads this residual stream, and "final"."""
        return (*map(str, range(len(self.top) - 1)), "final")

    def to_pandas(self) -> pd.DataFrame:
        """One row per layer and position: token, top token and both probabilities."""
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
        """The top tokens as a table of layers, last layer first, and positions."""
        import pandas as pd

        columns = [f"{place} {token!r}" for place, token in enumerate(self.tokens)]
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
        answer: token to track, as text or number; by default what the model predicts after the
            prompt. As texts, prompt and answer are read as one: a space at the end of the prompt
            belongs to the answer where the tokenizer reads it so.

    Raises:
        ValueError: the model cannot run the prompt, or the answer is not one token, or part of one
            that begins in the prompt.
    """
    adapter, tokens = adapt(model), prompt_tokens(model, prompt)
    if isinstance(answer, str) and isinstance(prompt, str):
        tokens, answer = _read_answer(model, prompt, tokens, answer)
    names = adapter.layer_points("hook_resid_pre")
    kept, final = record(adapter, tokens[None].to(adapter.device), names)
    streams = [*(kept[name] for name in names), final]
    own = adapter.logits(final)[0, -1]
    check_numbers(adapter, own)
    tracked = int(own.argmax()) if answer is None else output_number(model, answer)
    probability, best, likeliest = [], [], []
    starts = [tokens[: place + 1] for place in range(len(tokens))]
    for stream in streams:  # one at a time: there may be 250,000 tokens in the vocabulary
        found = adapter.logits(stream)[0].float().softmax(dim=-1)
        probability.append(found[:, tracked].cpu())
        likeliest.append(found.max(dim=-1).values.cpu())
        likely = zip(found.argmax(dim=-1).tolist(), starts, strict=True)
        best.append([output_text(model, token, before) for token, before in likely])
    return LogitLens(
        token_texts(model, tokens),
        output_text(model, tracked, tokens),
        torch.stack(probability),
        best,
        torch.stack(likeliest),
    )


def _read_answer(
    model: HookedModel, prompt: str, tokens: Int[Tensor, " pos"], answer: str
) -> tuple[Int[Tensor, " read"], int]:
    """The tokens of a prompt, and the token by which a text continues it."""
    encode = Encoder(model.tokenizer)
    check_known(model.tokenizer, answer)
    before, token = continued(encode, prompt, answer)
    start = tokens[: len(tokens) - len(encode(prompt))]
    return torch.cat([start, tokens.new_tensor(before)]), token

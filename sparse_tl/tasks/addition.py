"""Two-digit addition in characters: ``36+28=00064``, eleven tokens.

*Autoregressive*: the model also reads the characters of the sum and predicts each from those before
it; the loss is on the five answer characters. *Placeholder*: the answer columns contain ``?``, and
each character is read at its own column.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from jaxtyping import Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Seed, checked
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.pairs import PromptPairs

Form = Literal["autoregressive", "placeholder"]
Digit = Literal["hundreds", "tens", "units"]

CHARACTERS = "0123456789+=?"
LENGTH = 11
ANSWER = slice(6, 11)
"""The columns of the sum's five digits."""
COLUMNS: dict[str, int] = {"hundreds": 8, "tens": 9, "units": 10}
"""The columns of the digits that are not always 0."""


@checked
@dataclass(frozen=True)
class AdditionTask:
    """All 10,000 sums of two numbers below 100, in one form.

    Args:
        form: "autoregressive" or "placeholder".
    """

    form: Form = "placeholder"

    def batch(self, left: Int[Tensor, " sum"], right: Int[Tensor, " sum"]) -> TokenBatch:
        """Sums as tokens, labels and loss positions.

        Raises:
            ValueError: an operand is outside 0..99.
        """
        both = torch.cat([left, right])
        if ((both < 0) | (both > 99)).any():
            raise ValueError("operands have two digits each, 0..99")
        left, right = left.cpu().long(), right.cpu().long()
        plus, equals = (torch.full((len(left), 1), CHARACTERS.index(sign)) for sign in ("+", "="))
        parts = [_digits(left, 2), plus, _digits(right, 2), equals, _digits(left + right, 5)]
        text = torch.cat(parts, dim=1)
        loss_mask = torch.zeros_like(text, dtype=torch.bool)
        if self.form == "placeholder":
            tokens = text.clone()
            tokens[:, ANSWER] = CHARACTERS.index("?")
            loss_mask[:, ANSWER] = True
            return TokenBatch(tokens, text, loss_mask)
        # The character in a column is predicted one column to its left.
        loss_mask[:, ANSWER.start - 1 : ANSWER.stop - 1] = True
        return TokenBatch(text, text.roll(-1, dims=1), loss_mask)

    def split(
        self, *, validation: AtLeastOne = 1000, test: AtLeastOne = 1000, seed: Seed = 0
    ) -> tuple[TokenBatch, TokenBatch, TokenBatch]:
        """Disjoint random training, validation and test sums.

        Validation sums select among checkpoints; test sums are for reporting.
        """
        order = torch.randperm(10_000, generator=torch.Generator().manual_seed(seed))
        everything = self.batch(order // 100, order % 100)
        return (
            everything.select(slice(validation + test, None)),
            everything.select(slice(test, test + validation)),
            everything.select(slice(0, test)),
        )

    def pairs(
        self, digit: Digit, n: Annotated[int, Ge(1), Le(1000)], *, seed: Seed = 0
    ) -> PromptPairs:
        """Test sums, each paired with a sum that differs in the given digit.

        The answer is the clean sum's digit, and the wrong answer the corrupted sum's; the position
        is where that digit is read.

        Args:
            digit: "hundreds", "tens" or "units" of the answer.
            n: number of pairs, at most the 1,000 test sums.
            seed: random seed for the split, as in `split`, and for the pairs.
        """
        sums = self.split(seed=seed)[2]
        # The character in a column is predicted one column to its left, but for placeholders.
        position = COLUMNS[digit] - (self.form == "autoregressive")
        digits = sums.labels[:, position]
        generator = torch.Generator().manual_seed(seed)
        clean = torch.randperm(len(sums), generator=generator)[:n]
        differs = digits[clean, None] != digits
        corrupted = torch.multinomial(differs.float(), 1, generator=generator)[:, 0]
        return PromptPairs(
            sums.tokens[clean],
            sums.tokens[corrupted],
            digits[clean, None],
            digits[corrupted, None],
            torch.full((n,), position),
        )

    def prompt(self, text: str) -> TokenBatch:
        """A sum such as ``"36+28"`` as a batch of one.

        Raises:
            ValueError: the text is not two numbers of at most two digits joined by a plus sign.
        """
        operands = re.fullmatch(r"(\d\d?)\+(\d\d?)", text.replace(" ", ""))
        if operands is None:
            raise ValueError(f'expected a sum such as "36+28"; got {text!r}')
        left, right = map(int, operands.groups())
        return self.batch(torch.tensor([left]), torch.tensor([right]))


def _digits(numbers: Int[Tensor, " sum"], count: int) -> Int[Tensor, "sum digit"]:
    """The last `count` digits of numbers as tokens; a digit's token is the digit itself."""
    powers = 10 ** torch.arange(count - 1, -1, -1)
    return numbers[:, None] // powers % 10


def decode(tokens: Int[Tensor, " pos"]) -> str:
    """Convert tokens to characters."""
    return "".join(CHARACTERS[token] for token in tokens.tolist())


def addition_tokenizer() -> Any:
    """The character tokenizer; ``?`` is its mask token, and it does not add BOS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # TransformerLens would give a tokenizer without these tokens new ones outside the vocabulary.
    special = dict.fromkeys(("mask_token", "pad_token", "eos_token"), "?")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)

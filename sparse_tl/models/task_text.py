"""Data of the task model: its vocabulary, its tokenizer, and its training rows.

A row is a prompt of one of the four tasks, padded on the right; in a causal model, the padding
affects nothing before it. Most rows have a loss only where the answer is read. The others are
*text* rows, in which every token is predicted from those before it.

Whether a prompt belongs to training, validation or the held-out part depends only on its words, not
on the seed, so no draw from one part can contain a prompt of another.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.pairs import PairTexts, PromptPairs, pairs_of_texts
from sparse_tl.tasks import (
    DocstringTask,
    GreaterThanTask,
    IOILongTask,
    IOITask,
    docstring,
    greater_than,
    ioi,
)
from sparse_tl.tasks.words import WordTask, draw_distinct

Part = Literal["training", "validation", "held_out"]

TASKS: tuple[GreaterThanTask | IOITask | DocstringTask, ...] = (
    GreaterThanTask(),
    IOITask(),
    IOILongTask(),
    DocstringTask(),
)
"""The model's training tasks, in equal shares."""
N_NAMES, N_ARGUMENTS, N_NOUNS = 32, 48, 40
"""Number of words taken from the start of long word lists: few enough to learn in minutes."""
WIDTH = 30
"""Number of tokens in the longest prompt, Docstring's."""

MAX_DRAWS = 1000
"""Number of draws after which a part (an eighth of all prompts) is considered empty."""

PADDING, UNKNOWN = "<pad>", "<unk>"
_SPLIT = r'\d\d|\(self,|\):|"""|:param|\w+|[^\w\s]'
_FRAMES = 'The lasted from the year to def (self, , ): """ :param :'


def task_vocabulary() -> tuple[str, ...]:
    """All words of the model; a word's index is its token, and padding is token 0."""
    templates = re.sub(r"\[[A-Z]+\]", "", " ".join(ioi.TEMPLATES + ioi.LONG_TEMPLATES))
    words = [
        *(f"{number:02d}" for number in range(100)),
        *re.findall(_SPLIT, f"{_FRAMES} {templates}"),
        *greater_than.NOUNS,
        *ioi.NAMES[:N_NAMES],
        *ioi.PLACES,
        *ioi.OBJECTS,
        *docstring.ARGUMENTS[:N_ARGUMENTS],
        *docstring.NOUNS[:N_NOUNS],
    ]
    return tuple(dict.fromkeys([PADDING, UNKNOWN, *words]))


def task_tokenizer() -> Any:
    """The word tokenizer: years are two tokens, ``(self,`` and ``:param`` one token each."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: token for token, word in enumerate(task_vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(_SPLIT), "isolated")]
    )
    # TransformerLens would give a tokenizer without these tokens new ones outside the vocabulary.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, pad_token=PADDING, eos_token=PADDING
    )


def part_of(prompt: str) -> Part:
    """The part that a prompt belongs to: held out and validation are an eighth each."""
    remainder = zlib.crc32(prompt.encode()) % 8
    if remainder > 1:
        return "training"
    return "validation" if remainder else "held_out"


def task_pairs(
    task: WordTask, n: int, *, part: Part | str = "held_out", seed: int = 0
) -> PromptPairs:
    """Clean and corrupted prompts of one task, in the model's tokens.

    Args:
        task: one of `TASKS`, or another task of these types.
        n: number of pairs.
        part: part to draw from, decided by the clean prompt.
        seed: random seed for the draws.

    Raises:
        ValueError: the part is unknown or has no prompts, or `n` is below 1.
    """
    tokenizer = task_tokenizer()
    prompts = _draw(task, tokenizer, n, part, random.Random(seed))
    return pairs_of_texts(tokenizer, prompts, prepend_bos=False)


def task_rows(n: int, *, part: Part | str, text: float = 0.0, seed: int = 0) -> TokenBatch:
    """Shuffled rows of all tasks, with labels for every position and a loss mask.

    A prompt with several answers is labelled with one of them, drawn at random. Each task is a
    group of rows, in the order of `TASKS`; text rows form another group.

    Args:
        n: number of rows per task.
        part: part to draw from.
        text: share of text rows, in which every token is predicted, not only the answer.
        seed: random seed for the draws.

    Raises:
        ValueError: the part is unknown, `n` is below 1, or the share is outside 0..1.
    """
    if not 0 <= text <= 1:
        raise ValueError(f"expected a share of text in 0..1; got {text}")
    tokenizer, rng, rows = task_tokenizer(), random.Random(seed), []
    for number, task in enumerate(TASKS):
        prompts = _draw(task, tokenizer, n, part, rng)
        words = _encode(tokenizer, [prompt.clean for prompt in prompts])
        answers = _encode(tokenizer, [rng.choice(prompt.answers) for prompt in prompts])
        is_text = [index < text * n for index in range(n)]
        groups = [len(TASKS) if read else number for read in is_text]
        rows += zip(words, answers, is_text, groups, strict=True)
    rng.shuffle(rows)
    tokens = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    labels = torch.zeros_like(tokens)
    loss_mask = torch.zeros_like(tokens, dtype=torch.bool)
    attention_mask = torch.zeros_like(tokens)
    for row, (words, (answer,), is_text, _) in enumerate(rows):
        end = len(words)
        tokens[row, :end] = torch.tensor(words)
        labels[row, :end] = torch.tensor([*words[1:], answer])
        loss_mask[row, 0 if is_text else end - 1 : end] = True
        attention_mask[row, :end] = 1
    groups = torch.tensor([group for *_, group in rows])
    return TokenBatch(tokens, labels, loss_mask, attention_mask, groups)


def _draw(
    task: WordTask, tokenizer: Any, n: int, part: Part | str, rng: random.Random
) -> list[PairTexts]:
    if part not in get_args(Part):
        raise ValueError(f"expected one of {get_args(Part)} as part; got {part!r}")
    draw = task.drawing(tokenizer, rng)

    def draw_within() -> PairTexts:
        for _ in range(MAX_DRAWS):
            prompt = draw()
            if part_of(prompt.clean) == part:
                return prompt
        raise ValueError(
            f"expected prompts of {task} in the part {part!r}; {MAX_DRAWS} draws found none. Give "
            "the task more words."
        )

    return draw_distinct(draw_within, n)


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]

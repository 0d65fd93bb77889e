"""What the task model reads: its words, its tokenizer, and the rows that it is trained on.

A row is a prompt of one of the four tasks, filled up on the right with the padding token, which
nothing before it can see in a causal model. Most rows carry a loss where the answer is read and
nowhere else. The others are *text*: there every token is predicted from those before it.

Whether a prompt is for training, for validation or held out follows from its own words, whatever
the seed: no draw of one part can contain a prompt of another.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.tasks import (
    DocstringTask,
    GreaterThanTask,
    IOILongTask,
    IOITask,
    docstring,
    greater_than,
    ioi,
)
from sparse_tl.tasks.words import Prompt, WordTask, draw_distinct, to_pairs

Part = Literal["training", "validation", "held_out"]

TASKS: tuple[GreaterThanTask | IOITask | DocstringTask, ...] = (
    GreaterThanTask(),
    IOITask(),
    IOILongTask(),
    DocstringTask(),
)
"""The tasks that the model is trained on, each in equal shares."""
N_NAMES, N_ARGUMENTS, N_NOUNS = 32, 48, 40
"""Words taken from the start of the tasks' long lists: few enough to be learned in minutes."""
WIDTH = 30
"""Tokens of the longest prompt, Docstring's."""

MAX_DRAWS = 1000
"""Draws after which a part, an eighth of all prompts, is taken to be empty."""

PADDING, UNKNOWN = "<pad>", "<unk>"
_SPLIT = r'\d\d|\(self,|\):|"""|:param|\w+|[^\w\s]'
_FRAMES = 'The lasted from the year to def (self, , ): """ :param :'


def task_vocabulary() -> tuple[str, ...]:
    """All words of the model; a word's place is its token, and the padding's is 0."""
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
    """The tokenizer of words: years are two tokens, ``(self,`` and ``:param`` are one each."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: token for token, word in enumerate(task_vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(_SPLIT), "isolated")]
    )
    # TransformerLens gives a tokenizer without these tokens new ones, outside the vocabulary.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, pad_token=PADDING, eos_token=PADDING
    )


def part_of(prompt: str) -> Part:
    """The part that a prompt belongs to: one in eight is held out, one in eight for validation."""
    remainder = zlib.crc32(prompt.encode()) % 8
    if remainder > 1:
        return "training"
    return "validation" if remainder else "held_out"


def task_pairs(
    task: WordTask, n: int, *, part: Part | str = "held_out", seed: int = 0
) -> PromptPairs:
    """Clean and corrupted prompts of one task in the model's tokens.

    Args:
        task: one of `TASKS`, or of their kind.
        n: how many.
        part: of all prompts; the clean one decides.
        seed: of the draw.

    Raises:
        ValueError: an unknown part, one without a prompt, or no pair asked for.
    """
    tokenizer = task_tokenizer()
    prompts = _draw(task, tokenizer, n, part, random.Random(seed))
    return to_pairs(tokenizer, prompts, prepend_bos=False)


def task_rows(n: int, *, part: Part | str, text: float = 0.0, seed: int = 0) -> TokenBatch:
    """Rows of all tasks, shuffled, with the label of every position and where a loss is taken.

    A prompt of several answers is labelled with one of them, drawn at random. Every task is a group
    of rows, in the order of `TASKS`, and rows of text are one more.

    Args:
        n: rows of each task.
        part: of all prompts.
        text: share of the rows in which every token is predicted, not the answer alone.
        seed: of the draw.

    Raises:
        ValueError: an unknown part, no rows, or a share outside 0..1.
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
) -> list[Prompt]:
    if part not in get_args(Part):
        raise ValueError(f"expected one of {get_args(Part)} as part; got {part!r}")
    draw = task.drawing(tokenizer, rng)

    def draw_within() -> Prompt:
        for _ in range(MAX_DRAWS):
            prompt = draw()
            if part_of(prompt.clean) == part:
                return prompt
        raise ValueError(
            f"expected prompts of {task} that are in the part {part!r}; {MAX_DRAWS} draws found "
            "none. Give the task more words."
        )

    return draw_distinct(draw_within, n)


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]

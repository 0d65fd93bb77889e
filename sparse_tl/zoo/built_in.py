"""The built-in pairs: addition, and a small transformer that does four tasks; how they are trained.

*Addition*: 4 layers of 4 heads. *Tasks*: 12 layers of 12 heads. A row of the latter is a prompt of
one of the four tasks, padded on the right; in a causal model, the padding affects nothing before
it. Most rows have a loss only where the answer is read. The others are *text* rows, in which every
token is predicted from those before it.

Whether a prompt belongs to training, validation or the held-out part depends only on its words, not
on the seed, so no draw from one part can contain a prompt of another.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparse_tl.arguments import Seed, checked
from sparse_tl.backend import HookedModel, Model
from sparse_tl.circuits import accuracy
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.pairs import PairTexts, PromptPairs, pairs_of_texts
from sparse_tl.gates import SparseTransformer
from sparse_tl.tasks import (
    DocstringTask,
    GreaterThanTask,
    IOILongTask,
    IOITask,
    Task,
    docstring,
    greater_than,
    ioi,
)
from sparse_tl.tasks.addition import CHARACTERS, LENGTH, AdditionTask, Form, addition_tokenizer
from sparse_tl.tasks.task import draw_distinct
from sparse_tl.training import evaluate_held_out
from sparse_tl.zoo.building import Recipe, load_built_in

# ---- addition ------------------------------------------------------------------------------------


def addition_recipe(form: Form = "placeholder") -> Recipe:
    """The recipe of the addition models in one form."""
    task = AdditionTask(form)

    def measure(model: Model | SparseTransformer) -> dict[str, float]:
        measured = evaluate_held_out(model, task.split()[2])
        return {
            "accuracy": measured.accuracy,
            "active_attention_edges": measured.active_attention_edges,
        }

    return Recipe(
        name=f"addition-{form}",
        architecture={
            "n_layer": 4,
            "n_head": 4,
            "n_embd": 128,
            "n_inner": 512,
            "n_positions": LENGTH,
            "vocab_size": len(CHARACTERS),
            "activation_function": "relu",
        },
        tokenizer=addition_tokenizer,
        rows=lambda seed: task.split(seed=seed)[:2],
        measure=measure,
        batch_size=256,
        dense={
            "steps": 1200,
            "learning_rate": 1e-3,
            "good_enough": 1e-3,
            "weight_decay": 0.01,
            "evaluate_every": 50,
        },
        # At 0.002 nats, some runs get only 99.2 percent of unseen sums right.
        sparse={"steps": 600, "target_loss": 0.001},
    )


@checked
def load_addition_models(
    seed: Seed = 0,
    *,
    form: Form = "placeholder",
    cache: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> tuple[Model, SparseTransformer]:
    """The dense addition model and the sparse one made from it.

    Other arguments, errors and warnings are those of `load_task_models`.

    Args:
        seed: random seed of the pair; 0 comes with the package in the placeholder form.
        form: form of the sums.
    """
    recipe = addition_recipe(form)
    return load_built_in(recipe, seed, cache=cache, device=device, progress=progress)


def build_addition_model(seed: int = 0, device: str | None = None) -> Model:
    """An untrained model: 4 layers of 4 heads, d_model 128, MLPs of 512, 0.8 million weights."""
    return addition_recipe().build(seed, device)


# ---- four tasks ----------------------------------------------------------------------------------

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

PADDING, UNKNOWN = "<pad>", "<unk>"
_SPLIT = r'\d\d|\(self,|\):|"""|:param|\w+|[^\w\s]'
_FRAMES = 'The lasted from the year to def (self, , ): """ :param :'

TEXT_SHARE = 1 / 32
"""Share of the dense model's training rows in which every token is predicted, not only the answer.
"""
TRAINING_ROWS, VALIDATION_ROWS, MEASURED_ROWS = 8192, 256, 500
"""Numbers of prompts of each task."""
FRESH_ROWS, SEED_OFFSET = 16_384, 1_000
"""Number of prompts of each task in post-training, and the offset of the seed that draws them."""


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


def task_pairs(task: Task, n: int, *, part: Part | str = "held_out", seed: int = 0) -> PromptPairs:
    """Clean and corrupted prompts of one task, in the model's tokens.

    Args:
        task: one of `TASKS`, or another task of these types.
        n: number of pairs.
        part: part to draw from, decided by the clean prompt.
        seed: random seed for the draws.

    Raises:
        ValueError: the part is unknown or has no prompts.
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
        text: share of text rows, in which every token is predicted, not only the answer; 0 to 1.
        seed: random seed for the draws.

    Raises:
        ValueError: the part is unknown.
    """
    tokenizer, rng, rows = task_tokenizer(), random.Random(seed), []
    for number, task in enumerate(TASKS):
        prompts = _draw(task, tokenizer, n, part, rng)
        words = _encode(tokenizer, [prompt.clean for prompt in prompts])
        answers = _encode(tokenizer, [rng.choice(prompt.answers) for prompt in prompts])
        is_text = [index < text * n for index in range(n)]
        groups = [len(TASKS) if read else number for read in is_text]
        rows += zip(words, answers, is_text, groups, strict=True)
    rng.shuffle(rows)
    prompts, answers, is_text, groups = zip(*rows, strict=True)
    padding = [[0] * (WIDTH - len(words)) for words in prompts]
    whole = [words + answer for words, answer in zip(prompts, answers, strict=True)]
    column, end = torch.arange(WIDTH), torch.tensor([[len(words)] for words in prompts])
    start = torch.where(torch.tensor(is_text)[:, None], 0, end - 1)
    return TokenBatch(
        torch.tensor([words[:-1] + rest for words, rest in zip(whole, padding, strict=True)]),
        torch.tensor([words[1:] + rest for words, rest in zip(whole, padding, strict=True)]),
        (start <= column) & (column < end),
        (column < end).long(),
        torch.tensor(groups),
    )


def _draw(
    task: Task, tokenizer: Any, n: int, part: Part | str, rng: random.Random
) -> list[PairTexts]:
    draw = task.drawing(tokenizer, rng)

    def draw_within() -> PairTexts:
        for _ in range(1000):  # a part has an eighth of all prompts or more
            prompt = draw()
            if part_of(prompt.clean) == part:
                return prompt
        raise ValueError(
            f"no prompt of {task} was found in the part {part!r} of {get_args(Part)}. Give the "
            "task more words"
        )

    return draw_distinct(draw_within, n)


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def task_recipe() -> Recipe:
    """The recipe of the task models.

    Post-training has no text, which needs many edges and is not one of the tasks. Its rows are
    newly drawn, and none is seen twice: on rows that either model has memorised, the increase in
    loss differs from that on held-out rows.
    """
    return Recipe(
        name="tasks",
        architecture={
            "n_layer": 12,
            "n_head": 12,
            "n_embd": 144,
            "n_inner": 288,
            "n_positions": WIDTH + 2,
            "activation_function": "relu",
            "vocab_size": len(task_vocabulary()),
        },
        tokenizer=task_tokenizer,
        rows=lambda seed: _rows(TRAINING_ROWS, seed, TEXT_SHARE),
        sparse_rows=lambda seed: _rows(FRESH_ROWS, SEED_OFFSET + seed),
        measure=_measure,
        batch_size=64,
        dense={
            "steps": 1000,
            "learning_rate": 1e-3,
            "decay": 0.5,
            "weight_decay": 0.01,
            "evaluate_every": 100,
        },
        sparse={"steps": 1200, "target_loss": "+0.01"},
    )


@checked
def load_task_models(
    seed: Seed = 0,
    *,
    cache: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> tuple[Model, SparseTransformer]:
    """The dense task model and the sparse one made from it.

    Args:
        seed: random seed of the pair; 0 comes with the package, others are built if absent.
        cache: folder for pairs that are built; the user's cache folder by default.
        device: device of the models, also for building; a GPU by default if there is one.
        progress: whether to show a progress bar while building.

    Raises:
        OSError: the folder cannot be written.
        ValueError: it holds damaged models.
        KeyboardInterrupt: after Ctrl-C, once the state is saved; another call resumes.

    Warns:
        UserWarning: the sparse model missed its post-training target.
    """
    return load_built_in(task_recipe(), seed, cache=cache, device=device, progress=progress)


def task_accuracy(model: HookedModel, *, n: int = 256) -> dict[str, float]:
    """By task, the share of held-out prompts whose most likely next token is a right answer.

    Args:
        model: dense or sparse model with this module's vocabulary.
        n: number of prompts per task.
    """
    return {task.name: accuracy(model, task_pairs(task, n), batch_size=256) for task in TASKS}


def _measure(model: Model | SparseTransformer) -> dict[str, float]:
    """Accuracy on each task's held-out prompts, and active edges on held-out rows of all tasks."""
    rows = task_rows(MEASURED_ROWS, part="held_out")
    active = evaluate_held_out(model, rows).active_attention_edges
    return {**task_accuracy(model, n=MEASURED_ROWS), "active_attention_edges": active}


def _rows(n: int, seed: int, text: float = 0.0) -> tuple[TokenBatch, TokenBatch]:
    """Training rows, and validation rows for model selection."""
    training = task_rows(n, part="training", text=text, seed=seed)
    return training, task_rows(VALIDATION_ROWS, part="validation", text=text, seed=seed)

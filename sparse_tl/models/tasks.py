"""The built-in task models: one small transformer that does four tasks, dense and made sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_tl.arguments import Seed, checked
from sparse_tl.circuits import accuracy
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import HookedModel, Model
from sparse_tl.models.pairs import load_built_in
from sparse_tl.models.recipes import Recipe
from sparse_tl.models.task_text import (
    TASKS,
    WIDTH,
    task_pairs,
    task_rows,
    task_tokenizer,
    task_vocabulary,
)
from sparse_tl.training import evaluate_held_out

TEXT_SHARE = 1 / 32
"""Rows of the dense model's training in which every token is predicted, and not an answer alone."""
TRAINING_ROWS, VALIDATION_ROWS, MEASURED_ROWS = 8192, 256, 500
"""Prompts of each task."""
FRESH_ROWS, OTHER_SEED = 16_384, 1_000
"""Prompts of each task that post-training trains on, and what is added to the seed of its draws."""
ARCHITECTURE: dict[str, Any] = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 144,
    "n_inner": 288,
    "n_positions": WIDTH + 2,
    "activation_function": "relu",
}
DENSE: dict[str, Any] = {
    "steps": 1000,
    "learning_rate": 1e-3,
    "decay": 0.5,
    "weight_decay": 0.01,
    "evaluate_every": 100,
}
SPARSE: dict[str, Any] = {"steps": 1200, "target_loss": "+0.01"}


def task_recipe() -> Recipe:
    """How the task models are made."""
    return Recipe(
        name="tasks",
        architecture={**ARCHITECTURE, "vocab_size": len(task_vocabulary())},
        tokenizer=task_tokenizer,
        rows=_rows,
        sparse_rows=_sparse_rows,
        measure=_measure,
        batch_size=64,
        dense=DENSE,
        sparse=SPARSE,
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
        cache: folder for pairs that are built; in the user's cache folder by default.
        device: device of the models, also for building; a GPU by default if there is one.
        progress: whether to show a progress bar while building.

    Raises:
        ValueError: the folder cannot be written, or holds damaged models.
        KeyboardInterrupt: after Ctrl-C, once the state is saved; another call resumes.

    Warns:
        UserWarning: the sparse model missed its post-training target.
    """
    return load_built_in(task_recipe(), seed, cache=cache, device=device, progress=progress)


def task_accuracy(model: HookedModel, *, n: int = 256) -> dict[str, float]:
    """Share of held-out prompts, 0 to 1, whose most likely next token is a right answer, by task.

    Args:
        model: dense or sparse model with this module's vocabulary.
        n: number of prompts per task.
    """
    return {task.name: accuracy(model, task_pairs(task, n), batch_size=256) for task in TASKS}


def _measure(model: Model | SparseTransformer) -> dict[str, float]:
    """Accuracy on held-out prompts of each task, active edges on held-out rows of all of them."""
    rows = task_rows(MEASURED_ROWS, part="held_out")
    active = evaluate_held_out(model, rows).active_attention_edges
    return {**task_accuracy(model, n=MEASURED_ROWS), "active_attention_edges": active}


def _rows(seed: int) -> tuple[TokenBatch, TokenBatch]:
    """Rows to train on, and rows to choose among checkpoints by."""
    return (
        task_rows(TRAINING_ROWS, part="training", text=TEXT_SHARE, seed=seed),
        task_rows(VALIDATION_ROWS, part="validation", text=TEXT_SHARE, seed=seed),
    )


def _sparse_rows(seed: int) -> tuple[TokenBatch, TokenBatch]:
    """Rows of post-training: no text, which takes many edges and is none of the tasks.

    They are drawn anew, and none is seen twice. Rows that either model knows by heart would tell of
    another increase in loss than held-out rows do.
    """
    return (
        task_rows(FRESH_ROWS, part="training", seed=OTHER_SEED + seed),
        task_rows(VALIDATION_ROWS, part="validation", seed=OTHER_SEED + seed),
    )

"""The built-in task models: a small transformer that does four tasks, dense and sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_tl.calls.arguments import Seed, checked
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
"""Share of the dense model's training rows in which every token is predicted, not only the answer.
"""
TRAINING_ROWS, VALIDATION_ROWS, MEASURED_ROWS = 8192, 256, 500
"""Numbers of prompts of each task."""
FRESH_ROWS, SEED_OFFSET = 16_384, 1_000
"""Number of prompts of each task in post-training, and the offset of the seed that draws them."""
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
    """The recipe of the task models."""
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
        cache: folder for pairs that are built; the user's cache folder by default.
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


def _rows(seed: int) -> tuple[TokenBatch, TokenBatch]:
    """Training rows, and validation rows for model selection."""
    return (
        task_rows(TRAINING_ROWS, part="training", text=TEXT_SHARE, seed=seed),
        task_rows(VALIDATION_ROWS, part="validation", text=TEXT_SHARE, seed=seed),
    )


def _sparse_rows(seed: int) -> tuple[TokenBatch, TokenBatch]:
    """Rows of post-training: no text, which needs many edges and is not one of the tasks.

    They are newly drawn, and none is seen twice: on rows that either model has memorised, the
    increase in loss differs from that on held-out rows.
    """
    return (
        task_rows(FRESH_ROWS, part="training", seed=SEED_OFFSET + seed),
        task_rows(VALIDATION_ROWS, part="validation", seed=SEED_OFFSET + seed),
    )

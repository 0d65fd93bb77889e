"""The built-in task model: one small transformer that does four tasks, trained and made sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.circuits import accuracy
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import HookedModel, Model, build_model
from sparse_tl.models.task_text import (
    TASKS,
    WIDTH,
    task_pairs,
    task_rows,
    task_tokenizer,
    task_vocabulary,
)
from sparse_tl.training import PostTraining, post_train, pretrain

BASE_STEPS, SPARSE_STEPS = 700, 600
"""Optimizer steps of the two phases."""
TARGET_LOSS = "+0.1"
TEXT_SHARE = 1 / 32
"""Rows in which every token is predicted: about a third of all loss positions."""
BATCH_SIZE = 64
TRAINING_ROWS, VALIDATION_ROWS = 4096, 64
"""Prompts of each task."""
ARCHITECTURE: dict[str, Any] = {
    "n_layers": 4,
    "n_heads": 8,
    "d_model": 128,
    "d_head": 16,
    "d_mlp": 256,
    "n_ctx": WIDTH + 2,
    "act_fn": "relu",
    "normalization_type": "LN",
}
BASE_SETTINGS: dict[str, Any] = {
    "learning_rate": 2e-3,
    "decay": 0.35,
    "weight_decay": 0.01,
    "evaluate_every": 100,
}
SPARSE_SETTINGS: dict[str, Any] = {
    "learning_rate": 7e-4,
    "trained": "evenly",
    "lambda_": 4.0,
    "lambda_rate": 0.01,
    "lambda_fall": 1.0,
    "violation_scale": 0.05,
    "pressure": 0.2,
    "slack": 2.0,
    "brake": 2.5,
    "retreat_after": 6,
    "warmup": 20,
    "decay": 0.6,
    "evaluate_every": 25,
}
INITIAL_BIAS = 2.0


def task_settings() -> dict[str, Any]:
    """All that determines the models beside their seed and steps, as JSON can hold it."""
    return {
        "architecture": ARCHITECTURE,
        "base": BASE_SETTINGS,
        "sparse": SPARSE_SETTINGS,
        "initial_bias": INITIAL_BIAS,
        "target_loss": TARGET_LOSS,
        "rows": [TRAINING_ROWS, VALIDATION_ROWS, BATCH_SIZE, TEXT_SHARE],
        "vocabulary": task_vocabulary(),
    }


def build_task_model(seed: int = 0, device: str | None = None) -> Model:
    """An untrained model: 4 layers of 8 heads, d_model 128, MLPs of 256."""
    config = {
        **ARCHITECTURE,
        "model_name": "tasks",
        "d_vocab": len(task_vocabulary()),
        "default_prepend_bos": False,
        "seed": seed,
    }
    return build_model(config, tokenizer=task_tokenizer(), device=device)


def train_task_model(
    *,
    seed: int = 0,
    steps: int = BASE_STEPS,
    checkpoint: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> tuple[Model, pd.DataFrame]:
    """Train a base model from scratch on the prompts of all tasks.

    Args:
        seed: of the weights, the prompts and the batches.
        steps: optimizer steps.
        checkpoint: folder of the run's checkpoint; found there, an interrupted run goes on.
        device: where to train; a GPU if there is one when left out.
        progress: whether to show it.

    Returns:
        The model with its best validation weights, and the history.
    """
    model = build_task_model(seed, device)
    training, validation = _rows(seed)
    history = pretrain(
        model,
        ShuffledStream(training, BATCH_SIZE, seed),
        held_out=validation,
        steps=steps,
        checkpoint=checkpoint,
        progress=progress,
        **BASE_SETTINGS,
    )
    return model, history


def sparsify_task_model(
    base: Model,
    *,
    seed: int = 0,
    steps: int = SPARSE_STEPS,
    target_loss: float | str = TARGET_LOSS,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> tuple[SparseTransformer, PostTraining]:
    """Post-train the base model in place until few attention edges are left.

    Args:
        base: a trained base model; it is wrapped and changed.
        seed: of gate noise, batches and prompts; with its own seed the base model's prompts.
        steps: optimizer steps.
        target_loss: nats per loss position, as an increase over the base model or absolute.
        checkpoint: folder of the run's checkpoint; found there, an interrupted run goes on.
        progress: whether to show it.
    """
    training, validation = _rows(seed)
    sparse = SparseTransformer(base, initial_bias=INITIAL_BIAS)
    outcome = post_train(
        sparse,
        ShuffledStream(training, BATCH_SIZE, seed + 1),
        held_out=validation,
        target_loss=target_loss,
        steps=steps,
        seed=seed,
        checkpoint=checkpoint,
        progress=progress,
        **SPARSE_SETTINGS,
    )
    return sparse, outcome


def task_accuracy(model: HookedModel, *, n: int = 256, seed: int = 0) -> dict[str, float]:
    """Share of held-out prompts, 0 to 1, whose most likely next token is a right answer, by task.

    Args:
        model: dense or sparse, of this module's vocabulary.
        n: prompts of each task.
        seed: of the draw.
    """
    return {
        task.name: accuracy(model, task_pairs(task, n, seed=seed), batch_size=256) for task in TASKS
    }


def _rows(seed: int) -> tuple[TokenBatch, TokenBatch]:
    """Rows to train on, and rows to choose among checkpoints by."""
    return (
        task_rows(TRAINING_ROWS, part="training", text=TEXT_SHARE, seed=seed),
        task_rows(VALIDATION_ROWS, part="validation", text=TEXT_SHARE, seed=seed),
    )

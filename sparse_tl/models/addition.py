"""The built-in addition model: 4 layers of 4 heads, trained and made sparse by the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.data import ShuffledStream
from sparse_tl.files import digest
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model, build_model
from sparse_tl.tasks.addition import (
    ANSWER,
    CHARACTERS,
    LENGTH,
    AdditionTask,
    Form,
    addition_tokenizer,
)
from sparse_tl.training import PostTraining, post_train, pretrain

BASE_STEPS = 1200
SPARSE_STEPS = 1200
BATCH_SIZE = 256
TARGET_LOSS = 0.006
ARCHITECTURE: dict[str, Any] = {
    "n_layers": 4,
    "n_heads": 4,
    "d_model": 128,
    "d_head": 32,
    "d_mlp": 512,
    "n_ctx": LENGTH,
    "d_vocab": len(CHARACTERS),
    "act_fn": "relu",
    "normalization_type": "LN",
}
BASE_SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "good_enough": 1e-4,
    "weight_decay": 0.01,
    "evaluate_every": 50,
}
SPARSE_SETTINGS: dict[str, Any] = {
    "lambda_": 4.0,
    "lambda_rate": 0.006,
    "lambda_fall": 1.0,
    "learning_rate": 7e-4,
    "trained": "evenly",
    "pressure": 0.2,
    "slack": 8.0,
    "brake": 2.5,
    "retreat_after": 6,
    # All validation sums must be right, so that hardly any of the others is wrong.
    "min_accuracy": 1.0,
    "warmup": 20,
    "decay": 0.6,
    "evaluate_every": 25,
}
# At equal costs every answer column gathers the digits anew in the first layer, and gradients never
# find the way from there to a tree, in which digits are gathered once and handed on. Where answer
# columns can also read one another, a dear first layer is not enough: see `closed_edges`.
FORM_SETTINGS: dict[Form, dict[str, Any]] = {
    "placeholder": {"layer_costs": (8.0, 2.0, 1.0, 1.0)},
    "autoregressive": {"self_cost": 4.0, "closing": 0.2, "lambda_rise": 4.0},
}
FARTHEST = 5
"""Columns from where the tens are added up to where the tens of the sum are read off."""
EQUALS = ANSWER.start - 1
INITIAL_BIAS = 2.0


def addition_settings(form: Form) -> dict[str, Any]:
    """All that determines the models of a form beside seed and steps, as JSON can hold it."""
    closed = closed_edges(form)
    return {
        "architecture": ARCHITECTURE,
        "base": BASE_SETTINGS,
        "sparse": {**SPARSE_SETTINGS, **FORM_SETTINGS[form]},
        "initial_bias": INITIAL_BIAS,
        "target_loss": TARGET_LOSS,
        "batch_size": BATCH_SIZE,
        **({} if closed is None else {"closed": digest({"closed": closed})}),
    }


def closed_edges(form: Form) -> Bool[Tensor, "layer head query key"] | None:
    """The attention edges that the sparse model must do without; None for the placeholder form.

    In the autoregressive form no edge spans more than `FARTHEST` columns. In the first layer the
    equals sign and the answer's columns read nothing, and no column reads itself. So digits are
    added up among the columns of the question, and read from there in later layers.
    """
    if form == "placeholder":
        return None
    n_layers, n_heads = ARCHITECTURE["n_layers"], ARCHITECTURE["n_heads"]
    column = torch.arange(LENGTH)
    spans = column[:, None] - column
    closed = (spans > FARTHEST).repeat(n_layers, n_heads, 1, 1)
    closed[0] |= (spans == 0) | (column[:, None] >= EQUALS)
    return closed


def build_addition_model(seed: int = 0, device: str | None = None) -> Model:
    """An untrained model: 4 layers of 4 heads, d_model 128, MLPs of 512, 0.8 million weights."""
    config: dict[str, Any] = {
        **ARCHITECTURE,
        "model_name": "addition",
        "default_prepend_bos": False,
        "seed": seed,
    }
    return build_model(config, tokenizer=addition_tokenizer(), device=device)


def train_addition_model(
    task: AdditionTask,
    *,
    seed: int = 0,
    steps: int = BASE_STEPS,
    checkpoint: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> tuple[Model, pd.DataFrame]:
    """Train a base model from scratch until every validation sum is right.

    Args:
        task: the form of the sums.
        seed: of the weights, the split and the batches.
        steps: optimizer steps at most; training ends early at 1e-4 nats.
        checkpoint: folder of the run's checkpoint.
        device: where to train.
        progress: whether to show it.

    Returns:
        The model with its best validation weights, and the history.
    """
    training, validation, _ = task.split(seed=seed)
    model = build_addition_model(seed, device)
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


def sparsify_addition_model(
    base: Model,
    task: AdditionTask,
    *,
    seed: int = 0,
    steps: int = SPARSE_STEPS,
    target_loss: float | str = TARGET_LOSS,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> tuple[SparseTransformer, PostTraining]:
    """Post-train the base model in place until a handful of attention edges is left per sum.

    Args:
        base: a trained base model; it is wrapped and changed.
        task: the form that it was trained on.
        seed: of batches and gate noise, and of the split: the base model's own.
        steps: optimizer steps.
        target_loss: nats per answer character, absolute or as an increase.
        checkpoint: folder of the run's checkpoint.
        progress: whether to show it.
    """
    training, validation, _ = task.split(seed=seed)
    closed = closed_edges(task.form)
    sparse = SparseTransformer(base, initial_bias=INITIAL_BIAS, closed=closed)
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
        **FORM_SETTINGS[task.form],
    )
    return sparse, outcome

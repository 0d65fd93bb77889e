"""The built-in addition models: 4 layers of 4 heads, trained and made sparse by the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model
from sparse_tl.models.pairs import load_built_in
from sparse_tl.models.recipes import Recipe
from sparse_tl.tasks.addition import (
    ANSWER,
    CHARACTERS,
    LENGTH,
    AdditionTask,
    Form,
    addition_tokenizer,
)
from sparse_tl.training import evaluate_held_out

ARCHITECTURE: dict[str, Any] = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "n_inner": 512,
    "n_positions": LENGTH,
    "vocab_size": len(CHARACTERS),
    "activation_function": "relu",
}
DENSE: dict[str, Any] = {
    "steps": 1200,
    "learning_rate": 1e-3,
    "good_enough": 1e-4,
    "weight_decay": 0.01,
    "evaluate_every": 50,
}
SPARSE: dict[str, Any] = {
    "steps": 1200,
    "target_loss": 0.006,
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
SPARSE_OF_FORM: dict[Form, dict[str, Any]] = {
    "placeholder": {"layer_costs": (8.0, 2.0, 1.0, 1.0)},
    "autoregressive": {"self_cost": 4.0, "closing": 0.2, "lambda_rise": 4.0},
}
FARTHEST = 5
"""Columns from where the tens are added up to where the tens of the sum are read off."""
EQUALS = ANSWER.start - 1


def addition_recipe(form: Form = "placeholder") -> Recipe:
    """How the addition models of a form are made."""
    task = AdditionTask(form)

    def rows(seed: int) -> tuple[TokenBatch, TokenBatch]:
        training, validation, _ = task.split(seed=seed)
        return training, validation

    def measure(model: Model | SparseTransformer) -> dict[str, float]:
        measured = evaluate_held_out(model, task.split()[2])
        return {
            "accuracy": measured.accuracy,
            "active_attention_edges": measured.active_attention_edges,
        }

    return Recipe(
        name=f"addition-{form}",
        architecture=ARCHITECTURE,
        tokenizer=addition_tokenizer,
        rows=rows,
        measure=measure,
        batch_size=256,
        dense=DENSE,
        sparse={**SPARSE, **SPARSE_OF_FORM[form]},
        closed=closed_edges(form),
    )


def load_addition_models(
    seed: int = 0,
    *,
    form: Form = "placeholder",
    cache: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> tuple[Model, SparseTransformer]:
    """The dense addition model and the sparse one made from it; as `load_task_models`.

    Args:
        seed: of everything random; 0 comes with the package in the placeholder form.
        form: of the sums.
        cache: folder of the pairs that are built here; in the user's cache folder when left out.
        device: where the models go, and are built; a GPU if there is one when left out.
        progress: whether to show the progress of a build.
    """
    recipe = addition_recipe(form)
    return load_built_in(recipe, seed, cache=cache, device=device, progress=progress)


def build_addition_model(seed: int = 0, device: str | None = None) -> Model:
    """An untrained model: 4 layers of 4 heads, d_model 128, MLPs of 512, 0.8 million weights."""
    return addition_recipe().build(seed, device)


def closed_edges(form: Form) -> Bool[Tensor, "layer head query key"] | None:
    """The attention edges that the sparse model must do without; None for the placeholder form.

    In the autoregressive form no edge spans more than `FARTHEST` columns. In the first layer the
    equals sign and the answer's columns read nothing, and no column reads itself. So digits are
    added up among the columns of the question, and read from there in later layers.
    """
    if form == "placeholder":
        return None
    n_layers, n_heads = ARCHITECTURE["n_layer"], ARCHITECTURE["n_head"]
    column = torch.arange(LENGTH)
    spans = column[:, None] - column
    closed = (spans > FARTHEST).repeat(n_layers, n_heads, 1, 1)
    closed[0] |= (spans == 0) | (column[:, None] >= EQUALS)
    return closed

"""Small built-in models, trained by the package itself, so that everything runs offline."""

from sparse_tl.models.addition import (
    addition_recipe,
    build_addition_model,
    load_addition_models,
)
from sparse_tl.models.pairs import Pair, build_pair, read_pair
from sparse_tl.models.recipes import Recipe
from sparse_tl.models.task_text import TASKS, task_pairs, task_rows, task_tokenizer
from sparse_tl.models.tasks import load_task_models, task_accuracy, task_recipe

__all__ = [
    "TASKS",
    "Pair",
    "Recipe",
    "addition_recipe",
    "build_addition_model",
    "build_pair",
    "load_addition_models",
    "load_task_models",
    "read_pair",
    "task_accuracy",
    "task_pairs",
    "task_recipe",
    "task_rows",
    "task_tokenizer",
]

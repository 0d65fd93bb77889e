"""Makes the pairs of models that come with the package: ``python -m sparse_tl.models.shipping``.

1. Build the pairs of seed 0 by their recipes, or take them from the user's cache.
2. Write them into the package with weights in half precision, to keep it small.
3. Measure what was written, not what was built, and write that down beside it (``claims.json``).

A test loads the shipped models and measures the claims again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from sparse_tl.files import atomic_folder, read_tensors, write_json, write_tensors
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model
from sparse_tl.models.built_in import addition_recipe, task_recipe
from sparse_tl.models.cache import SHIPPED, Recipe, built_pair, load_pair
from sparse_tl.models.task_text import task_rows
from sparse_tl.models.tasks import TEXT_SHARE, task_accuracy
from sparse_tl.tasks import AdditionTask
from sparse_tl.training import evaluate_held_out

SEED = 0
N_PROMPTS = 500


def ship() -> None:
    """Write every shipped pair and its claims into the package."""
    console = Console()
    recipes = {"addition": addition_recipe("placeholder", SEED), "tasks": task_recipe(SEED)}
    for kind, recipe in recipes.items():
        folder = _write(recipe, built_pair(recipe, SEED))
        measured = claims(kind, *load_pair(recipe, SEED, device="cpu"))
        write_json(folder / "claims.json", measured)
        console.print(f"{folder}: {measured}")


def claims(kind: str, dense: Model, sparse: SparseTransformer) -> dict[str, dict[str, float]]:
    """What is said of a shipped pair, measured: shares of right answers, active attention edges."""
    measure = _addition_claims if kind == "addition" else _task_claims
    return {"dense": measure(dense), "sparse": measure(sparse)}


def _addition_claims(model: Model | SparseTransformer) -> dict[str, float]:
    """On the 1,000 sums that neither training nor selection saw."""
    measured = evaluate_held_out(model, AdditionTask("placeholder").split(seed=SEED)[2])
    return {"accuracy": measured.accuracy, "active_edges": measured.active_edges}


def _task_claims(model: Model | SparseTransformer) -> dict[str, float]:
    """On held-out prompts of each task; edges on held-out rows of all of them."""
    rows = task_rows(N_PROMPTS, part="held_out", text=TEXT_SHARE, seed=SEED)
    accuracy = task_accuracy(model, n=N_PROMPTS, seed=SEED)
    return {**accuracy, "active_edges": evaluate_held_out(model, rows).active_edges}


def _write(recipe: Recipe, built: Path) -> Path:
    """A copy of a pair with its weights in half precision, in place of any older one."""
    folder = recipe.shipped(SEED)
    for old in SHIPPED.glob(f"{recipe.name}-*"):
        shutil.rmtree(old)
    with atomic_folder(folder) as temporary:
        shutil.copytree(built, temporary, dirs_exist_ok=True)
        for side in ("base", "sparse"):
            file = temporary / side / "model.safetensors"
            weights = read_tensors(file)
            write_tensors(file, {name: tensor.half() for name, tensor in weights.items()})
    return folder


if __name__ == "__main__":
    ship()

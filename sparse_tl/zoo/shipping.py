"""Build the models that ship with the package: ``python -m sparse_tl.zoo.shipping``.

1. Build the pairs of seed 0 from their recipes, or take them from the user's cache.
2. Write them into the package with half-precision weights, to keep it small.
3. Measure the written models, not the built ones, and store the results (``claims.json``).

``python -m sparse_tl.zoo.shipping FOLDER`` instead writes the sparse SmolLM2, whose adapters and
gates ship: FOLDER is from ``save_pretrained(adapters_only=True)``.

A test loads the shipped models and checks the claims.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rich.console import Console

from sparse_tl.backend import HookedModel
from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.sparse.saving import ADAPTERS_WEIGHTS
from sparse_tl.storage.files import atomic_folder, read_tensors, write_json, write_tensors
from sparse_tl.tasks import task_report
from sparse_tl.zoo.building import SHIPPED, build_cached, read_pair
from sparse_tl.zoo.built_in import addition_recipe, task_recipe
from sparse_tl.zoo.language import SMOLLM2, load_language_model, load_language_models

RECIPES = (addition_recipe("placeholder"), task_recipe())


def ship() -> None:
    """Write every shipped pair and its claims into the package."""
    for recipe in RECIPES:
        built, folder = build_cached(recipe, 0), SHIPPED / recipe.name
        with atomic_folder(folder) as temporary:
            others = shutil.ignore_patterns("history.csv", ".*")
            shutil.copytree(built, temporary, dirs_exist_ok=True, ignore=others)
            for side in ("dense", "sparse"):
                _halve(temporary / side / "model.safetensors")
        pair = read_pair(folder, device="cpu")
        claims = {"dense": recipe.measure(pair.dense), "sparse": recipe.measure(pair.sparse)}
        write_json(folder / "claims.json", claims)
        Console().print(f"{folder}: {claims}")


def ship_language_model(trained: str | Path) -> None:
    """Write the adapters and gates of the sparse SmolLM2, and its claims, into the package."""
    folder, base = SHIPPED / SMOLLM2, load_language_model(device="cpu")
    sparse = SparseTransformer.from_pretrained(trained, base=base)
    with atomic_folder(folder) as temporary:
        sparse.save_pretrained(temporary / "sparse", adapters_only=True)
        _halve(temporary / "sparse" / ADAPTERS_WEIGHTS)
    models = zip(("dense", "sparse"), load_language_models(device="cpu"), strict=True)
    claims = {side: measure_language_model(model) for side, model in models}
    write_json(folder / "claims.json", claims)
    Console().print(f"{folder}: {claims}")


def measure_language_model(model: HookedModel) -> dict[str, float]:
    """By task, the share of prompts whose most likely next token is a right answer."""
    return {name: skill.accuracy for name, skill in task_report(model).skills.items()}


def _halve(file: Path) -> None:
    """Store a file's weights in half precision."""
    weights = read_tensors(file)
    write_tensors(file, {name: tensor.half() for name, tensor in weights.items()})


if __name__ == "__main__":
    ship_language_model(sys.argv[1]) if sys.argv[1:] else ship()

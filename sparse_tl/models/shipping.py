"""Build the model pairs that ship with the package: ``python -m sparse_tl.models.shipping``.

1. Build the pairs of seed 0 from their recipes, or take them from the user's cache.
2. Write them into the package with half-precision weights, to keep it small.
3. Measure the written models, not the built ones, and store the results (``claims.json``).

A test loads the shipped models and checks the claims.
"""

from __future__ import annotations

import shutil

from rich.console import Console

from sparse_tl.checksums import write_sums
from sparse_tl.files import atomic_folder, read_tensors, write_json, write_tensors
from sparse_tl.models.addition import addition_recipe
from sparse_tl.models.pairs import SHIPPED, build_cached, read_pair
from sparse_tl.models.tasks import task_recipe

RECIPES = (addition_recipe("placeholder"), task_recipe())


def ship() -> None:
    """Write every shipped pair and its claims into the package."""
    for recipe in RECIPES:
        built, folder = build_cached(recipe, 0), SHIPPED / recipe.name
        with atomic_folder(folder) as temporary:
            shutil.copytree(built, temporary, dirs_exist_ok=True)
            (temporary / "history.csv").unlink()
            for side in ("dense", "sparse"):
                file = temporary / side / "model.safetensors"
                weights = read_tensors(file)
                write_tensors(file, {name: tensor.half() for name, tensor in weights.items()})
                write_sums(file.parent, [file.name])
        pair = read_pair(folder, device="cpu")
        claims = {"dense": recipe.measure(pair.dense), "sparse": recipe.measure(pair.sparse)}
        write_json(folder / "claims.json", claims)
        Console().print(f"{folder}: {claims}")


if __name__ == "__main__":
    ship()

"""The built-in models, dense and sparse, by seed.

Those of seed 0 come with the package; others are built in the user's cache folder.
"""

from __future__ import annotations

from pathlib import Path

from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model
from sparse_tl.models import addition, tasks
from sparse_tl.models.addition import (
    addition_settings,
    sparsify_addition_model,
    train_addition_model,
)
from sparse_tl.models.cache import Recipe, load_pair
from sparse_tl.models.tasks import sparsify_task_model, task_settings, train_task_model
from sparse_tl.tasks import AdditionTask
from sparse_tl.tasks.addition import Form


def load_task_models(
    seed: int = 0,
    *,
    cache: str | Path | None = None,
    base_steps: int = tasks.BASE_STEPS,
    steps: int = tasks.SPARSE_STEPS,
    device: str | None = None,
    progress: bool = True,
) -> tuple[Model, SparseTransformer]:
    """The dense task model and the sparse one that was made from it, built when they are absent.

    Args:
        seed: of everything random.
        cache: folder of all such models; the user's cache folder when left out.
        base_steps: of the dense model's training.
        steps: of post-training.
        device: where the models go, and are built; a GPU if there is one when left out.
        progress: whether to show the progress of a build.

    Raises:
        ValueError: a folder that cannot be written, or that holds damaged models.
        UserWarning: a warning, where the sparse model misses the target of its post-training.
        KeyboardInterrupt: after Ctrl-C, once the state is saved; called again, it goes on.
    """
    recipe = task_recipe(seed, base_steps, steps, device, progress)
    return load_pair(recipe, seed, cache=cache, device=device)


def load_addition_models(
    seed: int = 0,
    *,
    form: Form = "placeholder",
    cache: str | Path | None = None,
    base_steps: int = addition.BASE_STEPS,
    steps: int = addition.SPARSE_STEPS,
    device: str | None = None,
    progress: bool = True,
) -> tuple[Model, SparseTransformer]:
    """The dense addition model and the sparse one that was made from it; as `load_task_models`.

    Args:
        seed: of everything random.
        form: of the sums.
        cache: folder of all such models; the user's cache folder when left out.
        base_steps: of the dense model's training at most.
        steps: of post-training.
        device: where the models go, and are built; a GPU if there is one when left out.
        progress: whether to show the progress of a build.
    """
    recipe = addition_recipe(form, seed, base_steps, steps, device, progress)
    return load_pair(recipe, seed, cache=cache, device=device)


def task_models_folder(
    seed: int = 0,
    *,
    cache: str | Path | None = None,
    base_steps: int = tasks.BASE_STEPS,
    steps: int = tasks.SPARSE_STEPS,
) -> Path:
    """Where `load_task_models` keeps the models of these arguments."""
    return task_recipe(seed, base_steps, steps, None, False).folder(seed, cache)


def task_recipe(
    seed: int,
    base_steps: int = tasks.BASE_STEPS,
    steps: int = tasks.SPARSE_STEPS,
    device: str | None = None,
    progress: bool = True,
) -> Recipe:
    """How the task models of a seed are made."""
    return Recipe(
        "tasks",
        {"base_steps": base_steps, "steps": steps, **task_settings()},
        lambda checkpoint: train_task_model(
            seed=seed, steps=base_steps, checkpoint=checkpoint, device=device, progress=progress
        )[0],
        lambda base, checkpoint: sparsify_task_model(
            base, seed=seed, steps=steps, checkpoint=checkpoint, progress=progress
        ),
    )


def addition_recipe(
    form: Form,
    seed: int,
    base_steps: int = addition.BASE_STEPS,
    steps: int = addition.SPARSE_STEPS,
    device: str | None = None,
    progress: bool = True,
) -> Recipe:
    """How the addition models of a form and seed are made."""
    task = AdditionTask(form)
    return Recipe(
        f"addition-{form}",
        {"base_steps": base_steps, "steps": steps, **addition_settings(form)},
        lambda checkpoint: train_addition_model(
            task,
            seed=seed,
            steps=base_steps,
            checkpoint=checkpoint,
            device=device,
            progress=progress,
        )[0],
        lambda base, checkpoint: sparsify_addition_model(
            base, task, seed=seed, steps=steps, checkpoint=checkpoint, progress=progress
        ),
    )

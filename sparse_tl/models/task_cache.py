"""The task models of a seed from a folder on this machine; built there when they are asked for
for the first time.

The folder's name says what determines the weights: the package's version and a digest of the
settings. It holds ``base`` and ``sparse``, each whole or absent, and the checkpoint of whichever
is in the making, so that a build that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path

import platformdirs
from filelock import FileLock

from sparse_tl.files import atomic_folder, check_writable, read_json, recover_folder, write_json
from sparse_tl.hooks import Model, load_model, save_model
from sparse_tl.masks import SparseTransformer
from sparse_tl.models.tasks import (
    BASE_STEPS,
    SPARSE_STEPS,
    sparsify_task_model,
    task_settings,
    train_task_model,
)


def load_task_models(
    seed: int = 0,
    *,
    cache: str | Path | None = None,
    base_steps: int = BASE_STEPS,
    steps: int = SPARSE_STEPS,
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
    folder = task_models_folder(seed, cache=cache, base_steps=base_steps, steps=steps)
    base, sparse = folder / "base", folder / "sparse"
    if not (_finished(base) and _finished(sparse)):
        check_writable(folder.parent)
        # The jobs of a cluster share the user's cache folder: one builds, the others wait.
        with FileLock(folder.with_suffix(".lock")):
            if not _finished(base):
                _build_base(folder, seed, base_steps, device, progress)
            if not _finished(sparse):
                _build_sparse(folder, seed, steps, device, progress)
    try:
        said = read_json(folder / "verdict.json")
        models = (
            load_model(base, device=device),
            SparseTransformer.from_pretrained(sparse, device=device),
        )
        if not isinstance(said, dict) or not {"verdict", "feasible"} <= said.keys():
            raise ValueError("verdict.json holds no verdict")
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"expected task models of this version in {folder}; {error}. Remove that folder to "
            "build them again."
        ) from error
    if not said["feasible"]:
        warnings.warn(f"the sparse task model of seed {seed}: {said['verdict']}", stacklevel=2)
    return models


def task_models_folder(
    seed: int = 0,
    *,
    cache: str | Path | None = None,
    base_steps: int = BASE_STEPS,
    steps: int = SPARSE_STEPS,
) -> Path:
    """Where `load_task_models` keeps the models of these arguments."""
    settings = {"base_steps": base_steps, "steps": steps, **task_settings()}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    root = Path(cache) if cache is not None else platformdirs.user_cache_path("sparse_tl")
    return root / f"tasks-{version('sparse_tl')}-{digest}" / f"seed-{seed}"


def _finished(folder: Path) -> bool:
    recover_folder(folder)
    return folder.exists()


def _build_base(folder: Path, seed: int, steps: int, device: str | None, progress: bool) -> None:
    model, _ = train_task_model(
        seed=seed,
        steps=steps,
        checkpoint=folder / "checkpoint-base",
        device=device,
        progress=progress,
    )
    with atomic_folder(folder / "base") as temporary:
        save_model(model, temporary)
    shutil.rmtree(folder / "checkpoint-base")


def _build_sparse(folder: Path, seed: int, steps: int, device: str | None, progress: bool) -> None:
    sparse, outcome = sparsify_task_model(
        load_model(folder / "base", device=device),
        seed=seed,
        steps=steps,
        checkpoint=folder / "checkpoint-sparse",
        progress=progress,
    )
    said = {"verdict": outcome.verdict, "feasible": outcome.feasible}
    write_json(folder / "verdict.json", said)
    sparse.save_pretrained(folder / "sparse")
    shutil.rmtree(folder / "checkpoint-sparse")

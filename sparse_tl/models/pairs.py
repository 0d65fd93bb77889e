"""Pairs of a dense model and the sparse model made from it: built in a folder, read, or shipped.

`build_pair` trains the dense model and sparsifies it. Its folder holds ``dense`` and ``sparse``,
each complete or absent, and the checkpoint of the one in progress, so that an interrupted build
resumes. It also builds the built-in pairs of seeds other than 0, in the user's cache folder, where
``recipe.json`` records the recipe.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import platformdirs
from filelock import FileLock, Timeout

from sparse_tl import __version__
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model, checked_device, load_model, save_model
from sparse_tl.models.recipes import Recipe
from sparse_tl.storage.files import (
    atomic_folder,
    check_writable,
    read_json,
    write_csv,
    write_json,
)

SHIPPED = Path(__file__).parent / "shipped"
"""The pairs of seed 0 that ship with the package, made by `sparse_tl.models.shipping`."""


class Pair(NamedTuple):
    """A dense model, the sparse model made from it, and whether the latter met its target."""

    dense: Model
    sparse: SparseTransformer
    verdict: str
    feasible: bool


def build_pair(
    recipe: Recipe,
    folder: str | Path,
    seed: int = 0,
    *,
    device: str | None = None,
    progress: bool = True,
) -> None:
    """Train the dense model and sparsify it, skipping a model that the folder already holds.

    Args:
        recipe: recipe of both models.
        folder: folder of the pair: ``dense``, ``sparse``, ``verdict.json`` and ``history.csv``.
        seed: random seed for everything.
        device: device for training; a GPU by default if there is one.
        progress: whether to show a progress bar.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the state is saved; another call resumes.
    """
    folder = Path(folder)
    if not (folder / "dense").exists():
        checkpoint = folder / "checkpoint-dense"
        model, history = recipe.train(seed, checkpoint=checkpoint, device=device, progress=progress)
        _write_history(folder, history.assign(phase="dense"))
        with atomic_folder(folder / "dense") as temporary:
            save_model(model, temporary)
    if not (folder / "sparse").exists():
        checkpoint = folder / "checkpoint-sparse"
        dense = load_model(folder / "dense", device=device)
        sparse, outcome = recipe.sparsify(dense, seed, checkpoint=checkpoint, progress=progress)
        _write_history(folder, outcome.history.assign(phase="sparse"))
        verdict = {"verdict": outcome.verdict, "feasible": outcome.feasible}
        write_json(folder / "verdict.json", verdict)
        sparse.save_pretrained(folder / "sparse")
    _remove_checkpoints(folder)


def read_pair(folder: str | Path, *, device: str | None = None) -> Pair:
    """Load the pair that `build_pair` wrote to a folder.

    Raises:
        ValueError: there is no pair, or it is damaged.
    """
    folder = Path(folder)
    try:
        verdict = read_json(folder / "verdict.json")
        if not (type(verdict["verdict"]) is str and type(verdict["feasible"]) is bool):
            raise ValueError("its verdict.json has no verdict")
        return Pair(
            load_model(folder / "dense", device=device),
            SparseTransformer.from_pretrained(folder / "sparse", device=device),
            verdict["verdict"],
            verdict["feasible"],
        )
    except (ValueError, FileNotFoundError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a pair of models, dense and sparse, in {folder}; {error}. Remove the "
            "folder to build them again."
        ) from error


def load_built_in(
    recipe: Recipe,
    seed: int,
    *,
    cache: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> tuple[Model, SparseTransformer]:
    """The pair of a seed: shipped with the package, or built in the cache folder.

    Warns if the sparse model missed its post-training target.
    """
    device = checked_device(device)
    folder = SHIPPED / recipe.name
    if seed or not folder.is_dir():
        folder = build_cached(recipe, seed, cache=cache, device=device, progress=progress)
    pair = read_pair(folder, device=device)
    if not pair.feasible:
        warnings.warn(
            f"the sparse {recipe.name} model of seed {seed}: {pair.verdict}", stacklevel=3
        )
    return pair.dense, pair.sparse


def cache_folder(cache: str | Path | None = None) -> Path:
    """The folder for built pairs and downloaded models; the user's cache folder by default."""
    return Path(cache) if cache is not None else platformdirs.user_cache_path("sparse_tl")


def build_cached(
    recipe: Recipe,
    seed: int,
    *,
    cache: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> Path:
    """The cache folder of a pair, which is built unless one of this recipe and version exists."""
    folder = cache_folder(cache) / recipe.name / f"seed-{seed}"
    made_by = {"version": __version__, **recipe.settings(seed)}
    complete = (folder / "dense").exists() and (folder / "sparse").exists()
    if complete and _made_by(folder) == made_by:
        _remove_checkpoints(folder)
        return folder
    check_writable(folder.parent)
    # Cluster jobs share the user's cache folder: one builds, the others wait.
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        warnings.warn(
            f"another job is building the {recipe.name} models of seed {seed} in {folder}; "
            "waiting until it is done",
            stacklevel=4,
        )
        lock.acquire()
    try:
        if _made_by(folder) != made_by:  # absent, or made by another recipe or version
            shutil.rmtree(folder, ignore_errors=True)
            write_json(folder / "recipe.json", made_by)
        build_pair(recipe, folder, seed, device=device, progress=progress)
    finally:
        lock.release()
    return folder


def _remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a complete pair, also those that a killed build left."""
    for side in ("dense", "sparse"):
        shutil.rmtree(folder / f"checkpoint-{side}", ignore_errors=True)


def _made_by(folder: Path) -> Any:
    return read_json(folder / "recipe.json") if (folder / "recipe.json").exists() else None


def _write_history(folder: Path, phase: pd.DataFrame) -> None:
    """Write the steps of a phase to ``history.csv``, replacing those of an earlier attempt."""
    path, earlier = folder / "history.csv", []
    if path.exists():
        written = pd.read_csv(path)
        earlier = [written[written["phase"] != phase["phase"].iloc[0]]]
    write_csv(path, pd.DataFrame(pd.concat([*earlier, phase])))

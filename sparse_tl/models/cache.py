"""Pairs of models, dense and sparse: those that come with the package, or else from a folder on
this machine, where they are built when they are asked for for the first time.

The folder's name says what determines the weights: the package's version and a digest of the
settings. It holds ``base`` and ``sparse``, each whole or absent, and the checkpoint of whichever
is in the making, so that a build that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from sparse_tl.files import atomic_folder, check_writable, read_json, recover_folder, write_json
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model, load_model, save_model
from sparse_tl.training import PostTraining

SHIPPED = Path(__file__).parent / "shipped"
"""The pairs that come with the package; `sparse_tl.models.shipping` made them."""


def cache_root(cache: str | Path | None) -> Path:
    """The folder of all such models; in the user's cache folder when none is given."""
    return Path(cache) if cache is not None else platformdirs.user_cache_path("sparse_tl")


@dataclass(frozen=True)
class Recipe:
    """How a pair of models is made.

    Args:
        name: of their kind.
        settings: all that determines the weights beside the seed, as JSON can hold it.
        train: makes the dense model, with a checkpoint in this folder.
        sparsify: makes it sparse, likewise.
    """

    name: str
    settings: Mapping[str, Any]
    train: Callable[[Path], Model]
    sparsify: Callable[[Model, Path], tuple[SparseTransformer, PostTraining]]

    @property
    def digest(self) -> str:
        """Of the settings."""
        said = json.dumps(dict(self.settings), sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:8]

    def folder(self, seed: int, cache: str | Path | None) -> Path:
        """Where the pair of a seed is built; in the user's cache folder when none is given."""
        return (
            cache_root(cache) / f"{self.name}-{version('sparse_tl')}-{self.digest}" / f"seed-{seed}"
        )

    def shipped(self, seed: int) -> Path:
        """Where the pair of a seed is if it comes with the package."""
        named = {"c92a97da": "3c09d424", "b1360e1c": "b44150f7"}  # before lambda was called lambda
        digest = named.get(self.digest, self.digest)
        return SHIPPED / f"{self.name}-{digest}" / f"seed-{seed}"


def load_pair(
    recipe: Recipe, seed: int, *, cache: str | Path | None = None, device: str | None = None
) -> tuple[Model, SparseTransformer]:
    """The dense model and the sparse one that was made from it, built when they are absent.

    A pair that comes with the package is taken from there.

    Raises:
        ValueError: a folder that cannot be written, or that holds damaged models.
        UserWarning: a warning, where the sparse model misses the target of its post-training.
    """
    folder = recipe.shipped(seed)
    if not folder.is_dir():
        folder = built_pair(recipe, seed, cache=cache, device=device)
    base, sparse = folder / "base", folder / "sparse"
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
            f"expected {recipe.name} models of this version in {folder}; {error}. Remove that "
            "folder to build them again."
        ) from error
    if not said["feasible"]:
        warnings.warn(
            f"the sparse {recipe.name} model of seed {seed}: {said['verdict']}", stacklevel=3
        )
    return models


def built_pair(
    recipe: Recipe, seed: int, *, cache: str | Path | None = None, device: str | None = None
) -> Path:
    """The folder of a pair in the cache, built when it is absent.

    Raises:
        ValueError: a folder that cannot be written.
        UserWarning: a warning, where another job builds this pair already and is waited for.
    """
    folder = recipe.folder(seed, cache)
    if not (_finished(folder / "base") and _finished(folder / "sparse")):
        check_writable(folder.parent)
        # The jobs of a cluster share the user's cache folder: one builds, the others wait.
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
            _build(recipe, folder, device)
        finally:
            lock.release()
    return folder


def _build(recipe: Recipe, folder: Path, device: str | None) -> None:
    if not _finished(folder / "base"):
        checkpoint = folder / "checkpoint-base"
        model = recipe.train(checkpoint)
        with atomic_folder(folder / "base") as temporary:
            save_model(model, temporary)
        shutil.rmtree(checkpoint)
    if not _finished(folder / "sparse"):
        checkpoint = folder / "checkpoint-sparse"
        base = load_model(folder / "base", device=device)
        sparse, outcome = recipe.sparsify(base, checkpoint)
        said = {"verdict": outcome.verdict, "feasible": outcome.feasible}
        write_json(folder / "verdict.json", said)
        sparse.save_pretrained(folder / "sparse")
        shutil.rmtree(checkpoint)


def _finished(folder: Path) -> bool:
    recover_folder(folder)
    return folder.exists()

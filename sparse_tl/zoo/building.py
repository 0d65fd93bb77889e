"""Pairs of a dense model and the sparse model made from it: their recipe, made, read or shipped.

`build_pair` trains the dense model and sparsifies it. Its folder holds ``dense`` and ``sparse``,
each complete or absent, and the checkpoint of the one in progress, so that an interrupted build
resumes. It also builds the built-in pairs of seeds other than 0, in the user's cache folder, where
``recipe.json`` records the recipe.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import platformdirs
import torch
from filelock import FileLock, Timeout
from transformers import GPT2Config, GPT2LMHeadModel

from sparse_tl import __version__
from sparse_tl.backend import Model, boot, checked_device, load_model, processes, save_model
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.storage.files import atomic_folder, read_json, write_csv, write_json
from sparse_tl.training import PostTraining, post_train, pretrain

SHIPPED = Path(__file__).parent / "shipped"
"""The pairs of seed 0 that ship with the package, made by `sparse_tl.zoo.shipping`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """How a dense model is trained and sparsified.

    Args:
        name: name of the pair and of its folder.
        architecture: fields of `transformers.GPT2Config`.
        tokenizer: function that returns the model's tokenizer.
        rows: function from seed to training and validation rows.
        sparse_rows: the same for post-training, if different.
        measure: function from a model to its accuracies and active attention edges, on examples
            used neither for training nor for selection.
        batch_size: rows per step.
        dense: settings of `pretrain`.
        sparse: settings of `post_train`.
        gates: settings of `SparseTransformer`.
    """

    name: str
    architecture: Mapping[str, Any]
    tokenizer: Callable[[], Any]
    rows: Callable[[int], tuple[TokenBatch, TokenBatch]]
    measure: Callable[[Model | SparseTransformer], dict[str, float]]
    batch_size: int
    dense: Mapping[str, Any]
    sparse: Mapping[str, Any]
    gates: Mapping[str, Any] = field(default_factory=dict)
    sparse_rows: Callable[[int], tuple[TokenBatch, TokenBatch]] | None = None

    def changed(
        self,
        *,
        dense: Mapping[str, Any] | None = None,
        sparse: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Recipe:
        """The recipe with settings of either training phase, or other fields, replaced."""
        dense, sparse = {**self.dense, **(dense or {})}, {**self.sparse, **(sparse or {})}
        return replace(self, dense=dense, sparse=sparse, **fields)

    def settings(self, seed: int) -> dict[str, Any]:
        """Everything except the code that determines the weights, as JSON-serialisable values."""
        names = ("name", "architecture", "batch_size", "dense", "sparse", "gates")
        settings = {name: getattr(self, name) for name in names}
        return json.loads(json.dumps({**settings, "seed": seed}))

    def build(self, seed: int = 0, device: str | None = None) -> Model:
        """The dense model before training: untied unembedding, no dropout, random weights.

        It is a GPT-2, which all versions of TransformerLens support.
        """
        tokenizer = self.tokenizer()
        fields: dict[str, Any] = {
            **self.architecture,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            # GPT-2's own 0.02 suits its width; with it, a model of width 128 learns more slowly.
            "initializer_range": 0.8 / math.sqrt(self.architecture["n_embd"]),
            "tie_word_embeddings": False,
        }
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            fields[name] = getattr(tokenizer, name, None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = GPT2LMHeadModel(GPT2Config(**fields))
        return boot(model.to(checked_device(device)), tokenizer, name=self.name)

    def train(
        self, seed: int = 0, *, device: str | None = None, **options: Any
    ) -> tuple[Model, pd.DataFrame]:
        """Train the dense model from scratch; further options as in `pretrain`.

        Returns:
            The model with its best validation weights, and the training history.
        """
        training, validation = self.rows(seed)
        model, stream = self.build(seed, device), ShuffledStream(training, self.batch_size, seed)
        return model, pretrain(model, stream, validation=validation, **options, **self.dense)

    def sparsify(
        self, dense: Model, seed: int = 0, **options: Any
    ) -> tuple[SparseTransformer, PostTraining]:
        """Post-train a dense model in place until few attention edges are open.

        Args:
            dense: a trained model; it is wrapped and modified.
            seed: random seed for gate noise, batches and rows; the dense model's seed gives the
                rows that it was trained on.
            **options: further options of `post_train`, such as `checkpoint` and `progress`.
        """
        training, validation = (self.sparse_rows or self.rows)(seed)
        stream = ShuffledStream(training, self.batch_size, seed + 1)
        sparse = SparseTransformer(dense, **self.gates)
        options |= {"validation": validation, "seed": seed, **self.sparse}
        return sparse, post_train(sparse, stream, **options)


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
    for side in ("dense", "sparse"):
        shutil.rmtree(folder / f"checkpoint-{side}", ignore_errors=True)


def read_pair(folder: str | Path, *, device: str | None = None) -> Pair:
    """Load the pair that `build_pair` wrote to a folder.

    Raises:
        ValueError: there is no pair, or it is damaged.
    """
    folder = Path(folder)
    try:
        dense = load_model(folder / "dense", device=device)
        sparse = SparseTransformer.from_pretrained(folder / "sparse", device=device)
        return Pair(dense, sparse, **read_json(folder / "verdict.json"))
    except (ValueError, FileNotFoundError, TypeError) as error:
        raise ValueError(
            f"there is no whole pair of models in {folder}; {error}. Remove the folder to build "
            "them again"
        ) from error


def load_built_in(
    recipe: Recipe, seed: int, *, device: str | None = None, **options: Any
) -> tuple[Model, SparseTransformer]:
    """The pair of a seed: shipped with the package, or built as by `build_cached`.

    Warns if the sparse model missed its post-training target.
    """
    device = checked_device(device)
    folder = SHIPPED / recipe.name
    if seed or not folder.is_dir():
        folder = build_cached(recipe, seed, device=device, **options)
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
    recipe: Recipe, seed: int, *, cache: str | Path | None = None, **options: Any
) -> Path:
    """The cache folder of a pair, which is built unless one of this recipe and version exists."""
    folder = cache_folder(cache) / recipe.name / f"seed-{seed}"
    made_by, record = {"version": __version__, **recipe.settings(seed)}, folder / "recipe.json"

    def is_current() -> bool:
        return record.exists() and read_json(record) == made_by

    if is_current() and (folder / "dense").exists() and (folder / "sparse").exists():
        return folder
    if processes().num_processes > 1:
        raise ValueError(f"build the {recipe.name} models of seed {seed} in one process first")
    folder.parent.mkdir(parents=True, exist_ok=True)
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
        if not is_current():  # absent, or made by another recipe or version
            shutil.rmtree(folder, ignore_errors=True)
            write_json(record, made_by)
        build_pair(recipe, folder, seed, **options)
    finally:
        lock.release()
    return folder


def _write_history(folder: Path, phase: pd.DataFrame) -> None:
    """Write the steps of a phase to ``history.csv``, replacing those of an earlier attempt."""
    path, earlier = folder / "history.csv", []
    if path.exists():
        written = pd.read_csv(path)
        earlier = [written[written["phase"] != phase["phase"].iloc[0]]]
    write_csv(path, pd.DataFrame(pd.concat([*earlier, phase])))

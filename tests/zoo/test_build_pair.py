"""One way to build a pair of models: whole or absent, resumed, in a folder or in the cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from sparse_tl.data.batches import TokenBatch
from sparse_tl.storage.files import read_json
from sparse_tl.zoo import Recipe, build_pair, read_pair
from sparse_tl.zoo.building import build_cached, load_built_in

pytestmark = pytest.mark.long

QUIET: dict[str, Any] = {"device": "cpu", "progress": False}


@pytest.fixture(scope="session")
def recipe(echo_rows: Callable[..., TokenBatch]) -> Recipe:
    """A pair of a tiny model that a few steps make."""
    return Recipe(
        name="echo",
        architecture={
            "n_layer": 1,
            "n_head": 2,
            "n_embd": 16,
            "n_inner": 16,
            "n_positions": 8,
            "vocab_size": 13,
            "activation_function": "relu",
        },
        tokenizer=lambda: None,
        rows=lambda seed: (echo_rows(32, seed=seed), echo_rows(16, seed=seed + 100)),
        measure=lambda model: {},
        batch_size=16,
        dense={"steps": 3, "learning_rate": 1e-2},
        sparse={"steps": 3, "target_loss": "+3", "learning_rate": 1e-2},
    )


@pytest.fixture(scope="session")
def built(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "whole"
    build_pair(recipe, folder, **QUIET)
    return folder


def weights(folder: Path) -> list[dict[str, torch.Tensor]]:
    dense, sparse, *_ = read_pair(folder, device="cpu")
    return [{k: v.detach() for k, v in m.named_parameters()} for m in (dense, sparse)]


def assert_same(one: Path, other: Path) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("built again")


def test_a_built_pair_is_read_and_not_built_again(
    recipe: Recipe, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["dense", "history.csv", "sparse", "verdict.json"]
    assert sorted(path.name for path in built.glob("[!.]*")) == files
    pair = read_pair(built, device="cpu")
    assert pair.feasible and pair.verdict.startswith("Target +3 nats met")
    history = pd.read_csv(built / "history.csv")
    assert history.groupby("phase")["step"].max().to_dict() == {"dense": 3, "sparse": 3}
    monkeypatch.setattr(Recipe, "train", refuse)
    monkeypatch.setattr(Recipe, "sparsify", refuse)
    (built / "checkpoint-sparse").mkdir()  # left by a build that was killed at its end
    build_pair(recipe, built, **QUIET)
    assert not (built / "checkpoint-sparse").exists()


def test_what_was_trained_is_what_is_read(
    recipe: Recipe, built: Path, echo_rows: Callable[..., TokenBatch]
) -> None:
    """A bridge has parameters that no saved model has; none of them may learn anything."""
    trained, _ = recipe.train(0, **QUIET)
    tokens = echo_rows(8).tokens
    with torch.no_grad():
        logits = read_pair(built, device="cpu").dense(tokens)
        torch.testing.assert_close(logits, trained(tokens), rtol=0, atol=0)
    first = recipe.build(0, device="cpu")
    assert not torch.equal(first(tokens), logits)
    assert torch.equal(first(tokens), recipe.build(0, device="cpu")(tokens))


@pytest.mark.parametrize("half", ["train", "sparsify"])
def test_a_build_goes_on_after_an_interruption(
    recipe: Recipe, built: Path, half: str, tmp_path: Path
) -> None:
    def pressed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, half, pressed)
        with pytest.raises(KeyboardInterrupt):
            build_pair(recipe, tmp_path, **QUIET)
    assert (tmp_path / "dense").exists() == (half == "sparsify")
    assert not (tmp_path / "sparse").exists()
    build_pair(recipe, tmp_path, **QUIET)
    assert_same(tmp_path, built)
    assert pd.read_csv(tmp_path / "history.csv").shape == pd.read_csv(built / "history.csv").shape


def test_damaged_models_are_refused_with_a_way_out(recipe: Recipe, tmp_path: Path) -> None:
    folder = build_cached(recipe, 0, cache=tmp_path, **QUIET)
    file = folder / "dense" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"dense; .*Remove the folder"):
        load_built_in(recipe, 0, cache=tmp_path, **QUIET)


def test_the_cache_keeps_a_pair_until_its_recipe_changes(
    recipe: Recipe, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_cached(recipe, 0, cache=tmp_path, **QUIET)
    assert_same(folder, built)
    with monkeypatch.context() as patch:
        patch.setattr(Recipe, "train", refuse)
        load_built_in(recipe, 0, cache=tmp_path, **QUIET)
        with pytest.raises(AssertionError, match="built again"):  # another seed
            load_built_in(recipe, 1, cache=tmp_path, **QUIET)
    other = recipe.changed(dense={"steps": 2}, sparse={"steps": 1})
    assert build_cached(other, 0, cache=tmp_path, **QUIET) == folder
    assert read_json(folder / "recipe.json")["dense"]["steps"] == 2
    assert pd.read_csv(folder / "history.csv")["step"].max() == 2


def test_a_sparse_model_that_misses_its_target_says_so(recipe: Recipe, tmp_path: Path) -> None:
    hopeless = recipe.changed(dense={"steps": 40}, sparse={"steps": 1, "target_loss": "+0.001"})
    closed = hopeless.changed(gates={"initial_bias": -20.0})
    for _ in range(2):  # also when it is read again
        with pytest.warns(UserWarning, match=r"echo model of seed 0: Target \+0\.001 nats NOT met"):
            load_built_in(closed, 0, cache=tmp_path, **QUIET)


@pytest.mark.filterwarnings("ignore:another job is building")
def test_two_jobs_build_the_same_pair_once(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds, original = [], Recipe.train

    def counted(self: Recipe, seed: int, **settings: Any) -> Any:
        builds.append(seed)
        return original(self, seed, **settings)

    monkeypatch.setattr(Recipe, "train", counted)
    with ThreadPoolExecutor() as jobs:
        list(jobs.map(lambda _: build_cached(recipe, 0, cache=tmp_path, **QUIET), range(2)))
    assert builds == [0]

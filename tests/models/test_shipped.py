"""The models that come with the package: of the present settings, and as good as they claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparse_tl.files import read_json
from sparse_tl.models import cache, load_addition_models, load_task_models
from sparse_tl.models.built_in import addition_recipe, task_recipe
from sparse_tl.models.shipping import SEED, claims

CASES = {
    "addition": (lambda: addition_recipe("placeholder", SEED), load_addition_models),
    "tasks": (lambda: task_recipe(SEED), load_task_models),
}
each = pytest.mark.parametrize("kind", CASES)


@pytest.fixture
def no_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a shipped pair was built")

    monkeypatch.setattr(cache, "built_pair", refuse)


@each
@pytest.mark.usefixtures("no_building")
def test_a_shipped_pair_does_what_it_claims(kind: str, tmp_path: Path) -> None:
    recipe, load = CASES[kind]
    claimed = read_json(recipe().shipped(SEED) / "claims.json")
    measured = claims(kind, *load(cache=tmp_path, device="cpu", progress=False))
    for side in ("dense", "sparse"):
        assert measured[side] == pytest.approx(claimed[side], abs=0.002)
    assert min(v for name, v in measured["sparse"].items() if name != "active_edges") >= 0.99
    assert measured["sparse"]["active_edges"] < 0.01 * measured["dense"]["active_edges"]
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_models_are_small_and_are_the_only_ones() -> None:
    recipes = [make() for make, _ in CASES.values()]
    folders = {recipe.shipped(SEED).parent.name for recipe in recipes}
    assert {folder.name for folder in cache.SHIPPED.iterdir()} == folders
    files = [file for file in cache.SHIPPED.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 10_000_000


def test_other_settings_and_seeds_are_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[Any, int]] = []

    def built(recipe: Any, seed: int, **_: object) -> Path:
        asked.append((recipe.name, seed))
        return tmp_path

    monkeypatch.setattr(cache, "built_pair", built)
    calls: list[Callable[[], object]] = [
        lambda: load_task_models(1),
        lambda: load_addition_models(form="autoregressive"),
        lambda: load_addition_models(steps=7),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="Remove that folder"):
            call()
    assert asked == [("tasks", 1), ("addition-autoregressive", 0), ("addition-placeholder", 0)]

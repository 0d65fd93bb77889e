"""The models that come with the package: of their recipes, and as good as they claim."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from sparse_tl.storage.files import read_json
from sparse_tl.zoo import Recipe, building, built_in, load_addition_models, load_task_models
from sparse_tl.zoo.building import SHIPPED, read_pair
from sparse_tl.zoo.language import SMOLLM2
from sparse_tl.zoo.shipping import RECIPES

FEWER = {"addition-placeholder": 0.012, "tasks": 0.001}
"""The largest share of the dense model's attention edges that the sparse one may have open."""
each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@pytest.mark.slow
@each
def test_a_shipped_pair_does_what_it_claims(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for draw in ("task_pairs", "task_rows"):  # of both models the same
        monkeypatch.setattr(built_in, draw, cache(getattr(built_in, draw)))
    load = load_task_models if recipe.name == "tasks" else load_addition_models
    models = load(cache=tmp_path, device="cpu", progress=False)
    claimed = read_json(SHIPPED / recipe.name / "claims.json")
    measured = dict(zip(("dense", "sparse"), map(recipe.measure, models), strict=True))
    for side in ("dense", "sparse"):
        assert measured[side] == pytest.approx(claimed[side], abs=0.002)
    active = {side: of.pop("active_attention_edges") for side, of in measured.items()}
    assert min(measured["sparse"].values()) >= 0.99
    assert active["sparse"] < FEWER[recipe.name] * active["dense"]
    assert list(tmp_path.iterdir()) == [], "nothing was built"


@each
def test_a_shipped_pair_is_of_the_present_recipe(recipe: Recipe) -> None:
    made_by = read_json(SHIPPED / recipe.name / "recipe.json")
    assert made_by.pop("version")
    assert made_by == recipe.settings(0), "make them again: python -m sparse_tl.zoo.shipping"


@pytest.mark.long
@each
@pytest.mark.parametrize("side", ["dense", "sparse"])
def test_transformers_reads_a_shipped_model(recipe: Recipe, side: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = SHIPPED / recipe.name / side
    plain = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    pair = read_pair(folder.parent, device="cpu")
    model = pair.dense if side == "dense" else pair.sparse.unwrap()
    tokens = recipe.rows(0)[1].tokens[:20]
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, model(tokens), rtol=1e-4, atol=2e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.get_vocab() == recipe.tokenizer().get_vocab()
    assert tokenizer.bos_token is None


def test_the_shipped_models_are_small_and_are_the_only_ones() -> None:
    pairs = {recipe.name for recipe in RECIPES}
    assert {folder.name for folder in SHIPPED.iterdir()} - {SMOLLM2} == pairs
    for folders in (pairs, {SMOLLM2}):
        files = [file for name in folders for file in (SHIPPED / name).rglob("*")]
        assert sum(file.stat().st_size for file in files) <= 15_000_000


def test_other_seeds_and_forms_are_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def built(recipe: Recipe, seed: int, **_: object) -> Path:
        asked.append((recipe.name, seed))
        return tmp_path

    monkeypatch.setattr(building, "build_cached", built)
    with pytest.raises(ValueError, match="Remove the folder"):
        load_task_models(1)
    with pytest.raises(ValueError, match="Remove the folder"):
        load_addition_models(form="autoregressive")
    assert asked == [("tasks", 1), ("addition-autoregressive", 0)]

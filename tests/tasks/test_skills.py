"""The battery of skills, and what is measured of it in a dense and a sparse model."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from made_tokenizers import byte_level
from reading import Reader
from tiny import tiny_model
from transformers import PreTrainedTokenizerFast

from sparse_tl import SparseTransformer, compare_skills, load_language_model
from sparse_tl.data.pairs import PairTexts
from sparse_tl.tasks import BATTERY, TASKS_BY_NAME, CompletionTask, SkillComparison, Task
from sparse_tl.tasks.skill_battery import numbers, sign_test, wilson_interval

ROWS = [["up", "down", "up|in"], ["in", "out", "in"], ["hot and wet", "cold|dry", "up"]]
FAMILY = CompletionTask(name="made", title="Made", templates=["{} not", "so {} not"], rows=ROWS)


# ---- families ----------------------------------------------------------------------------------


# GPT-2 reads a line feed and the indentation after it as several tokens.
@pytest.mark.parametrize(
    "family", [f for f in BATTERY if f.name != "indentation"], ids=lambda f: f.name
)
def test_every_family_has_prompts_with_right_and_wrong_tokens(
    family: Any, shared_data: Path
) -> None:
    path = shared_data / "tokenizers" / "gpt2" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    pairs = family.pairs(Reader(tokenizer), 64)
    records = pairs.to_records(tokenizer)
    assert len({record["clean"] for record in records}) >= 24
    for record in records:
        assert (
            record["clean"]
            and "[" not in record["clean"].replace("[1", "")
            or (family.name == "brackets")
        )
        assert record["wrong"] and not {*record["answer"]} & {*record["wrong"]}
    for task in TASKS_BY_NAME.values():
        assert not {*getattr(task, "templates", ())} & {*family.templates}, "prompts of a task"


def test_names_of_families_are_their_own() -> None:
    names = [family.name for family in BATTERY]
    assert len({*names, *TASKS_BY_NAME}) == len(names) + len(TASKS_BY_NAME) and len(names) >= 12


def test_prompts_whose_words_are_several_tokens_are_left_out_and_counted() -> None:
    known = byte_level(" up", " down", " in", " out", " not", " cold", " dry")
    assert FAMILY.describe(known) == ""
    fewer = byte_level(" up", " down", " in", " not", " cold")
    assert FAMILY.describe(fewer) == "4 of 6 prompts left out"
    pairs = FAMILY.pairs(Reader(fewer), 2)
    assert {r["clean"] for r in pairs.to_records(fewer)} == {"up not", "so up not"}
    with pytest.raises(ValueError, match="no prompt of made"):
        FAMILY.pairs(Reader(byte_level(" up")), 2)


# ---- measurements ------------------------------------------------------------------------------


def _models() -> tuple[Any, SparseTransformer]:
    tokenizer = byte_level(" up", " down", " in", " out", " not", " cold", " dry")
    size: dict[str, Any] = {"tokenizer": tokenizer, "d_vocab": len(tokenizer), "n_ctx": 32}
    sparse = SparseTransformer(tiny_model(seed=5, **size), initial_threshold=0.2)
    return tiny_model(seed=0, **size), sparse


def test_a_family_with_answers_of_several_tokens_is_not_measured() -> None:
    """Only the next token is compared; tokens of one answer counted as prompts of their own."""

    class Pair(Task):
        def drawing(self, *given: Any) -> Any:
            return lambda: PairTexts("up not", "up not", (" down in",), (" in down",))

    found = compare_skills(*_models(), [Pair(name="pair", title="Pair")], n=2, progress=False)
    assert "single token" in found.table["outcome"][0] and found.left_out == found.kept == []


@pytest.mark.parametrize("batch_size", [64, 4])
def test_the_numbers_are_those_computed_by_hand(batch_size: int) -> None:
    dense, sparse = _models()
    found = compare_skills(dense, sparse, [FAMILY], n=9, batch_size=batch_size, progress=False)
    row = found.to_pandas().loc["made"]
    tokenizer, sums = dense.tokenizer, Counter[str]()
    for prompt in FAMILY.prompts:
        ids = dense.to_tokens(prompt.clean)
        with torch.no_grad():
            logits = [model(ids)[0, -1].double() for model in (dense, sparse)]
        q, p = (each.log_softmax(dim=-1) for each in logits)
        sums["divergence"] += F.kl_div(p, q, log_target=True, reduction="sum").item()
        right, wrong = (
            [tokenizer.encode(text)[0] for text in side] for side in (prompt.answers, prompt.wrong)
        )
        for side, each in zip(("dense", "sparse"), logits, strict=True):
            sums[f"right_{side}"] += int(each.argmax()) in right
            sums[f"above_{side}"] += bool(each[right].max() > each[wrong].max())
        counts = sparse.count_attention_edges(ids)
        sums["edges"] += int(counts.active.sum())
        sums["possible"] += int(counts.possible.sum())
        sums["tokens"] += ids.shape[1]
    assert row["prompts"] == 6, "each prompt once"
    for name in ("divergence", "right_dense", "right_sparse", "above_dense", "above_sparse"):
        assert row[name] == pytest.approx(sums[name] / 6, rel=1e-4)
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    for name in ("edges", "possible"):
        assert row[name] == pytest.approx(sums[name] / sums["tokens"])
    assert 0 < row["edges"] < row["possible"] and 0 < row["above_dense"] < 1
    assert row["above_dense"] != row["above_sparse"]
    assert row["chance"] == pytest.approx((1 / 3 + 1 / 2 + 2 / 3) / 3)


def test_a_sparse_model_with_open_gates_is_its_own_dense_model() -> None:
    _, sparse = _models()
    closed = compare_skills(sparse, sparse, [FAMILY], progress=False).to_pandas().loc["made"]
    assert closed["divergence"] > 1e-6 and closed["edges"] < closed["possible"]
    with sparse.opened():
        opened = compare_skills(sparse, sparse, [FAMILY], progress=False).to_pandas().loc["made"]
    assert abs(opened["divergence"]) < 1e-6 and opened["edges"] == opened["possible"]
    assert (opened["change"], opened["p"]) == (0, 1)


def test_what_cannot_be_measured_is_said() -> None:
    dense, sparse = _models()
    families, lacking = [BATTERY[0], FAMILY, BATTERY[-1]], BATTERY[0].name
    left_out = [BATTERY[-1].name]
    found = compare_skills(dense, sparse, families, leave_out=left_out, progress=False)
    assert found.left_out == left_out and found.table["prompts"].notna().tolist() == [0, 1, 0]
    assert "single tokens" in found.to_pandas()["outcome"][lacking]
    assert "_low" not in found._repr_html_() and "single tokens" in found._repr_html_()
    none = compare_skills(dense, sparse, [BATTERY[0]], progress=False)
    assert none.verdict == "kept 0 of 0 skills"
    with pytest.raises(ValueError, match="wrapped already"):
        compare_skills(sparse.model, sparse, [FAMILY])


# ---- verdict -----------------------------------------------------------------------------------


def compared(**right: tuple[int, int]) -> SkillComparison:
    """Families of 40 prompts, by how many of them the models have right above wrong."""
    rows = []
    for name, both in right.items():
        above = torch.arange(40) < torch.tensor(both)[:, None]
        values = above, above & (torch.arange(40) < 20), torch.ones(40), torch.ones(3, 40)
        row = numbers(0.5, values[1], above, *values[2:])
        rows.append({"family": name, "title": name.title(), **row})
    return SkillComparison(pd.DataFrame(rows))


def test_skills_that_fell() -> None:
    found = compared(same=(39, 39), one=(40, 39), little=(40, 38), much=(40, 20), unknown=(24, 9))
    assert found.kept == ["same", "one"] and found.lost == ["much", "little"]
    assert found.verdict == (
        "kept 2 of 4 skills; fell: Much 100% to 50%, Little 100% to 95% (within noise)"
    )
    assert compared(same=(39, 39)).verdict == "kept 1 of 1 skills"
    much = found.to_pandas().loc["much"]
    assert (much["change"], much["right_sparse"], much["right_dense"]) == (-0.5, 0.5, 0.5)
    assert (much["above_sparse_low"], much["above_sparse_high"]) == wilson_interval(20, 40)
    assert found.to_pandas()["outcome"]["unknown"] == "the dense model is at chance"


def test_a_change_that_a_coin_explains_is_noise() -> None:
    assert (sign_test(0, 0), sign_test(3, 3)) == (1.0, 1.0)
    assert sign_test(6, 0) == sign_test(0, 6) == 2 * 0.5**6
    assert sign_test(8, 2) == 2 * (1 + 10 + 45) / 1024


def test_intervals() -> None:
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
    values = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, half = values.mean().item(), 1.96 * values.std().item() / math.sqrt(400)
    sides = torch.ones(4, 400, dtype=torch.bool).split(2)
    row = numbers(0.5, *sides, values, torch.ones(3, 400))
    assert row["divergence"] == pytest.approx(mean)
    ends = row["divergence_low"], row["divergence_high"]
    assert ends == pytest.approx((mean - half, mean + half), abs=0.02)


@pytest.mark.long
def test_a_language_model_has_the_skills_and_a_broken_one_lost_them(smollm2: Path) -> None:
    sparse = SparseTransformer(load_language_model(device="cpu"), initial_threshold=0.6)
    found = compare_skills(sparse, sparse, n=8, progress=False)
    assert not found.table.isna().any(axis=None)
    table = found.to_pandas()
    assert table["above_dense"].min() >= 0.75 and table["above_dense"].mean() > 0.92
    assert len(found.lost) > 0.8 * len(BATTERY)

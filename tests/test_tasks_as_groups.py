"""Tasks as groups of a post-training run, and as rows of a grid of head roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from made_tokenizers import byte_level

from sparse_tl.backend import Model
from sparse_tl.gates import SparseTransformer
from sparse_tl.jobs.head_roles import cells_of
from sparse_tl.jobs.post_training import Groups
from sparse_tl.jobs.settings import HeadRolesJob, PostTrainingJob
from sparse_tl.tasks import TASKS_BY_NAME, CapitalsTask
from sparse_tl.tasks.templates import COUNTRIES

pytestmark = pytest.mark.long

JOB = PostTrainingJob(model="tiny", task="capitals", window=16, steps=1, batch_size=4)


@pytest.fixture
def model(build_tiny: Callable[..., Model]) -> Any:
    words = [f" {word}" for row in COUNTRIES[:20] for word in row]
    tokenizer = byte_level(*words)
    return SparseTransformer(build_tiny(d_vocab=len(tokenizer), n_ctx=128, tokenizer=tokenizer))


def _prompts(rows: Any) -> set[tuple[int, ...]]:
    return {tuple(row) for row in rows.tokens.tolist()}


def test_a_task_of_too_few_prompts_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = CapitalsTask(templates=("The capital of [COUNTRY] is",), countries=COUNTRIES[:10])
    monkeypatch.setitem(TASKS_BY_NAME, "capitals", few)
    with pytest.raises(ValueError, match="at least 18 prompts of capitals.* got 10"):
        Groups(model, JOB).task("capitals")


def test_a_held_out_prompt_is_not_trained_on_where_a_task_has_few(model: Any) -> None:
    read = Groups(model, JOB)
    read.task("capitals")
    rows: Any = read.streams["capitals"].examples  # type: ignore[attr-defined]
    held_out = _prompts(read.validation["capitals"]) | _prompts(read.reported["capitals"])
    assert len(_prompts(rows)) == len(rows)
    assert not _prompts(rows) & held_out
    assert len(held_out) == (len(rows) + len(held_out)) // 9


def test_tasks_are_rows_of_head_roles(model: Any) -> None:
    (cell,) = cells_of(HeadRolesJob(model="some", tasks="induction", prompts=12))
    assert (cell.task, cell.row) == ("induction", "Induction")
    found = cell.prompts(model)
    assert (len(found), found.n_targets) == (12, 12)
    with pytest.raises(ValueError, match=r"--tasks: \['sums'\] are none of syntax.* induction"):
        HeadRolesJob(model="some", tasks="sums")

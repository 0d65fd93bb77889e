"""Which tasks a model does, as a table and in sentences."""

from __future__ import annotations

import pytest
from tiny import small_task_models

from sparse_tl import load_task_models, task_report
from sparse_tl.jobs.settings import TASK_NAMES
from sparse_tl.tasks import TASKS_BY_NAME, TaskReport
from sparse_tl.zoo import TASKS


@pytest.fixture(scope="module")
def report() -> TaskReport:
    return task_report(load_task_models(device="cpu")[0], n=16)


def test_the_tasks_by_name() -> None:
    names = ["greater_than", "ioi", "ioi_long", "docstring"]
    assert [task.name for task in TASKS] == names
    assert list(TASKS_BY_NAME) == [*names, "subject_verb", "anaphor", "induction", "capitals"]
    assert {*TASK_NAMES.split(", ")} == {*TASKS_BY_NAME}  # what commands name in their help
    with pytest.raises(ValueError, match=r"of \['greater_than'.* got \['sums'"):
        task_report(small_task_models()[0], ["sums"])


@pytest.mark.long
def test_the_built_in_model_does_its_tasks_and_knows_nothing_of_others(report: TaskReport) -> None:
    assert list(report.lacks) == list(TASKS_BY_NAME)
    assert report.done == ["greater_than", "ioi", "ioi_long", "docstring"]
    table = report.to_pandas()
    assert table["done"].tolist() == [True] * 4 + [False] * 4
    assert (table["accuracy"][:4] > 0.9).all() and (table["choice"][:4] > 0.9).all()
    assert table["chance"]["ioi"] == 0.5
    assert table["chance"]["docstring"] == pytest.approx(1 / 11)
    assert table["prompts"][["ioi", "induction"]].tolist() == [16, 16]
    assert table.loc["capitals"].isna().sum() == 6  # its words are not asked for
    for name in ("subject_verb", "anaphor", "capitals"):
        assert "that are single tokens after a space" in report.lacks[name]
    assert "the model does not do this task" in report.lacks["induction"]

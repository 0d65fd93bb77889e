"""The settings of the post-training job agree with what it calls, and with its command."""

from __future__ import annotations

import inspect

import pytest

from sparse_tl.jobs import run_post_training
from sparse_tl.jobs.settings import AdditionJob, CircuitsJob, HeadRolesJob, Job, PostTrainingJob
from sparse_tl.training import post_train


def test_post_training_on_text_has_the_defaults_of_post_training() -> None:
    job = PostTrainingJob(model="gpt2")
    names = ("steps", "learning_rate", "gate_learning_rate", "head_cost", "precision", "seed")
    parameters = inspect.signature(post_train).parameters
    assert set(dict(job)) < set(inspect.signature(run_post_training).parameters)
    assert job.only(*names) == {name: parameters[name].default for name in names}


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (PostTrainingJob, {}, "--model: Field required"),
        (PostTrainingJob, {"model": "gpt2", "stepz": 1}, "--stepz: "),
        (PostTrainingJob, {"model": "gpt2", "shard": True}, "--shard needs --text"),
        (PostTrainingJob, {"model": "gpt2", "task": "sums"}, "--task: "),
        (AdditionJob, {"target_loss": "x"}, "--target-loss: "),
        (HeadRolesJob, {"model": "gpt2", "tasks": "ioi=a.txt"}, "--tasks: .* none of syntax"),
    ],
)
def test_a_wrong_setting_is_named_by_its_option(kind: type[Job], settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**settings)


def test_lists_are_read_as_in_the_terminal() -> None:
    job = CircuitsJob(seeds="0, 2", tasks="ioi,docstring")
    assert (job.seeds, job.tasks) == ((0, 2), ("ioi", "docstring"))
    assert HeadRolesJob(tasks=["text=a,b.txt"], model="gpt2").tasks == ("text=a,b.txt",)

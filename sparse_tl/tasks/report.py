"""All tasks by name, and a report on how well a model does them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparse_tl.backend import HookedModel
from sparse_tl.calls.arguments import AtLeastOne, Seed, checked
from sparse_tl.circuits.skill import Skill, measure_skill
from sparse_tl.data.prompts import chat_start, prepends_bos
from sparse_tl.results import Result, table_html
from sparse_tl.tasks.agreement import AnaphorTask, SubjectVerbTask
from sparse_tl.tasks.capitals import CapitalsTask
from sparse_tl.tasks.docstring import DocstringTask
from sparse_tl.tasks.greater_than import GreaterThanTask
from sparse_tl.tasks.induction import InductionTask
from sparse_tl.tasks.ioi import IOILongTask, IOITask
from sparse_tl.tasks.words import Pairs, Task

if TYPE_CHECKING:
    import pandas as pd

SIDES = ("clean", "corrupted")
_ALL: tuple[Task, ...] = (
    GreaterThanTask(),
    IOITask(),
    IOILongTask(),
    DocstringTask(),
    SubjectVerbTask(),
    AnaphorTask(),
    InductionTask(),
    CapitalsTask(),
)
TASKS_BY_NAME = {task.name: task for task in _ALL}
"""The tasks that work for any tokenizer, by the names that commands take."""


@dataclass(frozen=True, eq=False)
class TaskReport(Result):
    """How well a model does tasks.

    Args:
        skills: the measured skill, by task.
        lacks: by task, the reason why the model does not do it or cannot be tested; empty if the
            model does it.
    """

    skills: dict[str, Skill]
    lacks: dict[str, str]

    @property
    def done(self) -> list[str]:
        """The tasks that the model does."""
        return [name for name, lack in self.lacks.items() if not lack]

    def to_pandas(self) -> pd.DataFrame:
        """One row per task, as in `Skill`; clean and corrupted are means of the task's metric.

        A task has no numbers if the model cannot be tested on it.
        """
        import pandas as pd

        rows = []
        for name, lack in self.lacks.items():
            row: dict[str, Any] = {"task": name}
            if name in self.skills:
                skill = self.skills[name]
                metric = {side: getattr(skill, side).mean().item() for side in SIDES}
                row |= {"prompts": len(skill.right), **skill.numbers, **metric}
            rows.append({**row, "done": not lack})
        columns = ["task", "prompts", "accuracy", "choice", "chance", *SIDES, "done"]
        return pd.DataFrame(rows, columns=columns).set_index("task")

    def __repr__(self) -> str:
        return f"TaskReport(does {len(self.done)} of {len(self.lacks)} tasks: {self.done})"

    def __str__(self) -> str:
        """One line per task."""
        return "\n".join(
            f"{name}: {lack or self.skills[name]}" for name, lack in self.lacks.items()
        )

    def _repr_html_(self) -> str:
        reasons = [f"{name}: {lack}" for name, lack in self.lacks.items() if lack]
        return table_html(self.to_pandas(), "; ".join([repr(self), *reasons]))


@checked
def task_report(
    model: HookedModel,
    tasks: Sequence[str | Task] = (),
    *,
    n: Pairs = 64,
    seed: Seed = 0,
    prepend_bos: bool | None = None,
    chat: bool = False,
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> TaskReport:
    """Measure how well a model does tasks, before searching it for their circuits.

    `Skill` describes the measurements, and when a model does a task.

    Args:
        model: dense or sparse model, with a tokenizer for all tasks but induction.
        tasks: tasks, or their names in `TASKS_BY_NAME`; all tasks if empty.
        n: number of prompts per task.
        seed: random seed for the prompts.
        prepend_bos: whether prompts start with the BOS token; by default as the model's own do.
        chat: whether each prompt begins the assistant's answer in a chat.
        batch_size: prompts per forward pass.
        progress: whether to show progress bars.

    Raises:
        ValueError: a task is unknown or given twice, or prompts cannot begin as requested.
    """
    if model.tokenizer is not None:
        prepends_bos(model, prepend_bos, chat=chat)
        _ = chat and chat_start(model.tokenizer)  # fail here, not in every task
    chosen = [by_name(task) if isinstance(task, str) else task for task in tasks or _ALL]
    names = [task.name for task in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"expected each task once; got {names}")
    options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    skills, lacks = {}, {}
    for task in chosen:
        try:
            pairs = task.pairs(model, n, seed=seed, prepend_bos=prepend_bos, chat=chat)
        except ValueError as error:  # the tokenizer lacks the task's words
            lacks[task.name] = str(error)
            continue
        skills[task.name] = measure_skill(model, pairs, task.metric, **options)
        lacks[task.name] = skills[task.name].lack
    return TaskReport(skills, lacks)


def by_name(name: str) -> Task:
    """The task with a name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in TASKS_BY_NAME:
        raise ValueError(f"expected tasks of {list(TASKS_BY_NAME)}; got {name!r}")
    return TASKS_BY_NAME[name]

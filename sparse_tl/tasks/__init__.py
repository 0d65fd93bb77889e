"""Tasks: prompts with known answers, as batches and prompt pairs."""

from sparse_tl.tasks.addition import AdditionTask as AdditionTask
from sparse_tl.tasks.docstring import DocstringTask as DocstringTask
from sparse_tl.tasks.generation import (
    Continuations as Continuations,
    compare_continuations as compare_continuations,
    continuations as continuations,
)
from sparse_tl.tasks.greater_than import GreaterThanTask as GreaterThanTask
from sparse_tl.tasks.induction import InductionTask as InductionTask
from sparse_tl.tasks.ioi import (
    GPT2_IOI_HEADS as GPT2_IOI_HEADS,
    IOILongTask as IOILongTask,
    IOITask as IOITask,
)
from sparse_tl.tasks.skill_battery import (
    TASKS_BY_NAME as TASKS_BY_NAME,
    SkillComparison as SkillComparison,
    TaskReport as TaskReport,
    compare_skills as compare_skills,
    task_report as task_report,
)
from sparse_tl.tasks.task import Task as Task
from sparse_tl.tasks.templates import (
    BATTERY as BATTERY,
    AnaphorTask as AnaphorTask,
    CapitalsTask as CapitalsTask,
    CompletionTask as CompletionTask,
    SubjectVerbTask as SubjectVerbTask,
)

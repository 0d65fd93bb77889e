"""Tasks: prompts with known answers, as batches and prompt pairs."""

from sparse_tl.tasks.addition import AdditionTask as AdditionTask
from sparse_tl.tasks.docstring import DocstringTask as DocstringTask
from sparse_tl.tasks.greater_than import GreaterThanTask as GreaterThanTask
from sparse_tl.tasks.ioi import (
    GPT2_IOI_HEADS as GPT2_IOI_HEADS,
    IOILongTask as IOILongTask,
    IOITask as IOITask,
)

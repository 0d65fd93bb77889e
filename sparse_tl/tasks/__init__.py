"""Tasks: prompts with known answers, as batches and prompt pairs."""

from sparse_tl.tasks.addition import AdditionTask
from sparse_tl.tasks.docstring import DocstringTask
from sparse_tl.tasks.greater_than import GreaterThanTask
from sparse_tl.tasks.ioi import IOILongTask, IOITask

__all__ = ["AdditionTask", "DocstringTask", "GreaterThanTask", "IOILongTask", "IOITask"]

"""The cells of the head-roles grid: one model with the prompts of one task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from sparse_tl.data import read_documents, token_windows
from sparse_tl.data.targets import TargetDataset
from sparse_tl.gates.sparse.sparse_transformer import load_dense_or_sparse
from sparse_tl.lens import HookedModel, adapt, check_folder
from sparse_tl.models import (
    TASKS,
    load_addition_models,
    load_named_model,
    load_task_models,
    task_pairs,
)
from sparse_tl.runs.folder import SIDES
from sparse_tl.tasks import TASKS_BY_NAME, AdditionTask, Task
from sparse_tl.tasks.questions import QUESTION_SETS

WINDOW = 64
"""Number of tokens per window of running text."""
N_SUMS = 1000
"""Number of held-out sums in the addition task."""


@dataclass(frozen=True)
class Cell:
    """One model on one task: names for files, titles of row and column, and how to load both."""

    task: str
    row: str
    model: str
    column: str
    load: Callable[[], HookedModel]
    prompts: Callable[[HookedModel], TargetDataset]


def built_in_cells(
    tasks: Sequence[str], prompts: int, seed: int, device: str | None, progress: bool
) -> list[Cell]:
    """Cells of the built-in dense and sparse models on the given tasks; by default on all."""
    known = {"addition": "Addition", **{task.name: task.title for task in TASKS}}
    unknown = [name for name in tasks if name not in known]
    if unknown:
        raise ValueError(f"expected tasks of {list(known)} for built-in models; got {unknown}")
    chosen = list(dict.fromkeys(tasks or known))
    if prompts > N_SUMS and "addition" in chosen:
        raise ValueError(f"expected at most {N_SUMS} prompts, all held-out sums; got {prompts}")

    @cache
    def pair(addition: bool) -> tuple[HookedModel, HookedModel]:
        load_pair = load_addition_models if addition else load_task_models
        return load_pair(seed, device=device, progress=progress)

    def read(name: str, model: HookedModel) -> TargetDataset:
        if name == "addition":
            sums = AdditionTask("placeholder").split(seed=seed)[2]
            return TargetDataset(sums).select(slice(0, prompts))
        task = next(task for task in TASKS if task.name == name)
        return TargetDataset.from_pairs(task_pairs(task, prompts, seed=seed), seed=seed)

    def load(name: str, side: str) -> HookedModel:
        dense, sparse = pair(name == "addition")
        return dense if side == "dense" else sparse

    cells = []
    for side in SIDES:
        for name in chosen:
            functions = partial(load, name, side), partial(read, name)
            cells.append(Cell(name, known[name], side, side.title(), *functions))
    return cells


def cells_of(
    models: Sequence[str], tasks: Sequence[str], prompts: int, device: str | None
) -> list[Cell]:
    """Cells of models, by name or folder, on question sets (by default all), tasks and text.

    One model is in memory at a time.
    """
    chosen = list(dict.fromkeys(tasks or QUESTION_SETS))
    _check_names(chosen)
    rows = [_row(name, prompts) for name in chosen]
    columns = _titled(models)
    for model in models:
        if Path(model).is_dir() or Path(model).suffix == ".gguf":
            check_folder(model)
    cache: dict[str, HookedModel] = {}

    def load(model: str) -> HookedModel:
        if model not in cache:
            cache.clear()  # the previous model may fill the device
            cache[model] = load_named_model(model, load_dense_or_sparse, device=device)
        return cache[model]

    return [
        Cell(kind, title, _file_name(column), column, partial(load, model), read)
        for column, model in columns.items()
        for kind, title, read in rows
    ]


def _check_names(tasks: Sequence[str]) -> None:
    """Check the names of all tasks, before any source is read.

    Raises:
        ValueError: a task is unknown or given twice.
    """
    unknown = [
        name
        for name in tasks
        if name not in TASKS_BY_NAME
        and name.partition("=")[0] not in QUESTION_SETS
        and not re.match("text=.", name)
    ]
    if unknown:
        raise ValueError(
            f"expected tasks of {list(QUESTION_SETS)}, each optionally with =SOURCE, of "
            f"{list(TASKS_BY_NAME)}, or text=SOURCE; got {unknown}"
        )
    if len({name.partition("=")[0] for name in tasks}) < len(tasks):
        raise ValueError(f"expected each kind of task once; got {list(tasks)}")


def _row(name: str, prompts: int) -> tuple[str, str, Callable[[HookedModel], TargetDataset]]:
    """A task's name, title and prompts. Reads its source, so that errors come before long work."""
    kind, _, source = name.partition("=")
    if kind == "text":
        next(iter(read_documents(source)), None)
        return "text", f"Text: {Path(source).stem}", partial(_windows, source, prompts)
    if name in TASKS_BY_NAME:
        return name, TASKS_BY_NAME[name].title, partial(_prompts, TASKS_BY_NAME[name], prompts)
    questions = QUESTION_SETS[kind]
    questions.questions(source or None, 2)
    return kind, questions.title, partial(questions.load, n=prompts, source=source or None)


def _prompts(task: Task, n: int, model: HookedModel) -> TargetDataset:
    return TargetDataset.from_pairs(task.pairs(model, n))


def _windows(source: str, n: int, model: HookedModel) -> TargetDataset:
    window = min(WINDOW, adapt(model).n_ctx)
    windows = token_windows(read_documents(source), model.tokenizer, window, limit=n)
    return TargetDataset.from_windows(windows)


def _titled(models: Sequence[str]) -> dict[str, str]:
    """Models by title: the last part of their name, or more parts if titles would clash."""
    for n_parts in range(1, max(len(Path(model).parts) for model in models) + 1):
        titles = ["/".join(Path(model).parts[-n_parts:]) for model in models]
        if len(set(map(_file_name, titles))) == len(models):
            return dict(zip(titles, models, strict=True))
    raise ValueError(f"expected each model once; got {list(models)}")


def _file_name(title: str) -> str:
    return re.sub(r"[^\w.-]+", "-", title).strip("-")

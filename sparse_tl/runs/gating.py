"""The columns and rows of the head-roles grid: which models, and which prompts they are given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sparse_tl.data import read_documents, token_windows
from sparse_tl.data.targets import TargetDataset
from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.saving import is_sparse_folder
from sparse_tl.lens import HookedModel, load_model
from sparse_tl.models import TASKS, load_addition_models, load_task_models, task_pairs
from sparse_tl.tasks import AdditionTask
from sparse_tl.tasks.questions import QUESTION_SETS, QuestionSet

WINDOW = 64
"""Tokens per window of running text."""
N_SUMS = 1000
"""Held-out sums of the addition task."""


@dataclass(frozen=True)
class GatingTask:
    """One row: a name for files, a title, and the prompts in a model's tokens."""

    name: str
    title: str
    load: Callable[[HookedModel], TargetDataset]


@runtime_checkable
class Shelf(Protocol):
    """Models by column, titled, and the tasks that all of them are given."""

    @property
    def columns(self) -> Mapping[str, str]: ...

    @property
    def tasks(self) -> Sequence[GatingTask]: ...

    def model(self, task: GatingTask, side: str) -> HookedModel: ...


class BuiltInModels:
    """The addition models and the task models, each dense and sparse.

    Args:
        names: of tasks; all when empty.
        prompts: of each task.
        seed: of models and prompts.
        device: where the models go.
        progress: whether to show how they are built, where they are absent.

    Raises:
        ValueError: an unknown task, or more prompts than there are held-out sums.
    """

    columns: Mapping[str, str] = {"dense": "Dense", "sparse": "Sparse"}

    def __init__(
        self, names: Sequence[str], prompts: int, seed: int, device: str | None, progress: bool
    ) -> None:
        self.prompts, self.seed = prompts, seed
        self._options: dict[str, Any] = {"device": device, "progress": progress}
        self._pairs: dict[bool, dict[str, HookedModel]] = {}
        known = {"addition": GatingTask("addition", "Addition", self._sums)}
        known |= {task.name: GatingTask(task.name, task.title, self._of(task)) for task in TASKS}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"expected tasks of {list(known)} for built-in models; got {unknown}")
        self.tasks = [known[name] for name in dict.fromkeys(names or known)]
        if prompts > N_SUMS and known["addition"] in self.tasks:
            raise ValueError(f"expected at most {N_SUMS} prompts, the held-out sums; got {prompts}")

    def model(self, task: GatingTask, side: str) -> HookedModel:
        """The model of a column that does this task."""
        sums = task.name == "addition"
        if sums not in self._pairs:
            load = load_addition_models if sums else load_task_models
            pair = load(self.seed, **self._options)
            self._pairs[sums] = dict(zip(self.columns, pair, strict=True))
        return self._pairs[sums][side]

    def _sums(self, model: HookedModel) -> TargetDataset:
        sums = AdditionTask("placeholder").split(seed=self.seed)[2]
        return TargetDataset(sums).select(slice(0, self.prompts))

    def _of(self, task: Any) -> Callable[[HookedModel], TargetDataset]:
        return lambda model: TargetDataset.from_pairs(
            task_pairs(task, self.prompts, seed=self.seed), seed=self.seed
        )


class GivenModels:
    """Models by name or folder, dense or sparse, one in memory at a time.

    Args:
        models: hub names or folders.
        names: of question sets, each with its source after ``=`` where it is not the published
            dataset; and ``text=SOURCE``.
        prompts: of each task.
        device: where the models go.

    Raises:
        ValueError: an unknown kind of task, one given twice, a source that cannot be read, or a
            model given twice.
    """

    def __init__(
        self, models: Sequence[str], names: Sequence[str], prompts: int, device: str | None
    ) -> None:
        self.prompts, self.device = prompts, device
        self.tasks = [self._task(name) for name in dict.fromkeys(names or QUESTION_SETS)]
        if len({task.name for task in self.tasks}) < len(self.tasks):
            raise ValueError(f"expected each kind of task once; got {list(names)}")
        self._sources = {_file_name(title): m for title, m in _titled(models).items()}
        self.columns = {_file_name(title): title for title in _titled(models)}
        for model in models:
            folder = Path(model)
            if folder.is_dir() and not any(
                (folder / f).exists() for f in ("tl_config.json", "config.json")
            ):
                raise ValueError(f"expected a model in {folder}; it holds no configuration of one")
        self._loaded: tuple[str, HookedModel] | None = None

    def model(self, task: GatingTask, side: str) -> HookedModel:
        """The model of a column."""
        if self._loaded is None or self._loaded[0] != side:
            self._loaded = None
            source = self._sources[side]
            sparse = is_sparse_folder(source)
            load = SparseTransformer.from_pretrained if sparse else load_model
            self._loaded = side, load(source, device=self.device)
        return self._loaded[1]

    def _task(self, name: str) -> GatingTask:
        """The task, if its source can be read at all: that is found out before any long work."""
        kind, _, source = name.partition("=")
        if kind == "text" and source:
            next(read_documents(source), None)
            title = f"Text: {Path(source).stem}"
            return GatingTask("text", title, lambda model: self._text(model, source))
        if kind not in QUESTION_SETS:
            raise ValueError(
                f"expected tasks of {list(QUESTION_SETS)}, with their source after =, or "
                f"text=SOURCE; got {name!r}"
            )
        asked = QUESTION_SETS[kind]
        asked.questions(source or None, 2)
        return GatingTask(kind, asked.title, lambda model: self._questions(model, asked, source))

    def _questions(self, model: HookedModel, asked: QuestionSet, source: str) -> TargetDataset:
        return asked.load(model, self.prompts, source=source or None)

    def _text(self, model: HookedModel, source: str) -> TargetDataset:
        window = min(WINDOW, model.cfg.n_ctx)
        documents = read_documents(source)
        return TargetDataset.from_windows(
            token_windows(documents, _tokenizer(model), window, limit=self.prompts)
        )


def _titled(models: Sequence[str]) -> dict[str, str]:
    """Models by title: the last part of their name, and more of it where two would be the same."""
    for n_parts in range(1, max(len(Path(model).parts) for model in models) + 1):
        titles = ["/".join(Path(model).parts[-n_parts:]) for model in models]
        if len(set(map(_file_name, titles))) == len(models):
            return dict(zip(titles, models, strict=True))
    raise ValueError(f"expected each model once; got {list(models)}")


def _file_name(title: str) -> str:
    return re.sub(r"[^\w.-]+", "-", title).strip("-")


def _tokenizer(model: HookedModel) -> Any:
    if model.tokenizer is None:
        raise ValueError("expected a model with a tokenizer; this one has none")
    return model.tokenizer

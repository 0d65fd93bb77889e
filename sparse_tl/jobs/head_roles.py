"""The head-roles job: fit gates for several models and tasks, ablate heads, draw the grid.

1. `run_head_roles` lists the cells of the grid: one per task and model.
2. Each cell fits gates on most of its prompts and measures ablation curves on the others. Every
   result is saved as soon as it is computed, and fits save checkpoints.
3. `_report` draws the grid and writes the tables from saved results.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.backend import HookedModel, adapt, check_folder, read_parameters
from sparse_tl.data import read_documents, token_windows
from sparse_tl.data.targets import TargetDataset
from sparse_tl.gates.sparse.sparse_transformer import load_dense_or_sparse
from sparse_tl.head_roles import (
    ROLES,
    AblationCurve,
    HeadRoles,
    ablation_curve,
    fit_head_gates,
)
from sparse_tl.jobs.folder import SIDES, RunFolder, save_figures, saved
from sparse_tl.jobs.settings import HeadRolesJob, takes
from sparse_tl.plots import ablation_grid, gate_trajectories
from sparse_tl.progress import say
from sparse_tl.results import table_html
from sparse_tl.storage.files import digest, read_json, write_csv, write_json
from sparse_tl.tasks import TASKS_BY_NAME, AdditionTask
from sparse_tl.tasks.questions import QUESTION_SETS
from sparse_tl.zoo import (
    TASKS,
    load_addition_models,
    load_named_model,
    load_task_models,
    task_pairs,
)

WINDOW = 64
"""Number of tokens per window of running text."""
FEWEST = 8
"""Minimum number of prompts per task."""
PROMPTS = "prompts.json"
"""The last file that a cell writes."""
HELD_OUT = 0.25
"""Share of the prompts that are held out, for the ablation curves."""


@dataclass(frozen=True)
class HeadRolesRun:
    """Results of a run: the content of ``metrics.json``, and scores and curves as tables."""

    metrics: dict[str, Any]
    scores: pd.DataFrame
    curves: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """Per task, model and role: number of heads, and change in nats per response if ablated."""
        rows = [
            {"task": task, "model": model, "role": role, **numbers[role]}
            for task, models in self.metrics["tasks"].items()
            for model, numbers in models.items()
            for role in ROLES
        ]
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return table_html(self.to_pandas())


@takes(HeadRolesJob)
def run_head_roles(out: Path, job: HeadRolesJob) -> HeadRolesRun:
    """Fit, ablate and draw everything unfinished, and return all results.

    Args:
        out: folder for the grid, ``metrics.json``, ``scores.csv``, ``curves.csv`` and each cell.

    Raises:
        ValueError: a setting is invalid, a model cannot read the prompts, or the output folder
            cannot be used.
    """
    cells = cells_of(job)
    folder = RunFolder(out, job, format=2)
    for number, cell in enumerate(cells, start=1):
        name, title = f"{cell.task}/{cell.model}", f"{cell.row}, {cell.column}"
        if folder.finished(f"{name}/{PROMPTS}"):
            continue
        with folder.stage(name, title):
            loaded = cell.load()
            folder.pin(f"model of {name}", digest(read_parameters(loaded)))
            dataset = cell.prompts(loaded)
            if len(dataset) < FEWEST:
                raise ValueError(
                    f"only {len(dataset)} prompts of the source fit the model; {FEWEST} are needed"
                )
            if len(dataset) < job.prompts:
                warnings.warn(
                    f"{job.prompts} prompts were asked for; only {len(dataset)} of the source fit "
                    "the model",
                    stacklevel=2,
                )
            if job.progress:
                say(f"{title} ({number} of {len(cells)})")
            _measure(loaded, dataset, folder, name, job)
            del loaded  # free its memory for the next model
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return _report(folder, cells)


def _measure(
    model: HookedModel,
    dataset: TargetDataset,
    folder: RunFolder,
    name: str,
    job: HeadRolesJob,
) -> None:
    """Measure one cell: roles on most prompts, curves on the others."""
    fitted, held_out = dataset.split(HELD_OUT, seed=job.seed)
    cell, options = folder / name, job.only("updates", "lambda_", "batch_size", "accumulate")
    options |= {"checkpoint": folder / "checkpoints" / name, "seeds": job.seeds}
    shared = job.only("seed", "progress")
    fit = partial(fit_head_gates, model, fitted, held_out=held_out, **options, **shared)
    roles = saved(cell / "roles", HeadRoles, fit)
    for role in ROLES:
        ablate = partial(ablation_curve, model, roles, held_out, role, max_heads=job.max_heads)
        saved(cell / role, AblationCurve, partial(ablate, control=role == ROLES[0], **shared))
    figures = {"heads": roles.figure(), "gates": gate_trajectories(roles)}
    save_figures(figures, cell, ["png"])  # a page of each would take 5 MB
    write_json(cell / PROMPTS, {"fitted": len(fitted), "held_out": len(held_out)})


def _report(folder: RunFolder, cells: Sequence[Cell]) -> HeadRolesRun:
    """Draw the grid and write the tables from saved results."""
    metrics: dict[str, Any] = {cell.task: {} for cell in cells}
    panels: dict[str, dict[str, list[AblationCurve]]] = {cell.row: {} for cell in cells}
    scores, tables = [], []
    for cell in cells:
        saved_in = folder / cell.task / cell.model
        roles = HeadRoles.load(saved_in / "roles")
        curves: dict[str, AblationCurve] = {
            role: AblationCurve.load(saved_in / role) for role in ROLES
        }
        first = curves[ROLES[0]]
        panels[cell.row][cell.column] = list(curves.values())
        metrics[cell.task][cell.model] = {
            "prompts": read_json(saved_in / PROMPTS),
            **_numbers(roles, curves),
        }
        labels = {"task": cell.task, "model": cell.model}
        scores.append(roles.to_pandas().assign(**labels))
        assert first.control is not None
        random = AblationCurve("random", first.counts, first.control, first.in_role)
        tables += [
            curve.to_pandas().drop(columns="control", errors="ignore").assign(**labels, by=by)
            for by, curve in {**curves, "random": random}.items()
        ]
    save_figures({"ablation_grid": ablation_grid(panels)}, folder.path)
    all_scores = pd.concat(scores, ignore_index=True)
    all_curves = pd.concat(tables, ignore_index=True)
    write_csv(folder / "scores.csv", all_scores)
    write_csv(folder / "curves.csv", all_curves)
    content = {"tasks": metrics, "seconds": round(folder.seconds, 1)}
    write_json(folder / "metrics.json", content)
    return HeadRolesRun(content, all_scores, all_curves)


def _numbers(roles: HeadRoles, curves: Mapping[str, AblationCurve]) -> dict[str, Any]:
    """Losses, and for each role the number of heads and the effect of ablating them."""
    losses = roles.losses[:, roles.fitted].mean(dim=1).tolist()
    numbers: dict[str, Any] = {"dense_loss": roles.dense_loss, "notes": roles.notes()}
    numbers |= dict(zip(("g0_loss", "g_plus_loss", "g_minus_loss"), losses, strict=True))
    for role, curve in curves.items():
        members = roles.members(role).flatten(1)
        ablated = [min(count, curve.counts[-1]) for count in curve.in_role]
        indices = map(curve.counts.index, ablated)
        ends = [values[index].item() for values, index in zip(curve.values, indices, strict=True)]
        numbers[role] = {
            "heads": members.sum(dim=1).double().mean().item(),
            "always": int(members.all(dim=0).sum()),
            "any": int(members.any(dim=0).sum()),
            "ablated": sum(ablated) / len(ablated),
            "change_when_ablated": sum(ends) / len(ends),
        }
    return numbers


@dataclass(frozen=True)
class Cell:
    """One model on one task: names for files, titles of row and column, and how to load both."""

    task: str
    row: str
    model: str
    column: str
    load: Callable[[], HookedModel]
    prompts: Callable[[HookedModel], TargetDataset]


def cells_of(job: HeadRolesJob) -> list[Cell]:
    """The cells of a job's models, or of the built-in pairs, on its tasks, or on all of them.

    One model that the job names is in memory at a time.
    """
    if not job.model:
        return _built_in_cells(job)
    rows = [_row(name, job.prompts, job.seed) for name in dict.fromkeys(job.tasks or QUESTION_SETS)]
    columns = titled(job.model)
    for model in job.model:
        if Path(model).is_dir() or Path(model).suffix == ".gguf":
            check_folder(model)
    cache: dict[str, HookedModel] = {}

    def load(model: str) -> HookedModel:
        if model not in cache:
            cache.clear()  # the previous model may fill the device
            cache[model] = load_named_model(model, load_dense_or_sparse, device=job.device)
        return cache[model]

    return [
        Cell(kind, title, _file_name(column), column, partial(load, model), read)
        for column, model in columns.items()
        for kind, title, read in rows
    ]


def _built_in_cells(job: HeadRolesJob) -> list[Cell]:
    titles = {"addition": "Addition", **{task.name: task.title for task in TASKS}}

    @cache
    def pair(addition: bool) -> dict[str, HookedModel]:
        load_pair = load_addition_models if addition else load_task_models
        models = load_pair(job.seed, device=job.device, progress=job.progress)
        return dict(zip(SIDES, models, strict=True))

    def read(name: str, model: HookedModel) -> TargetDataset:
        if name == "addition":
            sums = AdditionTask("placeholder").split(seed=job.seed)[2]
            return TargetDataset(sums).select(slice(job.prompts))
        pairs = task_pairs(TASKS_BY_NAME[name], job.prompts, seed=job.seed)
        return TargetDataset.from_pairs(pairs, seed=job.seed)

    def load(name: str, side: str) -> HookedModel:
        return pair(name == "addition")[side]

    return [
        Cell(name, titles[name], side, side.title(), partial(load, name, side), partial(read, name))
        for side in SIDES
        for name in dict.fromkeys(job.tasks or titles)
    ]


def _row(name: str, n: int, seed: int) -> tuple[str, str, Callable[[HookedModel], TargetDataset]]:
    """A task's name, title and prompts. Reads its source, so that errors come before long work."""
    kind, _, source = name.partition("=")
    if kind == "text":
        next(iter(read_documents(source)), None)
        return "text", f"Text: {Path(source).stem}", partial(_windows, source, n)
    if task := TASKS_BY_NAME.get(name):
        prompts = partial(task.pairs, n=n, seed=seed)
        return name, task.title, lambda model: TargetDataset.from_pairs(prompts(model), seed=seed)
    questions = QUESTION_SETS[kind]
    questions.questions(source or None, 2)
    return kind, questions.title, partial(questions.load, n=n, source=source or None)


def _windows(source: str, n: int, model: HookedModel) -> TargetDataset:
    window = min(WINDOW, adapt(model).n_ctx)
    windows = token_windows(read_documents(source), model.tokenizer, window, limit=n)
    return TargetDataset.from_windows(windows)


def titled(models: Sequence[str]) -> dict[str, str]:
    """Models by title: the last part of their name, or more parts if titles would clash."""
    for n_parts in range(1, max(len(Path(model).parts) for model in models) + 1):
        titles = ["/".join(Path(model).parts[-n_parts:]) for model in models]
        if len(set(map(_file_name, titles))) == len(models):
            return dict(zip(titles, models, strict=True))
    raise ValueError(f"give each model once; got {list(models)}")


def _file_name(title: str) -> str:
    return re.sub(r"[^\w.-]+", "-", title).strip("-")

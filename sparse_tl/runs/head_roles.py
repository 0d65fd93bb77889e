"""The head-roles job: fit gates for several models and tasks, ablate heads, draw the grid.

1. `run_head_roles` checks the settings and lists the cells: one per task and model.
2. Each cell estimates its cost, fits gates on most of its prompts and measures ablation curves on
   the others. Every result is saved as soon as it is computed, and every stage saves checkpoints.
3. `_report` draws the grid and writes the tables from saved results.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.calls.arguments import checked
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles import (
    ROLES,
    AblationCurve,
    HeadRoles,
    ablation_curve,
    fit_head_gates,
)
from sparse_tl.lens import HookedModel, read_parameters
from sparse_tl.plots import ablation_grid, gate_trajectories
from sparse_tl.progress import say
from sparse_tl.results import table_html
from sparse_tl.runs.cells import Cell, built_in_cells, cells_of
from sparse_tl.runs.folder import RunFolder, save_figure, saved
from sparse_tl.runs.jobs import HeadRolesJob, takes
from sparse_tl.storage.files import digest, read_json, write_csv, write_json

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
@checked
def run_head_roles(
    out: str | Path,
    *,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
    **settings: Any,
) -> HeadRolesRun:
    """Fit, ablate and draw everything unfinished, and return all results.

    Args:
        out: folder for the grid, ``metrics.json``, ``scores.csv``, ``curves.csv`` and each cell.
        device: device to run on.
        restart: set an earlier run aside.
        progress: whether to show a progress bar.
        settings: the fields of `HeadRolesJob`.

    Raises:
        ValueError: a setting is invalid, a model cannot read the prompts, or the output folder
            cannot be used.
    """
    job = HeadRolesJob(**settings)
    if job.model:
        cells = cells_of(job.model, job.tasks, job.prompts, device)
    else:
        cells = built_in_cells(job.tasks, job.prompts, job.seed, device, progress)
    folder = RunFolder(out, job.settings(format=2), restart=restart)
    for number, cell in enumerate(cells, start=1):
        name = f"{cell.task}/{cell.model}"
        if folder.finished(f"{name}/{PROMPTS}"):
            continue
        with folder.stage(name, f"{cell.row}, {cell.column}"):
            loaded = cell.load()
            folder.pin(f"model of {name}", digest(read_parameters(loaded)))
            dataset = cell.prompts(loaded)
            if len(dataset) < FEWEST:
                raise ValueError(
                    f"expected a source of at least {FEWEST} prompts that fit the model; got "
                    f"{len(dataset)}"
                )
            if len(dataset) < job.prompts:
                warnings.warn(
                    f"{job.prompts} prompts were asked for; only {len(dataset)} of the source fit "
                    "the model",
                    stacklevel=2,
                )
            title = f"{cell.row}, {cell.column} ({number} of {len(cells)})"
            _measure(loaded, dataset, folder, name, title, job, progress)
            del loaded  # free its memory for the next model
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return _report(folder, cells)


def _measure(
    model: HookedModel,
    dataset: TargetDataset,
    folder: RunFolder,
    name: str,
    title: str,
    job: HeadRolesJob,
    progress: bool,
) -> None:
    """Measure one cell: roles on most prompts, curves on the others."""
    fitted, held_out = dataset.split(HELD_OUT, seed=job.seed)
    cell, checkpoint = folder / name, folder / "checkpoints" / name
    fitting = job.only("updates", "lambda_", "batch_size", "accumulate", "seed")
    if progress:
        say(title)
    fitting |= {"seeds": job.seeds, "held_out": held_out, "progress": progress}
    roles = saved(
        cell / "roles",
        HeadRoles,
        lambda: fit_head_gates(model, fitted, checkpoint=checkpoint, **fitting),
    )
    for role in ROLES:
        options = {**job.only("max_heads", "seed"), "control": role == ROLES[0]}
        measured = partial(ablation_curve, model, roles, held_out, role, **options)
        saved(
            cell / role,
            AblationCurve,
            partial(measured, progress=progress),
        )
    save_figure(roles.figure(), cell, "heads")
    save_figure(gate_trajectories(roles), cell, "gates")
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
    save_figure(ablation_grid(panels), folder.path, "ablation_grid")
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

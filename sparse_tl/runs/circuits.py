"""The circuits job: scores, circuits and effect curves of a dense and a sparse model per task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits.skill import Skill, measure_skill
from sparse_tl.data import PromptPairs
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import HookedModel, adapt, load_model, read_parameters
from sparse_tl.models import (
    SMOLLM2,
    TASKS,
    load_language_models,
    load_named_model,
    load_task_models,
    task_pairs,
)
from sparse_tl.plots.page.rendering import check_address_space
from sparse_tl.runs.comparison import Comparison, measure, measured_file, measured_folder, report
from sparse_tl.runs.folder import SIDES, RunFolder
from sparse_tl.runs.jobs import CircuitsJob, takes
from sparse_tl.storage.files import digest, write_json
from sparse_tl.tasks import TASKS_BY_NAME, Task

ORDER = ("greater_than", "ioi", "docstring", "ioi_long")
"""The default tasks, in the order of their panels."""
EXAMPLES = 500
"""Prompts per task for accuracy; 64 prompts could not distinguish 98 from 100 %."""
Draw = Callable[[int], PromptPairs]


@takes(CircuitsJob)
@checked
def run_circuits(
    out: str | Path,
    *,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Score, evaluate and draw everything unfinished, and return all results.

    First, the accuracy of both models is measured on 500 prompts of every task. A task that either
    model cannot do (see `Skill`), or whose words the tokenizer lacks, gets no circuits;
    ``no_circuits.json`` and the result say why. On the other tasks, half of the prompt pairs score
    the edges and heads, and the other half evaluates the circuits; single-prompt circuits are found
    for 16 of these (`circuit_sizes_per_prompt`). Each seed's sparse model is compared with the
    dense model of the same seed. Seeds can be added later: results of other seeds are kept.

    Args:
        out: folder for ``metrics.json``, curves, scores, circuits and figures.
        device: device to run on.
        restart: set an earlier run aside.
        progress: whether to show a progress bar.
        settings: the fields of `CircuitsJob`.

    Raises:
        ValueError: a setting is invalid, or every task fails for a model.
        MemoryError: the address space of this process is limited.
    """
    job = CircuitsJob(**settings)
    model, sparse, seeds = job.model, job.sparse, tuple(dict.fromkeys(job.seeds))
    sides = SIDES if model is None or sparse is not None else ("dense",)
    check_address_space()
    built_in = {task.name: task for task in TASKS}
    known: Mapping[str, Task] = built_in if model is None else TASKS_BY_NAME
    unknown = [name for name in job.tasks if name not in known]
    if unknown:
        raise ValueError(f"expected tasks of {list(known)}; got {unknown}")
    chosen = [known[name] for name in dict.fromkeys(job.tasks or ORDER)]
    recorded = job.settings(format=6, tasks=[task.name for task in chosen])
    folder = RunFolder(out, recorded, restart=restart)
    declined: dict[str, list[str]] = {}
    for seed in seeds:
        missing = [
            (task, side)
            for task in chosen
            for side in sides
            if not folder.finished(measured_file(task.name, seed, side))
        ]
        if not missing:
            continue
        # Keep one pair in memory at a time.
        with folder.stage(f"models of seed {seed}"):
            models = _models(model, sparse, seed, device, progress)
            for side, loaded in models.items():
                suffix = f", seed {seed}" if model is None else ""
                folder.pin(f"{side} model{suffix}", digest(read_parameters(loaded)))
        draws: dict[str, Draw] = {}
        skills: dict[str, dict[str, Skill]] = {}
        for task in dict.fromkeys(task for task, _ in missing):
            if model is None:
                draws[task.name] = partial(task_pairs, built_in[task.name], seed=seed)
            else:
                draws[task.name] = partial(task.pairs, models["dense"], seed=seed)
            with folder.stage(f"{task.name}/seed-{seed}/accuracy"):
                skill = _skills(models, task, draws[task.name], job.batch_size, progress)
            if isinstance(skill, str):
                declined.setdefault(task.name, []).append(f"{task.title}, seed {seed}{skill}")
            else:
                skills[task.name] = skill
        for task, side in missing:
            if task.name in declined:
                continue
            name = measured_folder(task.name, seed, side)
            with folder.stage(name, f"{task.title}, seed {seed}, {side} model"):
                measure(
                    models[side],
                    draws[task.name](job.pairs),
                    skills[task.name][side].numbers,
                    task.metric,
                    folder / name,
                    progress=progress,
                    **job.only("method", "patch", "batch_size"),
                )
    reasons = [reason for by_seed in declined.values() for reason in by_seed]
    titles = {task.name: task.title for task in chosen if task.name not in declined}
    if not titles:
        raise ValueError(" ".join(reasons))
    if reasons:
        write_json(folder / "no_circuits.json", reasons)
    title = "Task Model" if model is None else model
    names = dict(zip(sides, (title, f"Sparse {title}"), strict=False))
    compared = report(folder.path, titles, names, seeds=seeds, patch=job.patch)
    return replace(compared, no_circuits=reasons)


def _skills(
    models: Mapping[str, HookedModel], task: Task, draw: Draw, batch_size: int, progress: bool
) -> dict[str, Skill] | str:
    """The skill of each model at a task; or, as the end of a sentence, why there is none."""
    try:
        examples = draw(EXAMPLES)
    except ValueError as error:  # the tokenizer lacks the task's words
        return f": {error}"
    skills, options = {}, {"batch_size": batch_size, "progress": progress}
    for side, model in models.items():
        skill = measure_skill(model, examples, task.metric, **options)
        if skill.lack:
            return f", {side} model: {skill.lack}."
        skills[side] = skill
    return skills


def _models(
    model: str | None,
    sparse: str | Path | None,
    seed: int,
    device: str | None,
    progress: bool,
) -> dict[str, HookedModel]:
    if model is None:
        pair = load_task_models(seed, device=device, progress=progress)
        return dict(zip(SIDES, pair, strict=True))
    if str(sparse) == model == SMOLLM2:
        return dict(zip(SIDES, load_language_models(device=device), strict=True))
    dense = load_named_model(model, load_model, device=device)
    if sparse is None:
        return {"dense": dense}
    wrapped = SparseTransformer.from_pretrained(sparse, device=device)
    dense.cfg.default_prepend_bos = wrapped.cfg.default_prepend_bos  # both read the same prompts
    graphs = [adapt(model).graph for model in (dense, wrapped)]
    sizes = [adapt(model).d_vocab for model in (dense, wrapped)]
    if graphs[0] != graphs[1] or sizes[0] != sizes[1]:
        raise ValueError(
            f"expected a sparse model made from the dense one; got {graphs[0]!r} over {sizes[0]} "
            f"tokens and {graphs[1]!r} over {sizes[1]}"
        )
    return {"dense": dense, "sparse": wrapped}

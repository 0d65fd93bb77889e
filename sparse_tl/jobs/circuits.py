"""The circuits job: scores, circuits and effect curves of a dense and a sparse model per task.

1. `measure` one model on one task: half of the pairs score edges and heads, the others evaluate.
2. `report` on all tasks and seeds from saved results: tables, figures and circuits, and multipliers
   between a dense and a sparse model.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from sparse_tl.backend import HookedModel, adapt, load_model, read_parameters
from sparse_tl.circuits import (
    Circuit,
    CircuitSizes,
    Evaluation,
    Scores,
    SeedCurves,
    attribute_circuit_edges,
    attribute_heads,
    circuit_sizes_per_prompt,
    evaluate_circuit_edges,
    evaluate_heads,
    seed_multipliers,
)
from sparse_tl.circuits.evaluation import median_size
from sparse_tl.circuits.methods.attribution import Method
from sparse_tl.circuits.skill import Skill, measure_skill
from sparse_tl.data import PromptPairs
from sparse_tl.gates import PatchName, SparseTransformer
from sparse_tl.jobs.folder import SIDES, RunFolder, save_figures, saved
from sparse_tl.jobs.settings import BuiltInTask, CircuitsJob, takes
from sparse_tl.metrics import Metric
from sparse_tl.plots import component_diagram, effect_figure
from sparse_tl.plots.page.rendering import check_address_space
from sparse_tl.plots.panels.curves import Parts
from sparse_tl.results import table_html
from sparse_tl.storage.files import digest, read_json, write_csv, write_json
from sparse_tl.tasks import TASKS_BY_NAME, Task
from sparse_tl.zoo import (
    SMOLLM2,
    TASKS,
    load_language_models,
    load_named_model,
    load_task_models,
    task_pairs,
)

EXAMPLES = 500
"""Prompts per task for accuracy; 64 prompts could not distinguish 98 from 100 %."""
Draw = Callable[[int], PromptPairs]
LEVEL = 0.9
"""The explained effect at which models are compared."""
PARTS: tuple[Parts, ...] = ("heads", "circuit_edges")
PER_PROMPT = f"circuit_edges_at_{LEVEL}_per_prompt"
"""Key of the median number of circuit edges that a single prompt needs."""
ENDS = ("_low", "_high")
"""Suffixes of the keys of a size's 95 % interval over pairs; absent for medians over seeds."""
ACCURACY = "accuracy.json"
PROMPTS = 16
"""Number of held-out pairs for which circuits of single prompts are found."""


@dataclass(frozen=True)
class Comparison:
    """Parts that each task needs: the content of ``metrics.json``, and the curves as a table."""

    metrics: dict[str, Any]
    curves: pd.DataFrame
    no_circuits: Sequence[str] = ()
    """Reasons why requested tasks have no circuits."""

    def to_pandas(self) -> pd.DataFrame:
        """Number of parts that each task needs for an explained effect of 0.9, per model.

        Medians for several seeds; for a single seed, also the 95 % interval over pairs.
        """
        rows = []
        for task, measured in self.metrics.items():
            for parts in PARTS:
                row: dict[str, Any] = {"task": task, "parts": parts}
                sides = [side for side in SIDES if side in measured]
                for side in sides:
                    key = f"{parts}_at_{LEVEL}"
                    row[side] = measured[side][key]
                    row |= {
                        f"{side}{end}": measured[side][key + end]
                        for end in ENDS
                        if key + end in measured[side]
                    }
                if len(sides) > 1:
                    row["multiplier"] = measured[f"multiplier_{parts}"]
                rows.append(row)
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        caption = [f"Parts needed for an explained effect of {LEVEL}", *self.no_circuits]
        return table_html(self.to_pandas(), ". ".join(caption))


def measure(
    model: HookedModel,
    pairs: PromptPairs,
    skill: Mapping[str, float],
    metric: Metric,
    folder: Path,
    *,
    method: Method = "eap-ig",
    patch: PatchName = "corrupted",
    batch_size: int = 32,
    progress: bool = True,
) -> None:
    """Save scores from the first half of the pairs, and curves and single-prompt circuits from the
    second, together with the model's skill at the task.

    Each result is saved as soon as it is computed, and loaded if an earlier call saved it;
    `measured_file` is written last. Raises a `NoEffectError` if there is no effect to explain.
    """
    scoring = pairs.select(slice(0, len(pairs) // 2))
    held_out = pairs.select(slice(len(pairs) // 2, None))
    single = held_out.select(slice(0, PROMPTS))
    options: dict[str, Any] = {"patch": patch, "batch_size": batch_size, "progress": progress}
    for parts, attribute, evaluate in (
        ("circuit_edge", attribute_circuit_edges, evaluate_circuit_edges),
        ("head", attribute_heads, evaluate_heads),
    ):
        scores = saved(
            folder / f"{parts}_scores",
            Scores,
            partial(attribute, model, scoring, metric, method=method, **options),
        )
        evaluation = saved(
            folder / f"{parts}s",
            Evaluation,
            partial(evaluate, model, held_out, metric, scores, **options),
        )
        _ = evaluation.effect  # raises where there is none
    saved(
        folder / "circuit_edges_per_prompt",
        CircuitSizes,
        partial(
            *(circuit_sizes_per_prompt, model, single, metric),
            level=LEVEL,
            method=method,
            **options,
        ),
    )
    write_json(folder / ACCURACY, skill)


def measured_folder(task: str, seed: int, side: str) -> str:
    """Path in a run's folder of the results of `measure` for one model and seed."""
    return f"{task}/seed-{seed}/{side}"


def measured_file(task: str, seed: int, side: str) -> str:
    """The last file that `measure` writes in `measured_folder`."""
    return f"{measured_folder(task, seed, side)}/{ACCURACY}"


def effect_curves(
    folder: Path, task: str, seeds: Sequence[int], side: str, parts: Parts, name: str
) -> SeedCurves:
    """The curves that `measure` saved for one model on one task, with a name for figures."""
    folders = [folder / measured_folder(task, seed, side) / parts for seed in seeds]
    return SeedCurves(seeds, [Evaluation.load(saved).curve(name) for saved in folders])


def report(
    folder: Path,
    tasks: Mapping[str, str],
    names: Mapping[str, str],
    *,
    seeds: Sequence[int] = (0,),
    patch: PatchName = "corrupted",
) -> Comparison:
    """Write figures, tables, circuits and ``metrics.json`` from what `measure` saved.

    `tasks` are panel titles by task name, and `names` those of the models by side.
    """
    metrics: dict[str, Any] = {}
    tables: list[pd.DataFrame] = []
    panels: dict[Parts, dict[str, list[SeedCurves]]] = {parts: {} for parts in PARTS}
    for task, title in tasks.items():
        multipliers: dict[str, pd.Series] = {}
        for parts in PARTS:
            curves = [
                effect_curves(folder, task, seeds, side, parts, name)
                for side, name in names.items()
            ]
            panels[parts][title] = curves
            if len(curves) > 1:
                multipliers[f"multiplier_{parts}"] = seed_multipliers(*curves, level=LEVEL)
        by_seed: dict[str, Any] = {}
        for index, seed in enumerate(seeds):
            numbers = by_seed[str(seed)] = {}
            for side in names:
                numbers[side], sizes = _numbers(folder / measured_folder(task, seed, side))
                labels = {"task": task, "seed": seed, "side": side}
                tables += [pd.DataFrame({**labels, "parts": p, **sizes[p]}) for p in PARTS]
            numbers |= {name: _number(ratios.iloc[index]) for name, ratios in multipliers.items()}
            shown = title if len(seeds) == 1 else f"{title}, seed {seed}"
            _draw_circuits(folder / task / f"seed-{seed}", shown, numbers, names, patch)
        metrics[task] = {
            side: _medians([numbers[side] for numbers in by_seed.values()]) for side in names
        }
        for name, ratios in multipliers.items():
            found = ratios.dropna()
            metrics[task] |= {name: _number(found.median())}
            metrics[task] |= {f"{name}_range": [found.min(), found.max()] if len(found) else None}
        metrics[task]["seeds"] = by_seed
    figures = {f"{p}_kept": effect_figure(panels[p], parts=p, level=LEVEL) for p in PARTS}
    save_figures(figures, folder)
    table = pd.concat(tables, ignore_index=True)
    write_csv(folder / "curves.csv", table)
    write_json(folder / "metrics.json", metrics)
    return Comparison(metrics, table)


def _number(value: float) -> float | None:
    """A number for JSON; None where it is missing."""
    return None if math.isnan(value) else float(value)


def _numbers(folder: Path) -> tuple[dict[str, Any], dict[Parts, pd.DataFrame]]:
    """The measurements of one model and seed, and its curves as tables."""
    numbers: dict[str, Any] = read_json(folder / ACCURACY)
    tables: dict[Parts, pd.DataFrame] = {}
    for parts in PARTS:
        evaluation = Evaluation.load(folder / parts)
        numbers[f"{parts}_at_{LEVEL}"] = evaluation.curve(parts).size_at(LEVEL)
        for end, size in zip(ENDS, evaluation.size_interval(LEVEL), strict=True):
            numbers[f"{parts}_at_{LEVEL}{end}"] = size
        tables[parts] = evaluation.to_pandas()
    single = CircuitSizes.load(folder / "circuit_edges_per_prompt")
    numbers |= {
        PER_PROMPT: single.median,
        "prompts": len(single.sizes),
        "prompts_not_reached": single.not_reached,
        "prompts_no_effect": single.no_effect,
    }
    return numbers, tables


def _medians(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each number over seeds; counts of prompts are summed."""
    if len(seeds) == 1:
        return dict(seeds[0])
    medians: dict[str, Any] = {}
    for name in seeds[0]:
        values = [numbers[name] for numbers in seeds]
        if name.endswith(ENDS):
            continue
        if name.startswith("prompts"):
            medians[name] = sum(values)
        else:
            medians[name] = median_size(values) if "_at_" in name else statistics.median(values)
    return medians


def _draw_circuits(
    folder: Path, title: str, measured: dict[str, Any], names: Mapping[str, str], patch: PatchName
) -> None:
    """Draw and list each model's circuit that reaches the level."""
    circuits: dict[str, Circuit] = {}
    by_name: dict[str, Scores] = {}
    for side in names:
        scores = Scores.load(folder / side / "circuit_edge_scores")
        size = measured[side][f"circuit_edges_at_{LEVEL}"]
        kept = scores.grid.n_parts if size is None else min(math.ceil(size), scores.grid.n_parts)
        circuit = _smallest(scores, kept, patch)
        circuits[names[side]], by_name[names[side]] = circuit, scores
        listed = [{"edge": str(edge), "score": scores[edge]} for edge in circuit.edges]
        write_json(folder / f"{side}_circuit.json", listed)
    title = f"{title}: circuit edges for an explained effect of {LEVEL}"
    save_figures({"circuit": component_diagram(circuits, scores=by_name, title=title)}, folder)


def _smallest(scores: Scores, size: int, patch: PatchName) -> Circuit:
    """The fewest top-scored edges of which `size` have an effect."""
    sizes = range(size, scores.grid.n_parts)
    extra = bisect_left(sizes, size, key=lambda n: len(scores.top(n).connected(patch=patch)))
    return scores.top(size + extra).connected(patch=patch)


@takes(CircuitsJob)
def run_circuits(
    out: Path,
    job: CircuitsJob,
    *,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
) -> Comparison:
    """Score, evaluate and draw everything unfinished, and return all results.

    The accuracy of both models is measured first, on 500 prompts of each task. A task that either
    model cannot do (see `Skill`), or whose words the tokenizer lacks, gets no circuits;
    ``no_circuits.json`` and the result say why. On the other tasks, half of the prompt pairs score
    the edges and heads, and the other half evaluates the circuits; single-prompt circuits are found
    for 16 of these (`circuit_sizes_per_prompt`). Each seed's sparse model is compared with the
    dense model of the same seed. Seeds can be added later: results of other seeds are kept.

    Args:
        out: folder for ``metrics.json``, curves, scores, circuits and figures.
        job: the settings; or give its fields as keywords.
        device: device to run on.
        restart: set an earlier run aside.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a setting is invalid, or every task fails for a model.
        MemoryError: the address space of this process is limited.
    """
    model, sparse, seeds = job.model, job.sparse, tuple(dict.fromkeys(job.seeds))
    sides = SIDES if model is None or sparse is not None else ("dense",)
    check_address_space()
    chosen = [TASKS_BY_NAME[name] for name in dict.fromkeys(job.tasks or get_args(BuiltInTask))]
    recorded = job.settings(format=6, tasks=[task.name for task in chosen])
    folder = RunFolder(out, recorded, restart=restart)
    declined: dict[str, list[str]] = {}
    for seed in seeds:
        missing = {
            task.name: [
                side for side in sides if not folder.finished(measured_file(task.name, seed, side))
            ]
            for task in chosen
        }
        if not any(missing.values()):
            continue
        # Keep one pair in memory at a time.
        with folder.stage(f"models of seed {seed}"):
            models = _models(model, sparse, seed, device, progress)
            for side, loaded in models.items():
                suffix = f", seed {seed}" if model is None else ""
                folder.pin(f"{side} model{suffix}", digest(read_parameters(loaded)))
        for task in chosen:
            if not missing[task.name]:
                continue
            if model is None:
                built_in = next(one for one in TASKS if one.name == task.name)
                draw = partial(task_pairs, built_in, seed=seed)
            else:
                draw = partial(task.pairs, models["dense"], seed=seed)
            title = f"{task.title}, seed {seed}"
            with folder.stage(f"{task.name}/seed-{seed}/accuracy"):
                skills = _skills(models, task, draw, job.batch_size, progress)
            if isinstance(skills, str):
                declined.setdefault(task.name, []).append(title + skills)
                continue
            for side in missing[task.name]:
                name = measured_folder(task.name, seed, side)
                with folder.stage(name, f"{title}, {side} model"):
                    measure(
                        models[side],
                        draw(job.pairs),
                        skills[side].numbers,
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

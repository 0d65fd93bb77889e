"""The circuits job: scores, circuits and effect curves of a dense and a sparse model per task.

1. `measure` one model on one task: half of the pairs score edges and heads, the others evaluate.
2. `report` on all tasks and seeds from saved results: tables, figures and circuits, and multipliers
   between a dense and a sparse model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
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
from sparse_tl.circuits.task_skill import Skill, measure_skill
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
PROMPTS = 16
"""Number of held-out pairs for which circuits of single prompts are found."""
LEVEL = 0.9
"""The explained effect at which models are compared."""
PARTS: tuple[Parts, ...] = ("heads", "circuit_edges")
PER_PROMPT = f"circuit_edges_at_{LEVEL}_per_prompt"
"""Key of the median number of circuit edges that a single prompt needs."""
ENDS = ("_low", "_high")
"""Suffixes of the keys of a size's 95 % interval over pairs; absent for medians over seeds."""
_LABELS = ["task", "seed", "side", "parts"]
ACCURACY = "accuracy.json"
"""The last file that `measure` writes."""


@dataclass(frozen=True)
class Comparison:
    """Parts that each task needs: the content of ``metrics.json``, and the curves as a table."""

    metrics: dict[str, Any]
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    no_circuits: Sequence[str] = ()
    """Reasons why requested tasks have no circuits."""

    def to_pandas(self) -> pd.DataFrame:
        """Number of parts that each task needs for an explained effect of 0.9, per model.

        For a single seed, also the 95 % interval over pairs; for several, medians, and the lowest
        and highest multiplier (dense parts over sparse ones). NaN if not reached.
        """
        rows = []
        sizes = {parts: f"{parts}_at_{LEVEL}" for parts in PARTS}
        for task, measured in self.metrics.items():
            sides = [side for side in SIDES if side in measured]
            for parts, key in {**sizes, "circuit_edges of one prompt": PER_PROMPT}.items():
                row: dict[str, Any] = {"task": task, "parts": parts}
                for side in sides:
                    ends = [end for end in ("", *ENDS) if key + end in measured[side]]
                    row |= {side + end: measured[side][key + end] for end in ends}
                if f"multiplier_{parts}" in measured:
                    row["multiplier"] = measured[f"multiplier_{parts}"]
                    if len(measured["seeds"]) > 1 and (
                        ends := measured[f"multiplier_{parts}_range"]
                    ):
                        row |= dict(zip(("lowest", "highest"), ends, strict=True))
                rows.append(row)
        return pd.DataFrame(rows)

    @property
    def caption(self) -> str:
        """What the numbers of the table are."""
        n_seeds = max(len(measured["seeds"]) for measured in self.metrics.values())
        over = f": medians of {n_seeds} seeds" if n_seeds > 1 else ""
        return f"Parts needed for an explained effect of {LEVEL}{over}"

    def _repr_html_(self) -> str:
        return table_html(self.to_pandas(), ". ".join([self.caption, *self.no_circuits]))


def measure(
    model: HookedModel,
    pairs: PromptPairs,
    skill: Mapping[str, float],
    metric: Metric,
    folder: Path,
    *,
    method: Method = "eap-ig",
    **options: Any,
) -> None:
    """Save scores from the first half of the pairs, and curves and single-prompt circuits from the
    second, together with the model's skill at the task.

    Each result is saved as soon as it is computed, and loaded if an earlier call saved it. Other
    options are patch, batch size and progress. Raises a `NoEffectError` without an effect.
    """
    half = len(pairs) // 2
    scoring, held_out = pairs.select(slice(half)), pairs.select(slice(half, None))
    for parts, attribute, evaluate in (
        ("circuit_edge", attribute_circuit_edges, evaluate_circuit_edges),
        ("head", attribute_heads, evaluate_heads),
    ):
        score = partial(attribute, model, scoring, metric, method=method, **options)
        scores = saved(folder / f"{parts}_scores", Scores, score)
        judge = partial(evaluate, model, held_out, metric, scores, **options)
        _ = saved(folder / f"{parts}s", Evaluation, judge).effect  # raises where there is none
    single = held_out.select(slice(PROMPTS))
    how: dict[str, Any] = {"level": LEVEL, "method": method, **options}
    find = partial(circuit_sizes_per_prompt, model, single, metric, **how)
    saved(folder / "circuit_edges_per_prompt", CircuitSizes, find)
    write_json(folder / ACCURACY, skill)


def measured_folder(task: str, seed: int, side: str) -> str:
    """Path in a run's folder of the results of `measure` for one model and seed."""
    return f"{task}/seed-{seed}/{side}"


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
        by_seed: dict[str, Any] = {str(seed): {} for seed in seeds}
        for seed, numbers in zip(seeds, by_seed.values(), strict=True):
            for side in names:
                numbers[side], sizes = _numbers(folder / measured_folder(task, seed, side))
                tables.append(sizes.assign(task=task, seed=seed, side=side))
            shown = title if len(seeds) == 1 else f"{title}, seed {seed}"
            _draw_circuits(folder / task / f"seed-{seed}", shown, numbers, names, patch)
        metrics[task] = {
            side: _medians([each[side] for each in by_seed.values()]) for side in names
        }
        for parts in PARTS:
            curves = panels[parts][title] = [
                effect_curves(folder, task, seeds, side, parts, name)
                for side, name in names.items()
            ]
            if len(curves) > 1:
                name, ratios = f"multiplier_{parts}", seed_multipliers(*curves, level=LEVEL)
                for numbers, ratio in zip(by_seed.values(), ratios, strict=True):
                    numbers[name] = _number(ratio)
                found = ratios.dropna()
                metrics[task][name] = _number(found.median())
                ends = [found.min(), found.max()] if len(found) else None
                metrics[task][f"{name}_range"] = ends
        metrics[task]["seeds"] = by_seed
    figures = {f"{p}_kept": effect_figure(panels[p], parts=p, level=LEVEL) for p in PARTS}
    save_figures(figures, folder)
    table = pd.concat(tables, ignore_index=True)
    table = table[[*_LABELS, *table.columns.drop(_LABELS)]]
    write_csv(folder / "curves.csv", table)
    write_json(folder / "metrics.json", metrics)
    return Comparison(metrics, table)


def _number(value: float) -> float | None:
    """A number for JSON; None where it is missing."""
    return None if math.isnan(value) else float(value)


def _numbers(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The measurements of one model and seed, and its curves as a table."""
    numbers: dict[str, Any] = read_json(folder / ACCURACY)
    tables = []
    for parts in PARTS:
        evaluation, key = Evaluation.load(folder / parts), f"{parts}_at_{LEVEL}"
        numbers[key] = evaluation.curve(parts).size_at(LEVEL)
        for end, size in zip(ENDS, evaluation.size_interval(LEVEL), strict=True):
            numbers[key + end] = size
        tables.append(evaluation.to_pandas().assign(parts=parts))
    single = CircuitSizes.load(folder / "circuit_edges_per_prompt")
    numbers |= {
        PER_PROMPT: single.median,
        "prompts": len(single.sizes),
        "prompts_not_reached": single.not_reached,
        "prompts_no_effect": single.no_effect,
    }
    return numbers, pd.concat(tables)


def _medians(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each number over seeds; counts of prompts are summed."""
    if len(seeds) == 1:
        return dict(seeds[0])
    values = {name: [numbers[name] for numbers in seeds] for name in seeds[0]}
    return {
        name: sum(each) if name.startswith("prompts") else median_size(each)
        for name, each in values.items()
        if not name.endswith(ENDS)
    }


def _draw_circuits(
    folder: Path, title: str, measured: dict[str, Any], names: Mapping[str, str], patch: PatchName
) -> None:
    """Draw and list each model's circuit that reaches the level."""
    circuits: dict[str, Circuit] = {}
    by_name: dict[str, Scores] = {}
    for side, name in names.items():
        scores = by_name[name] = Scores.load(folder / side / "circuit_edge_scores")
        size, n_parts = measured[side][f"circuit_edges_at_{LEVEL}"], scores.grid.n_parts
        kept = n_parts if size is None else min(math.ceil(size), n_parts)
        circuit = circuits[name] = _smallest(scores, kept, patch)
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

    Other arguments are those of `run_addition`.

    Args:
        out: folder for ``metrics.json``, curves, scores, circuits and figures.

    Raises:
        ValueError: a setting is invalid, or every task fails for a model.
        MemoryError: the address space of this process is limited.
    """
    check_address_space()
    sides = SIDES if job.model is None or job.sparse is not None else SIDES[:1]
    chosen = [TASKS_BY_NAME[name] for name in dict.fromkeys(job.tasks or get_args(BuiltInTask))]
    recorded = job.settings(format=6, tasks=[task.name for task in chosen])
    folder = RunFolder(out, recorded, restart=restart)
    declined: dict[str, list[str]] = {}
    seeds = tuple(dict.fromkeys(job.seeds))
    for seed in seeds:
        missing: dict[str, list[str]] = {}
        for task, side in product(chosen, sides):
            if not folder.finished(f"{measured_folder(task.name, seed, side)}/{ACCURACY}"):
                missing.setdefault(task.name, []).append(side)
        if not missing:
            continue
        # Keep one pair in memory at a time.
        with folder.stage(f"models of seed {seed}"):
            models = _models(job, seed, device, progress)
            for side, loaded in models.items():
                suffix = f", seed {seed}" if job.model is None else ""
                folder.pin(f"{side} model{suffix}", digest(read_parameters(loaded)))
        for task in (task for task in chosen if task.name in missing):
            if job.model is None:
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
                measured = models[side], draw(job.pairs), skills[side].numbers, task.metric
                how = job.only("method", "patch", "batch_size")
                with folder.stage(name, f"{title}, {side} model"):
                    measure(*measured, folder / name, progress=progress, **how)
    reasons = [reason for by_seed in declined.values() for reason in by_seed]
    titles = {task.name: task.title for task in chosen if task.name not in declined}
    if not titles:
        raise ValueError(" ".join(reasons))
    if reasons:
        write_json(folder / "no_circuits.json", reasons)
    title = job.model or "Task Model"
    names = dict(zip(sides, (title, f"Sparse {title}"), strict=False))
    compared = report(folder.path, titles, names, seeds=seeds, patch=job.patch)
    return replace(compared, no_circuits=reasons)


def _skills(
    models: Mapping[str, HookedModel],
    task: Task,
    draw: Callable[[int], PromptPairs],
    batch_size: int,
    progress: bool,
) -> dict[str, Skill] | str:
    """The skill of each model at a task; or, as the end of a sentence, why there is none."""
    try:
        examples = draw(EXAMPLES)
    except ValueError as error:  # the tokenizer lacks the task's words
        return f": {error}"
    skills, options = {}, {"batch_size": batch_size, "progress": progress}
    for side, model in models.items():
        skills[side] = skill = measure_skill(model, examples, task.metric, **options)
        if skill.lack:
            return f", {side} model: {skill.lack}."
    return skills


def _models(
    job: CircuitsJob, seed: int, device: str | None, progress: bool
) -> dict[str, HookedModel]:
    if job.model is None:
        pair = load_task_models(seed, device=device, progress=progress)
        return dict(zip(SIDES, pair, strict=True))
    if str(job.sparse) == job.model == SMOLLM2:
        return dict(zip(SIDES, load_language_models(device=device), strict=True))
    dense = load_named_model(job.model, load_model, device=device)
    if job.sparse is None:
        return {"dense": dense}
    sparse = SparseTransformer.from_pretrained(job.sparse, device=device)
    dense.cfg.default_prepend_bos = sparse.cfg.default_prepend_bos  # both read the same prompts
    of_dense, of_sparse = adapt(dense), adapt(sparse)
    if (of_dense.graph, of_dense.d_vocab) != (of_sparse.graph, of_sparse.d_vocab):
        raise ValueError(
            f"--sparse was not made from --model: {of_sparse.graph!r} over {of_sparse.d_vocab} "
            f"tokens, and {of_dense.graph!r} over {of_dense.d_vocab}"
        )
    return {"dense": dense, "sparse": sparse}

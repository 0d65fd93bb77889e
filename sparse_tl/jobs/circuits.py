"""The circuits job: scores, circuits and effect curves of a dense and a sparse model per task.

1. `measure` one model on one task: half of the pairs score edges and heads, and find a circuit; the
   others evaluate.
2. `report` on all tasks and seeds from saved results: tables, figures and circuits, and multipliers
   between a dense and a sparse model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import torch

from sparse_tl.backend import HookedModel, adapt, load_model, read_parameters
from sparse_tl.circuits import (
    Circuit,
    Evaluation,
    FoundCircuit,
    HeadBehaviour,
    Scores,
    SeedCurves,
    attribute_circuit_edges,
    attribute_heads,
    evaluate,
    evaluate_circuit_edges,
    evaluate_heads,
    find_circuit,
    head_behaviour,
    seed_multipliers,
)
from sparse_tl.circuits.curves import median_size
from sparse_tl.circuits.methods.attribution import Method
from sparse_tl.circuits.task_skill import accuracy, measure_skill
from sparse_tl.data import PromptPairs
from sparse_tl.gates import Patch, SparseTransformer
from sparse_tl.jobs.folder import SIDES, RunFolder, save_figures, saved
from sparse_tl.jobs.own_pairs import OwnPairs
from sparse_tl.jobs.settings import OWN_PAIRS, PAIRS, BuiltInTask, CircuitsJob, takes
from sparse_tl.metrics import Metric, log_probability
from sparse_tl.plots import component_diagram, effect_figure
from sparse_tl.plots.diagrams.component_diagram import shown_first
from sparse_tl.plots.page.rendering import check_address_space
from sparse_tl.plots.panels.curves import Parts
from sparse_tl.results import table_html
from sparse_tl.storage.files import digest, read_json, write_csv, write_json
from sparse_tl.tasks import TASKS_BY_NAME, Task
from sparse_tl.zoo import (
    SMOLLM2,
    load_language_models,
    load_named_model,
    load_task_models,
    task_pairs,
)

EXAMPLES, OWN_EXAMPLES = 500, 128
"""Prompts per task for accuracy, of the built-in models and of models that the user names; 64 could
not distinguish 98 from 100 %."""
LEVEL = 0.9
"""The explained effect at which models are compared."""
PARTS: tuple[Parts, ...] = ("heads", "circuit_edges")
ENDS = ("_low", "_high")
"""Suffixes of the keys of a size's 95 % interval over pairs; absent for medians over seeds."""
FOUND, DRAWN, SHOWN = "found_circuit", "drawn_circuit", "shown_circuit"
"""The circuit found; what the page draws of it; what the edges shown first, and all, explain."""
BEHAVIOUR = "head_behaviour"
"""What heads do."""
ACCURACY = "accuracy.json"
"""The last file that `measure` writes."""


@dataclass(frozen=True)
class Comparison:
    """Parts that each task needs: the content of ``metrics.json``, and the curves as a table."""

    metrics: dict[str, Any]
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    no_circuits: Sequence[str] = ()
    """Reasons why requested tasks have no circuits."""
    pages: Sequence[Path] = ()
    """Diagrams of the circuits found, one for each task and seed."""

    def to_pandas(self) -> pd.DataFrame:
        """Number of parts that each task needs for an explained effect of 0.9, per model.

        For a single seed, also the 95 % interval over pairs; for several, medians, and the lowest
        and highest multiplier (dense parts over sparse ones). NaN if not reached.
        """
        rows = []
        sizes = {str(parts): f"{parts}_at_{LEVEL}" for parts in PARTS}
        sizes["circuit_edges, searched"] = "circuit"
        for task, measured in self.metrics.items():
            sides = [side for side in SIDES if side in measured]
            for parts, key in sizes.items():
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

    @property
    def findings(self) -> list[str]:
        """What each circuit found explains, and the kinds of its heads but sinks, in words."""
        found = []
        for task, measured in self.metrics.items():
            for (seed, by_side), side in product(measured["seeds"].items(), SIDES):
                if side in by_side:
                    words = f"{task}, seed {seed}, {side} model: {_explained(by_side[side])}."
                    for kind, heads in by_side[side]["heads"].items():
                        words += f" {kind.capitalize()}: {', '.join(heads)}." * (kind != "sink")
                    if by_side[side].get("stopped"):
                        words += " The time limit ended the search."
                    found.append(words)
        return found

    def _repr_html_(self) -> str:
        words = [self.caption, *self.findings, *self.no_circuits]
        return table_html(self.to_pandas(), ". ".join(word.rstrip(".") for word in words))


def _explained(numbers: Mapping[str, Any]) -> str:
    """What a circuit and the part of it that its diagram shows explain, with 95 % intervals."""
    shown, whole = (
        "{:.2f} ({:.2f} to {:.2f})".format(*(numbers[f"{name}_effect{end}"] for end in ("", *ENDS)))
        for name in ("shown", "circuit")
    )
    words = f"all {numbers['circuit']:,} edges explain {whole} of the effect on held-out pairs"
    if numbers["shown"] < numbers["circuit"]:
        words += f", the {numbers['shown']:,} shown first {shown}"
    if numbers["drawn"] < numbers["circuit"]:
        words += f"; only the {numbers['drawn']:,} whose scores say that they help are drawn"
    return words


def measure(
    model: HookedModel,
    pairs: PromptPairs,
    skill: Mapping[str, float],
    metric: Metric,
    folder: Path,
    *,
    method: Method = "eap-ig",
    seconds: float | None = None,
    **options: Any,
) -> None:
    """Save a circuit and scores from the first half of the pairs; from the second curves, and what
    the circuit explains; what heads do; and the model's skill at the task.

    Each result is saved as soon as it is computed, and loaded if an earlier call saved it. Other
    options are patch, batch size and progress; `seconds` limits the search for the circuit. Raises
    a `NoEffectError` without an effect.
    """
    half = len(pairs) // 2
    scoring, held_out = pairs.select(slice(half)), pairs.select(slice(half, None))
    find = partial(find_circuit, model, scoring, metric, held_out=held_out, at=LEVEL, **options)
    found = saved(folder / FOUND, FoundCircuit, partial(find, seconds=seconds))
    for parts, attribute, evaluate_top in (
        ("circuit_edge", attribute_circuit_edges, evaluate_circuit_edges),
        ("head", attribute_heads, evaluate_heads),
    ):
        score = partial(attribute, model, scoring, metric, method=method, **options)
        known = parts == "circuit_edge" and method == found.scores.method
        scores = saved(
            folder / f"{parts}_scores", Scores, (lambda: found.scores) if known else score
        )
        judge = partial(evaluate_top, model, held_out, metric, scores, **options)
        _ = saved(folder / f"{parts}s", Evaluation, judge).effect  # raises where there is none
    draw = partial(_drawn, model, scoring, metric, found, **options)
    drawn = saved(folder / DRAWN, Circuit, draw)
    both = [shown_first(drawn, found.scores), found.circuit]
    saved(folder / SHOWN, Evaluation, partial(evaluate, model, held_out, metric, both, **options))
    for given in (pairs, None):  # where pairs do not show what heads move, what they attend to
        with suppress(ValueError):
            look = partial(behaviour, model, given, options["progress"])
            saved(folder / BEHAVIOUR, HeadBehaviour, look)
            break
    write_json(folder / ACCURACY, skill)


def _drawn(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    found: FoundCircuit,
    *,
    patch: Patch = "corrupted",
    **options: Any,
) -> Circuit:
    """The circuit found, or its edges that help: whose first view is closer to the whole effect."""
    helping = Circuit(found.circuit.grid, found.circuit.mask & (found.scores.values < 0))
    helping = helping.connected(patch=patch)
    both = [found.circuit, helping] if len(helping) else [found.circuit]
    first = [shown_first(some, found.scores) for some in both]
    off = (1 - evaluate(model, pairs, metric, first, patch=patch, **options).effect).abs()
    return both[int(off.argmin())]


def behaviour(model: HookedModel, pairs: PromptPairs | None, progress: bool) -> HeadBehaviour:
    """What the model's heads do, on random tokens that fit into its context, and on pairs."""
    length = min(32, (adapt(model).n_ctx - 1) // 2)
    return head_behaviour(model, pairs, length=length, progress=progress)


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
) -> Comparison:
    """Write figures, tables, circuits and ``metrics.json`` from what `measure` saved.

    `tasks` are panel titles by task name, and `names` those of the models by side.
    """
    metrics: dict[str, Any] = {}
    tables, pages = dict[tuple[str, int, str, Parts], pd.DataFrame](), list[Path]()
    panels: dict[Parts, dict[str, list[SeedCurves]]] = {parts: {} for parts in PARTS}
    for task, title in tasks.items():
        by_seed: dict[str, Any] = {str(seed): {} for seed in seeds}
        for seed, numbers in zip(seeds, by_seed.values(), strict=True):
            for side in names:
                numbers[side], sizes = _numbers(folder / measured_folder(task, seed, side))
                tables |= {(task, seed, side, parts): sizes[parts] for parts in PARTS}
            shown = title if len(seeds) == 1 else f"{title}, seed {seed}"
            pages.append(_draw_circuits(folder / task / f"seed-{seed}", shown, numbers, names))
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
                    numbers[name] = None if math.isnan(ratio) else ratio
                found = ratios.dropna()
                ends = [found.min(), found.max()] if len(found) else None
                metrics[task] |= {name: found.median() if ends else None, f"{name}_range": ends}
        metrics[task]["seeds"] = by_seed
    figures = {f"{p}_kept": effect_figure(panels[p], parts=p, level=LEVEL) for p in PARTS}
    save_figures(figures, folder)
    table = pd.concat(tables, names=["task", "seed", "side", "parts"]).droplevel(4).reset_index()
    write_csv(folder / "curves.csv", table)
    write_json(folder / "metrics.json", metrics)
    return Comparison(metrics, table, pages=pages)


def _numbers(folder: Path) -> tuple[dict[str, Any], dict[Parts, pd.DataFrame]]:
    """The measurements of one model and seed, and its curves as tables."""
    numbers: dict[str, Any] = read_json(folder / ACCURACY)
    tables = dict[Parts, pd.DataFrame]()
    for parts in PARTS:
        evaluation, key = Evaluation.load(folder / parts), f"{parts}_at_{LEVEL}"
        numbers[key] = evaluation.curve(parts).size_at(LEVEL)
        for end, size in zip(ENDS, evaluation.size_interval(LEVEL), strict=True):
            numbers[key + end] = size
        tables[parts] = evaluation.to_pandas()
    found, explained = FoundCircuit.load(folder / FOUND), Evaluation.load(folder / SHOWN)
    effects = torch.stack([explained.effect, *explained.interval()], dim=1).tolist()
    for name, size, some in zip(("shown", "circuit"), explained.sizes, effects, strict=True):
        keys = (f"{name}_effect{end}" for end in ("", *ENDS))
        numbers |= {name: size, **dict(zip(keys, some, strict=True))}
    numbers["drawn"], numbers["stopped"] = len(Circuit.load(folder / DRAWN)), found.stopped
    numbers["heads"] = by_kind = dict[str, list[str]]()
    if (folder / BEHAVIOUR).exists():  # the heads of some models cannot be scored
        ends = ((edge.source, edge.destination.node) for edge in found.circuit.edges)
        in_circuit = {str(node) for both in ends for node in both}
        for head, kind in HeadBehaviour.load(folder / BEHAVIOUR).main.items():
            if head in in_circuit:
                by_kind.setdefault(kind, []).append(head)
    return numbers, tables


def _medians(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each number over seeds."""
    if len(seeds) == 1:
        return dict(seeds[0])
    return {
        name: median_size([numbers[name] for numbers in seeds])
        for name in seeds[0]
        if not name.endswith(ENDS) and name not in ("heads", "stopped")
    }


def _draw_circuits(
    folder: Path, title: str, measured: dict[str, Any], names: Mapping[str, str]
) -> Path:
    """Draw and list the circuit found in each model; return the page."""
    circuits, scores = dict[str, Circuit](), dict[str, Scores]()
    kinds, remarks = dict[str, HeadBehaviour](), dict[str, str]()
    for side, name in names.items():
        found, numbers = FoundCircuit.load(folder / side / FOUND), measured[side]
        circuits[name], scores[name] = Circuit.load(folder / side / DRAWN), found.scores
        remarks[name] = _explained(numbers)
        if (folder / side / BEHAVIOUR).exists():
            kinds[name] = HeadBehaviour.load(folder / side / BEHAVIOUR)
        listed = [{"edge": str(edge), "score": found.scores[edge]} for edge in found.circuit.edges]
        write_json(folder / f"{side}_circuit.json", listed)
    effects = " and ".join(f"{measured[side]['shown_effect']:.2f}" for side in names)
    title = f"{title}: what is shown explains {effects} of the effect"
    roles = kinds if len(names) > 1 else next(iter(kinds.values()), None)  # of one, with labels
    page = component_diagram(circuits, scores=scores, roles=roles, remarks=remarks, title=title)
    save_figures({"circuit": page}, folder)
    return folder / "circuit.html"


@takes(CircuitsJob)
def run_circuits(out: Path, job: CircuitsJob) -> Comparison:
    """Score, evaluate and draw everything unfinished, and return all results.

    The accuracy of both models is measured first, on 500 prompts of each task, or 128 of a model
    that is named. A task that either model cannot do (see `Skill`), or whose words the tokenizer
    lacks, gets no circuits; ``no_circuits.json`` and the result say why. On the other tasks, half
    of the prompt pairs score the edges and heads and search for a circuit (`find_circuit`), and the
    other half evaluates the circuits. Each seed's sparse model is compared with the dense model of
    the same seed. Seeds can be added later: results of other seeds are kept.

    Args:
        out: folder for ``metrics.json``, curves, scores, circuits and figures.

    Raises:
        ValueError: a setting is invalid, or every task fails for a model.
        MemoryError: the address space of this process is limited.
    """
    check_address_space()
    sides = SIDES if job.model is None or job.sparse is not None else SIDES[:1]
    asked = dict.fromkeys(job.tasks or get_args(BuiltInTask))
    own = None if job.pairs_file is None else OwnPairs.read(job.pairs_file)
    if own is not None and len(own.rows) < 4:  # as for --pairs
        raise ValueError(f"{job.pairs_file} has {len(own.rows)} rows; give at least 4")
    chosen = [TASKS_BY_NAME[name] for name in asked] if own is None else [own]
    folder = RunFolder(out, job, format=10, tasks=[task.name for task in chosen])
    n_default = PAIRS if job.model is None else OWN_PAIRS
    n_pairs = job.pairs or (n_default if own is None else len(own.rows))
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
            models = _models(job, seed)
            for side, loaded in models.items():
                suffix = f", seed {seed}" if job.model is None else ""
                folder.pin(f"{side} model{suffix}", digest(read_parameters(loaded)))
        for task in (task for task in chosen if task.name in missing):
            draw = partial(task.pairs, models["dense"], seed=seed)
            if job.model is None:
                draw = partial(task_pairs, task, seed=seed)
            title = f"{task.title}, seed {seed}"
            with folder.stage(f"{task.name}/seed-{seed}/accuracy"):
                skills = _skills(models, task, draw, job)
            if isinstance(skills, str):
                declined.setdefault(task.name, []).append(title + skills)
                continue
            for side in missing[task.name]:
                name = measured_folder(task.name, seed, side)
                measured = models[side], draw(n_pairs), skills[side], task.metric
                options = job.only("method", "patch", "batch_size", "seconds", "progress")
                with folder.stage(name, f"{title}, {side} model"):
                    measure(*measured, folder / name, **options)
    reasons = [reason for by_seed in declined.values() for reason in by_seed]
    titles = {task.name: task.title for task in chosen if task.name not in declined}
    if not titles:
        raise ValueError(" ".join(reasons))
    if reasons:
        write_json(folder / "no_circuits.json", reasons)
    title = job.model or "Task Model"
    names = dict(zip(sides, (title, f"Sparse {title}"), strict=False))
    compared = report(folder.path, titles, names, seeds=seeds)
    return replace(compared, no_circuits=reasons)


def _skills(
    models: Mapping[str, HookedModel],
    task: Task,
    draw: Callable[[int], PromptPairs],
    job: CircuitsJob,
) -> dict[str, dict[str, float]] | str:
    """The skill of each model at a task; or, as the end of a sentence, why there is none."""
    try:
        examples = draw(EXAMPLES if job.model is None else OWN_EXAMPLES)
    except ValueError as error:  # the tokenizer lacks the task's words
        return f": {error}"
    skills = dict[str, dict[str, float]]()
    for side, model in models.items():
        if task.metric is log_probability:  # there is no wrong answer to choose instead
            skills[side] = {"accuracy": accuracy(model, examples, batch_size=job.batch_size)}
            continue
        options = job.only("batch_size", "progress")
        skill = measure_skill(model, examples, task.metric, **options)
        if skill.lack:
            return f", {side} model: {skill.lack}."
        skills[side] = skill.numbers
    return skills


def _models(job: CircuitsJob, seed: int) -> dict[str, HookedModel]:
    device = job.device
    if job.model is None:
        pair = load_task_models(seed, device=device, progress=job.progress)
        return dict(zip(SIDES, pair, strict=True))
    if str(job.sparse) == job.model == SMOLLM2:
        return dict(zip(SIDES, load_language_models(device=device), strict=True))
    if job.sparse is None:
        return {"dense": load_named_model(job.model, load_model, device=device)}
    sparse = SparseTransformer.from_pretrained(job.sparse, device=device)  # first: it is quick
    dense = load_named_model(job.model, load_model, device=device)
    dense.cfg.default_prepend_bos = sparse.cfg.default_prepend_bos  # both read the same prompts
    of_dense, of_sparse = adapt(dense), adapt(sparse)
    if (of_dense.graph, of_dense.d_vocab) != (of_sparse.graph, of_sparse.d_vocab):
        raise ValueError(
            f"--sparse was not made from --model: {of_sparse.graph!r} over {of_sparse.d_vocab} "
            f"tokens, and {of_dense.graph!r} over {of_dense.d_vocab}"
        )
    return {"dense": dense, "sparse": sparse}

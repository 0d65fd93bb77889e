"""Compare dense and sparse models: measure scores and curves into a folder, then draw them.

1. `measure` one model on one task: half of the pairs score edges and heads, the others evaluate.
2. `report` on all tasks and seeds from saved results: tables, figures and circuits, and multipliers
   between a dense and a sparse model.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.circuits import (
    Circuit,
    CircuitSizes,
    Evaluation,
    Scores,
    SeedCurves,
    SeedMultipliers,
    attribute_circuit_edges,
    attribute_heads,
    circuit_sizes_per_prompt,
    evaluate_circuit_edges,
    evaluate_heads,
    seed_multipliers,
)
from sparse_tl.circuits.effect import median_size
from sparse_tl.circuits.methods.attribution import Method
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import PatchName
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric
from sparse_tl.plots import component_diagram, effect_figure
from sparse_tl.plots.panels.curves import Parts
from sparse_tl.results import table_html
from sparse_tl.runs.folder import SIDES, save_figure, saved
from sparse_tl.storage.files import read_json, write_csv, write_json

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
    `measured_file` is written last.

    Raises:
        ValueError: there is no effect to explain.
    """
    scoring = pairs.select(slice(0, len(pairs) // 2))
    held_out = pairs.select(slice(len(pairs) // 2, None))
    single = held_out.select(slice(0, PROMPTS))
    options: dict[str, Any] = {"patch": patch, "batch_size": batch_size, "progress": progress}
    scored = (model, scoring, metric)
    edges = saved(
        folder / "circuit_edge_scores",
        Scores,
        lambda: attribute_circuit_edges(*scored, method=method, **options),
    )
    heads = saved(
        folder / "head_scores",
        Scores,
        lambda: attribute_heads(*scored, method=method, **options),
    )
    evaluated = (model, held_out, metric)
    saved(
        folder / "circuit_edges",
        Evaluation,
        lambda: _with_effect(evaluate_circuit_edges(*evaluated, edges, **options)),
    )
    saved(
        folder / "heads",
        Evaluation,
        lambda: _with_effect(evaluate_heads(*evaluated, heads, **options)),
    )
    saved(
        folder / "circuit_edges_per_prompt",
        CircuitSizes,
        lambda: circuit_sizes_per_prompt(
            model, single, metric, level=LEVEL, method=method, **options
        ),
    )
    write_json(folder / ACCURACY, skill)


def _with_effect(evaluation: Evaluation) -> Evaluation:
    """The evaluation, checked to have an effect to explain."""
    _ = evaluation.effect
    return evaluation


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
    """Write figures, tables, circuits and ``metrics.json`` from saved measurements.

    Args:
        folder: folder with the output of `measure`, laid out as in `measured_folder`.
        tasks: panel titles by task name.
        names: model names by side: the dense model's, and the sparse model's if it was measured.
        seeds: seeds that were measured.
        patch: patch that `measure` used.
    """
    metrics: dict[str, Any] = {}
    tables: list[pd.DataFrame] = []
    panels: dict[Parts, dict[str, list[SeedCurves]]] = {parts: {} for parts in PARTS}
    for task, title in tasks.items():
        multipliers: dict[str, SeedMultipliers] = {}
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
            numbers |= {name: ratios.values[index] for name, ratios in multipliers.items()}
            shown = title if len(seeds) == 1 else f"{title}, seed {seed}"
            _draw_circuits(folder / task / f"seed-{seed}", shown, numbers, names, patch)
        metrics[task] = {
            side: _medians([numbers[side] for numbers in by_seed.values()]) for side in names
        }
        for name, ratios in multipliers.items():
            metrics[task] |= {name: ratios.median}
            metrics[task] |= {f"{name}_range": ratios.range and [*ratios.range]}
        metrics[task]["seeds"] = by_seed
    for parts in PARTS:
        figure = effect_figure(panels[parts], parts=parts, level=LEVEL)
        save_figure(figure, folder, f"{parts}_kept")
    table = pd.concat(tables, ignore_index=True)
    write_csv(folder / "curves.csv", table)
    write_json(folder / "metrics.json", metrics)
    return Comparison(metrics, table)


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
    save_figure(component_diagram(circuits, scores=by_name, title=title), folder, "circuit")


def _smallest(scores: Scores, size: int, patch: PatchName) -> Circuit:
    """The fewest top-scored edges of which `size` have an effect."""
    sizes = range(size, scores.grid.n_parts)
    extra = bisect_left(sizes, size, key=lambda n: len(scores.top(n).connected(patch=patch)))
    return scores.top(size + extra).connected(patch=patch)

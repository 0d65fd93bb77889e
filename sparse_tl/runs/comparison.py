"""Compare dense and sparse models: measure scores and curves into a folder, then draw them.

1. `measure` one side on one task: half of the pairs score edges and heads, the others evaluate.
2. `report` on all tasks and seeds from saved results: tables, figures and circuits, and of both
   sides multipliers.
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
from sparse_tl.circuits.attribution import Method
from sparse_tl.circuits.seeds import median_size
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.files import read_json, write_csv, write_json
from sparse_tl.gates import PatchName
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric
from sparse_tl.plots import component_diagram, effect_figure
from sparse_tl.plots.curves import Parts
from sparse_tl.results import table_html
from sparse_tl.runs.folder import save_figure, saved

LEVEL = 0.9
"""The explained effect at which models are compared."""
SIDES = ("dense", "sparse")
PARTS: tuple[Parts, ...] = ("heads", "circuit_edges")
PER_PROMPT = f"circuit_edges_at_{LEVEL}_per_prompt"
"""Key of the number of circuit edges that a single prompt needs."""
ENDS = ("_low", "_high")
"""How the keys of a size's 95 % interval over pairs end: of one seed, since seeds have a range."""
ACCURACY = "accuracy.json"
PROMPTS = 16
"""Number of held-out pairs that get circuits of their own."""


@dataclass(frozen=True)
class Comparison:
    """What each task needs: the content of ``metrics.json``, and the curves as a table."""

    metrics: dict[str, Any]
    curves: pd.DataFrame
    no_circuits: Sequence[str] = ()
    """Why tasks have no circuits, of those that were asked for."""

    def to_pandas(self) -> pd.DataFrame:
        """Number of parts that each task needs for the level of explained effect, dense and sparse;
        medians over several seeds. Of a single seed, also the 95 % interval over pairs."""
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
        said = [f"Parts needed for an explained effect of {LEVEL}", *self.no_circuits]
        return table_html(self.to_pandas(), ". ".join(said))


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
    """Measure scores on the first half of the pairs, curves on the other, and circuits of single
    prompts on some of the other half; how well the model does the task is written beside them.

    Each result is written as soon as it is there, and read where an earlier call wrote it;
    `measured_file` comes last.

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


def _with_effect(found: Evaluation) -> Evaluation:
    """An evaluation, checked to have an effect to explain."""
    _ = found.effect
    return found


def measured_folder(task: str, seed: int, side: str) -> str:
    """Path in a run's folder where `measure` writes one side of a seed."""
    return f"{task}/seed-{seed}/{side}"


def measured_file(task: str, seed: int, side: str) -> str:
    """The last file that `measure` writes there."""
    return f"{measured_folder(task, seed, side)}/{ACCURACY}"


def effect_curves(
    folder: Path, task: str, seeds: Sequence[int], side: str, parts: Parts, name: str
) -> SeedCurves:
    """The curves that `measure` wrote for one side on one task, with a name for figures."""
    places = [folder / measured_folder(task, seed, side) / parts for seed in seeds]
    return SeedCurves(seeds, [Evaluation.load(place).curve(name) for place in places])


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
        names: model names by side; of the dense model alone, or of both.
        seeds: seeds that were measured.
        patch: patch that was used in measuring.
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
        for place, seed in enumerate(seeds):
            said = by_seed[str(seed)] = {}
            for side in names:
                said[side], found = _numbers(folder / measured_folder(task, seed, side))
                labels = {"task": task, "seed": seed, "side": side}
                tables += [pd.DataFrame({**labels, "parts": p, **found[p]}) for p in PARTS]
            said |= {name: some.values[place] for name, some in multipliers.items()}
            shown = title if len(seeds) == 1 else f"{title}, seed {seed}"
            _draw_circuits(folder / task / f"seed-{seed}", shown, said, names, patch)
        metrics[task] = {
            side: _medians([said[side] for said in by_seed.values()]) for side in names
        }
        for name, some in multipliers.items():
            metrics[task] |= {name: some.median, f"{name}_range": some.range and [*some.range]}
        metrics[task]["seeds"] = by_seed
    for parts in PARTS:
        figure = effect_figure(panels[parts], parts=parts, level=LEVEL)
        save_figure(figure, folder, f"{parts}_kept")
    table = pd.concat(tables, ignore_index=True)
    write_csv(folder / "curves.csv", table)
    write_json(folder / "metrics.json", metrics)
    return Comparison(metrics, table)


def _numbers(folder: Path) -> tuple[dict[str, Any], dict[Parts, pd.DataFrame]]:
    """The measurements of one side of one seed, and its curves as tables."""
    skill = read_json(folder / ACCURACY)
    said: dict[str, Any] = {**skill} if isinstance(skill, dict) else {"accuracy": skill}  # of 0.2
    tables: dict[Parts, pd.DataFrame] = {}
    for parts in PARTS:
        found = Evaluation.load(folder / parts)
        said[f"{parts}_at_{LEVEL}"] = found.curve(parts).size_at(LEVEL)
        for end, size in zip(ENDS, found.size_interval(LEVEL), strict=True):
            said[f"{parts}_at_{LEVEL}{end}"] = size
        tables[parts] = found.to_pandas()
    single = CircuitSizes.load(folder / "circuit_edges_per_prompt")
    said |= {
        PER_PROMPT: single.median,
        "prompts": len(single.sizes),
        "prompts_not_reached": single.not_reached,
        "prompts_no_effect": single.no_effect,
    }
    return said, tables


def _medians(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each number over seeds; counts of prompts are summed."""
    if len(seeds) == 1:
        return dict(seeds[0])
    found: dict[str, Any] = {}
    for name in seeds[0]:
        values = [said[name] for said in seeds]
        if name.endswith(ENDS):
            continue
        if name.startswith("prompts"):
            found[name] = sum(values)
        else:
            found[name] = median_size(values) if "_at_" in name else statistics.median(values)
    return found


def _draw_circuits(
    folder: Path, title: str, measured: dict[str, Any], names: Mapping[str, str], patch: PatchName
) -> None:
    """Draw and list the circuit that reaches the level, for both models."""
    circuits: dict[str, Circuit] = {}
    by_name: dict[str, Scores] = {}
    for side in names:
        scores = Scores.load(folder / side / "circuit_edge_scores")
        size = measured[side][f"circuit_edges_at_{LEVEL}"]
        kept = scores.site.n_parts if size is None else min(math.ceil(size), scores.site.n_parts)
        circuit = _smallest(scores, kept, patch)
        circuits[names[side]], by_name[names[side]] = circuit, scores
        listed = [{"edge": str(edge), "score": scores[edge]} for edge in circuit.edges]
        write_json(folder / f"{side}_circuit.json", listed)
    title = f"{title}: circuit edges for an explained effect of {LEVEL}"
    save_figure(component_diagram(circuits, scores=by_name, title=title), folder, "circuit")


def _smallest(scores: Scores, size: int, patch: PatchName) -> Circuit:
    """The fewest best-scored edges of which `size` have an effect."""
    sizes = range(size, scores.site.n_parts)
    taken = bisect_left(sizes, size, key=lambda some: len(scores.top(some).connected(patch=patch)))
    return scores.top(size + taken).connected(patch=patch)

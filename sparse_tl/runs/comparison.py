"""Dense beside sparse: scores and curves measured into a folder, then drawn and compared.

1. `measure` one side on one task: half of the pairs score edges and heads, the others evaluate.
2. `report` on all tasks from what is saved: multipliers, tables, figures, circuits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.circuits import (
    Circuit,
    EffectCurve,
    Evaluation,
    Scores,
    accuracy,
    attribute_circuit_edges,
    attribute_heads,
    evaluate_circuit_edges,
    evaluate_heads,
    multiplier,
)
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.files import atomic_folder, read_json, write_csv, write_json
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric
from sparse_tl.plots import component_diagram, effect_figure
from sparse_tl.plots.curves import Parts
from sparse_tl.results import table_html
from sparse_tl.runs.folder import save_figure

LEVEL = 0.9
"""The explained effect that models are compared at."""
SIDES = ("dense", "sparse")
PARTS: tuple[Parts, ...] = ("heads", "circuit_edges")


@dataclass(frozen=True)
class Comparison:
    """What is needed on each task: as ``metrics.json`` has it, and the curves as a table."""

    metrics: dict[str, Any]
    curves: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """How many parts each task needs for the level of explained effect, dense and sparse."""
        rows = [
            {
                "task": task,
                "parts": parts,
                **{side: measured[side][f"{parts}_at_{LEVEL}"] for side in SIDES},
                "multiplier": measured[f"multiplier_{parts}"],
            }
            for task, measured in self.metrics.items()
            for parts in PARTS
        ]
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return table_html(self.to_pandas(), f"Parts needed for an explained effect of {LEVEL}")


def measure(
    model: HookedModel,
    pairs: PromptPairs,
    examples: PromptPairs,
    metric: Metric,
    folder: Path,
    *,
    method: str = "eap-ig",
    patch: str = "corrupted",
    batch_size: int = 32,
    progress: bool = True,
) -> None:
    """Scores from the first half of the pairs, curves from the other, accuracy from examples.

    Raises:
        ValueError: there is no effect to explain; the folder is then not written.
    """
    scoring = pairs.select(slice(0, len(pairs) // 2))
    held_out = pairs.select(slice(len(pairs) // 2, None))
    options = {"patch": patch, "batch_size": batch_size, "progress": progress}
    edges = attribute_circuit_edges(model, scoring, metric, method=method, **options)
    heads = attribute_heads(model, scoring, metric, method=method, **options)
    by_edges = evaluate_circuit_edges(model, held_out, metric, edges, **options)
    by_heads = evaluate_heads(model, held_out, metric, heads, **options)
    _ = by_edges.effect, by_heads.effect  # no effect to explain is an error here, not when drawn
    with atomic_folder(folder) as temporary:
        edges.save(temporary / "circuit_edge_scores")
        heads.save(temporary / "head_scores")
        by_edges.save(temporary / "circuit_edges")
        by_heads.save(temporary / "heads")
        right = accuracy(model, examples, batch_size=batch_size)
        write_json(temporary / "accuracy.json", right)


def report(
    folder: Path,
    tasks: Mapping[str, str],
    names: Mapping[str, str],
    *,
    patch: str = "corrupted",
) -> Comparison:
    """Write figures, tables, circuits and ``metrics.json`` from what is measured.

    Args:
        folder: with what `measure` wrote for each task and side, as ``<task>/<side>``.
        tasks: titles of the panels by the name of the task.
        names: of the models, by side.
        patch: that was measured with.
    """
    metrics: dict[str, Any] = {}
    tables: list[pd.DataFrame] = []
    panels: dict[str, dict[str, list[EffectCurve]]] = {parts: {} for parts in PARTS}
    for task, title in tasks.items():
        measured: dict[str, Any] = {
            side: {"accuracy": read_json(folder / task / side / "accuracy.json")} for side in SIDES
        }
        multipliers = {}
        for parts in PARTS:
            curves = panels[parts][title] = []
            for side in SIDES:
                found = Evaluation.load(folder / task / side / parts)
                curves.append(found.curve(names[side]))
                measured[side] |= {
                    f"{parts}_at_{LEVEL}": curves[-1].size_at(LEVEL),
                    f"{parts}_cpr": found.cpr,
                    f"{parts}_cmd": found.cmd,
                }
                labels = {"task": task, "side": side, "parts": parts}
                tables.append(pd.DataFrame({**labels, **found.to_pandas()}))
            multipliers[f"multiplier_{parts}"] = multiplier(*curves, level=LEVEL)
        metrics[task] = measured | multipliers
        _draw_circuits(folder / task, title, measured, names, patch)
    for parts in PARTS:
        figure = effect_figure(panels[parts], parts=parts, level=LEVEL)
        save_figure(figure, folder, f"{parts}_kept")
    table = pd.concat(tables, ignore_index=True)
    write_csv(folder / "curves.csv", table)
    write_json(folder / "metrics.json", metrics)
    return Comparison(metrics, table)


def _draw_circuits(
    folder: Path, title: str, measured: dict[str, Any], names: Mapping[str, str], patch: str
) -> None:
    """The circuit that explains enough, of both models, as a diagram and as a list of edges."""
    circuits: dict[str, Circuit] = {}
    by_name: dict[str, Scores] = {}
    for side in SIDES:
        scores = Scores.load(folder / side / "circuit_edge_scores")
        size = measured[side][f"circuit_edges_at_{LEVEL}"]
        kept = scores.site.n_parts if size is None else min(math.ceil(size), scores.site.n_parts)
        circuit = _smallest(scores, kept, patch)
        circuits[names[side]], by_name[names[side]] = circuit, scores
        listed = [{"edge": str(edge), "score": scores[edge]} for edge in circuit.edges]
        write_json(folder / f"{side}_circuit.json", listed)
    title = f"{title}: circuit edges for an explained effect of {LEVEL}"
    save_figure(component_diagram(circuits, scores=by_name, title=title), folder, "circuit")


def _smallest(scores: Scores, size: int, patch: str) -> Circuit:
    """The best-scored edges, as few as needed for `size` of them to have an effect."""
    sizes = range(size, scores.site.n_parts)
    taken = bisect_left(sizes, size, key=lambda some: len(scores.top(some).connected(patch=patch)))
    return scores.top(size + taken).connected(patch=patch)

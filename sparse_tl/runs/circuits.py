"""Dense beside sparse on every task: scores, circuits, curves of explained effect, multipliers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import torch

from sparse_tl.circuits import (
    Circuit,
    EdgeScores,
    Evaluation,
    attribute_edges,
    attribute_heads,
    evaluate_edges,
    evaluate_heads,
)
from sparse_tl.circuits.attribution import Method
from sparse_tl.circuits.patches import Patch
from sparse_tl.files import atomic_file, atomic_folder, read_json, write_json
from sparse_tl.hooks import HookedModel, embedding_matrix, graph_of, load_model
from sparse_tl.masks import SparseTransformer
from sparse_tl.metrics import is_right
from sparse_tl.models import TASKS, load_task_models, task_pairs
from sparse_tl.plots import (
    EffectCurve,
    ScoredCircuit,
    component_diagram,
    effect_figure,
    multiplier,
    save_figure,
)
from sparse_tl.prompts import PromptPairs
from sparse_tl.runs.folder import RunFolder

LEVEL = 0.9
"""The explained effect that models are compared at."""
SIDES = ("dense", "sparse")
PARTS = ("heads", "edges")
ORDER = ("greater_than", "ioi", "docstring", "ioi_long")
"""Of the panels."""


@dataclass(frozen=True)
class CircuitsRun:
    """What the run left behind: ``metrics.json``, and the curves as a table."""

    metrics: dict[str, Any]
    curves: pd.DataFrame


def run_circuits(
    out: str | Path,
    *,
    model: str | None = None,
    sparse: str | Path | None = None,
    tasks: Sequence[str] = (),
    pairs: int = 128,
    method: str = "eap-ig",
    patch: str = "corrupted",
    batch_size: int = 32,
    seed: int = 0,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
) -> CircuitsRun:
    """Score, evaluate and draw what is not finished yet, and return everything.

    Half of the prompt pairs score the edges and heads, the other half evaluates the circuits.

    Args:
        out: folder for ``metrics.json``, curves, scores, circuits and figures.
        model: the dense model: a hub name or a folder; the built-in task model when left out.
        sparse: the folder of its sparse counterpart; needed with `model`.
        tasks: names of tasks; all of them when empty.
        pairs: prompt pairs of each task, at least 4.
        method: how edges and heads are scored, as of `attribute_edges`.
        patch: what a part outside of the circuit shows.
        batch_size: pairs per pass.
        seed: of the prompts, and of the built-in models.
        device: where to run.
        restart: begin anew.
        progress: whether to show live progress.

    Raises:
        ValueError: bad settings, or a task that the model does not do at all.
    """
    if (model is None) != (sparse is None):
        raise ValueError(
            "expected both a dense model and its sparse counterpart, or neither for the built-in "
            f"pair; got model={model!r} and sparse={None if sparse is None else str(sparse)!r}"
        )
    if pairs < 4:
        raise ValueError(f"expected at least 4 prompt pairs per task; got {pairs}")
    if method not in get_args(Method) or patch not in get_args(Patch) or batch_size < 1:
        raise ValueError(
            f"expected a method of {get_args(Method)}, a patch of {get_args(Patch)} and a batch "
            f"size of at least 1; got {method!r}, {patch!r} and {batch_size}"
        )
    chosen = _chosen_tasks(tasks)
    settings = {
        "command": "circuits",
        "model": model,
        "sparse": None if sparse is None else str(sparse),
        "tasks": [task.name for task in chosen],
        "pairs": pairs,
        "method": method,
        "patch": patch,
        "seed": seed,
    }
    folder = RunFolder(out, settings, restart=restart)
    missing = [
        (task, side)
        for task in chosen
        for side in SIDES
        if not folder.finished(f"{task.name}/{side}")
    ]
    if missing:
        with folder.stage("models"):
            models = _models(model, sparse, seed, device, progress)
        for task, side in missing:
            drawn = _pairs(task, models["dense"], pairs, seed, built_in=model is None)
            halves = drawn.select(slice(0, pairs // 2)), drawn.select(slice(pairs // 2, None))
            name = f"{task.name}/{side}"
            with folder.stage(name), atomic_folder(folder / name) as temporary:
                try:
                    _measure(
                        models[side],
                        halves,
                        task.metric,
                        temporary,
                        method=method,
                        patch=patch,
                        batch_size=batch_size,
                        progress=progress,
                    )
                except ValueError as error:
                    raise ValueError(f"{task.title}, {side} model: {error}") from error
    return _report(folder, chosen, "Task Model" if model is None else model)


def _measure(
    model: HookedModel,
    halves: tuple[PromptPairs, PromptPairs],
    metric: Any,
    folder: Path,
    *,
    method: str,
    patch: str,
    batch_size: int,
    progress: bool,
) -> None:
    """Scores from the first half of the pairs, curves and accuracy from the other."""
    scoring, held_out = halves
    options = {"patch": patch, "batch_size": batch_size, "progress": progress}
    edges = attribute_edges(model, scoring, metric, method=method, **options)
    heads = attribute_heads(model, scoring, metric, method=method, **options)
    by_edges = evaluate_edges(model, held_out, metric, edges, **options)
    by_heads = evaluate_heads(model, held_out, metric, heads, **options)
    _ = by_edges.effect, by_heads.effect  # no effect to explain is an error here, not when drawn
    edges.save(folder / "edge_scores")
    heads.save(folder / "head_scores")
    by_edges.save(folder / "edges.safetensors")
    by_heads.save(folder / "heads.safetensors")
    write_json(folder / "accuracy.json", _accuracy(model, held_out, batch_size))


@torch.no_grad()
def _accuracy(model: HookedModel, pairs: PromptPairs, batch_size: int) -> float:
    device = embedding_matrix(model).device
    right = [
        is_right(batch.read(model(batch.clean)), batch)
        for batch in pairs.to(device).split(batch_size)
    ]
    return torch.cat(right).double().mean().item()


def _report(folder: RunFolder, tasks: Sequence[Any], name: str) -> CircuitsRun:
    """Figures, tables and numbers from what is measured."""
    names: dict[str, str] = {"dense": name, "sparse": f"Sparse {name}"}
    metrics: dict[str, Any] = {}
    tables: list[pd.DataFrame] = []
    panels: dict[str, dict[str, list[EffectCurve]]] = {parts: {} for parts in PARTS}
    for task in tasks:
        said: dict[str, Any] = {
            side: {"accuracy": read_json(folder / task.name / side / "accuracy.json")}
            for side in names
        }
        multipliers = {}
        for parts in PARTS:
            curves = panels[parts][task.title] = []
            for side in names:
                found = Evaluation.load(folder / task.name / side / f"{parts}.safetensors")
                curves.append(found.curve(names[side]))
                said[side][f"{parts}_at_{LEVEL}"] = curves[-1].size_at(LEVEL)
                said[side][f"{parts}_cpr"], said[side][f"{parts}_cmd"] = found.cpr, found.cmd
                labels = {"task": task.name, "side": side, "parts": parts}
                tables.append(pd.DataFrame({**labels, **found.to_pandas()}))
            multipliers[f"multiplier_{parts}"] = multiplier(*curves, level=LEVEL)
        metrics[task.name] = said | multipliers
        _draw_circuits(folder, task, said, names)
    for parts in PARTS:
        figure = effect_figure(panels[parts], parts=parts, level=LEVEL)
        for suffix in ("html", "svg", "png"):
            save_figure(figure, folder / f"{parts}_kept.{suffix}")
    table = pd.concat(tables, ignore_index=True)
    with atomic_file(folder / "curves.csv") as temporary:
        table.to_csv(temporary, index=False)
    with atomic_file(folder / "curves.json") as temporary:
        table.to_json(temporary, orient="records", indent=1)
    write_json(folder / "metrics.json", metrics)
    return CircuitsRun(metrics, table)


def _draw_circuits(
    folder: RunFolder, task: Any, measured: dict[str, Any], names: dict[str, str]
) -> None:
    """The circuit that explains enough, of both models, as a diagram and as a list of edges."""
    drawn = {}
    for side in SIDES:
        scores = EdgeScores.load(folder / task.name / side / "edge_scores")
        size = measured[side][f"edges_at_{LEVEL}"]
        kept = scores.graph.n_edges if size is None else min(math.ceil(size), scores.graph.n_edges)
        circuit = _smallest(scores, kept, folder.settings["patch"])
        drawn[names[side]] = ScoredCircuit(scores.graph, circuit.mask, scores.scores)
        listed = [{"edge": str(edge), "score": scores[edge]} for edge in circuit.edges]
        write_json(folder / task.name / f"{side}_circuit.json", listed)
    title = f"{task.title}: edges for an explained effect of {LEVEL}"
    diagram = component_diagram(drawn, title=title)
    for suffix in ("html", "svg", "png"):
        diagram.save(folder / task.name / f"circuit.{suffix}")


def _smallest(scores: EdgeScores, size: int, patch: str) -> Circuit:
    """The best-scored edges, as few as needed for `size` of them to have an effect."""
    sizes = range(size, scores.graph.n_edges)
    taken = bisect_left(sizes, size, key=lambda some: len(scores.top(some).connected(patch=patch)))
    return scores.top(size + taken).connected(patch=patch)


def _models(
    model: str | None,
    sparse: str | Path | None,
    seed: int,
    device: str | None,
    progress: bool,
) -> dict[str, HookedModel]:
    if model is None or sparse is None:
        dense, thin = load_task_models(seed, device=device, progress=progress)
        return {"dense": dense, "sparse": thin}
    dense = load_model(model, device=device)
    thin = SparseTransformer.from_pretrained(sparse, device=device)
    if graph_of(dense) != graph_of(thin) or dense.cfg.d_vocab != thin.cfg.d_vocab:
        raise ValueError(
            f"expected a sparse model made from the dense one; got {graph_of(dense)!r} over "
            f"{dense.cfg.d_vocab} tokens and {graph_of(thin)!r} over {thin.cfg.d_vocab}"
        )
    return {"dense": dense, "sparse": thin}


def _chosen_tasks(names: Sequence[str]) -> list[Any]:
    known = {task.name: task for task in TASKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"expected tasks of {list(known)}; got {unknown}")
    return [known[name] for name in dict.fromkeys(names or ORDER)]


def _pairs(task: Any, model: HookedModel, n: int, seed: int, *, built_in: bool) -> PromptPairs:
    if built_in:
        return task_pairs(task, n, seed=seed)
    bos = bool(model.cfg.default_prepend_bos)
    return task.pairs(model.tokenizer, n, seed=seed, prepend_bos=bos)

"""Compare dense and sparse models on every task: scores, circuits, effect curves, multipliers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from sparse_tl.arguments import MOST, AtLeastOne, Seed, checked
from sparse_tl.circuits.attribution import Method
from sparse_tl.files import digest
from sparse_tl.gates import PatchName as Patch, SparseTransformer
from sparse_tl.lens import HookedModel, adapt, load_model, read_parameters
from sparse_tl.models import TASKS, load_task_models, task_pairs
from sparse_tl.plots.javascript import check_address_space
from sparse_tl.runs.comparison import SIDES, Comparison, measure, measured_folder, report
from sparse_tl.runs.folder import RunFolder

Pairs = Annotated[int, Ge(4), Le(MOST)]
"""Half of them score, half evaluate."""
ORDER = ("greater_than", "ioi", "docstring", "ioi_long")
"""Order of the panels."""
EXAMPLES = 500
"""Prompts per task for accuracy; 64 prompts could not distinguish 98 from 100 %."""


@checked
def run_circuits(
    out: str | Path,
    *,
    model: str | None = None,
    sparse: str | Path | None = None,
    tasks: Sequence[str] = (),
    pairs: Pairs = 128,
    method: Method = "eap-ig",
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    seeds: Sequence[Seed] = (0,),
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
) -> Comparison:
    """Score, evaluate and draw everything unfinished, and return all results.

    Half of the prompt pairs score the edges and heads, the other half evaluates the circuits;
    accuracy is measured on 500 prompts. 16 pairs of the other half also get circuits of their own
    (`circuit_sizes_per_prompt`). Each seed's sparse model is compared with its own dense model.
    Seeds can be added later: existing results of other seeds are kept.

    Args:
        out: folder for ``metrics.json``, curves, scores, circuits and figures.
        model: hub name or folder of the dense model; the built-in task model by default.
        sparse: folder of its sparse counterpart; required with `model`.
        tasks: names of tasks; all tasks if empty.
        pairs: prompt pairs per task, at least 4.
        method: attribution method, as in `attribute_circuit_edges`.
        patch: patch at parts outside a circuit.
        batch_size: prompt pairs per forward pass.
        seeds: seeds of the prompts and of the built-in models, one model pair per seed; all are
            drawn, with their median. With `model`, seeds affect only the prompts.
        device: device to run on.
        restart: discard an earlier run.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a setting is invalid, there is no seed, or the model cannot do a task at all.
        MemoryError: the address space of this process is limited.
    """
    if (model is None) != (sparse is None):
        raise ValueError(
            "expected both a dense model and its sparse counterpart, or neither for the built-in "
            f"pair; got model={model!r} and sparse={None if sparse is None else str(sparse)!r}"
        )
    check_address_space()
    seeds = tuple(dict.fromkeys(seeds))
    if not seeds:
        raise ValueError("expected at least one seed; got none")
    known = {task.name: task for task in TASKS}
    unknown = [name for name in tasks if name not in known]
    if unknown:
        raise ValueError(f"expected tasks of {list(known)}; got {unknown}")
    chosen = [known[name] for name in dict.fromkeys(tasks or ORDER)]
    settings = {
        "command": "circuits",
        "format": 5,
        "model": model,
        "sparse": None if sparse is None else str(sparse),
        "tasks": [task.name for task in chosen],
        "pairs": pairs,
        "method": method,
        "patch": patch,
    }
    folder = RunFolder(out, settings, restart=restart)
    for seed in seeds:
        missing = [
            (task, side)
            for task in chosen
            for side in SIDES
            if not folder.finished(measured_folder(task.name, seed, side))
        ]
        if not missing:
            continue
        # Keep one pair in memory at a time.
        with folder.stage(f"models of seed {seed}"):
            models = _models(model, sparse, seed, device, progress)
            for side, one in models.items():
                built_in = f", seed {seed}" if model is None else ""
                folder.pin(f"{side} model{built_in}", digest(read_parameters(one)))
        for task, side in missing:
            own = partial(task.pairs, models["dense"])
            draw = partial(task_pairs, task) if model is None else own
            name = measured_folder(task.name, seed, side)
            with folder.stage(name, f"{task.title}, seed {seed}, {side} model"):
                measure(
                    models[side],
                    draw(pairs, seed=seed),
                    draw(EXAMPLES, seed=seed),
                    task.metric,
                    folder / name,
                    method=method,
                    patch=patch,
                    batch_size=batch_size,
                    progress=progress,
                )
    title = "Task Model" if model is None else model
    names = {"dense": title, "sparse": f"Sparse {title}"}
    titles = {task.name: task.title for task in chosen}
    return report(folder.path, titles, names, seeds=seeds, patch=patch)


def _models(
    model: str | None,
    sparse: str | Path | None,
    seed: int,
    device: str | None,
    progress: bool,
) -> dict[str, HookedModel]:
    if model is None or sparse is None:
        pair = load_task_models(seed, device=device, progress=progress)
        return dict(zip(SIDES, pair, strict=True))
    dense = load_model(model, device=device)
    wrapped = SparseTransformer.from_pretrained(sparse, device=device)
    dense.cfg.default_prepend_bos = wrapped.cfg.default_prepend_bos  # both read the same prompts
    graphs = [adapt(some).graph for some in (dense, wrapped)]
    words = [adapt(some).d_vocab for some in (dense, wrapped)]
    if graphs[0] != graphs[1] or words[0] != words[1]:
        raise ValueError(
            f"expected a sparse model made from the dense one; got {graphs[0]!r} over {words[0]} "
            f"tokens and {graphs[1]!r} over {words[1]}"
        )
    return {"dense": dense, "sparse": wrapped}

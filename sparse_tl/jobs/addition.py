"""The addition job: train the model, sparsify it, measure both models and draw them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from sparse_tl.backend import Model, read_parameters
from sparse_tl.circuits import accuracy
from sparse_tl.explorer.figures import circuit_diagram
from sparse_tl.gates import SparseTransformer
from sparse_tl.jobs.circuits import ACCURACY, measure, measured_folder, report
from sparse_tl.jobs.folder import RunFolder, SparseRun, save_figures
from sparse_tl.jobs.settings import AdditionJob, takes
from sparse_tl.metrics import NoEffectError, logit_difference
from sparse_tl.plots.page.rendering import check_address_space
from sparse_tl.storage.files import digest, write_json
from sparse_tl.tasks.addition import ANSWER, AdditionTask, Digit, decode
from sparse_tl.training import Target, evaluate_held_out
from sparse_tl.zoo import addition_recipe, build_pair, read_pair

PROMPT = "36+28"
DIGITS: tuple[Digit, ...] = get_args(Digit)
PAIRS = 128
"""Sums per digit: half to score its circuit edges, half to evaluate them."""
EXAMPLES = 1000
"""Sums per digit for measuring accuracy."""
SECONDS = 5.0
"""Time limit of the search for the circuit of a digit in one model."""


@takes(AdditionJob)
def run_addition(out: Path, job: AdditionJob) -> SparseRun:
    """Run all unfinished steps and return all results.

    Args:
        out: folder for both models, ``metrics.json``, ``history.csv`` and the figure.
        job: settings; by default as in `addition_recipe`.

    Raises:
        ValueError: a setting is invalid, or the output folder cannot be used.
        MemoryError: the address space of this process is limited.
    """
    check_address_space()
    task, seed = AdditionTask(job.form), job.seed
    given = job.model_dump(include={"steps", "target_loss"}, exclude_none=True)
    dense_given = {} if job.dense_steps is None else {"steps": job.dense_steps}
    recipe = addition_recipe(job.form).changed(dense=dense_given, sparse=given)
    folder = RunFolder(
        out,
        job,
        dense_steps=recipe.dense["steps"],
        steps=recipe.sparse["steps"],
        target_loss=str(Target.parse(recipe.sparse["target_loss"])),
    )
    with folder.stage("models"):
        build_pair(recipe, folder.path, seed, device=job.device, progress=job.progress)
        dense, sparse, verdict, _ = read_pair(folder.path, device=job.device)
    with folder.stage("figure"):
        # Any answer character can be selected, and the last one is shown.
        diagram = circuit_diagram(
            {"Base Model": dense, "Sparse Model": sparse},
            decode(task.prompt(PROMPT).tokens[0]),
            positions=range(ANSWER.start, ANSWER.stop),
            position=ANSWER.stop - 1,
        )
        save_figures({"addition": diagram}, folder.path)
    test = task.split(seed=seed)[2]
    models: dict[str, Model | SparseTransformer] = {"dense": dense, "sparse": sparse}
    metrics: dict[str, Any] = {"seed": seed, "form": job.form, "verdict": verdict}
    metrics |= {side: asdict(evaluate_held_out(model, test)) for side, model in models.items()}
    found, failed = _circuits(folder, task, models, job)
    seconds = round(folder.seconds, 1)
    metrics |= {"circuits": found, "no_circuits": failed, "seconds": seconds}
    write_json(folder / "metrics.json", metrics)
    return SparseRun(metrics, sparse)


def _circuits(
    folder: RunFolder,
    task: AdditionTask,
    models: dict[str, Model | SparseTransformer],
    job: AdditionJob,
) -> tuple[dict[str, Any], list[str]]:
    """Heads and circuit edges that each digit needs, per model, and why some digits have none."""
    for side, model in models.items():
        folder.pin(f"{side} model", digest(read_parameters(model)))
    titles, failed, seed = {}, [], job.seed
    for digit in DIGITS:
        title = f"Addition, {digit}"
        for side, model in models.items():
            name = f"circuits/{measured_folder(digit, seed, side)}"
            if folder.finished(f"{name}/{ACCURACY}"):
                continue
            pairs, examples = (task.pairs(digit, n, seed=seed) for n in (PAIRS, EXAMPLES))
            try:
                with folder.stage(name):
                    saved, skill = folder / name, {"accuracy": accuracy(model, examples)}
                    how: dict[str, Any] = {"seconds": SECONDS, "progress": job.progress}
                    measure(model, pairs, skill, logit_difference, saved, **how)
            except NoEffectError as error:  # the model has not learned to add
                failed.append(f"{title}, {side} model: {error}")
                break
        else:
            titles[digit] = title
    if not titles:
        return {}, failed
    shown = {"dense": "Base Model", "sparse": "Sparse Model"}
    return report(folder / "circuits", titles, shown, seeds=[seed]).metrics, failed

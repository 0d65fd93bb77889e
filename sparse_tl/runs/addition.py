"""The main job end to end: train the addition model, make it sparse, measure both, draw them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.explorer.figures import circuit_diagram
from sparse_tl.files import atomic_file, atomic_folder, digest, read_json, write_json
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import HookedModel, Model, load_model, save_model
from sparse_tl.metrics import NoEffectError
from sparse_tl.models.addition import (
    BASE_STEPS,
    SPARSE_STEPS,
    TARGET_LOSS,
    sparsify_addition_model,
    train_addition_model,
)
from sparse_tl.plots import CircuitDiagram
from sparse_tl.results import table_html
from sparse_tl.runs.comparison import measure, report
from sparse_tl.runs.folder import RunFolder
from sparse_tl.tasks.addition import ANSWER, DIGITS, AdditionTask, Form, decode
from sparse_tl.training import TargetLoss, evaluate_held_out

PROMPT = "36+28"
PAIRS = 128
"""Sums per digit, half to score its circuit edges, half to evaluate them."""
EXAMPLES = 1000
"""Sums per digit that tell how often it is right."""


@dataclass(frozen=True, repr=False)
class AdditionRun:
    """What the run left behind.

    Args:
        metrics: as in ``metrics.json``.
        verdict: whether post-training met its target, and with how many edges.
        base: the dense model.
        sparse: the sparse model.
        diagram: the base-vs-sparse figure.
    """

    metrics: dict[str, Any]
    verdict: str
    base: Model
    sparse: SparseTransformer
    diagram: CircuitDiagram

    def to_pandas(self) -> pd.DataFrame:
        """Both models on held-out sums, side by side."""
        return pd.DataFrame({name: self.metrics[name] for name in ("base", "sparse")})

    def __repr__(self) -> str:
        return f"AdditionRun({self.verdict})"

    def _repr_html_(self) -> str:
        table = table_html(self.to_pandas(), self.verdict)
        return f"{table}\n{self.diagram}"


def run_addition(
    out: str | Path,
    *,
    form: Form = "autoregressive",
    seed: int = 0,
    base_steps: int = BASE_STEPS,
    steps: int = SPARSE_STEPS,
    target_loss: float | str = TARGET_LOSS,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
) -> AdditionRun:
    """Run what is not finished yet and return everything.

    Args:
        out: folder for both models, ``metrics.json``, ``history.csv`` and the figure.
        form: of the sums.
        seed: of everything random.
        base_steps: steps of the base model at most.
        steps: steps of post-training.
        target_loss: nats per answer character.
        device: where to train; a GPU if there is one when left out.
        restart: begin anew.
        progress: whether to show live progress.

    Raises:
        ValueError: bad settings, or an output folder that cannot be used.
    """
    task = AdditionTask(form)
    TargetLoss.parse(target_loss)
    settings = {
        "command": "addition",
        "form": form,
        "seed": seed,
        "base_steps": base_steps,
        "steps": steps,
        "target_loss": str(target_loss),
    }
    folder = RunFolder(out, settings, restart=restart)
    with folder.stage("base"):
        base = _base(folder, task, seed, base_steps, device, progress)
    with folder.stage("sparse"):
        sparse, verdict = _sparse(folder, task, seed, steps, target_loss, device, progress)
    with folder.stage("figure"):
        diagram = draw(base, sparse, task)
        for suffix in ("html", "svg", "png"):
            diagram.save(folder / f"addition.{suffix}")
    _write_history(folder)
    test = task.split(seed=seed)[2]
    metrics: dict[str, Any] = {"seed": seed, "form": form}
    for name, model in {"base": base, "sparse": sparse}.items():
        measured = evaluate_held_out(model, test)
        metrics[name] = {
            "heldout_accuracy": measured.accuracy,
            "heldout_loss": measured.loss,
            "active_attention_edges": measured.active_edges,
            "possible_attention_edges": measured.possible_edges,
            "active_heads": measured.active_heads,
        }
    metrics["circuits"], metrics["no_circuits"] = _circuits(
        folder, task, seed, base, sparse, progress
    )
    metrics["seconds"] = round(folder.seconds, 1)
    write_json(folder / "metrics.json", metrics)
    return AdditionRun(metrics, verdict, base, sparse, diagram)


def draw(base: Model, sparse: SparseTransformer, task: AdditionTask) -> CircuitDiagram:
    """The figure: ``36+28``, every answer character to choose from, the last one shown."""
    prompt = decode(task.prompt(PROMPT).tokens[0])
    return circuit_diagram(
        {"Base Model": base, "Sparse Model": sparse},
        prompt,
        positions=range(ANSWER.start, ANSWER.stop),
        position=ANSWER.stop - 1,
    )


def _base(
    folder: RunFolder,
    task: AdditionTask,
    seed: int,
    steps: int,
    device: str | None,
    progress: bool,
) -> Model:
    if not folder.finished("base"):
        model, history = train_addition_model(
            task,
            seed=seed,
            steps=steps,
            checkpoint=folder / "checkpoints" / "base",
            device=device,
            progress=progress,
        )
        _write_csv(folder / "history_base.csv", history)
        with atomic_folder(folder / "base") as temporary:
            save_model(model, temporary)
    return load_model(folder / "base", device=device)


def _sparse(
    folder: RunFolder,
    task: AdditionTask,
    seed: int,
    steps: int,
    target_loss: float | str,
    device: str | None,
    progress: bool,
) -> tuple[SparseTransformer, str]:
    if not folder.finished("sparse"):
        sparse, outcome = sparsify_addition_model(
            load_model(folder / "base", device=device),
            task,
            seed=seed,
            steps=steps,
            target_loss=target_loss,
            checkpoint=folder / "checkpoints" / "sparse",
            progress=progress,
        )
        _write_csv(folder / "history_sparse.csv", outcome.history)
        write_json(folder / "verdict.json", outcome.verdict)
        sparse.save_pretrained(folder / "sparse")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    sparse = SparseTransformer.from_pretrained(folder / "sparse", device=device)
    return sparse, read_json(folder / "verdict.json")


def _circuits(
    folder: RunFolder,
    task: AdditionTask,
    seed: int,
    base: Model,
    sparse: SparseTransformer,
    progress: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Which heads and circuit edges each digit needs, dense and sparse; and why some have none."""
    models: dict[str, HookedModel] = {"dense": base, "sparse": sparse}
    for side, model in models.items():
        folder.pin(f"{side} model", digest(model.state_dict()))
    measured, failed = [], []
    for digit in DIGITS:
        pairs = task.pairs(digit.name, PAIRS, seed=seed)
        every = task.pairs(digit.name, EXAMPLES, seed=seed)
        names = {side: f"circuits/{digit.name}/{side}" for side in models}
        for side, model in models.items():
            if folder.finished(names[side]):
                continue
            try:
                with folder.stage(names[side]):
                    place = folder / names[side]
                    measure(model, pairs, every, digit.metric, place, progress=progress)
            except NoEffectError as error:  # of a model that has not learned the sums
                failed.append(f"{digit.title}, {side} model: {error}")
        if all(map(folder.finished, names.values())):
            measured.append(digit)
    if not measured:
        return {}, failed
    titles = {"dense": "Base Model", "sparse": "Sparse Model"}
    return report(folder / "circuits", measured, titles).metrics, failed


def _write_history(folder: RunFolder) -> None:
    phases = [
        pd.read_csv(folder / f"history_{phase}.csv").assign(phase=phase)
        for phase in ("base", "sparse")
    ]
    _write_csv(folder / "history.csv", pd.concat(phases))


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    with atomic_file(path) as temporary:
        table.to_csv(temporary, index=False)

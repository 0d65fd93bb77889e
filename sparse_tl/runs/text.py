"""The post-training job: make any model sparse on any text and tasks, into an output folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits.prompt.tokens import prompt_tokens
from sparse_tl.data import TextStream
from sparse_tl.explorer.figures import circuit_diagram
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import (
    adapt,
    add_lora,
    check_raw,
    checkpointed_activations,
    load_model,
    processes,
    shard_model,
    takes_lora,
)
from sparse_tl.models import load_named_model
from sparse_tl.runs.folder import RunFolder, SparseRun, save_figure
from sparse_tl.runs.jobs import PostTrainingJob, option_name, takes
from sparse_tl.runs.texts import OWN, TASKS_BY_NAME, GroupReader, group_name, warn_of_repeats
from sparse_tl.storage.files import write_csv, write_json
from sparse_tl.tasks import BATTERY, measure_skills
from sparse_tl.training import post_train
from sparse_tl.training.constraint import parse_target
from sparse_tl.training.post_train import TARGET_LOSS


@takes(PostTrainingJob)
@checked
def run_post_training(
    out: str | Path,
    *,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
    **settings: Any,
) -> SparseRun:
    """Run all unfinished steps and return all results.

    Every text and task is a group with its own loss constraint, and groups share the batch evenly.
    Text that the model generates makes further groups of `short_rows`, which share one such part.
    Some held-out rows of each group select the weights; results are reported on the others. Several
    processes, as of `accelerate launch`, share the rows of every step; the first one writes.

    Args:
        out: folder for the sparse model, ``metrics.json``, ``history.csv`` and ``skills.csv``: what
            the model kept of skills that no group asks for, by `measure_skills`; not if sharded.
        device: device for training.
        restart: set an earlier run aside.
        progress: whether to show a progress bar.
        settings: the fields of `PostTrainingJob`.

    Raises:
        ValueError: a setting is invalid, there is too little text, or `out` cannot be used.
    """
    job = PostTrainingJob(**settings)
    target = parse_target(job.target_loss, job.target_edges, TARGET_LOSS)
    _check(job)
    if job.shard:
        if device is not None:
            raise ValueError(f"--device: a sharded model is placed by --shard, not on {device}")
        device = "cpu"  # to load the model before sharding, and to reload it
    load = partial(load_named_model, job.model, load_model, device=device, dtype=job.dtype)
    ranks = processes()
    progress = progress and ranks.is_main_process
    identity = job.settings(text=[*job.texts], target=str(target))
    with ranks.main_process_first():
        folder = RunFolder(out, identity, restart=restart, reads_only=not ranks.is_main_process)
    if not folder.finished("metrics.json"):
        model, trained = load(), job.trained
        check_raw(model)
        if job.prompt is not None:
            prompt_tokens(model, job.prompt)
        if job.window > adapt(model).n_ctx:
            raise ValueError(
                f"--window: the model's context has {adapt(model).n_ctx} tokens, fewer than "
                f"{job.window}"
            )
        if trained is None:
            trained = "lora" if takes_lora(model) else "all"
        unused = {"gates": ("learning_rate", "lora"), "lora": ()}.get(trained, ("lora",))
        for name in unused:
            if getattr(job, name) != PostTrainingJob.model_fields[name].default:
                raise ValueError(f"{option_name(name)}: --trained {trained} does not use it")
        if trained == "lora":
            add_lora(model, job.lora)
        if job.shard:
            shard_model(model, precision=job.precision)
        gates = job.only("gates", "mlps", "initial_threshold", "initial_bias")
        sparse = SparseTransformer(model, **gates)
        reader = GroupReader(sparse, job)
        groups = [reader.text(source) for source in job.texts if source != OWN]
        if OWN in job.texts:
            groups = [*reader.own(folder / "own.safetensors", progress), *groups]
        groups += [reader.task(name) for name in job.task]
        others = {group_name(source): reader.held_out(source) for source in job.held_out_text}
        with (
            folder.stage("post-training"),
            checkpointed_activations(sparse) if job.checkpoint_activations else nullcontext(),
        ):
            outcome = post_train(
                sparse,
                {group.name: group.stream for group in groups},
                validation={group.name: group.validation for group in groups},
                held_out={group.name: group.test for group in groups} | others,
                learning_rate={} if trained == "gates" else {trained: job.learning_rate},
                checkpoint=folder / "checkpoint",
                progress=progress,
                **job.only("target_loss", "target_edges", "steps", "gate_learning_rate"),
                **job.only("head_cost", "seed", "precision"),
            )
        for group in groups:
            if isinstance(group.stream, TextStream) and group.stream.n_windows is not None:
                warn_of_repeats(group.name, job.steps * job.per_group, group.stream.n_windows)
        verdict, skills = outcome.verdict, None
        if not job.shard:
            dense = sparse  # with gates open and adapters off, unless its weights were trained
            if trained not in ("lora", "gates"):
                dense = load()
            with folder.stage("skills"):
                skills = measure_skills(
                    dense, sparse, leave_out=_alike(job.task), progress=progress
                )
            if skills.kept or skills.lost:
                verdict += f" Skills of no group: {skills.verdict}."
        reported = outcome.reported
        first = reported[groups[0].name]
        measured = {
            "seed": job.seed,
            "verdict": verdict,
            "feasible": outcome.feasible,
            "trained": trained,
            "held_out_windows": len(groups[0].test),
            "dense": asdict(first.dense),
            "sparse": asdict(first.sparse),
            "texts": {name: asdict(both) for name, both in reported.items()},
        }
        sparse.save_pretrained(folder / "sparse")
        if ranks.is_main_process:
            write_csv(folder / "history.csv", outcome.history)
            write_csv(folder / "texts.csv", outcome.to_pandas().rename_axis("text").reset_index())
            if skills is not None:
                write_csv(folder / "skills.csv", skills.table)
            write_json(folder / "metrics.json", measured)
        ranks.wait_for_everyone()
    if ranks.is_main_process:  # also what a job killed at its end left
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    sparse = SparseTransformer.from_pretrained(folder / "sparse", device=device)
    if job.prompt is not None and ranks.is_main_process:
        models = {"Dense": load(), "Sparse": sparse}
        diagram = circuit_diagram(models, job.prompt, weight="carried")
        save_figure(diagram, folder.path, "circuit_diagram")
    return SparseRun.read(folder.path, sparse)


def _alike(tasks: Sequence[str]) -> list[str]:
    """The families of skills that ask for what a training task asks for."""
    asked = {type(TASKS_BY_NAME[name]) for name in tasks}
    return [family.name for family in BATTERY if type(family) in asked]


def _check(job: PostTrainingJob) -> None:
    """Check the settings before anything is loaded.

    Raises:
        ValueError: a task is unknown, two texts have one name, or there are fewer windows than
            groups.
    """
    if unknown := [name for name in job.task if name not in TASKS_BY_NAME]:
        raise ValueError(f"--task: {unknown} are none of {list(TASKS_BY_NAME)}")
    names = [*map(group_name, job.texts), *job.task, *map(group_name, job.held_out_text)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"texts and tasks need different names; {repeated} are given twice")
    if not job.per_group:
        raise ValueError(
            f"--batch-size: each step needs a window of every text and task, {job.n_groups} with "
            f"the model's own short text as one; got {job.batch_size}"
        )

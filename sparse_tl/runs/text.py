"""The post-training job: make any model sparse on any text and tasks, into an output folder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from sparse_tl.calls.arguments import AtLeastOne, Logit, NotNegative, Positive, Seed, Share, checked
from sparse_tl.circuits.prompt.tokens import prompt_tokens
from sparse_tl.data import Boundaries, TextStream
from sparse_tl.explorer.figures import circuit_diagram
from sparse_tl.gates import GateKind, SparseTransformer
from sparse_tl.lens import (
    adapt,
    add_lora,
    check_raw,
    checkpointed_activations,
    load_model,
    shard_model,
    takes_lora,
)
from sparse_tl.models import load_named_model
from sparse_tl.parallel import ranks
from sparse_tl.runs.folder import RunFolder, SparseRun, save_figure
from sparse_tl.runs.texts import (
    OWN,
    OWN_WINDOWS,
    TASKS_BY_NAME,
    GroupReader,
    group_name,
    warn_of_repeats,
)
from sparse_tl.storage.files import write_csv, write_json
from sparse_tl.tasks import BATTERY, measure_skills
from sparse_tl.training import post_train
from sparse_tl.training.config import Precision
from sparse_tl.training.constraint import parse_target
from sparse_tl.training.post_train import GATE_LEARNING_RATE, LEARNING_RATE, TARGET_LOSS

RANK = 16  # of adapters, by default
Trained = Literal["lora", "all", "qk", "gates"]
"""What is trained besides the gates: low-rank adapters, weights, or nothing ("gates")."""


@checked
def run_post_training(
    out: str | Path,
    *,
    model: str,
    text: str | Sequence[str] | None = None,
    task: str | Sequence[str] | None = None,
    target_loss: float | str | None = None,
    target_edges: float | str | None = None,
    held_out_text: str | Sequence[str] | None = None,
    own_windows: AtLeastOne = OWN_WINDOWS,
    window: AtLeastOne = 128,
    boundaries: Boundaries = "predict",
    batch_size: AtLeastOne = 8,
    steps: AtLeastOne = 2000,
    learning_rate: Positive = LEARNING_RATE,
    gate_learning_rate: Positive = GATE_LEARNING_RATE,
    trained: Trained | None = None,
    lora: AtLeastOne = RANK,
    head_cost: NotNegative = 0.0,
    mlps: bool = False,
    gates: GateKind = "share",
    initial_threshold: Share | None = None,
    initial_bias: Logit | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    precision: Precision = "float32",
    accumulate: AtLeastOne = 1,
    checkpoint_activations: bool = False,
    shard: bool = False,
    prompt: str | None = None,
    seed: Seed = 0,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
) -> SparseRun:
    """Run all unfinished steps and return all results.

    Every text and task is a group with its own loss constraint, and groups share the batch evenly.
    Text that the model generates makes further groups of `short_rows`, which share one such part.
    Some held-out rows of each group select the weights; results are reported on the others. Several
    ranks share the rows of every step; see `sparse_tl.parallel.ranks`.

    Args:
        out: folder for the sparse model, ``metrics.json``, ``history.csv`` and ``skills.csv``: what
            the model kept of skills that no group asks for, by `measure_skills`; not if sharded.
        model: name of `load_language_model`, hub name, Hugging Face folder, or folder written by
            `save_model`.
        text: text files, names of datasets (which are streamed), or "own" for text that the model
            generates, the default; see `sampled_windows`.
        task: names of tasks; the prompts of each are a group with the loss at the answer.
        target_loss: in nats per token, as in `post_train`.
        target_edges: instead of a target loss, edges per token, as in `post_train`.
        held_out_text: texts that are only evaluated: neither trained on nor constrained.
        own_windows: number of windows that the model generates.
        window: tokens per window.
        boundaries: what happens where one document follows another: "predict", "skip" or "split";
            as in `text_rows`.
        batch_size: windows per step, at least one for each text and task, and one for short text.
        steps: number of post-training steps.
        learning_rate: peak learning rate of weights or adapters.
        gate_learning_rate: peak learning rate of gates.
        trained: what to train besides the gates: "lora" (low-rank adapters), "all" weights, "qk"
            (queries and keys), or "gates" for nothing else. By default adapters, or all weights of
            a HookedTransformer, which takes no adapters.
        lora: rank of the adapters.
        head_cost: cost of a head in use, in attention edges; as in `post_train`.
        mlps: whether to gate MLPs too; as in `SparseTransformer`.
        gates: kind of gates, "share" or "score".
        initial_threshold: initial threshold of share gates, as in `SparseTransformer`.
        initial_bias: initial bias of score gates, likewise.
        dtype: precision of the model's weights, by default as in `load_model`; bfloat16 weights are
            trained through float32 copies.
        precision: "bf16" runs the forward pass under autocast; as in `post_train`.
        accumulate: micro-batches per step, to save memory.
        checkpoint_activations: whether to save memory by recomputing activations in the backward
            pass, with the same results. See `checkpointed_activations`.
        shard: whether every rank holds only a part of every weight; `precision` then applies to all
            passes. See `shard_model`.
        prompt: text for a circuit diagram of the dense model above the sparse one; can be given for
            a finished run.
        seed: random seed for data order and gate noise.
        device: device for training.
        restart: set an earlier run aside.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a setting is invalid, there is too little text, or `out` cannot be used.
    """
    texts, tasks, held_out_texts = map(_names, (text, task, held_out_text))
    if not (texts or tasks):
        texts = [OWN]
    settings = {
        "command": "post-train",
        "model": str(model),
        "text": texts,
        "task": tasks,
        "held_out_text": held_out_texts,
        "own_windows": own_windows,
        "target": str(parse_target(target_loss, target_edges, TARGET_LOSS)),
        "window": window,
        "boundaries": boundaries,
        "batch_size": batch_size,
        "steps": steps,
        "learning_rate": learning_rate,
        "gate_learning_rate": gate_learning_rate,
        "trained": trained,
        "lora": lora,
        "head_cost": head_cost,
        "mlps": mlps,
        "gates": gates,
        "initial_threshold": initial_threshold,
        "initial_bias": initial_bias,
        "dtype": dtype,
        "precision": precision,
        "accumulate": accumulate,
        "seed": seed,
    }
    _check(texts, tasks, held_out_texts, batch_size, accumulate)
    if shard:
        if device is not None:
            raise ValueError(f"expected no device with shard, which places the model; got {device}")
        if OWN in texts:
            raise ValueError(
                "expected --text with shard, since a sharded model cannot generate text"
            )
        device = "cpu"  # to load the model before sharding, and to reload it
    folder = RunFolder(out, settings, restart=restart)
    if not folder.finished("metrics.json"):
        model_ = load_named_model(model, load_model, device=device, dtype=dtype)
        check_raw(model_)
        if prompt is not None:
            prompt_tokens(model_, prompt)
        if window > adapt(model_).n_ctx:
            raise ValueError(
                f"expected a window of at most {adapt(model_).n_ctx} tokens, the model's "
                f"context; got {window}"
            )
        if trained is None:
            trained = "lora" if takes_lora(model_) else "all"
        no_rate = trained == "gates" and learning_rate != LEARNING_RATE
        if no_rate or (trained != "lora" and lora != RANK):
            unused = "learning_rate" if no_rate else "lora"
            raise ValueError(f"expected no {unused} with trained={trained!r}, which ignores it")
        if trained == "lora":
            add_lora(model_, lora)
        if shard:
            shard_model(model_, precision=precision)
        starts = {"initial_threshold": initial_threshold, "initial_bias": initial_bias}
        sparse = SparseTransformer(model_, gates=gates, mlps=mlps, **starts)
        n_groups = _n_parts(texts, tasks)
        per_step = batch_size // n_groups
        reader = GroupReader(
            sparse, window, boundaries, steps, per_step, n_groups, seed, accumulate
        )
        groups = [reader.text(source) for source in texts if source != OWN]
        if OWN in texts:
            own = reader.own(own_windows, folder / "own.safetensors", progress)
            groups = [*own, *groups]
        groups += [reader.task(name) for name in tasks]
        others = {group_name(source): reader.held_out(source) for source in held_out_texts}
        with (
            folder.stage("post-training"),
            checkpointed_activations(sparse) if checkpoint_activations else nullcontext(),
        ):
            outcome = post_train(
                sparse,
                {group.name: group.stream for group in groups},
                validation={group.name: group.validation for group in groups},
                held_out={group.name: group.test for group in groups} | others,
                target_loss=target_loss,
                target_edges=target_edges,
                steps=steps,
                learning_rate={} if trained == "gates" else {trained: learning_rate},
                gate_learning_rate=gate_learning_rate,
                head_cost=head_cost,
                seed=seed,
                precision=precision,
                checkpoint=folder / "checkpoint",
                progress=progress,
            )
        for group in groups:
            if isinstance(group.stream, TextStream) and group.stream.n_windows is not None:
                warn_of_repeats(group.name, steps * per_step, group.stream.n_windows)
        verdict, skills = outcome.verdict, None
        if not shard:
            dense = sparse  # with gates open and adapters off, unless its weights were trained
            if trained not in ("lora", "gates"):
                dense = load_named_model(model, load_model, device=device, dtype=dtype)
            with folder.stage("skills"):
                skills = measure_skills(dense, sparse, leave_out=_alike(tasks), progress=progress)
            if skills.kept or skills.lost:
                verdict += f" Skills of no group: {skills.verdict}."
        reported = outcome.reported
        first = reported[groups[0].name]
        measured = {
            "seed": seed,
            "verdict": verdict,
            "feasible": outcome.feasible,
            "trained": trained,
            "held_out_windows": len(groups[0].test),
            "dense": asdict(first.dense),
            "sparse": asdict(first.sparse),
            "texts": {name: asdict(both) for name, both in reported.items()},
        }

        def write() -> None:
            write_csv(folder / "history.csv", outcome.history)
            write_csv(folder / "texts.csv", outcome.to_pandas().rename_axis("text").reset_index())
            if skills is not None:
                sparse.save_pretrained(folder / "sparse")
                write_csv(folder / "skills.csv", skills.table)
            write_json(folder / "metrics.json", measured)

        if shard:
            sparse.save_pretrained(folder / "sparse")
        ranks.on_first(write)
    # Also one that a job killed at its end left.
    ranks.on_first(lambda: shutil.rmtree(folder / "checkpoint", ignore_errors=True))
    sparse = SparseTransformer.from_pretrained(folder / "sparse", device=device)
    if prompt is not None and ranks.is_first():
        dense = load_named_model(model, load_model, device=device, dtype=dtype)
        diagram = circuit_diagram({"Dense": dense, "Sparse": sparse}, prompt, weight="carried")
        save_figure(diagram, folder.path, "circuit_diagram")
    return SparseRun.read(folder.path, sparse)


def _n_parts(texts: Sequence[str], tasks: Sequence[str]) -> int:
    """The parts of a step that have equally many tokens; the model's own short text is one."""
    return len(texts) + len(tasks) + (OWN in texts)


def _alike(tasks: Sequence[str]) -> list[str]:
    """The families of skills that ask for what a training task asks for."""
    asked = {type(TASKS_BY_NAME[name]) for name in tasks}
    return [family.name for family in BATTERY if type(family) in asked]


def _names(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _check(
    texts: Sequence[str],
    tasks: Sequence[str],
    held_out_texts: Sequence[str],
    batch_size: int,
    accumulate: int,
) -> None:
    """Check the settings before anything is loaded.

    Raises:
        ValueError: a task is unknown, two texts have one name, or there are fewer windows than
            groups or ranks.
    """
    if unknown := [name for name in tasks if name not in TASKS_BY_NAME]:
        raise ValueError(f"expected tasks of {list(TASKS_BY_NAME)}; got {unknown}")
    names = [*map(group_name, texts), *tasks, *map(group_name, held_out_texts)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"expected texts and tasks of different names; got {repeated} twice")
    n_groups = _n_parts(texts, tasks)
    if batch_size < n_groups:
        raise ValueError(
            f"expected a window of every text and task in each step; got {batch_size} windows for "
            f"{n_groups} of these, as which the model's own short text counts. Use a larger "
            "--batch-size."
        )
    micro_batch = math.ceil(batch_size / accumulate)
    smallest = batch_size % micro_batch or micro_batch
    if smallest < ranks.count():
        raise ValueError(
            f"expected at least one window for each of {ranks.count()} ranks in every micro-batch; "
            f"with --batch-size {batch_size} and --accumulate {accumulate}, the smallest has "
            f"{smallest}. Use a larger --batch-size, a smaller --accumulate, or fewer ranks."
        )

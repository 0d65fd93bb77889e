"""The post-training job: make any model sparse on any text and tasks, into an output folder.

Every text and task is a group of training and held-out rows with its own loss constraint.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sparse_tl.backend import (
    adapt,
    add_lora,
    check_raw,
    checkpointed_activations,
    load_model,
    processes,
    shard_model,
    takes_lora,
)
from sparse_tl.circuits.prompt.tokens import prompt_tokens
from sparse_tl.data import Documents, ShuffledStream, TextStream, read_documents
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.streams import TokenStream, cut_windows, window_rows
from sparse_tl.explorer.figures import circuit_diagram
from sparse_tl.gates import SparseTransformer
from sparse_tl.jobs.folder import RunFolder, SparseRun, save_figures
from sparse_tl.jobs.settings import OWN, PostTrainingJob, group_name, takes
from sparse_tl.plots.page.rendering import check_address_space
from sparse_tl.storage.files import read_json, write_csv, write_json
from sparse_tl.tasks import BATTERY, TASKS_BY_NAME, compare_skills
from sparse_tl.training import Target, post_train, sampled_windows, short_rows
from sparse_tl.zoo import load_named_model

VALIDATION_WINDOWS = 200
"""Maximum number of windows for model selection; at most half of the held-out windows."""
TEST_WINDOWS = 800
"""Maximum number of windows to report on, from the other held-out windows."""
HELD_OUT_WINDOWS = VALIDATION_WINDOWS + TEST_WINDOWS
TASK_PROMPTS = 4096
"""Maximum number of prompts of a task to train on; an eighth as many are held out."""
WINDOW_TOKENS = 2**24
"""Maximum number of tokens of a text to keep in memory, 128 MB; longer runs stream the text."""


class Groups:
    """The texts and tasks of a run by name, which share the held-out windows evenly.

    Some held-out rows select the weights (`validation`); results are reported on the others.
    """

    def __init__(self, model: SparseTransformer, job: PostTrainingJob) -> None:
        self.model, self.job = model, job
        self.streams: dict[str, TokenStream] = {}
        self.validation: dict[str, TokenBatch] = {}
        self.reported: dict[str, TokenBatch] = {}

    def text(self, source: str, documents: Documents) -> None:
        """Add a text or dataset; the last tenth of the windows read before training is held out."""
        needed = self.job.steps * self.job.per_group + HELD_OUT_WINDOWS // self.job.n_groups
        limit = min(needed, WINDOW_TOKENS // self.job.window)
        windows = self._windows(documents, limit)
        train, held_out = self._split(windows)
        if len(windows) == limit < needed:
            stream = TextStream(
                documents,
                self.model.tokenizer,
                self.job.window,
                self.job.per_group,
                self.job.seed,
                left_out=range(len(train), len(windows)),
                boundaries=self.job.boundaries,
                accumulate=self.job.accumulate,
            )
        else:
            stream = self._shuffled(source, self._rows(train), self.job.per_group)
        self._add(source, stream, self._rows(held_out))

    def own(self, save_to: Path, progress: bool) -> None:
        """Add text that the model generates as windows and `short_rows`; a tenth is held out.

        All kinds of short rows together have about as many tokens per step as the windows.
        """
        n, window = self.job.own_windows, self.job.window
        options = {"seed": self.job.seed, "save_to": save_to, "progress": progress}
        parts = self._split(torch.arange(n))
        with self.model.opened():
            rows = sampled_windows(self.model, n, window, **options)
        train, held_out = map(rows.select, parts)
        self._add(OWN, self._shuffled(OWN, train, self.job.per_group), held_out)
        n_held_out = min(HELD_OUT_WINDOWS // self.job.n_groups, 2 * len(held_out))
        train, held_out = (
            short_rows(rows.tokens, self.model.tokenizer, seed=self.job.seed)
            for rows in (train, held_out)
        )
        for name, rows in train.items():
            n_tokens = int(rows.loss_mask.sum()) / len(rows) * len(train)
            per_step = max(1, round(self.job.per_group * window / n_tokens))
            stream = self._shuffled(name, rows, per_step)
            self._add(name, stream, held_out[name].select(slice(n_held_out)))

    def task(self, name: str) -> None:
        """Add a task's prompts, with loss at the answer; as many tokens per step as of a text."""
        task = TASKS_BY_NAME[name]
        pairs = task.pairs(self.model, TASK_PROMPTS + TASK_PROMPTS // 8, seed=self.job.seed)
        rows, n = pairs.answer_rows(), len(pairs.clean.unique(dim=0))  # repeats come last
        if n < 18:
            raise ValueError(f"expected at least 18 prompts of {name}, to hold out two; got {n}")
        train, held_out = rows.select(slice(n - n // 9)), rows.select(slice(n - n // 9, n))
        per_step = self.job.per_group * max(1, self.job.window // rows.tokens.shape[1])
        self._add(name, self._shuffled(name, train, per_step), held_out)

    def held_out(self, source: str, documents: Documents) -> None:
        """Add a text that is only evaluated."""
        windows = self._windows(documents, TEST_WINDOWS // self.job.n_groups)
        self.reported[group_name(source)] = self._rows(windows)

    def _windows(self, documents: Documents, limit: int) -> Tensor:
        tokenizer = self.model.tokenizer
        return cut_windows(documents, tokenizer, self.job.window, limit, self.job.boundaries)

    def _rows(self, windows: Tensor) -> TokenBatch:
        return window_rows(windows, self.model.tokenizer, self.job.boundaries)

    def _split(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """The windows to train on, and the held-out ones."""
        n_held_out = min(HELD_OUT_WINDOWS // self.job.n_groups, len(windows) // 10)
        if n_held_out < 2:
            raise ValueError(
                f"expected at least 20 windows of text, to hold out two; got {len(windows)}. Use "
                "more text or a smaller window."
            )
        # Cloned, so that the memory of the training windows can be freed.
        return windows[:-n_held_out], windows[-n_held_out:].clone()

    def _shuffled(self, name: str, rows: TokenBatch, per_step: int) -> ShuffledStream:
        warn_of_repeats(group_name(name), self.job.steps * per_step, len(rows))
        size = min(per_step, len(rows))
        return ShuffledStream(rows, size, self.job.seed, accumulate=self.job.accumulate)

    def _add(self, source: str, stream: TokenStream, held_out: TokenBatch) -> None:
        name = group_name(source)
        half = min(VALIDATION_WINDOWS // self.job.n_groups, len(held_out) // 2)
        self.streams[name] = stream
        self.validation[name] = held_out.select(slice(half))
        self.reported[name] = held_out.select(slice(half, None))


def warn_of_repeats(name: str, used: int, n_rows: int) -> None:
    """Warn if a run sees rows more than once."""
    if used > n_rows:
        warnings.warn(
            f"the run uses {used:,} rows of {name}, which has {n_rows:,}: some are seen more than "
            "once, and training rows may meet a target that held-out rows miss. Use more text or "
            "fewer steps",
            stacklevel=3,
        )


@takes(PostTrainingJob)
def run_post_training(out: Path, job: PostTrainingJob) -> SparseRun:
    """Run all unfinished steps and return all results.

    Every text and task is a group with its own loss constraint, and groups share the batch evenly.
    Text that the model generates makes further groups of `short_rows`, which share one such part.
    Some held-out rows of each group select the weights; results are reported on the others. Several
    processes, as of `accelerate launch`, share the rows of every step; the first one writes.

    Args:
        out: folder for the sparse model, ``metrics.json``, ``history.csv`` and ``skills.csv``: what
            the model kept of skills that no group asks for, by `compare_skills`; not if sharded.

    Raises:
        ValueError: a setting is invalid, there is too little text, or `out` cannot be used.
        MemoryError: there is a prompt to draw, and the address space of this process is limited.
    """
    if job.prompt is not None:
        check_address_space()
    target = Target.parse(job.target_loss, job.target_edges)
    device = job.device
    if job.shard:
        if device is not None:
            raise ValueError(f"--device: a sharded model is placed by --shard, not on {device}")
        device = "cpu"  # to load the model before sharding, and to reload it
    load = partial(load_named_model, job.model, load_model, device=device, dtype=job.dtype)
    ranks = processes()
    progress = job.progress and ranks.is_main_process
    recorded = {"text": [*job.texts], "target": str(target)}
    with ranks.main_process_first():
        folder = RunFolder(out, job, reads_only=not ranks.is_main_process, **recorded)
    if not folder.finished("metrics.json"):
        texts = {source: read_documents(source) for source in job.texts if source != OWN}
        held_out = {name: read_documents(name, split="validation") for name in job.held_out_text}
        model = load()
        check_raw(model)
        if job.prompt is not None:
            prompt_tokens(model, job.prompt)
        if job.window > adapt(model).n_ctx:
            raise ValueError(
                f"--window: the model's context has {adapt(model).n_ctx} tokens, fewer than "
                f"{job.window}"
            )
        trained = job.trained or ("lora" if takes_lora(model) else "all")
        if trained == "lora":
            add_lora(model, job.lora)
        if job.shard:
            shard_model(model, precision=job.precision)
        gates = job.only("gates", "mlps", "initial_threshold", "initial_bias")
        sparse = SparseTransformer(model, **gates)
        groups = Groups(sparse, job)
        if OWN in job.texts:
            groups.own(folder / "own.safetensors", progress)
        for source, documents in texts.items():
            groups.text(source, documents)
        for task in job.task:
            groups.task(task)
        for source, documents in held_out.items():
            groups.held_out(source, documents)
        with (
            folder.stage("post-training"),
            checkpointed_activations(sparse) if job.checkpoint_activations else nullcontext(),
        ):
            outcome = post_train(
                sparse,
                groups.streams,
                validation=groups.validation,
                held_out=groups.reported,
                learning_rate={} if trained == "gates" else {trained: job.learning_rate},
                checkpoint=folder / "checkpoint",
                progress=progress,
                **job.only("target_loss", "target_edges", "steps", "gate_learning_rate"),
                **job.only("head_cost", "seed", "precision"),
            )
        for name, stream in groups.streams.items():
            if isinstance(stream, TextStream) and stream.n_windows is not None:
                warn_of_repeats(name, job.steps * job.per_group, stream.n_windows)
        verdict, skills = outcome.verdict, None
        if not job.shard:
            dense = sparse  # with gates open and adapters off, unless its weights were trained
            if trained not in ("lora", "gates"):
                dense = load()
            alike = _alike(job.task)
            with folder.stage("skills"):
                skills = compare_skills(dense, sparse, leave_out=alike, progress=progress)
            verdict += f" Skills of no group: {skills.verdict}."
        reported = outcome.reported
        name = next(iter(groups.streams))
        measured = {
            "seed": job.seed,
            "verdict": verdict,
            "feasible": outcome.feasible,
            "trained": trained,
            "held_out_windows": len(groups.reported[name]),
            **asdict(reported[name]),
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
        save_figures({"circuit_diagram": diagram}, folder.path)
    return SparseRun(read_json(folder / "metrics.json"), sparse)


def _alike(tasks: Sequence[str]) -> list[str]:
    """The families of skills that ask for what a training task asks for."""
    asked = {type(TASKS_BY_NAME[name]) for name in tasks}
    return [family.name for family in BATTERY if type(family) in asked]

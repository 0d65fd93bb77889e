"""The resumable training loop, shared by pretraining and post-training.

Each step: get the stream's batch, compute the objective's loss (in micro-batches if requested),
backpropagate, clip, step the optimizer, update the objective. Random generators are seeded by step,
so a resumed run draws the same numbers as an uninterrupted one.

Several ranks take each step together: each has its own rows of the step's batch, and gradients are
averaged. The first rank keeps the best weights and writes checkpoints; every rank does so for its
shards of sharded weights.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparse_tl.calls.scopes import autograd, scope
from sparse_tl.data.streams import ResumableStream, TokenStream
from sparse_tl.lens import in_use, merged_lora, read_parameters
from sparse_tl.parallel import ranks, shards
from sparse_tl.parallel.progress import tracked
from sparse_tl.results import NonFiniteError
from sparse_tl.storage.files import locked
from sparse_tl.training.checkpoints import (
    TrainingState,
    check_ranks,
    load_checkpoint,
    run_identity,
    save_checkpoint,
)
from sparse_tl.training.config import Precision, Selection, TrainingConfig, in_precision
from sparse_tl.training.masters import MasterWeights
from sparse_tl.training.objectives import Objective
from sparse_tl.training.stopping import interrupt_noted, on_any_rank

SAVE_AFTER = 120.0
"""Seconds after which a checkpoint is due, however few steps have been done."""
BETWEEN_RANKS = 2_654_435_761
"""Distance between the seeds of two ranks: about 2^32 over the golden ratio, since CPU generators
take seeds modulo 2^32. No two ranks then share a seed within a million steps."""


class NonFiniteLossError(ValueError):
    """The loss or its gradient became NaN or infinite; the last checkpoint remains valid."""


def train(
    model: nn.Module,
    objective: Objective,
    stream: TokenStream,
    selection: Selection,
    config: TrainingConfig,
    *,
    trained: Mapping[str, float],
    settings: dict[str, Any],
    checkpoint: str | Path | None,
    title: str,
    progress: bool,
) -> TrainingState:
    """Run the training loop; on return, the model holds the weights of the best evaluation.

    Args:
        model: module whose parameters are trained.
        objective: objective to minimise.
        stream: training batches by step.
        selection: evaluation and model selection.
        config: settings of the optimizer and the loop.
        trained: names of the parameters to train, with multiples of the learning rate; all other
            parameters are frozen during the run.
        settings: further settings that identify this run in its checkpoints.
        checkpoint: folder for checkpoints; a run interrupted there is resumed.
        title: title of the progress bar.
        progress: whether to show a progress bar.

    Raises:
        NonFiniteLossError: NaN or infinity occurred; the last checkpoint is left unchanged.
        ValueError: the checkpoint belongs to another run, or is in use by another process; or the
            ranks run different things.
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, once the state is saved.
    """
    parameters = read_parameters(model)
    weights = {name: parameters[name] for name in trained}
    masters = MasterWeights(weights)
    optimizer = _optimizer(masters.by_name, trained, config)
    as_stored = json.loads(json.dumps(asdict(config)))  # to compare with the checkpoint's copy
    identity = run_identity(model, {**settings, "trained": dict(trained), "config": as_stored})
    check_ranks(identity)
    state, folder = TrainingState(), None
    with ExitStack() as stack:  # holds the lock until the run ends
        if checkpoint is not None:
            folder = Path(checkpoint)
            ranks.on_first(lambda: stack.enter_context(locked(Path(checkpoint))))
            state = load_checkpoint(folder, masters.by_name, optimizer, identity, stream)
            masters.write()
        if state.step > 0:
            objective.load_state(state.objective)
        ranks.check_alike({"step of the checkpoint": state.step})
        with (
            in_use(model),
            autograd(True),  # notebooks often switch gradients off
            _only_trained(model, weights),
            _merged(model, config.precision) as merge,
            masters.taking_gradients(),
            _repeatable(),
            interrupt_noted() as interrupted,
            tracked(title, config.steps, progress, done=state.step) as show,
        ):
            run = Run(objective, stream, selection, config, masters, optimizer, state, merge)
            if state.step == 0:
                run.evaluate()
            saved = time.monotonic()
            while state.step < config.steps and not run.finished():
                run.step()
                show(state.latest())
                if state.step % config.evaluate_every == 0 or state.step == config.steps:
                    run.evaluate()
                due = state.step % config.checkpoint_every == 0 or state.step == config.steps
                late, stop = on_any_rank(time.monotonic() - saved > SAVE_AFTER, interrupted())
                if folder is not None and (due or late or stop):
                    state.objective = objective.state()
                    state.last_batch = run.batch.digest()
                    state.stream = stream.state() if isinstance(stream, ResumableStream) else {}
                    save_checkpoint(folder, state, masters.by_name, optimizer, identity)
                    saved = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
    run.restore_best()
    return state


@dataclass
class Run:
    """The mutable parts of one run."""

    objective: Objective
    stream: TokenStream
    selection: Selection
    config: TrainingConfig
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    state: TrainingState
    merge: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.trained = self.masters.by_name
        self.device = next(iter(self.trained.values())).device
        before = self.state.history[-1]["seconds"] if self.state.history else 0.0
        self.started = time.monotonic() - before

    def step(self) -> None:
        step, config = self.state.step, self.config
        rate = config.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        seed = config.seed * 1_000_003 + step + ranks.rank() * BETWEEN_RANKS
        generator = torch.Generator(self.device).manual_seed(seed)
        self.batch = batch = self.stream.batch(step)
        if ranks.count() > 1:
            ranks.check_alike({f"batch of step {step}": batch.digest()})
        if step == 0:
            self.state.first_batch = batch.digest()
        pieces = batch.split(math.ceil(len(batch) / config.accumulate))
        self.objective.begin(batch)
        measured: dict[str, float] = {}
        self.optimizer.zero_grad(set_to_none=True)
        for piece in pieces:
            share = int(piece.loss_mask.sum()) / int(batch.loss_mask.sum())
            with in_precision(config.precision, self.device):
                rows = piece.shard(ranks.rank(), ranks.count()).to(self.device)
                loss, logged = self.objective.measure(rows, generator, step / config.steps)
            (loss * share).backward()
            self.masters.take_gradients()
            for name, value in logged.items():
                measured[name] = measured.get(name, 0.0) + share * value
        shards.average_gradients(self.trained.values())
        clip = math.inf if config.clip is None else config.clip
        norm = shards.clip_gradients(self.trained.values(), clip)
        if not all(map(math.isfinite, [*measured.values(), norm])):
            raise NonFiniteLossError(
                f"expected a finite loss and gradient; at step {step} the measurements were "
                f"{measured} and the gradient's norm {norm}. The last checkpoint holds weights "
                "from before this step; a smaller learning rate usually helps."
            )
        self.optimizer.step()
        self.masters.write()
        self.merge()
        self.objective.update(measured)
        self.state.step += 1
        self.state.history.append({**self._now(), "rate": rate, **measured})

    def evaluate(self) -> None:
        try:
            measured = ranks.from_first(self.selection.evaluate())
            if not all(map(math.isfinite, measured.values())):
                raise NonFiniteError(f"expected finite measurements; got {measured}.")
        except NonFiniteError as error:
            raise NonFiniteLossError(
                f"after step {self.state.step}, on validation rows: {error} The last checkpoint is "
                "from an earlier step; a smaller learning rate usually helps."
            ) from error
        metrics = {"step": self.state.step, **measured}
        if not self.state.best or self.selection.better(metrics, self.state.best):
            self.state.best = metrics
            self.state.best_weights = {
                name: shards.local(parameter).detach().to("cpu", copy=True)
                for name, parameter in self.trained.items()
                if ranks.is_first() or shards.is_sharded(parameter)
            }
        if not self.state.history:
            self.state.history.append(self._now())
        named = {f"validation_{name}": value for name, value in measured.items()}
        self.state.history[-1].update(named)

    @autograd(False)
    def restore_best(self) -> None:
        for name, best in self.state.best_weights.items():
            shards.local(self.trained[name]).copy_(best)
        shards.copy_first(self.trained.values())
        self.masters.write()

    def finished(self) -> bool:
        waited = (self.state.step - self.state.best["step"]) // self.config.evaluate_every
        too_long = self.config.patience is not None and waited >= self.config.patience
        return too_long or self.selection.finished(self.state.best)

    def _now(self) -> dict[str, float]:
        return {"step": self.state.step, "seconds": time.monotonic() - self.started}


@scope
def _only_trained(model: nn.Module, trained: dict[str, nn.Parameter]) -> Iterator[None]:
    """Enable gradients for the trained parameters only, and restore all flags at the end."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(parameter) for parameter in trained.values()}
    for parameter, _ in flags:
        parameter.requires_grad_(id(parameter) in chosen)
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for parameter in trained.values():
            parameter.grad = None


def _optimizer(
    weights: Mapping[str, nn.Parameter], scales: Mapping[str, float], config: TrainingConfig
) -> torch.optim.AdamW:
    """AdamW with a group of weights for each multiple of the learning rate, updated together."""
    groups = [
        {"params": [weights[name] for name in scales if scales[name] == scale], "scale": scale}
        for scale in dict.fromkeys(scales.values())
    ]
    how = {"lr": config.learning_rate, "betas": config.betas, "weight_decay": config.weight_decay}
    # The fused update takes a weight for one piece of memory, which views of joint weights are not.
    fused = all(w.is_contiguous() and not shards.is_sharded(w) for w in weights.values())
    return torch.optim.AdamW(groups, fused=fused, **how)


@scope
def _merged(model: nn.Module, precision: Precision) -> Iterator[Callable[[], None]]:
    """Compute with merged adapters within the block; sharded ones stay apart from weights."""
    if shards.has_sharded_weights(model):
        yield lambda: None
        return
    with merged_lora(model, torch.bfloat16 if precision == "bf16" else None) as merge:
        yield merge


@scope
def _repeatable() -> Iterator[None]:
    """Use deterministic algorithms, and restore the previous setting at the end.

    Otherwise, several threads add up embedding gradients in varying order, and a resumed run drifts
    away from an uninterrupted one. Operations without a deterministic implementation, of which CUDA
    has a few, only warn.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Untyped, because type checkers cannot follow how the module adds this setting to itself.
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # a slow debugging aid
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill

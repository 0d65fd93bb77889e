"""The training loop that dense models and post-training share: resumable, and never losing work.

Each step: the stream's batch, a loss from the objective (in micro-batches if asked for), backward,
clip, optimizer, objective's update. Every random number is drawn from a generator seeded by the
step, so a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparse_tl.data.streams import TokenStream
from sparse_tl.lens import read_parameters
from sparse_tl.progress import tracked
from sparse_tl.training.checkpoints import (
    TrainingState,
    fingerprint,
    load_checkpoint,
    save_checkpoint,
)
from sparse_tl.training.config import Selection, TrainingConfig
from sparse_tl.training.objectives import Objective

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals after which a run is saved and ends; the last is not known everywhere."""
SAVE_AFTER = 120.0
"""Seconds after which a checkpoint is due, however few the steps were."""


class NonFiniteLossError(ValueError):
    """The loss or its gradient became NaN or infinite; the last checkpoint is still good."""


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
    """Run the loop; on return the model holds the best weights that an evaluation saw.

    Args:
        model: the module whose parameters are trained.
        objective: what is minimised.
        stream: training batches by step.
        selection: evaluation, and what counts as better.
        config: how weights are moved.
        trained: names of the parameters to train, with multiples of the learning rate; all others
            are frozen meanwhile.
        settings: what else identifies this run in its checkpoints.
        checkpoint: folder of the run's checkpoint; an interrupted run found there goes on.
        title: shown beside the progress bar.
        progress: whether to show it.

    Raises:
        NonFiniteLossError: NaN or infinity turned up; the last checkpoint is kept as it was.
        ValueError: the checkpoint belongs to another run.
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, once the state is saved.
    """
    parameters = read_parameters(model)
    weights = {name: parameters[name] for name in trained}
    optimizer = torch.optim.AdamW(
        [{"params": [weights[name]], "scale": scale} for name, scale in trained.items()],
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
    )
    as_read_back = json.loads(json.dumps(asdict(config)))  # so that both compare equal
    identity = fingerprint(model, {**settings, "trained": dict(trained), "config": as_read_back})
    state, folder = TrainingState(), None
    if checkpoint is not None:
        folder = Path(checkpoint)
        state = load_checkpoint(folder, weights, optimizer, identity, stream)
    if state.step > 0:
        objective.load_state(state.objective)
    run = _Run(objective, stream, selection, config, weights, optimizer, state)
    with (
        _only_trained(model, weights),
        _repeatable(),
        _interrupt_noted() as interrupted,
        tracked(title, config.steps, progress, done=state.step) as show,
    ):
        if state.step == 0:
            run.evaluate()
        saved = time.monotonic()
        while state.step < config.steps and not run.finished():
            run.step()
            show(state.latest())
            if state.step % config.evaluate_every == 0 or state.step == config.steps:
                run.evaluate()
            due = state.step % config.checkpoint_every == 0 or state.step == config.steps
            late = time.monotonic() - saved > SAVE_AFTER
            if folder is not None and (due or late or interrupted()):
                state.objective = objective.state()
                state.last_batch = run.batch.digest()
                save_checkpoint(folder, state, weights, optimizer, identity)
                saved = time.monotonic()
            if interrupted():
                raise KeyboardInterrupt
    run.restore_best()
    return state


@dataclass
class _Run:
    """One run's moving parts, so that a step and an evaluation each fit a screen."""

    objective: Objective
    stream: TokenStream
    selection: Selection
    config: TrainingConfig
    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    state: TrainingState

    def __post_init__(self) -> None:
        self.device = next(iter(self.trained.values())).device
        before = self.state.history[-1]["seconds"] if self.state.history else 0.0
        self.started = time.monotonic() - before

    def step(self) -> None:
        step, config = self.state.step, self.config
        rate = config.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        generator = torch.Generator(self.device).manual_seed(config.seed * 1_000_003 + step)
        self.batch = batch = self.stream.batch(step)
        if step == 0:
            self.state.first_batch = batch.digest()
        pieces = batch.split(math.ceil(len(batch) / config.accumulate))
        measured: dict[str, float] = {}
        self.optimizer.zero_grad(set_to_none=True)
        for piece in pieces:
            share = int(piece.loss_mask.sum()) / int(batch.loss_mask.sum())
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=config.precision == "bf16"
            ):
                loss, some = self.objective.measure(
                    piece.to(self.device), generator, step / config.steps
                )
            (loss * share).backward()
            for name, value in some.items():
                measured[name] = measured.get(name, 0.0) + share * value
        clip = math.inf if config.clip is None else config.clip
        norm = nn.utils.clip_grad_norm_(list(self.trained.values()), clip).item()
        if not all(map(math.isfinite, [*measured.values(), norm])):
            raise NonFiniteLossError(
                f"expected a finite loss and gradient; at step {step} the measurements were "
                f"{measured} and the gradient's norm {norm}. Weights from before this step are in "
                "the last checkpoint; a smaller learning rate usually helps."
            )
        self.optimizer.step()
        self.objective.update(measured)
        self.state.step += 1
        self.state.history.append({**self._now(), "rate": rate, **measured})

    def evaluate(self) -> None:
        measured = self.selection.evaluate()
        metrics = {"step": self.state.step, **measured}
        if not all(map(math.isfinite, metrics.values())):
            raise NonFiniteLossError(
                f"expected finite validation measurements; after step {self.state.step} they were "
                f"{metrics}. The last checkpoint is older; a smaller learning rate usually helps."
            )
        if not self.state.best or self.selection.better(metrics, self.state.best):
            self.state.best = metrics
            self.state.best_weights = {
                name: parameter.detach().clone() for name, parameter in self.trained.items()
            }
        if not self.state.history:
            self.state.history.append(self._now())
        named = {f"validation_{name}": value for name, value in measured.items()}
        self.state.history[-1].update(named)

    @torch.no_grad()
    def restore_best(self) -> None:
        for name, best in self.state.best_weights.items():
            self.trained[name].copy_(best)

    def finished(self) -> bool:
        waited = (self.state.step - self.state.best["step"]) // self.config.evaluate_every
        too_long = self.config.patience is not None and waited >= self.config.patience
        return too_long or self.selection.finished(self.state.best)

    def _now(self) -> dict[str, float]:
        return {"step": self.state.step, "seconds": time.monotonic() - self.started}


@contextmanager
def _only_trained(model: nn.Module, trained: dict[str, nn.Parameter]) -> Iterator[None]:
    """Gradients for the trained parameters alone; every flag is put back at the end."""
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


@contextmanager
def _repeatable() -> Iterator[None]:
    """The same sums in the same order every time; the caller's setting is put back at the end.

    Without it the gradient of an embedding is added up by several threads in the order in which
    they come, and a resumed run drifts from an uninterrupted one. Operations that have no
    repeatable form (a few, on CUDA) warn and go on.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Untyped: the module adds the setting to itself in a way that type checkers do not follow.
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # a debugging aid, at a price
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back until the running step is complete, so that what is saved is whole.

    So it is with what a cluster or a closed terminal sends before it kills.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set
        return

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        noted.set()
        put_back()  # a second one stops at once

    known = [getattr(signal, name) for name in STOPPING if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in known}
    # What is ignored stays so: `nohup` keeps a run alive when its terminal goes.
    before = {k: v for k, v in before.items() if v not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, note)
    try:
        yield noted.is_set
    finally:
        put_back()

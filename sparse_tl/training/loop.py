"""The resumable training loop, shared by pretraining, post-training and fits of head gates.

Random generators are seeded by step, so a run that resumes from a checkpoint draws the same numbers
as an uninterrupted one.

Several ranks take each step together: each has its own rows of the step's batch, and gradients are
averaged. The first rank keeps the best weights, writes checkpoints and shows progress. Checkpoints
hold whole tensors, also of sharded weights, so that any number of ranks can resume.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.arguments import AtLeastOne, Count, Fraction, NotNegative, Positive, Seed, checked
from sparse_tl.backend import (
    HookedModel,
    Model,
    adapt,
    check_raw,
    has_sharded_weights,
    in_use,
    is_sharded,
    lora_parameters,
    merged_lora,
    processes,
    read_parameters,
    weights_digest,
    whole,
)
from sparse_tl.contexts import autograd
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.data.streams import TokenStream
from sparse_tl.devices import is_slow_in_bfloat16
from sparse_tl.progress import tracked
from sparse_tl.results import NonFiniteError
from sparse_tl.storage import files
from sparse_tl.training import ranks
from sparse_tl.training.evaluation import evaluate_held_out

FORMAT = 11
_STATE, _TENSORS = "state.json", "tensors.safetensors"
SAVE_AFTER = 120.0
"""Seconds after which a checkpoint is due, however few steps have been done."""
BETWEEN_RANKS = 2_654_435_761
"""Distance between the seeds of two ranks: about 2^32 over the golden ratio, since CPU generators
take seeds modulo 2^32. No two ranks then share a seed within a million steps."""

Metrics = dict[str, float]
Precision = Literal["float32", "bf16"]


class NonFiniteLossError(ValueError):
    """The loss or its gradient became NaN or infinite; the last checkpoint remains valid."""


@checked
@dataclass(frozen=True)
class TrainingConfig:
    """Settings of the optimizer and the training loop.

    Args:
        steps: number of optimizer steps.
        learning_rate: peak learning rate.
        warmup: number of linear warm-up steps.
        decay: final fraction of the steps, over which the rate decays.
        schedule: shape of the decay: cosine or linear.
        final_rate: final learning rate, as a fraction of the peak.
        betas: betas of AdamW.
        weight_decay: weight decay of AdamW.
        clip: maximum gradient norm; None for no clipping.
        accumulate: micro-batches per step.
        precision: "bf16" runs the forward pass under autocast.
        seed: random seed for gate noise.
        evaluate_every: steps between validation evaluations.
        checkpoint_every: steps between checkpoints.
    """

    steps: AtLeastOne
    learning_rate: Positive
    warmup: Count = 50
    decay: Fraction = 0.5
    schedule: Literal["cosine", "linear"] = "cosine"
    final_rate: Fraction = 0.02
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: NotNegative = 0.0
    clip: Positive | None = 1.0
    accumulate: AtLeastOne = 1
    precision: Precision = "float32"
    seed: Seed = 0
    evaluate_every: AtLeastOne = 50
    checkpoint_every: AtLeastOne = 100

    def rate(self, step: int) -> float:
        """The learning rate at a step: warm-up, plateau, decay."""
        scale = min(1.0, (step + 1) / max(1, self.warmup))
        start = self.steps * (1 - self.decay)
        if step > start:
            decayed = (step - start) / (self.steps - start)
            left = 1 - decayed
            if self.schedule == "cosine":
                left = 0.5 * (1 + math.cos(math.pi * decayed))
            scale *= self.final_rate + (1 - self.final_rate) * left
        return self.learning_rate * scale


class Objective:
    """What a run minimises, and which weights it returns.

    In every step, `begin` is called once, `measure` on each micro-batch, and `update` once. All
    ranks return the same values. An objective may measure only its rank's rows (`ranks.own_parts`),
    and then joins means over rows or labels by `ranks.mean`.
    """

    def begin(self, batch: TokenBatch) -> None:
        """Prepare for a step, given its whole batch."""

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """The value to minimise, and measurements to log; all randomness is the generator's."""
        raise NotImplementedError

    def update(self, fraction_done: float) -> dict[str, float]:
        """Update the state; return more to log."""
        return {}

    def evaluate(self) -> Metrics:
        """Measurements of the current model on validation rows."""
        return {}

    def better(self, new: Metrics, old: Metrics) -> bool:
        """Whether to return the weights of an evaluation rather than those of an earlier one."""
        return True

    def finished(self, best: Metrics) -> bool:
        """Whether training can stop early, given the best evaluation."""
        return False

    def state(self) -> dict[str, Any]:
        """The state that is carried from step to step: plain values and tensors."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""


@dataclass
class TrainingState:
    """The complete state of a run.

    Args:
        step: number of completed steps.
        history: measurements of every step.
        best: metrics of the best evaluation so far, including its step.
        best_weights: on the first rank, the trained weights at that evaluation, on the CPU.
        objective: its state.
        first_batch, last_batch: digests of the first and the last completed step's batch.
    """

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    first_batch: str = ""
    last_batch: str = ""

    def latest(self) -> str:
        """The last step's measurements for the progress bar, and the edges of the best weights."""
        row = self.history[-1]
        shown = {
            "loss": row.get("loss"),
            "over": row.get("over_limit"),
            "λ": row.get("lambda"),
            "edges/token": row.get("expected_per_token"),
            "best": self.best.get("active_attention_edges_per_token"),
        }
        return ", ".join(f"{k} {value:.5g}" for k, value in shown.items() if value is not None)


def run_identity(model: nn.Module | HookedModel, settings: dict[str, Any]) -> dict[str, Any]:
    """The identity of a run: its settings, parameter shapes, and a digest of the weights."""
    shapes = {name: list(weight.shape) for name, weight in read_parameters(model).items()}
    return {"settings": settings, "shapes": shapes, "weights": weights_digest(model)}


def train(
    model: nn.Module,
    objective: Objective,
    stream: TokenStream,
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
        objective: what is minimised, and how weights are selected.
        stream, config: training batches by step; settings of the optimizer and the loop.
        trained: names of the parameters to train, with multiples of the learning rate; all other
            parameters are frozen during the run.
        settings: further settings that identify this run in its checkpoints.
        checkpoint: folder for checkpoints; a run interrupted there is resumed.
        title, progress: title of the progress bar, and whether to show it.

    Raises:
        NonFiniteLossError: NaN or infinity occurred; the last checkpoint is left unchanged.
        ValueError: the checkpoint belongs to another run, or is in use by another process; or the
            ranks run different things.
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, once the state is saved.
    """
    folder = None if checkpoint is None else Path(checkpoint)
    run = Run(model, objective, stream, config, trained)
    # As JSON has it, to compare with the checkpoint's copy.
    stated = json.loads(json.dumps({**settings, **trained, **asdict(config)}))
    identity = run_identity(model, stated)
    ranks.check_alike({**identity["settings"], "weights": identity["weights"]})
    is_first = processes().is_main_process
    half = torch.bfloat16 if config.precision == "bf16" else None
    if half and is_slow_in_bfloat16(run.device):
        warnings.warn(
            "this CPU is slow in bfloat16: products take 5 to 50 times as long as in float32. "
            'precision="float32" is faster',
            stacklevel=2,
        )
    apart = has_sharded_weights(model)  # adapters stay apart from sharded weights
    with files.locked(folder if is_first else None):
        if folder is not None:
            run.load(folder, identity)
        with (
            in_use(model),
            autograd(True),  # notebooks often switch gradients off
            _only_trained(model, run.weights),
            nullcontext(run.merge) if apart else merged_lora(model, half) as run.merge,
            _repeatable(),
            interrupt_noted() as interrupted,
            tracked(title, config.steps, progress and is_first, done=run.state.step) as show,
        ):
            if run.state.step == 0:
                run.evaluate()
            saved = time.monotonic()
            while run.state.step < config.steps and not objective.finished(run.state.best):
                run.step()
                show(run.state.latest())
                last = run.state.step == config.steps
                if run.state.step % config.evaluate_every == 0 or last:
                    run.evaluate()
                due = run.state.step % config.checkpoint_every == 0 or last
                facts = ranks.gathered((time.monotonic() - saved > SAVE_AFTER, interrupted()))
                late, stop = map(any, zip(*facts, strict=True))  # on any rank
                if folder is not None and (due or late or stop):
                    run.save(folder, identity)
                    saved = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
    run.set_weights(run.state.best_weights)
    return run.state


@dataclass
class Run:
    """One run of the loop; arguments as in `train`."""

    model: nn.Module
    objective: Objective
    stream: TokenStream
    config: TrainingConfig
    rates: Mapping[str, float]

    def __post_init__(self) -> None:
        parameters = read_parameters(self.model)
        self.weights = {name: parameters[name] for name in self.rates}
        self.masters = MasterWeights(self.weights)
        self.trained = self.masters.by_name
        self.optimizer = _optimizer(self.trained, self.rates, self.config)
        self.device = next(iter(self.trained.values())).device
        self.state, self.started = TrainingState(), time.monotonic()
        self.merge: Callable[[], None] = lambda: None

    def step(self) -> None:
        step, config = self.state.step, self.config
        rate = config.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        launched = processes()
        seed = config.seed * 1_000_003 + step + launched.process_index * BETWEEN_RANKS
        generator = torch.Generator(self.device).manual_seed(seed)
        self.batch = batch = self.stream.batch(step)
        if launched.num_processes > 1:
            ranks.check_alike({f"the batch of step {step}": batch.digest()})
        if step == 0:
            self.state.first_batch = batch.digest()
        # Of every n-th row each: the groups of a batch follow one another, and pieces need all.
        n_pieces = max(1, min(config.accumulate, int(batch.loss_mask.any(dim=1).sum())))
        pieces = [batch.shard(piece, n_pieces) for piece in range(n_pieces)]
        self.objective.begin(batch)
        measured: dict[str, float] = {}
        done = step / config.steps
        self.optimizer.zero_grad(set_to_none=True)
        for piece in pieces:
            share = int(piece.loss_mask.sum()) / int(batch.loss_mask.sum())
            with in_precision(config.precision, self.device):
                loss, logged = self.objective.measure(piece.to(self.device), generator, done)
            (loss * share).backward()
            self.masters.take_gradients()
            for name, value in logged.items():
                measured[name] = measured.get(name, 0.0) + share * value
        ranks.average_gradients(self.trained.values())
        norm = ranks.clip_gradients(self.trained.values(), config.clip or math.inf)
        if not all(map(math.isfinite, [*measured.values(), norm])):
            raise NonFiniteLossError(
                f"the loss or gradient is not finite: at step {step} the measurements were "
                f"{measured} and the gradient's norm {norm}. The last checkpoint is from before "
                "this step; a smaller learning rate usually helps."
            )
        self.optimizer.step()
        self.masters.write()
        self.merge()
        measured |= self.objective.update(done)
        self.state.step += 1
        self.state.history.append({**self._now(), "rate": rate, **measured})

    def evaluate(self) -> None:
        try:
            measured = ranks.from_first(self.objective.evaluate())
        except NonFiniteError as error:
            where = f"after step {self.state.step}, on validation rows"
            raise NonFiniteLossError(f"{where}: {error}") from error
        metrics = {"step": self.state.step, **measured}
        if not self.state.best or self.objective.better(metrics, self.state.best):
            self.state.best = metrics
            for name, parameter in self.trained.items():
                weight = whole(parameter)  # all ranks take part
                if processes().is_main_process:
                    self.state.best_weights[name] = weight.detach().to("cpu", copy=True)
        if not self.state.history:
            self.state.history.append(self._now())
        named = {f"validation_{name}": value for name, value in measured.items()}
        self.state.history[-1].update(named)

    def _now(self) -> dict[str, float]:
        return {"step": self.state.step, "seconds": time.monotonic() - self.started}

    def save(self, folder: Path, identity: dict[str, Any]) -> None:
        """Write a checkpoint in place of the earlier one; all ranks take part."""
        state, launched = self.state, processes()
        state.objective, state.last_batch = self.objective.state(), self.batch.digest()
        tensors = {f"best/{name}": tensor for name, tensor in state.best_weights.items()}
        for name, parameter in self.trained.items():
            moments = self.optimizer.state[parameter].items()
            found = {"weights": parameter} | {f"optimizer/{key}": value for key, value in moments}
            for kind, value in found.items():
                gathered = whole(value)
                if launched.is_main_process:
                    tensors[f"{kind}/{name}"] = gathered
        if not launched.is_main_process:
            return
        plain = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "best_weights"}
        carried = {k: v for k, v in state.objective.items() if isinstance(v, Tensor)}
        plain["objective"] = {k: v for k, v in state.objective.items() if k not in carried}
        tensors |= {f"objective/{name}": tensor for name, tensor in carried.items()}
        content = {"format": FORMAT, "identity": identity, "state": plain}
        with files.atomic_folder(folder) as temporary:
            files.write_json(temporary / _STATE, content)
            files.write_tensors(temporary / _TENSORS, tensors)

    def load(self, folder: Path, identity: dict[str, Any]) -> None:
        """Continue from a checkpoint, if there is one and it is of this run."""
        launched = processes()
        with launched.main_process_first():
            files.check_replaceable(folder, _STATE, _TENSORS)
        if not (folder / _STATE).exists():
            return
        content = files.read_json(folder / _STATE)
        if content.get("format") != FORMAT:
            raise ValueError(f"the checkpoint in {folder} is from another version of this package")
        if (stored := content["identity"]) != identity:
            raise _of_another_run(folder, _difference(stored, identity))
        groups: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in files.read_tensors(folder / _TENSORS).items():
            kind, _, name = key.rpartition("/")
            groups[kind][name] = tensor
        self.state = state = TrainingState(**content["state"])
        state.objective.update(groups["objective"])
        if launched.is_main_process:
            state.best_weights = groups["best"]
        for step, digest in ((0, state.first_batch), (state.step - 1, state.last_batch)):
            if self.stream.batch(step).digest() != digest:
                what = f"the batch of step {step} has different tokens or rows, or another order"
                raise _of_another_run(folder, what)
        for kind in [kind for kind in groups if kind.startswith("optimizer/")]:
            for name, value in groups[kind].items():
                like = self.trained[name]
                placed = ranks.spread(value, like) if value.ndim else value
                self.optimizer.state[like][kind.removeprefix("optimizer/")] = placed
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # places counts of steps
        self.set_weights(groups["weights"])
        self.objective.load_state(state.objective)
        self.started -= state.history[-1]["seconds"]

    @torch.no_grad()
    def set_weights(self, values: Mapping[str, Tensor]) -> None:
        """Set the trained weights to the first rank's values."""
        for name, parameter in self.trained.items():
            parameter.copy_(ranks.spread(values.get(name), parameter))
        self.masters.write()


def _difference(stored: dict[str, Any], expected: dict[str, Any]) -> str:
    """How a checkpoint's run differs from this run."""
    there, here = stored["settings"], expected["settings"]
    if changed := [k for k in here | there if here.get(k) != there.get(k)]:
        return ", ".join(f"{k}: {there.get(k)!r} there, {here.get(k)!r} here" for k in changed[:5])
    return "it started from different weights; load the model again before resuming"


def _of_another_run(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"the checkpoint in {folder} belongs to another run ({what:.500}): use its settings and "
        "data, choose another folder, or remove this one"
    )


@contextmanager
def _only_trained(model: nn.Module, trained: dict[str, nn.Parameter]) -> Iterator[None]:
    """Enable gradients for the trained parameters only, and restore all flags at the end."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_().grad = None
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
    # The fused update takes a weight for one piece of memory, which views of joint weights are not.
    fused = all(w.is_contiguous() and not is_sharded(w) for w in weights.values())
    return torch.optim.AdamW(
        groups, betas=config.betas, weight_decay=config.weight_decay, fused=fused
    )


@contextmanager
def _repeatable() -> Iterator[None]:
    """Use deterministic algorithms where they exist, so that a resumed run does not drift away."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # a slow debugging aid
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def in_precision(precision: Precision, device: torch.device) -> torch.autocast:
    """Run the block's forward passes in this precision: under autocast for "bf16"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def choose_trained(model: HookedModel, rates: Mapping[str, float]) -> dict[str, float]:
    """Resolve names and patterns to parameter names, each with the rate of its first match.

    Names are those of `post_train`. If a model has low-rank adapters, only these and its gates can
    be trained.
    """
    names = {id(parameter): name for name, parameter in read_parameters(model).items()}
    gates = [name for name in names.values() if name.startswith(("gates.", "mlp_gates."))]
    lora = [names[id(p)] for p in lora_parameters(model)]
    if lora:
        names = {key: name for key, name in names.items() if name in {*gates, *lora}}
    chosen: dict[str, float] = {}
    for wanted, rate in rates.items():
        if wanted == "gates":
            matches = gates
        elif wanted == "lora":
            matches = lora
        elif wanted in ("qk", "all"):
            matches = [names[id(p)] for p in adapt(model).parameters(wanted) if id(p) in names]
            matches += gates if wanted == "all" else []
        else:
            matches = [name for name in names.values() if fnmatchcase(name, wanted)]
        if not matches:
            raise ValueError(
                f"{wanted!r} is none of 'gates', 'lora', 'qk' and 'all', and matches no parameter "
                f"name: {list(names.values())[:8]}..."
            )
        for name in matches:
            chosen.setdefault(name, rate)
    return chosen


class MasterWeights:
    """The parameters that the optimizer trains: float32 copies of bfloat16 weights, and all others.

    With its eight significant bits, a bfloat16 weight would not change in most steps. The optimizer
    moves the master weights, by gradients that are also accumulated in float32, and the model
    computes with their rounded values.

    Reference: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.1.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        if torch.float16 in {weight.dtype for weight in weights.values()}:
            raise ValueError(
                "small gradients vanish in float16: load the model in float32 or bfloat16, or "
                "train low-rank adapters (add_lora), which are float32"
            )
        copies = {
            name: nn.Parameter(weight.detach().float())
            for name, weight in weights.items()
            if weight.dtype == torch.bfloat16
        }
        self.by_name = {**weights, **copies}
        self._copied = [(weights[name], master) for name, master in copies.items()]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the gradients of the model's weights to their masters."""
        for weight, master in self._copied:
            if weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                weight.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Write the rounded master weights into the model."""
        for weight, master in self._copied:
            weight.copy_(master)


@contextmanager
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C, and signals that precede a kill, until the running step is complete."""
    noted, before = threading.Event(), {}
    if threading.current_thread() is threading.main_thread():  # no other can handle signals
        asking = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")]
        before = {number: signal.getsignal(number) for number in asking}
    # Ignored signals stay ignored: `nohup` keeps a run alive when its terminal closes.
    before = {k: v for k, v in before.items() if v not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        noted.set()
        # A second signal stops a lone process at once. Several ranks get two for one Ctrl-C, the
        # terminal's and the launcher's, which kills them if they take too long.
        if processes().num_processes == 1:
            restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield noted.is_set
    finally:
        restore()


@dataclass
class PlainLoss(Objective):
    """Mean cross-entropy in nats over the loss positions; arguments as in `pretrain`."""

    model: Model
    validation: TokenBatch | None = None
    good_enough: float = 0.0

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        losses = []
        for part in ranks.own_parts(batch, self.model):
            with adapt(self.model).only_at(part.loss_mask) as logits_at:
                logits = logits_at(self.model(part.tokens, **part.model_kwargs))
            losses.append(token_losses(logits, part.loss_labels()))
        loss = ranks.mean(torch.cat(losses))
        return loss, {"loss": loss.item()}

    def evaluate(self) -> Metrics:
        assert self.validation is not None
        measured = evaluate_held_out(self.model, self.validation)
        return {"loss": measured.loss, "accuracy": measured.accuracy}

    def better(self, new: Metrics, old: Metrics) -> bool:
        return new["loss"] < old["loss"]

    def finished(self, best: Metrics) -> bool:
        return best["loss"] <= self.good_enough and best["accuracy"] == 1.0


def pretrain(
    model: Model,
    stream: TokenStream,
    *,
    validation: TokenBatch,
    steps: int,
    learning_rate: float = 1e-3,
    good_enough: float = 0.0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **config: Any,
) -> pd.DataFrame:
    """Train all weights on the stream; on return, the model holds its best validation weights.

    Args:
        model: a newly initialised model.
        stream: training batches.
        validation: rows for model selection.
        steps: maximum number of steps.
        learning_rate: peak learning rate.
        good_enough: validation loss in nats at which training stops, if all rows are right.
        checkpoint, progress: as in `post_train`.
        **config: further fields of `TrainingConfig`.

    Returns:
        The history, one row per step.
    """
    check_raw(model)
    state = train(
        model,
        PlainLoss(model, validation, good_enough),
        stream,
        TrainingConfig(steps=steps, learning_rate=learning_rate, **config),
        trained=choose_trained(model, {"all": 1.0}),
        settings={"good_enough": good_enough, "validation": validation.digest()},
        checkpoint=checkpoint,
        title="dense model",
        progress=progress,
    )
    return pd.DataFrame(state.history)

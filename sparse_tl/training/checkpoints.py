"""Training checkpoints: a folder with ``state.json`` and ``tensors.safetensors``.

The first rank writes whole tensors, also of sharded weights, so any number of ranks can resume.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_tl.backend import HookedModel, processes, read_parameters, weights_digest, whole
from sparse_tl.data.streams import ResumableStream, TokenStream
from sparse_tl.storage.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from sparse_tl.training.ranks import spread

FORMAT = 8
_STATE, _TENSORS = "state.json", "tensors.safetensors"
_SHOWN = {"loss": "loss", "over_limit": "over", "lambda": "λ", "expected_per_token": "edges/token"}


@dataclass
class TrainingState:
    """The complete state of a run, from which it resumes as if never interrupted.

    Args:
        step: number of completed steps.
        history: one dictionary per logged step.
        best: metrics of the best evaluation so far, including its step; empty before the first.
        best_weights: on the first rank, the trained weights at that evaluation, on the CPU.
        objective: the objective's state: plain values and tensors.
        first_batch: digest of the first step's batch.
        last_batch: digest of the last completed step's batch.
        stream: the stream's state, if it has one.
    """

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    first_batch: str = ""
    last_batch: str = ""
    stream: dict[str, Any] = field(default_factory=dict)

    def latest(self) -> str:
        """The last step's measurements, in nats and attention edges per token.

        ``over`` is how far the worst group's gap at the last evaluation exceeds this step's limit,
        negative if it is within; ``best`` is the number of active edges per token at the best
        evaluation.
        """
        row = self.history[-1]
        shown = {label: row[name] for name, label in _SHOWN.items() if name in row}
        if "active_attention_edges_per_token" in self.best:
            shown["best"] = self.best["active_attention_edges_per_token"]
        return ", ".join(
            f"{label} {value:{'.2f' if abs(value) >= 10 else '.4g'}}"
            for label, value in shown.items()
        )


_PLAIN = [f.name for f in fields(TrainingState) if f.name != "best_weights"]


def run_identity(model: nn.Module | HookedModel, settings: dict[str, Any]) -> dict[str, Any]:
    """The identity of a run: its settings, parameter shapes, and a digest of the weights."""
    shapes = {name: list(weight.shape) for name, weight in read_parameters(model).items()}
    return {"settings": settings, "shapes": shapes, "weights": weights_digest(model)}


def save_checkpoint(
    folder: Path,
    state: TrainingState,
    trained: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    identity: dict[str, Any],
) -> None:
    """Write the complete state; the earlier checkpoint remains until the new one is complete.

    All ranks must call this; the first one writes.
    """
    ranks = processes()
    tensors = {f"best/{name}": tensor for name, tensor in state.best_weights.items()}
    for name, parameter in trained.items():
        found = {"weights": parameter}
        found |= {f"optimizer/{key}": value for key, value in optimizer.state[parameter].items()}
        for kind, value in found.items():
            gathered = whole(value)
            if ranks.is_main_process:
                tensors[f"{kind}/{name}"] = gathered
    if not ranks.is_main_process:
        return
    plain = {name: getattr(state, name) for name in _PLAIN}
    carried = {k: v for k, v in state.objective.items() if isinstance(v, Tensor)}
    plain["objective"] = {k: v for k, v in state.objective.items() if k not in carried}
    tensors |= {f"objective/{name}": tensor for name, tensor in carried.items()}
    content = {"format": FORMAT, "identity": identity, "ranks": ranks.num_processes, "state": plain}
    with atomic_folder(folder) as temporary:
        write_json(temporary / _STATE, content)
        write_tensors(temporary / _TENSORS, tensors)


def load_checkpoint(
    folder: Path,
    trained: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    identity: dict[str, Any],
    stream: TokenStream,
) -> TrainingState:
    """Restore weights and optimizer, and return the rest; without a checkpoint, a fresh state.

    Warns if the checkpoint was made on another number of ranks.

    Raises:
        ValueError: the folder holds something else or is damaged, or the checkpoint belongs to
            another run or other data.
    """
    ranks = processes()
    with ranks.main_process_first():
        check_replaceable(folder, _STATE, _TENSORS)
    if not (folder / _STATE).exists():
        return TrainingState()
    content = read_json(folder / _STATE)
    if content.get("format") != FORMAT:
        raise ValueError(f"the checkpoint in {folder} is from another version of this package")
    _check_identity(folder, content["identity"], identity)
    groups: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in read_tensors(folder / _TENSORS).items():
        kind, _, name = key.rpartition("/")
        groups[kind][name] = tensor
    state = TrainingState(**content["state"])
    state.objective.update(groups["objective"])
    if ranks.is_main_process:
        state.best_weights = groups["best"]
    if state.stream and isinstance(stream, ResumableStream):
        stream.load_state(state.stream)
    _check_stream(folder, state, stream)
    if content["ranks"] != ranks.num_processes and ranks.is_main_process:
        warnings.warn(
            f"the checkpoint in {folder} was made on {content['ranks']} ranks, and the run resumes "
            f"on {ranks.num_processes}: the gates draw other noise from here on",
            stacklevel=2,
        )
    moments = {kind.removeprefix("optimizer/"): of for kind, of in groups.items() if "/" in kind}
    names = {id(parameter): name for name, parameter in trained.items()}
    restored = [
        {
            key: spread(of[name], like) if of[name].ndim else of[name]
            for key, of in moments.items()
            if (name := names[id(like)]) in of
        }
        for group in optimizer.param_groups
        for like in group["params"]
    ]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(restored))})
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(spread(groups["weights"][name], parameter))
    return state


def _check_identity(folder: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    there, here = _flat(stored["settings"]), _flat(expected["settings"])
    if stored == expected:
        return
    if changed := [k for k in here | there if here.get(k) != there.get(k)]:
        what = ", ".join(f"{k}: {there.get(k)!r} there, {here.get(k)!r} here" for k in changed[:5])
    elif stored["shapes"] != expected["shapes"]:
        what = "its parameters have different names or shapes"
    else:
        what = "it started from different weights; load the model again before resuming"
    raise ValueError(
        f"the checkpoint in {folder} belongs to another run ({what:.500}). Start over in another "
        "folder, remove this one, or use the settings that it was made with."
    )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with nested dictionaries flattened by one level."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def _check_stream(folder: Path, state: TrainingState, stream: TokenStream) -> None:
    """Check that the first and last batches are those that the run was trained on."""
    for step, digest in ((0, state.first_batch), (state.step - 1, state.last_batch)):
        if stream.batch(step).digest() != digest:
            raise ValueError(
                f"the checkpoint in {folder} belongs to a run on different data: the batch of step "
                f"{step} has different tokens or rows, or another order. Start over in another "
                "folder, remove this one, or use the text, batch size and seed of that run."
            )

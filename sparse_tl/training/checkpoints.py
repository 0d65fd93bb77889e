"""Training checkpoints: a folder with ``state.json`` and ``tensors.safetensors``.

If weights are sharded, each rank writes its shards of them and of their optimizer state to its own
file: ``tensors-1.safetensors`` and so on. The first file also holds everything else. Concatenated
along their rows, the shards are the full tensors, so any number of ranks can resume.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_tl import __version__
from sparse_tl.calls.scopes import autograd
from sparse_tl.data.streams import ResumableStream, TokenStream
from sparse_tl.lens import HookedModel, read_parameters, weights_digest
from sparse_tl.parallel import ranks, shards
from sparse_tl.storage.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)

FORMAT = 7
_STATE = "state.json"
_VERSIONS = ("torch", "transformers", "transformer-lens")
_SHOWN = {"loss": "loss", "over_limit": "over", "lambda": "λ", "expected_per_token": "edges/token"}


@dataclass
class TrainingState:
    """The complete state of a run, from which it resumes as if never interrupted.

    Args:
        step: number of completed steps.
        history: one dictionary per logged step.
        best: metrics of the best evaluation so far, including its step; empty before the first.
        best_weights: trained weights at that evaluation, on the CPU: this rank's shards of sharded
            weights, and, on the first rank, all other weights.
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

    All ranks must call this.
    """
    tensors = {f"weights/{name}": parameter for name, parameter in trained.items()}
    for name, parameter in trained.items():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer/{key}/{name}"] = value
    sharded = any(map(shards.is_sharded, trained.values()))
    first = ranks.is_first()
    written = {k: shards.local(v) for k, v in tensors.items() if first or shards.is_sharded(v)}
    written |= {f"best/{name}": tensor for name, tensor in state.best_weights.items()}
    plain = {name: getattr(state, name) for name in _PLAIN}
    carried = {k: v for k, v in state.objective.items() if isinstance(v, Tensor)}
    if first:
        written |= {f"objective/{name}": tensor for name, tensor in carried.items()}
    plain["objective"] = {k: v for k, v in state.objective.items() if k not in carried}
    content = {
        "format": FORMAT,
        "identity": identity,
        "ranks": ranks.count(),
        "files": ranks.count() if sharded else 1,
        "state": plain,
    }

    def write() -> None:
        if first:
            write_json(temporary / _STATE, content)
        if first or sharded:
            write_tensors(temporary / _tensors_file(ranks.rank()), written)

    with ExitStack() as stack:
        temporary = ranks.on_first(lambda: stack.enter_context(atomic_folder(folder)))
        ranks.on_each(write)
        ranks.on_first(stack.close)


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
    ranks.on_first(lambda: check_replaceable(folder, _STATE, "tensors*.safetensors"))
    if not (folder / _STATE).exists():
        return TrainingState()
    content = read_json(folder / _STATE)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"expected a checkpoint of format {FORMAT} in {folder}")
    try:
        _check_identity(folder, content["identity"], identity)
        groups = ranks.on_each(partial(_read, folder, content["files"], trained))
        state = _restored(content["state"])
        weights = {name: groups["weights"][name] for name in trained}
        best = groups["best"]  # empty before the first evaluation
        state.best_weights = {
            name: best[name]
            for name, parameter in trained.items()
            if best and (ranks.is_first() or shards.is_sharded(parameter))
        }
        if state.stream and isinstance(stream, ResumableStream):
            stream.load_state(state.stream)
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"expected a complete checkpoint in {folder}; {error!r}") from error
    _check_stream(folder, state, stream)
    before = content["ranks"]
    if before != ranks.count() and ranks.is_first():
        warnings.warn(
            f"the checkpoint in {folder} was made on {before} ranks, and the run resumes on "
            f"{ranks.count()}: the gates draw different noise than they would have on {before}",
            stacklevel=2,
        )
    state.objective.update(groups["objective"])
    moments = {kind[len("optimizer/") :]: groups[kind] for kind in groups if "optimizer/" in kind}
    names = {id(parameter): name for name, parameter in trained.items()}
    restored = [
        {
            key: shards.from_local(of[name], like) if of[name].ndim else of[name]
            for key, of in moments.items()
            if (name := names[id(like)]) in of
        }
        for group in optimizer.param_groups
        for like in group["params"]
    ]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(restored))})
    with autograd(False):
        for name, parameter in trained.items():
            shards.local(parameter).copy_(weights[name])
    return state


def _tensors_file(rank: int) -> str:
    return f"tensors-{rank}.safetensors" if rank else "tensors.safetensors"


def _read(
    folder: Path, n_files: int, trained: dict[str, nn.Parameter]
) -> defaultdict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint by kind and name; this rank's shards of sharded weights."""
    groups: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    own_file = n_files == ranks.count() and any(map(shards.is_sharded, trained.values()))
    numbers = {0, ranks.rank()} if own_file else range(n_files)
    first, *others = [read_tensors(folder / _tensors_file(number)) for number in numbers]
    for key, tensor in first.items():
        kind, _, name = key.rpartition("/")
        if others and key in others[0]:
            tensor = others[0][key] if own_file else torch.cat([tensor, *(t[key] for t in others)])
        if not own_file and name in trained and tensor.ndim:
            tensor = shards.local_rows(tensor, trained[name]).clone()
        groups[kind][name] = tensor
    _check_tensors(groups, trained)
    return groups


def _check_tensors(groups: dict[str, dict[str, Tensor]], trained: dict[str, nn.Parameter]) -> None:
    """Refuse tensors that are not finite, or whose shape or dtype is not that of their weight."""
    for kind in groups.keys() - {"objective"}:
        for name, tensor in groups[kind].items():
            like = shards.local(trained[name])
            fits = (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
            if not (fits or kind == "optimizer/step") or not tensor.isfinite().all():
                raise TypeError(f"{kind}/{name} is not a finite {like.dtype} {tuple(like.shape)}")


def check_ranks(identity: dict[str, Any]) -> None:
    """Check that all ranks run the same thing, or raise a ValueError that says what differs."""
    facts = {name: repr(value) for name, value in _flat(identity["settings"]).items()}
    facts |= {f"version of {name}": version(name) for name in _VERSIONS}
    facts |= {"version of sparse_tl": __version__, "weights": identity["weights"]}
    ranks.check_alike(facts)


def _restored(plain: dict[str, Any]) -> TrainingState:
    """The state without its tensors, once its entries are known and of the right type."""
    kinds = {name: type(getattr(TrainingState(), name)) for name in _PLAIN}
    if wrong := [name for name, value in plain.items() if type(value) is not kinds[name]]:
        raise TypeError(f"{wrong[:3]} have the wrong type")
    return TrainingState(**plain)


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

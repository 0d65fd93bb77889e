"""Jobs that resume, on tiny models: functions of a folder, in processes of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tiny import WORDS, save_story, save_taught_task_models, save_tiny, tiny_model
from torch import Tensor

import sparse_tl as stl
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.jobs import run_circuits, run_post_training

QUIET: dict[str, Any] = {"progress": False}
FITTING: dict[str, Any] = {"seeds": 2, "updates": 2, "batch_size": 4, "record_every": 1, **QUIET}


def rows() -> TokenBatch:
    draw = torch.Generator().manual_seed(2)
    return TokenBatch.next_token(torch.randint(13, (12, 6), generator=draw))


def targets() -> stl.TargetDataset:
    return stl.TargetDataset(rows())


def facts(value: Any) -> str:
    """A digest of everything in a result but durations; figures are compared as files."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.ndim else b"")
    elif isinstance(value, torch.nn.Module):
        _feed(found, dict(value.state_dict()))
    elif isinstance(value, pd.DataFrame):
        found.update(value.drop(columns="seconds", errors="ignore").to_json(indent=0).encode())
    elif is_dataclass(value):
        _feed(found, {field.name: getattr(value, field.name) for field in fields(value)})
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            if key != "seconds":
                found.update(str(key).encode())
                _feed(found, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for some in value:
            _feed(found, some)
    elif isinstance(value, Path):  # in a folder of this run
        found.update(value.name.encode())
    else:
        found.update(repr(value).encode())


def _post_train(folder: Path) -> str:
    _often()
    sparse = SparseTransformer(tiny_model(n_layers=1), mlps=True)
    stream = stl.ShuffledStream(rows(), 4, 0)
    how: dict[str, Any] = {"target_loss": 9.0, "steps": 8, "checkpoint": folder / "c", **QUIET}
    how |= {"validation": rows()}
    return facts([stl.post_train(sparse, stream, **how), sparse])


def _often() -> None:
    """As many checkpoints as a long job would write."""
    import_module("sparse_tl.training.loop").SAVE_AFTER = 0.0


def _head_gates(folder: Path) -> str:
    _often()
    how: dict[str, Any] = {**FITTING, "updates": 6}
    model = tiny_model(n_layers=1)
    return facts(stl.fit_head_gates(model, targets(), checkpoint=folder / "c", **how))


def inputs(place: Path) -> None:
    """What the commands read: models with a tokenizer, and a text."""
    place.mkdir(parents=True, exist_ok=True)
    save_story(place / "story.txt")
    save_tiny(place / "tiny", WORDS)
    save_taught_task_models(place, n_layer=1, n_head=2, n_embd=16, n_inner=16)


def _inputs(folder: Path) -> Path:
    return folder.parent / "inputs"


def _post_training(folder: Path) -> str:
    _often()
    given = _inputs(folder)
    asked: dict[str, Any] = {"window": 8, "batch_size": 4, "steps": 8, "target_loss": "+1"}
    asked |= {"model": str(given / "tiny"), "text": str(given / "story.txt"), "device": "cpu"}
    return facts(run_post_training(folder / "out", **asked, **QUIET))


def _circuits(folder: Path) -> str:
    given = _inputs(folder)
    asked: dict[str, Any] = {"model": str(given / "dense"), "sparse": given / "sparse"}
    asked |= {"tasks": ["greater_than"], "pairs": 4, "device": "cpu"}
    return facts(run_circuits(folder / "out", **asked, **QUIET))


JOBS: dict[str, Callable[[Path], str]] = {
    "post_train": _post_train,
    "fit_head_gates": _head_gates,
    "post-train": _post_training,
    "circuits": _circuits,
}


def hidden(file: Path, folder: Path) -> bool:
    """Whether a file is a lock, or what a killed process left of a write."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def content(folder: Path) -> dict[str, str]:
    """What a job left, by file; without durations and hidden files."""
    found: dict[str, str] = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or hidden(file, folder):
            continue
        if file.suffix == ".json":
            said = facts(json.loads(file.read_text(encoding="utf-8")))
        elif file.suffix == ".csv":
            said = facts(pd.read_csv(file))
        elif file.stem.endswith("_kept"):
            said = "curves, whose elements plotly names at random"
        else:
            said = hashlib.sha256(file.read_bytes()).hexdigest()
        found[file.relative_to(folder).as_posix()] = said
    return found

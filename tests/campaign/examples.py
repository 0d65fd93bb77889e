"""A valid value for every parameter of the public interface that has no default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from calls import LENGTH, N, pairs, rows, targets
from malformed import required
from tiny import tiny_model

import sparse_tl as stl
from sparse_tl.circuits import EffectCurve

OF_OTHERS = {"hooks", "points", "shape", "first_layer", "drawing", "columns", "layer"}
"""Methods that the package calls on what users write (`Site`), not users themselves."""


@cache
def model() -> Any:
    return tiny_model()


@cache
def sparse() -> stl.SparseTransformer:
    return stl.SparseTransformer(tiny_model(seed=1))


@cache
def scores() -> stl.Scores:
    return stl.attribute_circuit_edges(
        model(), pairs(), stl.logit_difference, method="eap", progress=False
    )


@cache
def roles() -> Any:
    how: dict[str, Any] = {"updates": 2, "batch_size": 4, "record_every": 1, "progress": False}
    return stl.fit_head_gates(model(), targets(), seeds=2, **how)


@cache
def tokenizer() -> Any:
    return stl.load_addition_models()[0].tokenizer


def _curve(name: str) -> EffectCurve:
    return EffectCurve(name, (1, 2, 4), *[(0.1, 0.5, 1.0)] * 3)


def _graph() -> stl.CircuitGraph:
    return stl.CircuitGraph(2, 2, 2)


PAIR_FIELDS = ("clean", "corrupted", "answers", "wrong", "positions")


def _field(make: Callable[[], Any], name: str, _folder: Path) -> Any:
    return getattr(make(), name)


BY_NAME: dict[str, Callable[[Path], Any]] = {
    "model": lambda _: model(),
    "models": lambda _: {"Dense": model()},
    "sparse": lambda _: sparse(),
    "pairs": lambda _: pairs(),
    "metric": lambda _: stl.logit_difference,
    "logits": lambda _: torch.zeros(N, 13),
    "site": lambda _: stl.Heads(),
    "gates": lambda _: torch.ones(2, 2),
    "tokens": lambda _: pairs().clean,
    "read": lambda _: torch.ones(N, LENGTH, dtype=torch.bool),
    "folder": lambda folder: folder / "out",
    "prompt": lambda _: pairs().clean[0],
    "scores": lambda _: scores(),
    "circuit": lambda _: scores().top(5),
    "circuits": lambda _: scores().top(5),
    "known": lambda _: scores().top(7),
    "found": lambda _: scores(),
    "size": lambda _: 5,
    "n": lambda _: 2,
    "d_model": lambda _: 16,
    "heads": lambda _: [(0, 1)],
    "edges": lambda _: [(0, 1, 3, 2)],
    "names": lambda _: "blocks.0.attn.hook_z",
    "axes": lambda _: -1,
    "examples": lambda _: rows(),
    "stream": lambda _: stl.ShuffledStream(rows(), 4, 0),
    "validation": lambda _: rows(),
    "target_loss": lambda _: 9.0,
    "batch_size": lambda _: 2,
    "dataset": lambda _: targets(),
    "retain": lambda _: targets(),
    "forget": lambda _: targets(3),
    "roles": lambda _: roles(),
    "tokenizer": lambda _: tokenizer(),
    "documents": lambda _: ["12+34=46"] * 40,
    "window": lambda _: 8,
    "source": lambda folder: _text(folder),
    "dense": lambda _: _curve("dense"),
    "position": lambda _: 0,
    "step": lambda _: 0,
    "held_out": lambda _: 0.2,
}
"""By the parameter's name; what one function alone asks for is in `OF_ONE`."""

OF_ONE: dict[str, dict[str, Callable[[Path], Any]]] = {
    "multiplier": {"sparse": lambda _: _curve("sparse")},
    "from_eap_ig": {"content": lambda _: stl.to_eap_ig(scores(), scores().top(5), 16)},
    "load_model": {"source": lambda _: model()},
    "load_mib": {"folder": lambda folder: stl.save_mib(scores(), folder / "mib", 16)},
    "merge_lora": {"model": lambda _: stl.add_lora(tiny_model(), 2)},
    "add_lora": {"model": lambda _: tiny_model()},
    "post_train": {"sparse": lambda _: stl.SparseTransformer(tiny_model())},
    "SparseTransformer": {"model": lambda _: tiny_model()},
    "effect_figure": {
        "panels": lambda _: {"IOI": [_curve("dense"), _curve("sparse")]},
        "parts": lambda _: "heads",
    },
    "layer_map": {"panels": lambda _: {"Dense": stl.logit_lens(model(), pairs().clean[0])}},
    "steer": {"name": lambda _: "blocks.0.hook_resid_pre", "vector": lambda _: torch.ones(16)},
    "head_map": {"panels": lambda _: {"Dense": _head_scores()}},
    "component_diagram": {"panels": lambda _: {"Dense": scores().top(5)}},
    "ablation_grid": {"rows": lambda _: {"Task": {"Dense": [_ablation()]}}},
    "acdc": {"threshold": lambda _: 10.0},
    "Circuit": {"site": lambda _: _graph(), "mask": lambda _: _graph().exists},
    "CircuitGraph": {
        "n_layers": lambda _: 2,
        "n_heads": lambda _: 2,
        "n_kv_heads": lambda _: 2,
    },
    "HookPoints": {
        "names": lambda _: ("blocks.0.attn.hook_z",),
        "axes": lambda _: (-1,),
        "sizes": lambda _: (8,),
    },
    "PromptPairs": {key: partial(_field, pairs, key) for key in PAIR_FIELDS},
    "TokenBatch": {key: partial(_field, rows, key) for key in ("tokens", "labels", "loss_mask")},
    "TargetDataset": {"rows": lambda _: rows()},
    "Scores": {
        "site": lambda _: _graph(),
        "values": lambda _: torch.zeros(_graph().exists.shape),
        "method": lambda _: "by hand",
    },
    "AdditionTask.batch": {
        "left": lambda _: torch.tensor([12, 34]),
        "right": lambda _: torch.tensor([56, 7]),
    },
    "AdditionTask.pairs": {"digit": lambda _: "units", "self": lambda _: stl.AdditionTask()},
    "AdditionTask.read_at": {"column": lambda _: 9},
    "AdditionTask.prompt": {"text": lambda _: "36+28=?????"},
}


def _text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("12+34=46\n" * 10, encoding="utf-8")
    return path


@cache
def _head_scores() -> stl.Scores:
    return stl.attribute_heads(model(), pairs(), stl.logit_difference, method="eap", progress=False)


@cache
def _ablation() -> Any:
    return stl.ablation_curve(model(), roles(), targets(), max_heads=2, progress=False)


def public_calls() -> Iterator[tuple[str, Any]]:
    """Every public function, class and method of a public class, with its name."""
    for name in sorted(stl.__all__):
        value = getattr(stl, name)
        if not callable(value):
            continue
        yield name, value
        for method, plain in vars(value).items() if inspect.isclass(value) else ():
            static = isinstance(plain, staticmethod | classmethod)
            if not method.startswith("_") and (static or inspect.isfunction(plain)):
                yield f"{name}.{method}", getattr(value, method)


def valid_arguments(name: str, function: Any, folder: Path) -> dict[str, Any]:
    """Arguments that the function accepts.

    Raises:
        KeyError: a parameter without an example: give it one in `BY_NAME` or `OF_ONE`.
    """
    own = OF_ONE.get(name, {})
    names = {*required(function), *own} - {"self"}
    return {key: (own.get(key) or BY_NAME[key])(folder) for key in names}

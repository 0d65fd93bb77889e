"""A valid value for every parameter of the public interface that has no default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from calls import LENGTH, N, pairs, rows, targets
from made_tokenizers import byte_level
from malformed import required
from pandas import DataFrame
from tiny import small_task_models, tiny_model, tokenizer_of

import sparse_tl as stl
from sparse_tl.circuits import EffectCurve
from sparse_tl.tasks import agreement, capitals

OF_OTHERS = {"hooks", "points", "shape", "first_layer", "drawing", "columns", "layer", "names"}
"""Methods that the package calls on what users write (`Site`, tasks), not users themselves."""
OF_OTHERS |= {"check", "keeps_all", "sources", "of_stream", "read_logits"}
"""The rest of a `Site`."""
OF_OTHERS |= {"words", "describe"}
OF_OTHERS |= {"set_state", "load_state"}
"""What ipywidgets and checkpoints call."""
OF_OTHERS |= {"generate", "to_tokens"}
"""What takes TransformerLens's arguments alone."""


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
def by_position() -> stl.Scores:
    how: dict[str, Any] = {"method": "eap", "positions": "tokens", "progress": False}

    return stl.attribute_circuit_edges(model(), pairs(), stl.logit_difference, **how)


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
    "mlp": lambda _: "m0",
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
    "device": lambda _: "cpu",
    "index": lambda _: slice(0, 2),
}
"""By the parameter's name; what one function alone asks for is in `OF_ONE`."""

WORD_TASKS = ("IOITask", "IOILongTask", "GreaterThanTask", "DocstringTask", "InductionTask")
MORE_TASKS = ("SubjectVerbTask", "AnaphorTask", "CapitalsTask")
"""Their words are not those of the task model."""
PASSED_ON = ("forward", "run_with_cache", "run_with_hooks", "run_with_counts")


@cache
def task_model() -> Any:
    return small_task_models()[0]


def _with_words(folder: Path) -> Any:
    return tiny_model(tokenizer=tokenizer_of(["<s>", *"abcdefghijkl"], folder))


@cache
def knowing() -> Any:
    rows = [*agreement.NOUNS, *agreement.VERBS, *agreement.PEOPLE, *capitals.COUNTRIES]
    words = {word for row in rows for word in row} | {agreement.PLURAL}
    own = byte_level(*(f" {word}" for word in sorted(words)))
    return tiny_model(d_vocab=len(own), n_ctx=64, tokenizer=own)


def _of_task(name: str, _folder: Path) -> stl.PromptPairs:
    return getattr(stl, name)().pairs(task_model(), 2)


OF_ONE: dict[str, dict[str, Callable[[Path], Any]]] = {
    "multiplier": {"sparse": lambda _: _curve("sparse")},
    "from_eap_ig": {"content": lambda _: stl.to_eap_ig(scores(), scores().top(5), 16)},
    "load_model": {"source": lambda _: model()},
    "load_mib": {"folder": lambda folder: stl.save_mib(scores(), folder / "mib", 16)},
    "merge_lora": {"model": lambda _: stl.add_lora(tiny_model(), 2)},
    "add_lora": {"model": lambda _: tiny_model()},
    "ablate_attention_edges": {"query": lambda _: slice(3, None), "key": lambda _: [0, 1]},
    "post_train": {"sparse": lambda _: stl.SparseTransformer(tiny_model())},
    "sampled_windows": {"model": _with_words},
    "SparseTransformer": {"model": lambda _: tiny_model()},
    "measure_skills": {"dense": lambda _: model()},
    "effect_figure": {
        "panels": lambda _: {"IOI": [_curve("dense"), _curve("sparse")]},
        "parts": lambda _: "heads",
    },
    "evaluate_heads": {"scores": lambda _: _head_scores()},
    "layer_map": {"panels": lambda _: {"Dense": stl.logit_lens(model(), pairs().clean[0])}},
    "steer": {"name": lambda _: "blocks.0.hook_resid_pre", "vector": lambda _: torch.ones(16)},
    "head_behaviour": {"length": lambda _: 5},
    "head_map": {"panels": lambda _: {"Dense": _head_scores()}},
    "component_diagram": {"panels": lambda _: {"Dense": scores().top(5)}},
    "ablation_grid": {"rows": lambda _: {"Task": {"Dense": [_ablation()]}}},
    "acdc": {"threshold": lambda _: 10.0},
    "Circuit": {"grid": lambda _: _graph(), "mask": lambda _: _graph().exists},
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
        "grid": lambda _: _graph(),
        "values": lambda _: torch.zeros(_graph().exists.shape),
        "method": lambda _: "by hand",
    },
    "AdditionTask.batch": {
        "left": lambda _: torch.tensor([12, 34]),
        "right": lambda _: torch.tensor([56, 7]),
    },
    "AdditionTask.pairs": {"digit": lambda _: "units"},
    "Scores.of": {
        "grid": lambda _: _graph(),
        "values": lambda _: {"a0.h0->m0": 1.0},
        "method": lambda _: "exact",
    },
    "Circuit.of": {"grid": lambda _: _graph(), "parts": lambda _: ["a0.h0->m0"]},
    "Circuit.load": {"folder": lambda folder: scores().top(5).save(folder / "circuit")},
    "Circuit.save": {"folder": lambda folder: folder / "circuit"},
    "Scores.load": {"folder": lambda folder: scores().save(folder / "saved")},
    "CircuitGraph.edges_of": {"mask": lambda _: _graph().exists},
    "CircuitGraph.n_sources_before": {"node": lambda _: _graph().sources[1]},
    "CircuitGraph.source_index": {"node": lambda _: "a0.h0"},
    "CircuitGraph.destination_index": {"destination": lambda _: "m0"},
    "CircuitGraph.index": {"part": lambda _: "a0.h0->m0"},
    "CircuitGraph.readers_of": {"destination": lambda _: _graph().destinations[0]},
    "DocstringTask.metric": {"pairs": lambda _: pairs()},
    "PromptPairs.from_texts": {"model": lambda _: worded(), "rows": lambda _: [dict(ROW)]},
    "PromptPairs.with_spans": {"spans": lambda _: {"first": 0, "END": -1}},
    "PromptPairs.spans_of": {"positions": lambda _: "tokens"},
    "PromptPairs.read": {"logits": lambda _: torch.zeros(N, LENGTH, 13)},
    "SparseTransformer.from_pretrained": {"folder": lambda f: sparse().save_pretrained(f / "s")},
    "TargetDataset.from_tokens": {
        "tokens": lambda _: [[1, 2, 3], [4, 5, 6]],
        "spans": lambda _: [(1, 3), (2, 3)],
    },
    "TargetDataset.from_texts": {
        "texts": lambda _: ["12+34=", "1+2="],
        "targets": lambda _: ["46", "3"],
    },
    "TargetDataset.from_records": {"records": lambda _: [{"text": "1+2=", "target": "3"}]},
    "TargetDataset.from_pandas": {"frame": lambda _: DataFrame([{"text": "1+2=", "target": "3"}])},
    "TargetDataset.from_jsonl": {"path": lambda folder: _jsonl(folder)},
    "TargetDataset.from_windows": {"windows": lambda _: pairs().clean},
    "TokenBatch.joined": {"parts": lambda _: [rows(), rows()]},
    "TokenBatch.shard": {"rank": lambda _: 0, "n_ranks": lambda _: 2},
    "TokenBatch.dealt": {"rank": lambda _: 0, "n_ranks": lambda _: 2},
    "TokenBatch.trimmed": {"causal": lambda _: True},
    "explore.toggle_attention_edges": {"title": lambda _: "Dense"},
    "explore.toggle_head": {"layer": lambda _: 0, "head": lambda _: 1, "title": lambda _: "Dense"},
    "explore.choose": {
        "target": lambda _: 0,
        "weight": lambda _: "attention",
        "threshold": lambda _: 0.2,
    },
    "explore.select": {
        "title": lambda _: "Dense",
        "level": lambda _: 1,
        "column": lambda _: 1,
    },
    "explore.show_position": {"column": lambda _: 3},
    "explore.save": {"path": lambda folder: folder / "figure.html"},
    "GatedRun.start_from": {"gates": lambda _: torch.ones(2, 2)},
    "AdditionTask.read_at": {"column": lambda _: 9},
    "AdditionTask.prompt": {"text": lambda _: "36+28"},
    **{f"{name}.pairs": {"model": lambda _: task_model()} for name in WORD_TASKS},
    **{f"{name}.pairs": {"model": lambda _: knowing()} for name in MORE_TASKS},
    **{f"{name}.spans": {"pairs": partial(_of_task, name)} for name in ("IOITask", "IOILongTask")},
    "GreaterThanTask.years": {"tokenizer": lambda _: task_model().tokenizer},
    **{f"SparseTransformer.{name}": {"input": lambda _: pairs().clean} for name in PASSED_ON},
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


def _jsonl(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text('{"text": "1+2=", "target": "3"}\n', encoding="utf-8")
    return path


ROW = {"clean": "12+34=", "corrupted": "12+35=", "answer": "4", "wrong": "5"}


@cache
def worded() -> Any:
    return stl.load_addition_models()[0]


INSTANCES: dict[str, Callable[[], Any]] = {
    "AdditionTask": stl.AdditionTask,
    "Circuit": lambda: scores().top(5),
    "Circuit.at": lambda: by_position().top(5),
    "CircuitGraph": _graph,
    "DocstringTask": stl.DocstringTask,
    "GatedRun": lambda: stl.GatedRun(
        model(), stl.Heads(), pairs().clean, torch.ones(N, LENGTH, dtype=torch.bool)
    ),
    "GreaterThanTask": stl.GreaterThanTask,
    "IOILongTask": stl.IOILongTask,
    "InductionTask": stl.InductionTask,
    "IOITask": stl.IOITask,
    **{name: getattr(stl, name) for name in MORE_TASKS},
    "PromptPairs": pairs,
    "Scores": _head_scores,
    "Scores.at": by_position,
    "Scores.top": scores,
    "ShuffledStream": lambda: stl.ShuffledStream(rows(), 4, 0),
    "SparseTransformer": lambda: stl.SparseTransformer(tiny_model(seed=1)),
    "TargetDataset": targets,
    "TextStream": lambda: stl.TextStream(["12+34=46"] * 40, tokenizer(), window=8, batch_size=2),
    "TokenBatch": rows,
    "explore": lambda: stl.explore({"Dense": model()}, pairs().clean[0]),
}
"""An object of each public class that has methods of its own, or for one method alone."""


def public_calls() -> Iterator[tuple[str, Any]]:
    """Every public function, class and method of a public class, with its name.

    Methods of objects take the object first, as functions of the class do.
    """
    for name in sorted(stl.__all__):
        value = getattr(stl, name)
        if not callable(value):
            continue
        yield name, value
        for method in dir(value) if inspect.isclass(value) else ():
            plain = inspect.getattr_static(value, method)
            static = isinstance(plain, staticmethod | classmethod)
            ours = getattr(getattr(value, method), "__module__", "") or ""
            if (
                not method.startswith("_")
                and method not in OF_OTHERS
                and ours.startswith("sparse_tl")
                and (static or inspect.isfunction(plain))
            ):
                yield f"{name}.{method}", getattr(value, method)


def of_object(name: str, function: Any) -> Any:
    """A method with its object; anything else as it is."""
    owner, _, method = name.partition(".")
    if not method or "self" not in inspect.signature(function).parameters:
        return function
    return getattr(INSTANCES.get(name, INSTANCES[owner])(), method)


def valid_arguments(name: str, function: Any, folder: Path) -> dict[str, Any]:
    """Arguments that the function accepts.

    Raises:
        KeyError: a parameter without an example: give it one in `BY_NAME` or `OF_ONE`; a class
            with methods gets an object in `INSTANCES`.
    """
    own = OF_ONE.get(name, {})
    names = {*required(function), *own} - {"self"}
    return {key: (own.get(key) or BY_NAME[key])(folder) for key in names}

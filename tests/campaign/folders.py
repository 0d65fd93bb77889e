"""Folders of every kind that the package reads: how one is written, and how it is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jobs
import torch
from calls import FITTING, QUIET, pairs, targets
from jobs import WORDS, facts
from tiny import tiny_model, tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM

import sparse_tl as stl
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import load_model, save_model
from sparse_tl.models import read_pair
from sparse_tl.results import Result
from sparse_tl.runs import run_circuits, run_post_training
from sparse_tl.storage.files import write_json, write_tensors


class NotFiniteError(AssertionError):
    """What was read computes NaN or infinity."""


def _logits(model: Any) -> str:
    """What a model computes; and, as a notebook would, what it says of itself."""
    repr(model)
    if model.tokenizer is not None:
        model.tokenizer("the cat")
    with torch.no_grad():
        logits = model(torch.arange(8)[None] % 5)
    if not logits.isfinite().all():
        raise NotFiniteError(f"{int((~logits.isfinite()).sum())} logits")
    return facts(logits)


def _llama(folder: Path) -> None:
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=len(WORDS),
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer_of(WORDS, folder)


def _sharded(folder: Path) -> None:
    _llama(folder)
    (folder / "model.safetensors").unlink()
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model.save_pretrained(folder, max_shard_size="4KB")


def hooked(folder: Path) -> None:
    """A folder of a HookedTransformer, written by hand."""
    folder.mkdir(exist_ok=True)
    sizes = {"n_layers": 1, "n_ctx": 16, "d_model": 16, "d_head": 8, "n_heads": 2, "d_mlp": 32}
    config = {**sizes, "d_vocab": len(WORDS), "act_fn": "gelu", "eps": 1e-5, "model_name": "mine"}
    config |= {"normalization_type": "LN", "dtype": "float32", "attn_scale": 8**0.5}
    write_json(folder / "tl_config.json", {**config, "positional_embedding_type": "standard"})
    words = len(WORDS)
    shapes: dict[str, tuple[int, ...]] = {"embed.W_E": (words, 16), "pos_embed.W_pos": (16, 16)}
    shapes |= {"unembed.W_U": (16, words), "unembed.b_U": (words,)}
    shapes |= {"ln_final.w": (16,), "ln_final.b": (16,)}
    block: dict[str, tuple[int, ...]] = {f"{n}.{k}": (16,) for n in ("ln1", "ln2") for k in "wb"}
    block |= {f"attn.W_{slot}": (2, 16, 8) for slot in "QKV"} | {"attn.W_O": (2, 8, 16)}
    block |= {f"attn.b_{slot}": (2, 8) for slot in "QKV"} | {"attn.b_O": (16,)}
    block |= {"mlp.W_in": (16, 32), "mlp.b_in": (32,), "mlp.W_out": (32, 16), "mlp.b_out": (16,)}
    shapes |= {f"blocks.0.{name}": shape for name, shape in block.items()}
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    write_tensors(folder / "model.safetensors", weights)
    tokenizer_of(WORDS, folder)


def _sparse_hooked(folder: Path) -> None:
    sparse = SparseTransformer(tiny_model(d_vocab=len(WORDS)), mlps=True)
    sparse.save_pretrained(folder)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    small = SparseTransformer(tiny_model(n_layers=1, d_vocab=len(WORDS)), mlps=True)
    small.save_pretrained(folder.with_name("small"))
    shutil.copy(folder.with_name("small") / "gates.safetensors", folder)
    hooked(folder)


def _sparse(folder: Path) -> None:
    with TemporaryDirectory() as words:
        tokenizer = tokenizer_of(WORDS, Path(words))
    model = tiny_model("grouped", d_vocab=len(WORDS), tokenizer=tokenizer)
    SparseTransformer(model, mlps=True).save_pretrained(folder)


@cache
def _results() -> dict[str, Result]:
    """A result of every kind that can be had in a second."""
    model, some = tiny_model(n_layers=1), pairs()
    edges = stl.attribute_circuit_edges(model, some, stl.logit_difference, method="eap", **QUIET)
    heads = stl.attribute_heads(model, some, stl.logit_difference, method="eap", **QUIET)
    roles = stl.fit_head_gates(model, targets(), **FITTING)
    return {
        "scores": edges,
        "evaluation": stl.evaluate_heads(model, some, stl.logit_difference, heads, **QUIET),
        "search": stl.acdc(model, some, threshold=0.1, start="heads", **QUIET),
        "pruning": stl.prune_circuit_edges(model, some, size=5, steps=2, **QUIET),
        "head roles": roles,
        "ablation": stl.ablation_curve(model, roles, targets(), max_heads=2, **QUIET),
        "sizes": stl.circuit_sizes_per_prompt(model, some, stl.logit_difference, steps=1, **QUIET),
        "circuit": edges.top(5),
    }


def _saved(name: str) -> Callable[[Path], Any]:
    return lambda folder: _results()[name].save(folder)


def _loaded(name: str) -> Callable[[Path], str]:
    def load(folder: Path) -> str:
        found = type(_results()[name]).load(folder)
        shown = f"{found!r}{found._repr_html_()}"
        assert "<script>alert" not in shown, "markup is not escaped"
        return facts([found, shown])

    return load


def _training(folder: Path) -> str:
    return jobs.JOBS["post_train"](folder)


def _searching(folder: Path) -> str:
    return jobs.JOBS["acdc to a size"](folder)


def _run(folder: Path, **more: Any) -> str:
    given = folder.parent.parent / "inputs"
    asked: dict[str, Any] = {"window": 8, "batch_size": 4, "steps": 2, "target_loss": "+1"}
    asked |= {"model": str(given / "tiny"), "text": str(given / "story.txt"), "device": "cpu"}
    found = run_post_training(folder / "out", **asked, **QUIET, **more)
    shown = found._repr_html_()
    assert "<script>alert" not in shown, "markup is not escaped"
    return facts(found) + shown


def _run_anew(folder: Path) -> str:
    return _run(folder, restart=True)


def _circuits(folder: Path) -> str:
    given = folder.parent.parent / "inputs"
    asked: dict[str, Any] = {"model": str(given / "dense"), "sparse": given / "sparse"}
    asked |= {"tasks": ["greater_than"], "pairs": 4, "device": "cpu"}
    return facts(run_circuits(folder / "out", **asked, **QUIET))


def _pair(folder: Path) -> None:
    dense = tiny_model(n_layers=1)
    (folder / "dense").mkdir(parents=True, exist_ok=True)
    save_model(dense, folder / "dense")
    SparseTransformer(dense).save_pretrained(folder / "sparse")
    write_json(folder / "verdict.json", {"verdict": "met", "feasible": True})


def _read_pair(folder: Path) -> str:
    found = read_pair(folder, device="cpu")
    return _logits(found.dense) + _logits(found.sparse) + facts([found.verdict, found.feasible])


def _mib(folder: Path) -> None:
    edges = _results()["scores"]
    assert isinstance(edges, stl.Scores)
    stl.save_mib(edges, folder, 16)


Write = Callable[[Path], Any]
Read = Callable[[Path], str]
KINDS: dict[str, tuple[Write, Read]] = {
    "sparse model": (
        _sparse,
        lambda folder: _logits(SparseTransformer.from_pretrained(folder, device="cpu")),
    ),
    "sparse model of HookedTransformer": (
        _sparse_hooked,
        lambda folder: _logits(SparseTransformer.from_pretrained(folder, device="cpu")),
    ),
    "HookedTransformer": (hooked, lambda folder: _logits(load_model(folder, device="cpu"))),
    "Hugging Face model": (_llama, lambda folder: _logits(load_model(folder, device="cpu"))),
    "model in shards": (_sharded, lambda folder: _logits(load_model(folder, device="cpu"))),
    "checkpoint of training": (_training, _training),
    "checkpoint of a search": (_searching, _searching),
    "run": (_run, _run),
    "run, begun anew": (_run, _run_anew),
    "run of circuits": (_circuits, _circuits),
    "pair of models": (_pair, _read_pair),
    "MIB": (_mib, lambda folder: facts(stl.load_mib(folder))),
    **{
        f"result: {name}": (_saved(name), _loaded(name))
        for name in ("scores", "evaluation", "search", "pruning", "head roles", "ablation")
        + ("sizes", "circuit")
    },
}

"""Public analyses as calls on tiny models, each a fraction of a second long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sparse_tl as stl
from sparse_tl.backend import adapt, checkpointed_activations
from sparse_tl.data.batches import TokenBatch
from sparse_tl.metrics import logit_difference
from sparse_tl.training import evaluate_held_out
from sparse_tl.training.memory import training_memory

N, LENGTH, VOCABULARY = 3, 6, 13
QUIET: dict[str, Any] = {"progress": False}


def pairs() -> stl.PromptPairs:
    draw = torch.Generator().manual_seed(1)
    clean, corrupted = torch.randint(VOCABULARY, (2, N, LENGTH), generator=draw)
    answers = torch.arange(N)[:, None]
    return stl.PromptPairs(clean, corrupted, answers, answers + 5, torch.full((N,), LENGTH - 1))


def targets(shift: int = 0) -> stl.TargetDataset:
    draw = torch.Generator().manual_seed(2)
    tokens = (torch.randint(VOCABULARY, (12, LENGTH), generator=draw) + shift) % VOCABULARY
    return stl.TargetDataset(TokenBatch.next_token(tokens))


def rows() -> TokenBatch:
    return targets().rows


@dataclass(frozen=True)
class Call:
    """One public call.

    Args:
        run: the call, of a dense or a sparse model and a folder for checkpoints.
        trains: whether it changes the model's weights.
        sparse: whether it needs a model under gates.
    """

    run: Callable[[Any, Path], Any]
    trains: bool = False
    sparse: bool = False


def _under(model: Any, block: Any) -> Any:
    with block:
        return model(pairs().clean)


def _sampled(model: Any, _folder: Path) -> Any:
    with model.sampled(torch.Generator().manual_seed(0)), checkpointed_activations(model):
        output, counts = model.run_with_counts(pairs().clean)
        return torch.autograd.grad(output.sum() + counts.expected.sum(), model.gates.bias)


def _ablated(model: Any, _folder: Path) -> Any:
    _under(model, stl.ablate_heads(model, [(0, 0)], "mean", reference=pairs().corrupted))
    return _under(model, stl.ablate_attention_edges(model, [(0, 1, 3, 2)]))


def _gated_run(model: Any, _folder: Path) -> Any:
    read = torch.ones(N, LENGTH, dtype=torch.bool)
    run = stl.GatedRun(model, stl.CircuitEdges(), pairs().clean, read, patch="zero")
    shape = 2, *stl.CircuitEdges().shape(adapt(model))
    masks = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return run.logits(masks)


def _wrapped(model: Any, folder: Path) -> Any:
    sparse = stl.SparseTransformer(model, mlps=True)
    try:
        return sparse.save_pretrained(folder / "wrapped")
    finally:
        sparse.unwrap()


def _trained(model: Any, folder: Path) -> Any:
    stream = stl.ShuffledStream(rows(), 4, 0)
    how: dict[str, Any] = {"steps": 3, "validation": rows(), "checkpoint": folder / "training"}
    return stl.post_train(model, stream, target_loss=9.0, **how, **QUIET)


def _attribution(kind: str, **how: Any) -> Call:
    attribute = getattr(stl, f"attribute_{kind}")
    return Call(lambda m, _: attribute(m, pairs(), logit_difference, **how, **QUIET))


def _whole(model: Any) -> stl.Circuit:
    heads = adapt(model).graph.heads
    return stl.Circuit(heads, heads.exists)


FITTING: dict[str, Any] = {"seeds": 2, "updates": 2, "batch_size": 4, "record_every": 1, **QUIET}
CALLS: dict[str, Call] = {
    "eap": _attribution("circuit_edges", method="eap"),
    "eap-ig": _attribution("circuit_edges", steps=2),
    "relp": _attribution("circuit_edges", method="relp"),
    "heads": _attribution("heads", steps=2),
    "attention edges": _attribution("attention_edges", steps=2),
    "exact": Call(
        lambda m, _: stl.patch_exactly(m, pairs(), logit_difference, ["a0.h0->m0"], **QUIET)
    ),
    "acdc": Call(lambda m, _: stl.acdc(m, pairs(), threshold=0.1, start="heads", **QUIET)),
    "finding": Call(lambda m, _: stl.find_circuit(m, pairs(), logit_difference, at=0.6, **QUIET)),
    "pruning": Call(lambda m, _: stl.prune_circuit_edges(m, pairs(), size=5, steps=2, **QUIET)),
    "evaluation": Call(lambda m, _: stl.evaluate(m, pairs(), logit_difference, _whole(m), **QUIET)),
    "per prompt": Call(
        lambda m, _: stl.circuit_sizes_per_prompt(m, pairs(), logit_difference, steps=1, **QUIET)
    ),
    "trace": Call(
        lambda m, _: stl.trace_attention(m, pairs().clean[0], attribution=True, max_effects=2)
    ),
    "head gates": Call(
        lambda m, f: stl.fit_head_gates(m, targets(), checkpoint=f / "h", **FITTING)
    ),
    "contrastive": Call(
        lambda m, _: stl.fit_contrastive_head_gates(m, targets(), targets(3), **FITTING)
    ),
    "ablation": Call(_ablated),
    "gated run": Call(_gated_run),
    "held out": Call(lambda m, _: evaluate_held_out(m, rows())),
    "memory": Call(lambda m, _: training_memory(m, LENGTH)),
    "wrapping": Call(_wrapped),
    "sampled": Call(_sampled, sparse=True),
    "post-training": Call(_trained, trains=True, sparse=True),
}

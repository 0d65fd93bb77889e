"""Circuits, against the slow oracle. The first paragraph of each docstring stands on the page."""

from __future__ import annotations

from typing import Any

import torch
from architectures import N_LAYERS
from double_precision import DoublePrecision
from oracle import by_head, run_patched, slow_scores
from torch import Tensor

from architecture_checks.subject import (
    FLOAT64,
    GATES,
    PAIRS,
    QUIET,
    Subject,
    metric_of,
    near,
    require,
)
from sparse_tl import (
    Circuit,
    acdc,
    attribute_circuit_edges,
    attribute_heads,
    evaluate,
    logit_difference,
    patch_exactly,
)
from sparse_tl.backend import adapt
from sparse_tl.metrics import divergence

POINTS = 3
"""Of EAP-IG."""
EMBEDDED = "blocks.0.hook_resid_pre"
Z = [f"blocks.{layer}.attn.hook_z" for layer in range(N_LAYERS)]


def eap(subject: Subject) -> float:
    """EAP scores of every circuit edge and every head, compared with autograd through an oracle,
    built from plain hooks only, in which every destination reads its own residual stream."""
    return _attribution(subject, "eap", [1.0])


def eap_ig(subject: Subject) -> float:
    """EAP-IG scores at three points, compared in the same way."""
    return _attribution(subject, "eap-ig", [k / POINTS for k in range(1, POINTS + 1)])


def _attribution(subject: Subject, method: str, shares: list[float]) -> float:
    model, graph = subject.exact, adapt(subject.exact).graph
    options = {"method": method, "steps": POINTS, **QUIET}
    with DoublePrecision():
        edges = attribute_circuit_edges(model, PAIRS, logit_difference, **options)
        slow = [slow_scores(model, graph, PAIRS, logit_difference, share) for share in shares]
        heads = attribute_heads(model, PAIRS, logit_difference, **options)
        by_hand = [_head_scores(model, share) for share in shares]
    off = near(edges.values, sum(slow) / len(slow), FLOAT64, "a circuit edge's score")
    return max(off, near(heads.values, sum(by_hand) / len(by_hand), FLOAT64, "a head's score"))


def _head_scores(model: Any, share: float) -> Tensor:
    """The change of each head's z times the gradient there, at interpolated embeddings."""
    clean, corrupted = (_kept(model, tokens) for tokens in (PAIRS.clean, PAIRS.corrupted))
    embedded = torch.lerp(corrupted[EMBEDDED], clean[EMBEDDED], share)
    leaves = {name: torch.zeros_like(clean[name], requires_grad=True) for name in Z}
    hooks = [(EMBEDDED, lambda x, hook: embedded)]
    hooks += [(name, lambda z, hook, leaf=leaf: z + leaf) for name, leaf in leaves.items()]
    metric_of(model.run_with_hooks(PAIRS.clean, fwd_hooks=hooks)).backward()
    scores = [(corrupted[name] - clean[name]) * leaf.grad for name, leaf in leaves.items()]
    return torch.stack([by_head(model, score) for score in scores]).sum(dim=(1, 2, 4))


@torch.no_grad()
def _kept(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return name, lambda value, hook: kept.update({name: value})

    model.run_with_hooks(tokens, fwd_hooks=[keep(name) for name in (EMBEDDED, *Z)])
    return kept


@torch.no_grad()
def exact_patching(subject: Subject) -> float:
    """Exact patching of 24 circuit edges, compared with that oracle, and of all heads, compared
    with hooks."""
    model, graph = subject.exact, adapt(subject.exact).graph
    chosen = torch.randperm(graph.n_edges, generator=torch.Generator().manual_seed(0))[:24]
    expected = {}
    with DoublePrecision():
        for edge in (graph.edges[index] for index in chosen):
            mask = graph.exists.clone()
            mask[graph.index(edge)] = False
            logits = run_patched(model, graph, PAIRS, mask)
            expected[str(edge)] = logit_difference(logits, PAIRS).mean().item()
        for layer, head in torch.ones_like(GATES).nonzero().tolist():
            open_heads = torch.ones_like(GATES)
            open_heads[layer, head] = 0
            logits = _with_corrupted_heads(model, open_heads)
            expected[f"a{layer}.h{head}"] = metric_of(logits).item()
        plain = metric_of(model(PAIRS.clean)).item()
        found = patch_exactly(model, PAIRS, logit_difference, list(expected), **QUIET)
    changes = torch.tensor(list(expected.values()), dtype=torch.float64) - plain
    return near(found.to_list(), changes, FLOAT64, "the change of the metric")


def _with_corrupted_heads(model: Any, gates: Tensor) -> Tensor:
    """Logits where heads whose gate is 0 write what they write in the corrupted prompts."""
    corrupted = _kept(model, PAIRS.corrupted)

    def patch(name: str, row: Tensor) -> Any:
        def hook(z: Tensor, hook: Any) -> Tensor:
            parts = (by_head(model, value) for value in (corrupted[name], z))
            return torch.lerp(*parts, row[:, None]).reshape(z.shape)

        return name, hook

    hooks = [patch(name, row) for name, row in zip(Z, gates.double(), strict=True)]
    return model.run_with_hooks(PAIRS.clean, fwd_hooks=hooks)


@torch.no_grad()
def search(subject: Subject) -> str:
    """Circuit edges that ACDC keeps at a threshold of a fiftieth of the effect of patching
    everything. A dozen of its tests, and the final divergence, agree with that oracle; every
    decision follows the threshold."""
    model, graph = subject.exact, adapt(subject.exact).graph
    with DoublePrecision():
        clean, corrupted = (PAIRS.read(model(some)) for some in (PAIRS.clean, PAIRS.corrupted))
        threshold = divergence(corrupted, clean).mean().item() / 50
        found = acdc(model, PAIRS, threshold=threshold, **QUIET)

        def diverges(mask: Tensor) -> float:
            return divergence(run_patched(model, graph, PAIRS, mask), clean).mean().item()

        history, now = found.history, graph.exists.clone()
        parts, keeps = history["part"].to_list(), history["kept"].to_list()
        expected, moved = [], []
        for test, (part, kept) in enumerate(zip(parts, keeps, strict=True)):
            without = now.clone()
            without[graph.index(part)] = False
            if test % (len(parts) // 12 + 1) == 0:
                expected.append(diverges(without) - diverges(now))
                moved.append(history["moved"].iloc[test])
            now = now if kept else without
        near(moved, expected, FLOAT64, "a change of the divergence")
        divergences = found.searched.values.mean().item()
        near(divergences, diverges(found.circuit.mask), FLOAT64, "the divergence of the circuit")
    require(all(history["kept"] == (history["moved"] >= threshold)), "a wrong decision")
    require(0 < len(found.circuit) < graph.n_edges, "the circuit is empty, or everything")
    return f"{len(found.circuit)} of {graph.n_edges}"


@torch.no_grad()
def evaluation(subject: Subject) -> float:
    """The metric of three random circuits of edges, compared with that oracle; of three random
    circuits of heads, compared with hooks; and of the full and empty circuits, compared with the
    clean and corrupted prompts."""
    model, graph = subject.exact, adapt(subject.exact).graph
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(graph.exists.shape, generator=generator) for _ in range(3)]
    masks = [
        graph.exists & (draw < keep) for draw, keep in zip(draws, (0.3, 0.6, 0.9), strict=True)
    ]
    some = [torch.rand(GATES.shape, generator=generator) < keep for keep in (0.3, 0.6, 0.9)]
    with DoublePrecision():
        ends = [
            logit_difference(PAIRS.read(model(tokens)), PAIRS)
            for tokens in (PAIRS.clean, PAIRS.corrupted)
        ]
        by_hand = [run_patched(model, graph, PAIRS, mask) for mask in masks]
        by_hooks = [PAIRS.read(_with_corrupted_heads(model, mask)) for mask in some]
        whole = [graph.exists, torch.zeros_like(graph.exists)]
        edges = [Circuit(graph, mask) for mask in [*masks, *whole]]
        heads = [Circuit(graph.heads, mask) for mask in [*some, torch.ones_like(some[0])]]
        found = [evaluate(model, PAIRS, logit_difference, one, **QUIET) for one in (edges, heads)]
    expected = [logit_difference(logits, PAIRS) for logits in by_hand] + ends
    off = near(found[0].values, torch.stack(expected), FLOAT64, "the metric of circuit edges")
    expected = [logit_difference(logits, PAIRS) for logits in by_hooks] + ends[:1]
    return max(off, near(found[1].values, torch.stack(expected), FLOAT64, "the metric of heads"))

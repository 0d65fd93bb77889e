"""One gated site, every analysis: all find the same logits; and what autograd loses is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_models import random_pairs, shaken
from tiny import SHAPES

from sparse_tl import CircuitEdges, GatedRun, Heads, ablate_heads, gated, patch_exactly
from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import (
    Circuit,
    acdc,
    attribute_attention_edges,
    attribute_circuit_edges,
    attribute_heads,
    evaluate,
    patch_activations,
)
from sparse_tl.circuits.prompt.attention import LeaveOneOut
from sparse_tl.data import TokenBatch
from sparse_tl.explorer.exploration import Exploration
from sparse_tl.gates import SparseTransformer
from sparse_tl.head_roles import target_log_probabilities
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]
HEAD = (0, 1)


@pytest.mark.parametrize("sparse", [False, True])
def test_one_closed_head_is_the_same_everywhere(build_tiny: Build, sparse: bool) -> None:
    """By a plain hook, by hand, in stacks, as circuit edges, by every analysis that closes it."""
    model: Any = shaken(build_tiny(dtype="float64"))
    model = SparseTransformer(model, initial_bias=0.5) if sparse else model
    pairs, graph = random_pairs(), adapt(model).graph
    read = pairs.forced.read
    close = {"rtol": 1e-9, "atol": 1e-10}

    def silence(z: torch.Tensor, hook: Any) -> torch.Tensor:
        return z * torch.tensor([1.0, 0.0], dtype=z.dtype)[:, None]

    name = f"blocks.{HEAD[0]}.attn.hook_z"
    with torch.no_grad():
        expected = pairs.read(model.run_with_hooks(pairs.clean, fwd_hooks=[(name, silence)]))
        clean = pairs.read(model(pairs.clean))
    heads = torch.ones(2, 2, dtype=torch.float64)
    heads[HEAD] = 0
    edges = graph.exists.double()
    edges[graph.source_index("a0.h1")] = 0
    with torch.no_grad():
        with ablate_heads(model, [HEAD]):
            found = [pairs.read(model(pairs.clean))]
        with gated(model, Heads(), heads):
            found.append(pairs.read(model(pairs.clean)))
        with gated(model, CircuitEdges(), edges):
            found.append(pairs.read(model(pairs.clean)))
        stack = torch.stack([torch.ones_like(heads), heads])
        run = GatedRun(model, Heads(), pairs.clean, read)
        found.append(run.logits(stack)[1])
        torch.testing.assert_close(run.clean_logits, clean, **close)
        found.append(run.logits(heads))  # from the layer of the head on
        found.append(GatedRun(model, CircuitEdges(), pairs.clean, read).logits(edges))
    for logits in found:
        torch.testing.assert_close(logits, expected, **close)

    for row, at in enumerate(pairs.positions.tolist()):
        labels = [f"t{token}" for token in pairs.clean[row].tolist()]
        seen = Exploration({"it": model}, pairs.clean[row], labels=labels)
        seen.models["it"].toggle_head(*HEAD)
        torch.testing.assert_close(seen.models["it"].now.logits[at], expected[row], **close)

    metric = logit_difference(expected, pairs)
    for site, mask in ((graph.heads, heads), (graph, edges)):
        circuit = Circuit(site, mask.bool())
        values = evaluate(model, pairs, logit_difference, circuit, patch="zero").values
        torch.testing.assert_close(values[0], metric, **close)
        search = {"size": len(circuit), "metric": logit_difference, "start": circuit}
        found = acdc(model, pairs, patch="zero", **search)
        assert found.searched.values.mean().item() == pytest.approx(metric.mean().item(), rel=1e-9)
    change = (metric - logit_difference(clean, pairs)).mean().item()
    exact = patch_exactly(model, pairs, logit_difference, ["a0.h1"], patch="zero")["a0.h1"]
    assert exact == pytest.approx(change, rel=1e-9)
    for row in range(len(pairs)):
        one = pairs.select(slice(row, row + 1))
        lost = metric[row] - logit_difference(clean, pairs)[row]
        effect = LeaveOneOut(model, one, logit_difference).effects([HEAD])[0].T
        assert effect.item() == pytest.approx(lost.item(), rel=1e-8)
    labels = pairs.answers[:, :1].expand_as(pairs.clean)
    rows = TokenBatch(pairs.clean, labels, read)
    likely = target_log_probabilities(model, rows, heads[None])[0]
    by_hand = expected.log_softmax(-1).gather(1, pairs.answers[:, :1])[:, 0]
    torch.testing.assert_close(likely, by_hand, **close)


@pytest.mark.parametrize("patch", ["zero", "mean", "corrupted", "resample"])
def test_every_patch_goes_everywhere(build_tiny: Build, patch: str) -> None:
    """The same words by hand and in analyses, on heads and as circuit edges from them."""
    model = shaken(build_tiny(dtype="float64"))
    pairs = random_pairs()
    pairs = pairs.select(pairs.positions == pairs.positions[0])
    heads = torch.ones(2, 2, dtype=torch.bool)
    heads[HEAD] = False
    graph = adapt(model).graph
    edges = graph.exists.clone()
    edges[graph.source_index("a0.h1")] = False
    both = [
        evaluate(model, pairs, logit_difference, Circuit(site, mask), patch=patch).values
        for site, mask in ((graph.heads, heads), (graph, edges))
    ]
    torch.testing.assert_close(both[0], both[1], rtol=1e-9, atol=1e-10)
    if patch == "resample":
        return  # drawn by each call
    reference = {"corrupted": pairs.corrupted, "mean": pairs.clean}.get(patch)
    with torch.no_grad(), ablate_heads(model, [HEAD], patch, reference=reference):
        by_hand = logit_difference(pairs.read(model(pairs.clean)), pairs)
    torch.testing.assert_close(both[0][0], by_hand, rtol=1e-9, atol=1e-10)
    if patch == "corrupted":
        patched = patch_activations(model, pairs, logit_difference, "z", into="clean")
        torch.testing.assert_close(patched.values[HEAD], by_hand, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sparse", [False, True])
def test_first_order_scores_are_slopes_of_the_gate(build_tiny: Build, sparse: bool) -> None:
    """Of one head's gate, at open gates: by autograd, for the head and for all edges out of it."""
    model: Any = shaken(build_tiny(dtype="float64"))
    model = SparseTransformer(model, initial_bias=0.5) if sparse else model
    pairs = random_pairs()
    heads = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    with gated(model, Heads(), heads):
        metric = logit_difference(pairs.read(model(pairs.clean)), pairs).mean()
    (slope,) = torch.autograd.grad(metric, heads)
    options: dict[str, Any] = {"method": "eap", "patch": "zero", "progress": False}
    by_head = attribute_heads(model, pairs, logit_difference, **options).mean()
    torch.testing.assert_close(by_head, -slope, rtol=1e-9, atol=1e-10)
    edges = attribute_circuit_edges(model, pairs, logit_difference, **options)
    out_of_it = edges.mean()[adapt(model).graph.source_index("a0.h1")].sum()
    assert out_of_it.item() == pytest.approx(-slope[HEAD].item(), rel=1e-9)


@pytest.mark.parametrize("kind", SHAPES)
def test_open_gates_are_the_model_bit_for_bit(build_tiny: Build, kind: str) -> None:
    model, pairs = build_tiny(kind), random_pairs()
    plain = model(pairs.clean)
    for site in (Heads(), CircuitEdges()):
        with gated(
            model,
            site,
            torch.ones(site.shape(adapt(model))),
            "corrupted",
            reference=pairs.corrupted,
        ):
            assert torch.equal(model(pairs.clean), plain)


@pytest.mark.parametrize(
    ("analyse", "name"),
    [
        (attribute_circuit_edges, "blocks.1.attn.hook_q"),
        (attribute_heads, "blocks.1.attn.hook_z"),
        (attribute_attention_edges, "blocks.1.attn.hook_pattern"),
    ],
)
def test_what_a_hook_loses_is_an_error_not_a_zero(
    build_tiny: Build, analyse: Callable[..., Any], name: str
) -> None:
    """Detached behind our own hook, as some models hand out views that lead nowhere."""
    model = shaken(build_tiny())
    attention = model.blocks[1].attn
    part = {"q": "hook_q", "z": "hook_z", "pattern": "hook_pattern"}[name.rsplit("_", 1)[1]]
    point = getattr(attention, part)
    point.register_forward_hook(lambda module, args, output: output.detach())
    with pytest.raises(ValueError, match=f"no gradient at {name}"):
        analyse(model, random_pairs(), logit_difference, progress=False)


def test_what_has_no_influence_still_scores_nothing(build_tiny: Build) -> None:
    """A head whose output somebody replaces does nothing, though autograd does not see it."""
    model = shaken(build_tiny())
    model.add_hook("blocks.1.hook_attn_out", lambda x, hook: torch.zeros_like(x), is_permanent=True)
    scores = attribute_heads(model, random_pairs(), logit_difference, progress=False)
    assert (scores.values[1] == 0).all() and (scores.values[0] != 0).all()


def test_a_users_permanent_hook_is_part_of_the_model(build_tiny: Build) -> None:
    """What it does to a head is there in every analysis, dense and under gates."""
    model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: 1.5 * z, is_permanent=True)
    graph = adapt(model).graph
    clean = logit_difference(pairs.read(model(pairs.clean)), pairs)
    corrupted = logit_difference(pairs.read(model(pairs.corrupted)), pairs)
    circuits = [Circuit(graph, torch.zeros_like(graph.exists)), Circuit(graph, graph.exists)]
    found = evaluate(model, pairs, logit_difference, circuits).values
    expected = torch.stack([corrupted, clean]).detach()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    exact = patch_exactly(model, pairs, logit_difference, ["a0.h1->m0", "a0.h0"])
    scores = attribute_circuit_edges(model, pairs, logit_difference, method="eap")
    assert exact["a0.h1->m0"] != 0 and scores["a0.h1->m0"] != 0

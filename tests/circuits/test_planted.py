"""Planted circuits: that they are what carries the effect, and that discovery finds them."""

from __future__ import annotations

import pytest
import torch
from oracle import explained, run_patched_each, written_by
from planted import PLANTED, Planted

from sparse_tl.circuits import attribute_circuit_edges
from sparse_tl.metrics import explained_effect


@pytest.fixture(scope="module", params=list(PLANTED))
def planted(request: pytest.FixtureRequest) -> Planted:
    return PLANTED[request.param]()


def _explained(planted: Planted, mask: torch.Tensor) -> float:
    return explained(planted.model, planted.graph, planted.pairs, planted.metric, mask)


def test_models_do_their_task(planted: Planted) -> None:
    """The answer comes first, well ahead of the wrong one; not so on corrupted prompts."""
    pairs = planted.pairs
    with torch.no_grad():
        clean, corrupted = (pairs.read(planted.model(t)) for t in (pairs.clean, pairs.corrupted))
    assert (clean.argmax(dim=1) == pairs.answers[:, 0]).all()
    assert planted.metric(clean, pairs).min() > 1
    assert planted.metric(corrupted, pairs).max() < 0.5


def test_planted_edges_alone_do_it_all(planted: Planted) -> None:
    assert _explained(planted, planted.mask) == pytest.approx(1, abs=1e-9)


def test_no_planted_edge_can_be_spared(planted: Planted) -> None:
    pairs, edges = planted.pairs, sorted(planted.edges)
    wholes = torch.stack([planted.mask, planted.graph.exists])
    masks = wholes.repeat(len(edges), 1, 1, 1)
    for of_edge, edge in zip(masks, edges, strict=True):
        of_edge[:, *planted.graph.index(edge)] = False
    logits = run_patched_each(planted.model, planted.graph, pairs, masks.flatten(0, 1))
    with torch.no_grad():
        clean, corrupted = (
            planted.metric(pairs.read(planted.model(tokens)), pairs)
            for tokens in (pairs.clean, pairs.corrupted)
        )
    circuits = torch.stack([planted.metric(each, pairs) for each in logits])
    effects = explained_effect(circuits, clean, corrupted).view(-1, 2)
    for edge, effect in zip(edges, effects, strict=True):
        assert (effect < 0.75).all(), edge


def test_patching_other_edges_changes_nothing(planted: Planted) -> None:
    """Neither those of one source, nor of one destination, nor any of some random sets."""
    graph, pairs = planted.graph, planted.pairs
    with torch.no_grad():
        expected = pairs.read(planted.model(pairs.clean))
    patched = []
    for row in range(len(graph.sources)):
        patched.append(torch.zeros_like(graph.exists))
        patched[-1][row] = True
    for column in range(len(graph.destinations)):
        patched.append(torch.zeros_like(graph.exists))
        patched[-1][:, column] = True
    generator = torch.Generator().manual_seed(0)
    for share in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8):
        patched.append(torch.rand(graph.exists.shape, generator=generator) < share)
    masks = graph.exists & (planted.mask | ~torch.stack(patched))
    for logits in run_patched_each(planted.model, graph, pairs, masks):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_distractors_are_alive(planted: Planted) -> None:
    """Each writes something at the last place that depends on the prompt."""
    clean, corrupted = (
        written_by(planted.model, planted.graph, tokens)
        for tokens in (planted.pairs.clean, planted.pairs.corrupted)
    )
    change = (clean - corrupted)[:, :, -1].norm(dim=-1).amax(dim=1)
    planted_sources = {edge.partition("->")[0] for edge in planted.edges}
    distractors = {
        str(node): change[row].item()
        for row, node in enumerate(planted.graph.sources)
        if str(node) not in planted_sources
    }
    assert len(distractors) >= 4
    assert min(distractors.values()) > 0.1, distractors


@pytest.mark.parametrize(("method", "steps"), [("eap", 1), ("eap-ig", 5)])
def test_attribution_ranks_planted_edges_first(planted: Planted, method: str, steps: int) -> None:
    """ROC AUC 1, by a wide margin; all others score exactly nothing where parts are independent.

    A normalisation couples them: to first order, a part of another sign is a part of another size.
    """
    scores = attribute_circuit_edges(
        planted.model, planted.pairs, planted.metric, method=method, steps=steps
    )
    inside = scores.values[planted.mask].abs()
    outside = scores.values[planted.graph.exists & ~planted.mask].abs()
    assert inside.min() > 5 * outside.max(), scores.to_pandas().head(12)
    if planted.name != "lock":
        assert outside.max() == 0
    assert {str(edge) for edge in scores.top(len(planted.edges)).edges} == planted.edges

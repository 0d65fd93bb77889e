"""Scores, exact patching and circuits by position: against slow oracles, and on paper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hand_made import attending_model, paths_model
from oracle import run_patched, slow_token_scores
from random_models import MORE_KINDS, random_pairs, shaken
from torch import Tensor

from sparse_tl import CircuitEdges, GatedRun
from sparse_tl.backend import Model, adapt, relevance_rules
from sparse_tl.circuits import (
    Circuit,
    Scores,
    attribute_circuit_edges,
    evaluate,
    patch_exactly,
)
from sparse_tl.circuits.methods.attribution import Method
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import PositionedGraph
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def _with_spans() -> PromptPairs:
    """Pairs of several lengths, each with spans of its own; other tokens are the rest."""
    pairs = random_pairs()
    return pairs.with_spans([{"S": [row % 2], "END": -1} for row in range(len(pairs))])


def _at(pairs: PromptPairs) -> Tensor:
    """One-hot: the span of every token, ``[span, pair, pos]``."""
    assert pairs.spans is not None
    return torch.stack([pairs.spans.at == index for index in range(len(pairs.spans.names))])


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    ("kind", "method"),
    [*((kind, "eap") for kind in MORE_KINDS), *(("sequential", m) for m in get_args(Method)[1:])],
)
def test_sums_over_positions_are_the_plain_scores(
    build_tiny: Build, kind: str, method: str
) -> None:
    model = shaken(build_tiny(**MORE_KINDS[kind], dtype="float64"))
    for pairs, positions in ((random_pairs(at=5), "tokens"), (_with_spans(), "spans")):
        options: Any = {"method": method, "steps": 2, "batch_size": 3}
        options["by_pair"] = positions == "spans"
        plain, parts = (
            attribute_circuit_edges(model, pairs, logit_difference, positions=some, **options)
            for some in (None, positions)
        )
        torch.testing.assert_close(parts.values.sum(dim=-3), plain.values, rtol=1e-12, atol=1e-12)
        assert (parts.values.flatten(0, -3).abs().amax(dim=(1, 2)) > 0).sum() > 1


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("method", ["eap", "relp"])
@pytest.mark.parametrize("kind", ["sequential", "grouped"])
def test_fast_equals_slow_at_every_token(build_tiny: Build, kind: str, method: str) -> None:
    model = shaken(build_tiny(**MORE_KINDS[kind], dtype="float64"))
    graph, options = adapt(model).graph, {"method": method, "batch_size": 3}
    pairs = random_pairs(at=5)
    with relevance_rules(adapt(model)) if method == "relp" else nullcontext():
        slow = slow_token_scores(model, graph, pairs, logit_difference)
    fast = attribute_circuit_edges(
        model, pairs, logit_difference, positions="tokens", by_pair=True, **options
    )
    torch.testing.assert_close(fast.values, slow, **CLOSE)
    fast = attribute_circuit_edges(model, pairs, logit_difference, positions="tokens", **options)
    torch.testing.assert_close(fast.values, slow.mean(dim=0), **CLOSE)


def test_a_span_scores_the_sum_of_its_tokens(build_tiny: Build) -> None:
    model, pairs = shaken(build_tiny(dtype="float64")), _with_spans()
    slow = slow_token_scores(model, adapt(model).graph, pairs, logit_difference)
    expected = torch.einsum("spt,ptuv->suv", _at(pairs).double(), slow) / len(pairs)
    found = attribute_circuit_edges(
        model, pairs, logit_difference, method="eap", positions="spans", batch_size=2
    )
    assert found.grid.positions == ("S", "END", "rest")
    torch.testing.assert_close(found.values, expected, **CLOSE)


@pytest.mark.parametrize("positions", ["tokens", "spans"])
def test_exact_patching_equals_the_slow_oracle(model: Model, positions: str) -> None:
    pairs = random_pairs(at=5) if positions == "tokens" else _with_spans()
    graph, spans = adapt(model).graph, pairs.spans_of(positions)
    site = PositionedGraph(graph, spans.names)
    chosen = site.places[torch.randperm(site.n_parts, generator=torch.manual_seed(0))[:8]]
    found = patch_exactly(
        model, pairs, logit_difference, site.names(chosen), positions=positions, batch_size=3
    )
    clean = logit_difference(pairs.read(model(pairs.clean)), pairs).mean().item()
    for name, (span, *edge) in zip(site.names(chosen), chosen.tolist(), strict=True):
        mask = torch.ones(*pairs.clean.shape, *graph.exists.shape, dtype=torch.bool)
        mask[..., edge[0], edge[1]] = spans.at != span
        slow = logit_difference(run_patched(model, graph, pairs, mask), pairs).mean().item()
        assert found[name] == pytest.approx(slow - clean, rel=1e-9, abs=1e-9), name
    assert found.abs().max() > 0.001


PATHS = {
    # Token 0 reaches the logits of token 1 through what a0 writes at 0 (read by a1) and at 1.
    "input->a0.h0<v>@0": -(4.0 + 3.0),
    "input->a0.h0<v>@1": -3.0,
    "a0.h0->a1.h0<v>@0": -4.0,
    "a0.h0->a1.h0<v>@1": -4.0,
    "input->a1.h0<v>@0": -2.0,
    "input->a1.h0<v>@1": -2.0,
    "input->logits@1": -1.0,
    "a0.h0->logits@1": -2.0,
    "a1.h0->logits@1": -12.0,
}
"""``paths_model``: the metric is 9 e0 + 6 e1; both change by 1."""


@pytest.mark.parametrize("method", ["eap", "eap-ig"])
def test_scores_of_paths_are_as_on_paper(method: str) -> None:
    known = paths_model()
    scores = attribute_circuit_edges(
        known.model, known.pairs, known.metric, method=method, positions="tokens"
    )
    names = scores.grid.names(scores.grid.places)
    expected = {name: PATHS.get(name, 0.0) for name in names}
    assert {name: scores[name] for name in names} == pytest.approx(expected, rel=1e-12, abs=0)
    exact = patch_exactly(known.model, known.pairs, known.metric, positions="tokens")
    assert exact.to_dict() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_scores_of_attention_are_as_on_paper() -> None:
    """The query is read at the last token, the key and value at the first."""
    known = attending_model()
    scores = attribute_circuit_edges(
        known.model, known.pairs, known.metric, method="eap", positions="tokens"
    )
    at = {"<q>": "1", "<k>": "0", "<v>": "0"}
    for edge, score in known.scores.items():
        here = at.get(edge[-3:], "1")
        assert scores[f"{edge}@{here}"] == pytest.approx(score, rel=1e-12)
        assert scores[f"{edge}@{1 - int(here)}"] == 0


@pytest.mark.parametrize("positions", ["tokens", "spans"])
def test_circuits_equal_the_slow_oracle(model: Model, positions: str) -> None:
    pairs = random_pairs(at=5) if positions == "tokens" else _with_spans()
    graph, spans = adapt(model).graph, pairs.spans_of(positions)
    site = PositionedGraph(graph, spans.names)
    generator = torch.Generator().manual_seed(0)
    masks = [
        site.exists & (torch.rand(site.exists.shape, generator=generator) < p)
        for p in (0.03, 0.2, 0.5, 0.9)
    ]
    circuits = [Circuit(site, mask) for mask in (*masks, site.exists)]
    found = evaluate(model, pairs, logit_difference, circuits, batch_size=3, progress=False)
    for mask, values in zip(masks, found.values, strict=False):
        logits = run_patched(model, graph, pairs, mask[spans.at])
        torch.testing.assert_close(values, logit_difference(logits, pairs), **CLOSE)
    torch.testing.assert_close(found.values[-1], found.clean, **CLOSE)
    corrupted = logit_difference(pairs.read(model(pairs.corrupted)), pairs)
    torch.testing.assert_close(found.none, corrupted.detach(), **CLOSE)


def test_tables_and_files(build_tiny: Build, tmp_path: Path) -> None:
    model, pairs = shaken(build_tiny()), _with_spans()
    scores = attribute_circuit_edges(model, pairs, logit_difference, positions="spans")
    circuit = scores.top(7)
    table = circuit.to_pandas()
    assert list(table) == ["edge", "source", "destination", "slot", "position"]
    assert len(table) == len(circuit) == 7
    row = scores.to_pandas(1).iloc[0]
    assert row["edge"].endswith(f"@{row['position']}")
    assert scores[row["edge"]] == row["score"]
    assert len(circuit.without(row["edge"])) == 6
    for result in (scores, circuit):
        loaded: Any = type(result).load(result.save(tmp_path / type(result).__name__))
        assert loaded.grid == result.grid
        assert repr(loaded) == repr(result)
    one = scores.at("END")
    assert one.grid == scores.grid.graph
    assert one["input->logits"] == scores["input->logits@END"]
    assert sum(len(circuit.at(span)) for span in scores.grid.positions) == 7


def test_what_fits_no_position(build_tiny: Build) -> None:
    model, pairs = shaken(build_tiny()), random_pairs(at=5)

    def attribute(pairs: PromptPairs, positions: str) -> Scores:
        return attribute_circuit_edges(model, pairs, logit_difference, positions=positions)

    with pytest.raises(ValueError, match=r"of one length.* lengths of \[3, .* 6\] tokens"):
        attribute(random_pairs(), "tokens")
    spanned = pairs.with_spans({"END": -1})
    circuit = attribute(spanned, "spans").top(3)
    with pytest.raises(ValueError, match="positions of the circuit are .*'END', 'rest'.*'S'"):
        evaluate(model, pairs.with_spans({"S": 1}), logit_difference, circuit)
    run = GatedRun(
        model, CircuitEdges(spanned.spans), pairs.clean[:2], torch.ones(2, 6, dtype=torch.bool)
    )
    with pytest.raises(ValueError, match="prompts that the gates' spans"):
        run.logits(torch.zeros(run.site.shape(run.adapter)))

"""Edges closed for good are first taken from the model little by little; size does not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch, cross_entropy
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model, adapt
from sparse_tl.training import LossConstraint, PostTraining, TargetLoss, post_train
from sparse_tl.training.objectives import SparsityObjective

Build = Callable[..., Model]
Rows = Callable[..., TokenBatch]


def first_layer_closed(model: Model, longest: int = 8) -> Tensor:
    shape = adapt(model)
    closed = torch.zeros(shape.n_layers, shape.n_heads, longest, longest, dtype=torch.bool)
    closed[0] = True
    return closed


def run(sparse: SparseTransformer, rows: Rows, **settings: Any) -> PostTraining:
    defaults: dict[str, Any] = {
        "stream": ShuffledStream(rows(), 32),
        "target_loss": 0.5,
        "validation": rows(seed=1),
        "steps": 8,
        "warmup": 0,
        "learning_rate": 3e-3,
        "lambda_": 2.0,
        "evaluate_every": 2,
        "progress": False,
    }
    settings = {**defaults, **settings}
    return post_train(sparse, settings.pop("stream"), **settings)


def objective_at(build_echo: Build, closing: float) -> SparsityObjective:
    model = build_echo()
    sparse = SparseTransformer(model, initial_bias=0.5, closed=first_layer_closed(model))
    target, constraint = TargetLoss.parse(0.5), LossConstraint(scale=0.5)
    return SparsityObjective(sparse, None, target, constraint, closing=closing, brake=2.0)


def test_the_share_of_draws_rises_from_none_to_all(build_echo: Build) -> None:
    objective = objective_at(build_echo, 0.4)
    assert [objective.closed_share(t) for t in (0.0, 0.1, 0.4, 0.9)] == [0.0, 0.25, 1.0, 1.0]
    assert objective_at(build_echo, 0.0).closed_share(0.0) == 1.0


def test_until_all_are_closed_the_loss_alone_counts(build_echo: Build, echo_rows: Rows) -> None:
    objective, batch = objective_at(build_echo, 0.4), echo_rows()
    sparse, before = objective.sparse, objective.constraint.lambda_
    with sparse.sampled(torch.Generator().manual_seed(3), 1.0, 0.5), torch.no_grad():
        loss = cross_entropy(sparse(batch.tokens), batch)
    minimised, measured = objective.measure(batch, torch.Generator().manual_seed(3), 0.2)
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert minimised.item() == pytest.approx(loss.item() * before / (1 + before), rel=1e-6)
    objective.update(measured)
    objective.evaluated(1e3)
    assert objective.constraint.lambda_ == before

    minimised, measured = objective.measure(batch, torch.Generator().manual_seed(3), 0.4)
    with sparse.sampled(torch.Generator().manual_seed(3)):
        logits, counts = sparse.run_with_counts(batch.tokens)
    loss = cross_entropy(logits, batch)
    edges = counts.expected.sum() / len(batch)
    expected = (torch.log1p(edges) + before * loss) / (1 + before)
    assert minimised.item() == pytest.approx(expected.item(), rel=1e-6)
    objective.update(measured)
    assert objective.constraint.lambda_ != before
    lower = objective.constraint.lambda_
    objective.evaluated(1e3)
    assert objective.constraint.lambda_ == pytest.approx(1.5 * lower)


def test_what_is_measured_and_kept_is_closed(build_echo: Build, echo_rows: Rows) -> None:
    model = build_echo()
    sparse = SparseTransformer(model, closed=first_layer_closed(model))
    outcome = run(sparse, echo_rows, closing=0.4)
    # 2 layers of 36 causal pairs a head, of which one layer is closed: half at most, from step 0.
    shares = (
        outcome.history["validation_active_attention_edges"].dropna()
        / outcome.sparse.possible_attention_edges
    )
    assert shares.max() <= 0.5
    assert sparse.count_attention_edges(echo_rows(seed=1).tokens).active[0].sum() == 0


@pytest.mark.parametrize(
    ("closed", "closing", "message"),
    [
        (False, 0.2, "`sparse` has none. Give them to"),
        (True, 0.5, "below anneal_noise_from .0.5.; got 0.5"),
        (True, -0.1, "below anneal_noise_from .0.5.; got -0.1"),
    ],
)
def test_closing_that_makes_no_sense(
    build_echo: Build, echo_rows: Rows, closed: bool, closing: float, message: str
) -> None:
    model = build_echo()
    sparse = SparseTransformer(model, closed=first_layer_closed(model) if closed else None)
    with pytest.raises(ValueError, match=message):
        run(sparse, echo_rows, closing=closing)


def test_other_closed_edges_are_another_run(
    build_echo: Build, echo_rows: Rows, tmp_path: Path
) -> None:
    model = build_echo()
    closed = first_layer_closed(model)
    run(SparseTransformer(model, closed=closed), echo_rows, checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match="closed"):
        other = build_echo()
        run(SparseTransformer(other, closed=~closed), echo_rows, checkpoint=tmp_path / "c")


def test_a_run_that_is_stopped_while_closing_goes_on_as_if_it_was_not(
    build_echo: Build, echo_rows: Rows, tmp_path: Path
) -> None:
    def fresh() -> SparseTransformer:
        model = build_echo()
        return SparseTransformer(model, closed=first_layer_closed(model))

    class Watched(ShuffledStream):
        stop_at: int | None = None

        def batch(self, step: int) -> TokenBatch:
            if step == self.stop_at:
                raise KeyboardInterrupt
            seen.append(step)
            return super().batch(step)

    whole, again = fresh(), fresh()
    run(whole, echo_rows, closing=0.4)
    seen: list[int] = []
    stream = Watched(echo_rows(), 32)
    stream.stop_at = 2
    settings: dict[str, Any] = {
        "stream": stream,
        "closing": 0.4,
        "checkpoint": tmp_path / "c",
        "checkpoint_every": 1,
    }
    with pytest.raises(KeyboardInterrupt):
        run(fresh(), echo_rows, **settings)
    stream.stop_at = None
    run(again, echo_rows, **settings)
    # It looked whether the data are those it was trained on, and went on: no step was done twice.
    assert seen == [0, 1, 0, *range(1, 8)]
    for name, parameter in whole.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name]), name


def test_patience_counts_from_where_pruning_starts(build_echo: Build, echo_rows: Rows) -> None:
    histories = {}
    for closing in (0.0, 0.4):
        model = build_echo()
        closed = torch.zeros_like(first_layer_closed(model))
        closed[0, :, 0, 0] = True  # Harmless: step 0 meets the target already.
        sparse = SparseTransformer(model, closed=closed)
        # Nothing that is learned here is better than what was there.
        outcome = run(
            sparse,
            echo_rows,
            closing=closing,
            target_loss="+0.5",
            patience=2,
            evaluate_every=1,
            learning_rate=1e-9,
            trained="gates",
            steps=20,
        )
        histories[closing] = outcome.history["step"].max()
    assert histories == {0.0: 2, 0.4: 10}


def test_nothing_turns_back_while_closing(build_echo: Build, echo_rows: Rows) -> None:
    """At a rate that ruins the model, misses lead back to the first weights, which are feasible."""
    rates = {}
    for after in (None, 1):
        model = build_echo()
        closed = torch.zeros_like(first_layer_closed(model))
        closed[0, :, 0, 0] = True
        outcome = run(
            SparseTransformer(model, closed=closed),
            echo_rows,
            closing=0.4,
            target_loss="+0.05",
            retreat_after=after,
            evaluate_every=1,
            learning_rate=0.3,
            decay=0.0,
            steps=10,
        )
        assert outcome.feasible
        rates[after] = outcome.history["rate"].dropna().tolist()
    assert rates[1][:4] == rates[None][:4]
    assert rates[1][-1] < rates[None][-1]

"""Post-training keeps its promise about the loss, says so, and returns what it measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import BernoulliGate, SparseTransformer
from sparse_tl.lens import Model
from sparse_tl.training import (
    LossConstraint,
    PostTraining,
    TargetLoss,
    evaluate_held_out,
    post_train,
)
from sparse_tl.training.objectives import SparsityObjective

Build = Callable[..., Model]
Rows = Callable[..., TokenBatch]


def _post_train(sparse: SparseTransformer, rows: Rows, **settings: Any) -> PostTraining:
    defaults: dict[str, Any] = {
        "target_loss": "+0.2",
        "steps": 6,
        "learning_rate": 1e-2,
        "warmup": 2,
        "evaluate_every": 3,
        "lambda_": 1.0,
        "progress": False,
        "stream": ShuffledStream(rows(), 32),
        "validation": rows(seed=1),
    }
    settings = {**defaults, **settings}
    return post_train(sparse, settings.pop("stream"), **settings)


class Untouchable:
    """A stream that must not be read."""

    def batch(self, step: int) -> TokenBatch:
        raise AssertionError("training began")


# What is refused before any training.


def test_a_target_below_the_dense_loss(build_echo: Build, echo_rows: Rows) -> None:
    sparse = SparseTransformer(build_echo())
    before = {name: p.clone() for name, p in sparse.named_parameters()}
    with pytest.raises(ValueError, match=r'validation loss is 0\.0.*the target 0\.0001.*"\+0\.01"'):
        _post_train(sparse, echo_rows, target_loss=1e-4, stream=Untouchable())
    assert all(torch.equal(p, before[name]) for name, p in sparse.named_parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_loss": "little"}, "expected a target loss in nats"),
        ({"trained": "qkv"}, "expected trained to be one of .*'qk'.*got 'qkv'"),
        ({"trained": {"*.W_Z": 1.0}}, r"'\*\.W_Z' matches none of"),
        ({"steps": 0}, "expected steps above 0"),
        ({"lambda_fall": 0.0}, "expected lambda_fall above 0"),
        ({"lambda_rise": 0.5}, "expected lambda_rise of at least 1; got 0.5"),
        ({"layer_costs": [1.0]}, "expected layer_costs to be 2 numbers above 0.*got .1.0."),
        ({"self_cost": 0.0}, "expected self_cost to be a number above 0; got 0.0"),
        ({"layer_costs": [1.0, 0.0]}, "expected layer_costs to be 2 numbers above 0"),
        ({"layer_costs": [1.0, math.inf]}, "expected layer_costs to be 2 numbers above 0"),
    ],
)
def test_settings_that_make_no_sense(
    build_echo: Build, echo_rows: Rows, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _post_train(
            SparseTransformer(build_echo()), echo_rows, **{"stream": Untouchable(), **settings}
        )


@pytest.mark.parametrize("lambda_", [0.0, -1.0])
def test_a_multiplier_that_is_no_multiplier(
    build_echo: Build, echo_rows: Rows, lambda_: float
) -> None:
    with pytest.raises(ValueError, match="expected lambda_ above 0"):
        _post_train(
            SparseTransformer(build_echo()),
            echo_rows,
            lambda_=lambda_,
            stream=Untouchable(),
        )


# The outcome.


@pytest.fixture(scope="module")
def run(build_echo: Build, echo_rows: Rows) -> tuple[PostTraining, SparseTransformer]:
    sparse = SparseTransformer(build_echo(), initial_bias=2.0)
    outcome = _post_train(
        sparse, echo_rows, target_loss="+0.1", steps=50, evaluate_every=5, retreat_after=None
    )
    return outcome, sparse


def test_the_best_feasible_weights_are_returned(
    run: tuple[PostTraining, SparseTransformer], echo_rows: Rows
) -> None:
    outcome, sparse = run
    limit = outcome.dense.loss + 0.1
    evaluated = outcome.history.dropna(subset=["validation_loss"])
    meets = evaluated["validation_loss"] <= limit
    assert meets.any(), "the example should hold evaluations that meet the target"
    best = evaluated[meets].sort_values(["validation_active_attention_edges", "step"]).iloc[0]
    assert outcome.feasible
    assert outcome.best_step == best["step"]
    # The weights that the model is left with give these very numbers.
    again = evaluate_held_out(sparse, echo_rows(seed=1))
    assert again == outcome.sparse
    assert again.active_attention_edges == best["validation_active_attention_edges"]
    assert again.loss == best["validation_loss"]
    assert again.active_attention_edges < outcome.dense.active_attention_edges == 2 * 2 * 8 * 9 / 2
    assert f"met at step {outcome.best_step}" in outcome.verdict
    assert "NOT" not in outcome.verdict


def test_the_history_has_the_columns_it_promises(
    run: tuple[PostTraining, SparseTransformer],
) -> None:
    history = run[0].history
    validation = [f"validation_{name}" for name in asdict(run[0].sparse)]
    every_step = ["step", "seconds", "rate", "loss", "violation", "lambda", "expected_per_token"]
    assert set(every_step + validation) <= set(history)
    assert history["step"].tolist() == list(range(51))
    assert history.loc[1:, every_step].notna().all(axis=None)
    assert history.loc[history["validation_loss"].notna(), "step"].tolist() == list(range(0, 51, 5))
    assert history["seconds"].is_monotonic_increasing


def test_an_outcome_shows_itself(run: tuple[PostTraining, SparseTransformer]) -> None:
    outcome, _ = run
    assert outcome.verdict in repr(outcome)
    assert outcome.verdict in outcome._repr_html_()
    assert list(outcome.to_pandas()) == ["dense", "sparse"]
    assert outcome.loss_increase == outcome.sparse.loss - outcome.dense.loss
    assert outcome.times_fewer == pytest.approx(144 / outcome.sparse.active_attention_edges)


def test_a_target_that_is_not_reached(build_echo: Build, echo_rows: Rows) -> None:
    """Gates that start shut cannot win back the loss in a few steps."""
    sparse = SparseTransformer(build_echo(), initial_bias=-30.0)
    outcome = _post_train(sparse, echo_rows, target_loss="+0.001", steps=9)
    assert not outcome.feasible
    assert "NOT met by any validation evaluation" in outcome.verdict
    evaluated = outcome.history.dropna(subset=["validation_loss"])
    lowest = evaluated.loc[evaluated["validation_loss"].idxmin()]
    assert outcome.best_step == lowest["step"]
    assert outcome.sparse.loss == lowest["validation_loss"]
    assert evaluate_held_out(sparse, echo_rows(seed=1)) == outcome.sparse


def test_a_target_that_only_the_start_met(build_echo: Build, echo_rows: Rows) -> None:
    sparse = SparseTransformer(build_echo(), initial_bias=50.0)
    # So large a step ruins the model at once.
    outcome = _post_train(sparse, echo_rows, target_loss="+0.001", steps=9, learning_rate=0.5)
    assert outcome.feasible and outcome.best_step == 0
    assert "before the first step alone: nothing was made sparser" in outcome.verdict


def test_an_accuracy_is_asked_for_beside_the_loss(build_echo: Build, echo_rows: Rows) -> None:
    sparse = SparseTransformer(build_echo(), initial_bias=-30.0)
    outcome = _post_train(sparse, echo_rows, target_loss=50.0, min_accuracy=1.0, steps=3)
    assert outcome.sparse.loss < 50
    assert not outcome.feasible
    assert "100.00% of the examples right NOT met" in outcome.verdict


def test_evaluations_are_reported(build_echo: Build, echo_rows: Rows) -> None:
    seen: list[dict[str, float]] = []
    outcome = _post_train(SparseTransformer(build_echo()), echo_rows, report=seen.append)
    evaluated = outcome.history.dropna(subset=["validation_loss"])
    assert [m["loss"] for m in seen] == evaluated["validation_loss"].tolist()


def test_padding_on_the_left_changes_nothing(build_tiny: Build) -> None:
    """Few positions count, so the last MLP is computed there alone, and a padded row fits too."""
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(0))
    rows = TokenBatch.next_token(tokens)
    rows.loss_mask[:, :3] = False
    padded = TokenBatch(
        *(torch.cat([some[:, :2], some], dim=1) for some in (tokens, rows.labels)),
        torch.cat([torch.zeros(4, 2, dtype=torch.bool), rows.loss_mask], dim=1),
        torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]).repeat(4, 1),
    )
    sparse = SparseTransformer(build_tiny("float64"), initial_bias=0.5)
    found = [asdict(evaluate_held_out(sparse, batch)) for batch in (rows, padded)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_the_same_seed_gives_the_same_result(build_echo: Build, echo_rows: Rows) -> None:
    runs = {}
    for disturbance, (name, seed) in enumerate((("one", 0), ("again", 0), ("other", 1))):
        torch.manual_seed(disturbance)
        sparse = SparseTransformer(build_echo(), initial_bias=1.0)
        _post_train(sparse, echo_rows, seed=seed)
        runs[name] = torch.cat([p.detach().flatten() for p in sparse.parameters()])
    assert torch.equal(runs["one"], runs["again"])
    assert not torch.equal(runs["one"], runs["other"])


def test_bf16_runs(build_echo: Build, echo_rows: Rows) -> None:
    sparse = SparseTransformer(build_echo())
    outcome = _post_train(sparse, echo_rows, precision="bf16")
    assert sparse.model.embed.W_E.dtype == torch.float32
    assert outcome.history["loss"].iloc[1:].notna().all()


# Which weights move.


def _weights(sparse: SparseTransformer) -> dict[str, torch.Tensor]:
    """By what they do, whatever their names in this kind of model; without what is absent."""
    found = {"gates": sparse.gates.bias, "embed": sparse.model.embed.W_E}
    found["unembed"] = sparse.model.unembed.W_U
    for layer, block in enumerate(sparse.model.blocks):
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_V", "b_O"):
            found[f"{layer}.{name}"] = getattr(block.attn, name, None)
        for name in ("W_in", "W_out", "b_in", "b_out"):
            found[f"{layer}.{name}"] = getattr(block.mlp, name, None)
    return {name: w.detach().clone() for name, w in found.items() if w is not None}


def _moved(before: dict[str, torch.Tensor], sparse: SparseTransformer) -> set[str]:
    now = _weights(sparse)
    return {name for name in now if not torch.equal(before[name], now[name])}


@pytest.mark.parametrize("trained", ["qk", "gates", "all", "evenly"])
def test_only_the_chosen_weights_move(build_echo: Build, echo_rows: Rows, trained: str) -> None:
    sparse = SparseTransformer(build_echo())
    before = _weights(sparse)
    # So loose a target that the last, sparsest weights are kept.
    outcome = _post_train(sparse, echo_rows, trained=trained, target_loss=50.0)
    if outcome.best_step == 0:
        pytest.fail("the example should move the weights")
    names = {
        "gates": {"gates"},
        "qk": {"gates"} | {f"{layer}.{w}" for layer in (0, 1) for w in ("W_Q", "W_K", "b_Q")},
    }
    moved = _moved(before, sparse)
    if trained in names:
        assert moved <= names[trained]
        assert "gates" in moved
    else:
        assert {"gates", "embed", "unembed"} <= moved


def test_grouped_keys_are_trained_too(build_tiny: Build, echo_rows: Rows) -> None:
    """With grouped-query attention, W_K stands for the shared keys that the model repeats."""
    sparse = SparseTransformer(build_tiny("grouped"))
    before = _weights(sparse)
    _post_train(sparse, echo_rows, trained="qk", target_loss=50.0, learning_rate=0.1)
    moved = _moved(before, sparse)
    assert any("W_Q" in name for name in moved)
    assert any("W_K" in name for name in moved)
    assert all("_Q" in name or "_K" in name for name in moved - {"gates"})


# What is minimised.


def _measure(
    build_echo: Build,
    batch: TokenBatch,
    target: str = "+0.05",
    distillation: float = 0.0,
    seed: int = 5,
) -> tuple[torch.Tensor, dict[str, float], torch.Tensor, torch.Tensor]:
    """Objective, measurements, and the logits of both models under the same noise."""
    sparse = SparseTransformer(build_echo(), initial_bias=0.5)
    dense = sparse.dense_copy()
    objective = SparsityObjective(
        sparse, dense, TargetLoss.parse(target), LossConstraint(1.0, log_lambda=0.7), distillation
    )
    loss, measured = objective.measure(batch, torch.Generator().manual_seed(seed), 0.0)
    with sparse.sampled(torch.Generator().manual_seed(seed)), torch.no_grad():
        sparse_logits = sparse(batch.tokens)
    return loss, measured, sparse_logits, dense(batch.tokens)


def _nll(logits: torch.Tensor, batch: TokenBatch) -> float:
    picked = logits.double().log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    return -picked[batch.loss_mask].mean().item()


def test_the_violation_is_paired_with_the_dense_model(build_echo: Build, echo_rows: Rows) -> None:
    batch = echo_rows(16, seed=3)
    _, measured, sparse_logits, dense_logits = _measure(build_echo, batch)
    assert measured["loss"] == pytest.approx(_nll(sparse_logits, batch), rel=1e-5)
    paired = _nll(sparse_logits, batch) - _nll(dense_logits, batch) - 0.05
    assert measured["violation"] == pytest.approx(paired, rel=1e-4)
    assert abs(paired) > 1e-3
    _, absolute, _, _ = _measure(build_echo, batch, target="0.05")
    assert absolute["violation"] == pytest.approx(_nll(sparse_logits, batch) - 0.05, rel=1e-4)


def test_the_first_row_of_the_history_is_that_of_the_first_batch(
    build_echo: Build, echo_rows: Rows
) -> None:
    stream = ShuffledStream(echo_rows(), 16, seed=2)
    outcome = _post_train(
        SparseTransformer(build_echo(), initial_bias=0.5), echo_rows, stream=stream, seed=4
    )
    # The noise of step s is seeded by the seed and s.
    _, measured, _, _ = _measure(build_echo, stream.batch(0), "+0.2", seed=4 * 1_000_003)
    assert outcome.history["violation"].iloc[1] == measured["violation"]
    assert outcome.history["loss"].iloc[1] == measured["loss"]


def test_distillation_adds_the_divergence_from_the_dense_model(
    build_echo: Build, echo_rows: Rows
) -> None:
    batch = echo_rows(16, seed=3)
    plain, measured, sparse_logits, dense_logits = _measure(build_echo, batch)
    distilled, _, _, _ = _measure(build_echo, batch, distillation=0.3)
    p, q = (x[batch.loss_mask].double().softmax(-1) for x in (dense_logits, sparse_logits))
    divergence = (p * (p.log() - q.log())).sum(-1).mean().item()
    assert divergence > 1e-2
    weight = measured["lambda"] / (1 + measured["lambda"])
    difference = weight * 0.3 * (divergence - measured["loss"])
    assert (distilled - plain).item() == pytest.approx(difference, rel=1e-3)


def test_edges_count_at_their_cost(build_echo: Build, echo_rows: Rows) -> None:
    """The difference between two costs is that of the logarithms; measurements stay unweighted."""
    batch = echo_rows(16, seed=3)
    sparse = SparseTransformer(build_echo(), initial_bias=0.5)
    with sparse.sampled(torch.Generator().manual_seed(0)):
        _, counts = sparse.run_with_counts(batch.tokens)
    every, own = (
        (part.sum(dim=(1, 2)) / len(batch)).tolist()
        for part in (counts.expected, counts.expected_self)
    )
    results = []
    for costs in (
        {},
        {"layer_costs": [1.0, 1.0], "self_cost": 1.0},
        {"layer_costs": [3.0, 0.5]},
        {"layer_costs": [3.0, 0.5], "self_cost": 4.0},
    ):
        objective = SparsityObjective(
            sparse, None, TargetLoss.parse(0.05), LossConstraint(1.0), **costs
        )
        results.append(objective.measure(batch, torch.Generator().manual_seed(0), 0.0))
    (plain, measured), (ones, _), (by_layer, _), (by_both, also_measured) = results
    assert ones.item() == pytest.approx(plain.item())
    assert also_measured == measured
    sizes = [
        sum(every),
        3.0 * every[0] + 0.5 * every[1],
        3.0 * (every[0] + 3 * own[0]) + 0.5 * (every[1] + 3 * own[1]),
    ]
    logarithms = [math.log1p(size) for size in sizes]
    for weighted, logarithm in zip((by_layer, by_both), logarithms[1:], strict=True):
        expected = (logarithm - logarithms[0]) / 2
        assert (weighted - plain).item() == pytest.approx(expected, rel=1e-4)


def test_edges_to_oneself_are_told_apart(build_tiny: Build) -> None:
    sparse = SparseTransformer(build_tiny(), initial_bias=0.7)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    _, counts = sparse.run_with_counts(tokens)
    assert (counts.expected_self <= counts.expected).all()
    _, cache = sparse.run_with_cache(tokens)
    for layer in range(sparse.cfg.n_layers):
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"]
        own = (scores.diagonal(dim1=2, dim2=3) + 0.7).sigmoid().sum(dim=-1)
        torch.testing.assert_close(counts.expected_self[layer], own, rtol=1e-4, atol=1e-5)


def test_lambda_grows_until_the_loss_meets_its_target(build_echo: Build, echo_rows: Rows) -> None:
    sparse = SparseTransformer(build_echo(), initial_bias=-3.0)
    outcome = _post_train(
        sparse, echo_rows, target_loss="+0.01", lambda_rate=0.1, steps=8, lambda_=2.0
    )
    lambdas = outcome.history["lambda"].dropna().tolist()
    assert lambdas[0] == pytest.approx(2.0)
    assert lambdas == sorted(lambdas)
    assert lambdas[-1] == pytest.approx(2.0 * math.exp(0.7), rel=1e-6)


def test_lambda_rises_as_fast_as_it_may(build_echo: Build, echo_rows: Rows) -> None:
    """Gates that are shut lose far more than a tiny target allows."""
    for rise in (1.0, 4.0):
        outcome = _post_train(
            SparseTransformer(build_echo(), initial_bias=-30.0),
            echo_rows,
            target_loss="+0.001",
            lambda_=2.0,
            lambda_rate=0.01,
            lambda_rise=rise,
            steps=3,
        )
        lambdas = outcome.history["lambda"].dropna().tolist()
        # A row tells lambda as it was in that step: two updates before the third.
        assert lambdas[-1] == pytest.approx(2.0 * math.exp(0.02 * rise), rel=1e-6)


def test_lambda_falls_as_fast_as_it_may(build_echo: Build, echo_rows: Rows) -> None:
    """Gates that stay open leave the loss far below a generous target: a full step downwards."""
    for fall in (0.3, 1.0):
        outcome = _post_train(
            SparseTransformer(build_echo(), initial_bias=30.0),
            echo_rows,
            target_loss=20.0,
            violation_scale=1.0,
            lambda_=2.0,
            lambda_rate=0.1,
            lambda_fall=fall,
            steps=3,
        )
        lambdas = outcome.history["lambda"].dropna().tolist()
        assert lambdas[-1] == pytest.approx(2.0 * math.exp(-0.2 * fall), rel=1e-6)


def test_other_distributions_are_another_run(
    build_echo: Build, echo_rows: Rows, tmp_path: Any
) -> None:
    """A checkpoint made under one gate distribution does not go on under another."""
    for temperature, context in ((1.0, None), (0.5, pytest.raises(ValueError))):
        sparse = SparseTransformer(build_echo(), distribution=BernoulliGate(temperature))
        if context is None:
            _post_train(sparse, echo_rows, checkpoint=tmp_path / "c")
        else:
            with context:
                _post_train(sparse, echo_rows, checkpoint=tmp_path / "c")


def test_the_noise_falls_to_nothing_and_the_slack_to_the_target(build_echo: Build) -> None:
    objective = SparsityObjective(
        SparseTransformer(build_echo()),
        None,
        TargetLoss.parse(0.5),
        LossConstraint(scale=0.5),
        anneal_noise_from=0.5,
        slack=3.0,
    )
    assert [objective.noise(t) for t in (0.0, 0.49, 0.5)] == [1.0, 1.0, 1.0]
    assert objective.noise(0.75) == pytest.approx(0.5)
    assert objective.noise(1.0) == pytest.approx(0.0)
    allowances = [objective.allowance(t) for t in (0.0, 0.45, 0.9, 1.0)]
    assert allowances == pytest.approx([3.0, 2.0, 1.0, 1.0])


def test_the_brake_stops_a_fall_that_goes_too_far(build_echo: Build) -> None:
    """Only beyond the multiple of what is allowed, and only while the noise is full."""
    objective = SparsityObjective(
        SparseTransformer(build_echo()),
        None,
        TargetLoss.parse(0.5),
        LossConstraint(scale=0.5),
        anneal_noise_from=0.5,
        slack=2.0,
        brake=3.0,
    )
    lambdas = []
    for done, excess in ((0.0, 2.9), (0.0, 3.1), (0.45, 2.1), (0.45, 2.3), (0.5, 100.0)):
        objective._allowance, objective._fraction_done = objective.allowance(done), done
        objective.evaluated(excess)
        lambdas.append(objective.constraint.lambda_)
    assert lambdas == pytest.approx([1.0, 1.5, 1.5, 2.25, 2.25])


def test_no_brake_unless_asked_for(build_echo: Build, echo_rows: Rows) -> None:
    """A learning rate that ruins the model: lambda jumps at evaluations with a brake alone."""
    highest = {}
    for brake in (None, 1.0):
        outcome = _post_train(
            SparseTransformer(build_echo()),
            echo_rows,
            target_loss="+0.05",
            learning_rate=0.3,
            lambda_=2.0,
            lambda_rate=1e-6,
            anneal_noise_from=0.9,
            brake=brake,
            steps=6,
            evaluate_every=1,
        )
        highest[brake] = outcome.history["lambda"].max()
    assert highest[None] == pytest.approx(2.0, rel=1e-4)
    assert highest[1.0] > 2.9


@pytest.mark.parametrize("near", [True, False])
def test_a_retreat_goes_back_to_near_best_weights_and_weighs_the_loss_more(
    build_echo: Build, echo_rows: Rows, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    """At a rate that ruins the model, every miss leads back to the first, feasible weights.

    Unless they are far denser: in the first fast fall, going back would undo it.
    """
    module = sys.modules["sparse_tl.training.post_train"]
    monkeypatch.setattr(module, "NEAR", 1e9 if near else 1e-9)
    settings = {"steps": 12, "evaluate_every": 1, "learning_rate": 0.3, "target_loss": "+0.05"}
    outcomes = {
        after: _post_train(
            SparseTransformer(build_echo()), echo_rows, retreat_after=after, **settings
        )
        for after in (None, 1)
    }
    lost, kept = (outcomes[after].history for after in (None, 1))
    assert outcomes[1].feasible
    last = {name: (lost[name].iloc[-1], kept[name].iloc[-1]) for name in ("rate", "lambda")}
    if not near:
        assert all(without == with_it for without, with_it in last.values())
        return
    # Each retreat cuts the rate and raises lambda.
    assert last["rate"][1] < 0.5 * last["rate"][0]
    assert last["lambda"][1] > last["lambda"][0]
    assert kept["validation_loss"].iloc[-1] < lost["validation_loss"].iloc[-1]

"""Post-training keeps its promise about the loss, says so, and returns what it measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from short_runs import Build, Rows, moved, often, post_train_module, short_run, weights

from sparse_tl import AdditionTask, load_addition_models
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import PostTraining, evaluate_held_out
from sparse_tl.training.constraint import NO_NOISE
from sparse_tl.training.loop import choose_trained


@dataclass
class Untouchable:
    """A stream that must not be read."""

    accumulate: int = 1

    def batch(self, step: int) -> TokenBatch:
        raise AssertionError("training began")


# A target of edges.


@pytest.mark.long
def test_the_edges_that_are_asked_for(build_echo: Build, echo_rows: Rows) -> None:
    """Reached and held; of the weights with at most so many, those nearest to the dense model."""
    sparse, dense = SparseTransformer(build_echo(), gates="share"), build_echo()
    settings = {"target_loss": None, "target_edges": "4x", "steps": 120, "gate_learning_rate": 0.05}
    outcome = short_run(sparse, echo_rows, learning_rate=3e-3, **settings)
    target = outcome.dense.active_attention_edges_per_token / 4
    assert target == 2 * 2 * 8 * 9 / 2 / 8 / 4
    history = outcome.history.dropna(subset="validation_loss")
    edges = history["validation_active_attention_edges_per_token"]
    held = edges[history["step"] > 100]
    assert ((0.8 * target < held) & (held < target)).all()
    reached = history[edges <= target]["validation_divergence"]
    assert reached.iloc[-1] < 1.1 * reached.iloc[0]
    assert (edges <= 1.02 * edges.cummin()).all()  # nothing is closed, only to be opened again
    few = history[(edges <= target) & (history["step"] > 0)]
    best = few.loc[few["validation_divergence"].idxmin()]
    assert outcome.feasible and outcome.best_step == best["step"]
    # Counted anew, and the divergence by its definition.
    rows = echo_rows(seed=1)
    counts = sparse.count_attention_edges(rows.tokens)
    assert counts.active_per_token == best["validation_active_attention_edges_per_token"] <= target
    with torch.no_grad():
        p, q = (model(rows.tokens)[rows.loss_mask].log_softmax(-1) for model in (dense, sparse))
    divergence = (p.exp() * (p - q)).sum(-1).mean().item()
    assert outcome.sparse.divergence == pytest.approx(divergence, rel=1e-3)
    assert "Target of 4 times fewer edges per token met at step" in outcome.verdict
    assert f": {counts.active_per_token:.2f} of 18.0 attention edges active per" in outcome.verdict


def test_weights_that_were_trained_with_gates_are_no_reference() -> None:
    """The built-in sparse model holds no dense one: 0.0003 nats with gates, 0.3 without."""
    sparse, (train, rows, _) = load_addition_models()[1], AdditionTask("placeholder").split(seed=0)
    with pytest.warns(UserWarning, match=r"a loss of 0\..* its weights were trained with them"):
        post_train_module.post_train(
            sparse, ShuffledStream(train, 8), validation=rows.select(slice(64)), steps=1
        )


def test_edges_are_a_mean_over_groups(build_echo: Build, echo_rows: Rows) -> None:
    """Groups count alike, whatever the number and the length of their rows."""
    short = echo_rows(12, length=4, seed=1)
    validation = {"long": echo_rows(36, seed=1), "short": short}
    streams = {name: ShuffledStream(rows, 8) for name, rows in validation.items()}
    settings = {"target_loss": None, "target_edges": 9, "steps": 2, "stream": streams}
    sparse = SparseTransformer(build_echo(), gates="share")
    outcome = short_run(sparse, echo_rows, validation=validation, **settings)
    assert outcome.dense.edges_per_token == (2 * 2 * 4.5 + 2 * 2 * 2.5) / 2
    counts = [sparse.count_attention_edges(rows.tokens) for rows in validation.values()]
    mean = sum(count.active_per_token for count in counts) / 2
    assert outcome.sparse.edges_per_token == pytest.approx(mean)
    assert "Target of 9 edges per token, on average over 2 groups," in outcome.verdict


# What is refused before any training.


def test_a_target_below_the_dense_loss_of_one_group(build_echo: Build, echo_rows: Rows) -> None:
    """The mean over all rows would meet it."""
    rows = echo_rows(seed=1)
    labels = rows.labels.clone()
    labels[0] = (labels[0] + 1) % 13
    validation = replace(rows, labels=labels, groups=(torch.arange(len(rows)) == 0).long())
    dense = evaluate_held_out(build_echo(), validation)
    target = dense.loss + 0.1
    assert dense.group_losses[0] < target < dense.group_losses[1]
    with pytest.raises(ValueError, match=rf"validation loss is {dense.group_losses[1]:.5f}"):
        short_run(
            SparseTransformer(build_echo()),
            echo_rows,
            target_loss=target,
            validation=validation,
            stream=Untouchable(),
        )


def test_costs_of_other_prompts_are_refused_before_a_weight_moves(
    build_echo: Build, echo_rows: Rows
) -> None:
    """How long prompts are is known once the first batch is there."""
    sparse = SparseTransformer(build_echo())
    before = {name: p.clone() for name, p in sparse.named_parameters()}
    with pytest.raises(ValueError, match=r"shape \[7, 7\].*here \[2, 2, 8, 8\]"):
        short_run(sparse, echo_rows, edge_cost=torch.ones(7, 7))
    assert all(torch.equal(p, before[name]) for name, p in sparse.named_parameters())


def test_a_group_without_validation_rows(build_echo: Build, echo_rows: Rows) -> None:
    rows = echo_rows(seed=1)
    validation = replace(rows, groups=torch.arange(len(rows)) % 2 * 2)
    with pytest.raises(ValueError, match=r"no label .* groups \[1\]"):
        short_run(
            SparseTransformer(build_echo()),
            echo_rows,
            validation=validation,
            stream=Untouchable(),
        )


# The outcome.


@pytest.fixture(scope="module")
def run(build_echo: Build, echo_rows: Rows) -> tuple[PostTraining, SparseTransformer]:
    sparse = SparseTransformer(build_echo(), initial_bias=2.0)
    with pytest.MonkeyPatch.context() as patch:
        often(patch, 10)
        return short_run(sparse, echo_rows, target_loss="+0.1", steps=50), sparse


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
    validation = [f"validation_{name}" for name in run[0].sparse.numbers]
    every_step = ["step", "seconds", "rate", "loss", "over_limit", "lambda", "size"]
    assert set(every_step + validation) <= set(history)
    assert history["step"].tolist() == list(range(51))
    assert history.loc[1:, every_step].notna().all(axis=None)
    assert history.loc[history["validation_loss"].notna(), "step"].tolist() == list(range(0, 51, 5))
    assert history["seconds"].is_monotonic_increasing


def test_a_target_that_is_not_reached(build_echo: Build, echo_rows: Rows) -> None:
    """Gates that start shut cannot win back the loss in a few steps."""
    sparse = SparseTransformer(build_echo(), initial_bias=-30.0)
    outcome = short_run(sparse, echo_rows, target_loss="+0.001", steps=9)
    assert not outcome.feasible
    assert "NOT met by any validation evaluation" in outcome.verdict
    evaluated = outcome.history.dropna(subset=["validation_loss"])
    lowest = evaluated.loc[evaluated["validation_loss"].idxmin()]
    assert outcome.best_step == lowest["step"]
    assert outcome.sparse.loss == lowest["validation_loss"]
    assert evaluate_held_out(sparse, echo_rows(seed=1)) == outcome.sparse


@pytest.mark.long
def test_every_group_has_to_meet_the_target(build_echo: Build, echo_rows: Rows) -> None:
    """The rows that lose the most are a group: the target that all rows together meet is missed."""
    rows = echo_rows(24, seed=1)
    sparse = SparseTransformer(build_echo(), initial_bias=0.5)
    losses = [
        [evaluate_held_out(model, rows.select(slice(n, n + 1))).loss for n in range(len(rows))]
        for model in (sparse, sparse.dense_copy())
    ]
    lost = torch.tensor(losses[0]) - torch.tensor(losses[1])
    target = f"+{(lost.mean() + lost.max()).item() / 2}"
    assert lost.mean() < 0.8 * lost.max()
    outcomes = {}
    for name, groups in (("one", None), ("two", (lost == lost.max()).long())):
        outcomes[name] = short_run(
            SparseTransformer(build_echo(), initial_bias=0.5),
            echo_rows,
            target_loss=target,
            validation=replace(rows, groups=groups),
            learning_rate=1e-12,
            gate_learning_rate=1e-12,
            steps=1,
        )
    assert outcomes["one"].feasible and not outcomes["two"].feasible
    assert "nats in each of 2 groups NOT met" in outcomes["two"].verdict
    worst = outcomes["two"].history["validation_violation"].iloc[0]
    assert worst == pytest.approx((lost.max() - float(target)).item(), rel=1e-4)
    assert outcomes["two"].sparse.group_losses[1] == pytest.approx(
        losses[0][int(lost.argmax())], rel=1e-5
    )


def test_a_target_that_only_the_start_met(build_echo: Build, echo_rows: Rows) -> None:
    sparse = SparseTransformer(build_echo(), initial_bias=50.0)
    # So large a step ruins the model at once.
    outcome = short_run(sparse, echo_rows, target_loss="+0.001", steps=9, learning_rate=0.5)
    tried = outcome.history.dropna(subset="validation_violation").query("step > 0")
    closest = tried.loc[tried["validation_violation"].idxmin()]
    assert not outcome.feasible and outcome.history["validation_violation"].iloc[0] <= 0
    assert outcome.best_step == closest["step"] > 0
    assert "NOT met by any validation evaluation after the first step" in outcome.verdict


@pytest.mark.long
def test_the_constraint_is_on_held_out_rows(build_echo: Build, echo_rows: Rows) -> None:
    """A third of them has wrong labels, which no training row has; the violation knows."""
    validation = echo_rows(seed=1)
    labels = validation.labels.clone()
    labels[::3] = (labels[::3] + 1) % 13
    validation = replace(validation, labels=labels)
    sparse = SparseTransformer(build_echo())
    target = evaluate_held_out(sparse, validation).loss + 0.5
    outcome = short_run(
        sparse, echo_rows, target_loss=target, validation=validation, steps=80, learning_rate=1e-3
    )
    history, every = outcome.history, 80 // post_train_module.EVALUATIONS
    assert history.loss[1:].max() < history.validation_loss.min()
    late = range(int(NO_NOISE * 80) + 1, 81)  # from here on the target itself is what is allowed
    for step in late:
        evaluated = (step - 1) // every * every
        assert history.over_limit[step] == pytest.approx(
            history.validation_loss[evaluated] - target
        )


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
    found = [evaluate_held_out(sparse, batch).numbers for batch in (rows, padded)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


# Which weights move.


def test_grouped_keys_are_trained_too(build_tiny: Build, echo_rows: Rows) -> None:
    """With grouped-query attention, W_K stands for the shared keys that the model repeats."""
    sparse = SparseTransformer(build_tiny("grouped"))
    before = weights(sparse)
    short_run(sparse, echo_rows, target_loss=50.0, learning_rate={"gates": 0.1, "qk": 0.1})
    chosen = set(choose_trained(sparse, {"gates": 1.0, "qk": 1.0}))
    assert moved(before, sparse) == chosen
    assert any("k_proj" in name or "W_K" in name for name in chosen)

"""What a post-training step minimises, against sums and hooks by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from short_runs import Build, Rows
from torch import Tensor

from sparse_tl.backend import read_parameters
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import LossConstraint, Target
from sparse_tl.training.constraint import MARGIN, NO_NOISE, START, remaining
from sparse_tl.training.post_train import SparsityObjective

SILENT = 0.95
"""A part of the run in which gates have no noise."""


def _constraint(n_groups: int = 1, nats: float = 0.05, **settings: Any) -> LossConstraint:
    return LossConstraint(torch.full((n_groups,), nats, dtype=torch.float64), **settings)


def _objective(
    sparse: SparseTransformer,
    target: str = "+0.05",
    n_groups: int = 1,
    steered: dict[str, Any] | None = None,
    **costs: Any,
) -> Any:
    parsed = Target.parse(target)
    dense = sparse.dense_copy() if parsed.of != "loss" else None
    constraint = _constraint(n_groups, parsed.amount, **(steered or {}))
    return SparsityObjective(sparse, dense, constraint, **costs)


def _measured(
    objective: SparsityObjective, batch: TokenBatch, done: float = 0.0, seed: int = 5
) -> tuple[Tensor, dict[str, float]]:
    """The objective, and what is logged after the step's update."""
    objective.begin(batch)
    loss, measured = objective.measure(batch, torch.Generator().manual_seed(seed), done)
    return loss, measured | objective.update(done)


def _nll(logits: Tensor, batch: TokenBatch) -> float:
    picked = logits.double().log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    return -picked[batch.loss_mask].mean().item()


def _in_groups(batch: TokenBatch, groups: list[int]) -> TokenBatch:
    return replace(batch, groups=torch.tensor(groups))


# The violation.


def test_lambda_follows_the_held_out_losses(build_echo: Build, echo_rows: Rows) -> None:
    """Relative to what is allowed, every group by itself, whatever the training batch loses."""
    every_second: dict[str, Any] = {"evaluated_every": 2}
    sparse = SparseTransformer(build_echo())
    objective = _objective(sparse, "0.5", 2, every_second)
    by_hand, batch = _constraint(2, **every_second), echo_rows(4)
    _, measured = _measured(objective, batch)  # nothing was held out yet
    by_hand.move(torch.zeros(2, dtype=torch.float64))
    assert measured["over_limit"] == 0.0
    for losses in ([0.3, 0.45], [0.32, 0.44], [0.4, 0.45]):
        objective.constraint.record(torch.tensor(losses, dtype=torch.float64), 1.0)
        for done in (0.0, NO_NOISE / 2, 0.7, 0.985):
            _, measured = _measured(objective, batch, done)
            allowed = 0.5 + MARGIN * remaining(done)
            excess = [(loss - allowed) / allowed for loss in losses]
            by_hand.move(torch.tensor(excess, dtype=torch.float64))
            assert measured["over_limit"] == pytest.approx(max(losses) - allowed)
        assert objective.constraint.lambda_.tolist() == pytest.approx(by_hand.lambda_.tolist())
    assert objective.constraint.lambda_[0].item() != pytest.approx(START)


def test_lambda_steers_the_edges_along_a_line(build_echo: Build, echo_rows: Rows) -> None:
    """From 40 edges to 10, fast at first."""
    steered: dict[str, Any] = {"target_edges": 10 / 0.98, "steered": True}
    objective = _objective(SparseTransformer(build_echo()), n_groups=2, steered=steered)
    by_hand, batch = _constraint(2, **steered), echo_rows(4)
    gap = torch.tensor([0.3, 0.9], dtype=torch.float64)
    for edges, done, line in (
        (40.0, 0.0, 40.0),
        (38.0, 0.2, 40 / 4 ** (5 / 9)),
        (20.0, 0.3, 40 / 4 ** (3 / 4)),
        (11.0, 0.6, 10.0),
        (11.0, 0.6, 10.0),
        (0.0, 1.0, 10.0),
    ):
        objective.constraint.record(gap, edges)
        _, measured = _measured(objective, batch, done)
        assert measured["over_limit"] == pytest.approx(edges - line, abs=1e-5)
        error = 2 * math.log(line / edges) if edges else 1.0  # beyond any gain
        by_hand.move(torch.full((2,), error, dtype=torch.float64))
        assert objective.constraint.lambda_.tolist() == pytest.approx(by_hand.lambda_.tolist())


def test_lambda_steers_each_divergence_along_a_line(build_echo: Build, echo_rows: Rows) -> None:
    """From where it was to 0.95 times the target; what begins beyond that is to meet it at once."""
    objective = _objective(SparseTransformer(build_echo()), n_groups=3, steered={"steered": True})
    by_hand, batch, aim = _constraint(3), echo_rows(4), 0.95 * 0.05
    first = [0.0, 0.03, 0.2]
    for gaps, done in ((first, 0.0), ([0.01, 0.06, 0.15], 0.3), ([0.05, 0.05, 0.05], 0.8)):
        objective.constraint.record(torch.tensor(gaps, dtype=torch.float64), 1.0)
        _, measured = _measured(objective, batch, done)
        share = min(done / 0.6, 1)
        lines = [(1 - share) * max(start, 1e-6) + share * aim for start in first[:2]] + [aim]
        over = [max(gap, 1e-6) - line for gap, line in zip(gaps, lines, strict=True)]
        assert measured["over_limit"] == pytest.approx(max(over))
        gain = 2 if done < 0.6 else 2 / (0.2 / 0.4) ** 2  # the rate is a fourth of that at 0.6
        errors = [
            gain * math.log(max(gap, 1e-6) / line) for gap, line in zip(gaps, lines, strict=True)
        ]
        by_hand.move(torch.tensor(errors, dtype=torch.float64))
        assert objective.constraint.lambda_.tolist() == pytest.approx(by_hand.lambda_.tolist())


def test_gates_are_deterministic_in_the_end(build_echo: Build, echo_rows: Rows) -> None:
    batch, sparse = echo_rows(16, seed=3), SparseTransformer(build_echo(), initial_bias=0.5)
    losses = [_measured(_objective(sparse), batch, SILENT, seed)[1]["loss"] for seed in (1, 2)]
    with torch.no_grad():
        assert losses == pytest.approx([_nll(sparse(batch.tokens), batch)] * 2, rel=1e-5)
    early = [_measured(_objective(sparse), batch, 0.0, seed)[1]["loss"] for seed in (1, 2)]
    assert early[0] != early[1]


# The size.


@pytest.mark.parametrize("head_cost", [0.0, 3.0])
@pytest.mark.parametrize("costly", [False, True])
def test_the_objective_is_its_formula(
    build_echo: Build, echo_rows: Rows, head_cost: float, costly: bool
) -> None:
    """From probabilities of hooked scores; half of the labels are the dense model's predictions.

    What is logged is never weighted, and is the plain loss.
    """
    batch, sparse = echo_rows(16, seed=3), SparseTransformer(build_echo(), initial_bias=0.5)
    cost = torch.rand(2, 1, 8, 1, generator=torch.Generator().manual_seed(0)) if costly else None
    objective = _objective(sparse, edge_cost=cost, head_cost=head_cost)
    found, measured = _measured(objective, batch, SILENT)
    _, cache = sparse.run_with_cache(batch.tokens)
    scores = torch.stack([cache[f"blocks.{n}.attn.hook_attn_scores"] for n in range(2)])
    open_ = (scores + 0.5).sigmoid()
    by_head = open_.sum(dim=(-2, -1)).mean(dim=1)
    weighted = open_ if cost is None else open_ * cost[:, None]
    size = weighted.sum().item() / len(batch)
    size += head_cost * (1 - (-by_head / 0.1).exp()).sum().item()
    with torch.no_grad():
        assert objective.dense is not None
        dense = objective.dense(batch.tokens)[batch.loss_mask].softmax(dim=-1)
        logits = sparse(batch.tokens)[batch.loss_mask].log_softmax(dim=-1)
    from_dense = -(dense * logits).sum(dim=-1).mean().item()
    task = 0.5 * measured["loss"] + 0.5 * from_dense
    assert abs(from_dense - measured["loss"]) > 1e-3 and measured["loss"] == pytest.approx(
        _nll(sparse(batch.tokens), batch)
    )
    expected = (math.log1p(size) + START * task) / (1 + START)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    assert measured["lambda"] == pytest.approx(START)
    assert measured["expected_per_token"] == pytest.approx(open_.sum().item() / (16 * 8), rel=1e-5)


def test_a_head_that_is_shut_costs_nothing(build_echo: Build, echo_rows: Rows) -> None:
    """And one more edge of a head in use costs next to no more: heads count, not their edges."""
    sparse = SparseTransformer(build_echo(), initial_bias=-60.0)
    with torch.no_grad():
        sparse.gates.bias[1, 0] = 60.0
    _, counts = sparse.run_with_counts(echo_rows(16).tokens)
    rows = torch.zeros(16, dtype=torch.long)
    without, with_it = (
        _objective(sparse, head_cost=cost).sizes(counts, rows)[0].item() for cost in (0.0, 7.0)
    )
    assert without == pytest.approx(8 * 9 / 2, rel=1e-3)
    assert with_it - without == pytest.approx(7.0, rel=1e-4)


def test_gates_that_are_wide_open_are_pressed(build_echo: Build, echo_rows: Rows) -> None:
    """The sigmoid's own gradient is nothing there."""
    sparse = SparseTransformer(build_echo(), initial_bias=50.0)
    loss, _ = _measured(_objective(sparse), echo_rows(16, seed=3))
    loss.backward()
    assert sparse.gates.bias.grad is not None
    assert sparse.gates.bias.grad.min() > 1e-3


# Groups.


@pytest.mark.parametrize("head_cost", [0.0, 3.0])
def test_every_group_counts_at_its_own_lambda_and_size(
    build_echo: Build, echo_rows: Rows, head_cost: float
) -> None:
    """And all alike, whatever their numbers of labels and edges."""
    batch = _in_groups(echo_rows(12, seed=3), [0, 1, 1, 1] * 3)
    shown = torch.ones(12, 8, dtype=torch.long)
    shown[batch.row_groups() == 1, 3:] = 0  # the prompts of the second group are shorter
    batch = replace(batch, attention_mask=shown, loss_mask=shown.bool())
    sparse = SparseTransformer(build_echo(), initial_bias=0.5)
    objective = _objective(sparse, "0.5", n_groups=2, head_cost=head_cost)
    state = objective.state()
    objective.load_state({**state, "log_lambda": [math.log(6.0), math.log(9.0)]})
    found, measured = _measured(objective, batch, SILENT)
    with torch.no_grad():
        logits, counts = sparse.run_with_counts(batch.tokens, attention_mask=shown)
        losses = token_losses(logits[batch.loss_mask], batch.loss_labels())
        first, second = (losses[batch.label_groups() == g].mean().item() for g in (0, 1))
        sizes = []
        for g in (0, 1):
            by_head = counts.expected[:, batch.row_groups() == g].mean(dim=1)
            in_use = 1 - (-by_head / 0.1).exp()
            sizes.append((by_head.sum() + head_cost * in_use.sum()).item())
    assert sizes[0] > 2 * sizes[1]
    size = sum(map(math.log1p, sizes)) / 2
    expected = (size + 0.5 * 6.0 * first + 0.5 * 9.0 * second) / (1 + 7.5)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    assert measured["lambda"] == pytest.approx(7.5)


def test_the_last_edges_are_worth_no_more_than_the_loss_that_is_allowed(
    build_echo: Build, echo_rows: Rows
) -> None:
    """lambda is at least ``1 / (allowed (1 + size))``, with the size of the step before."""
    batch, sparse = echo_rows(12, seed=3), SparseTransformer(build_echo(), initial_bias=0.5)
    objective = _objective(sparse, "0.001")
    first = _measured(objective, batch, SILENT)[1]
    assert first["lambda"] == pytest.approx(START), "nothing is known of the size yet"
    objective.load_state({**objective.state(), "log_lambda": [math.log(6.0)], "last_error": [0.0]})
    again = json.loads(json.dumps(objective.state()))
    found, second = _measured(objective, batch, SILENT)
    (known,) = again["sizes"]
    least = 1 / (0.001 * (1 + known))
    assert second["lambda"] == pytest.approx(least) and least > 6.0
    with torch.no_grad():
        logits, counts = sparse.run_with_counts(batch.tokens)
    size = counts.expected.sum().item() / 12
    assert known == pytest.approx(size, rel=1e-5)
    expected = (math.log1p(size) + least * _nll(logits, batch)) / (1 + least)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    resumed = _objective(sparse, "0.001")
    resumed.load_state(again)
    assert _measured(resumed, batch, SILENT)[1] == second
    noisy = _objective(sparse, "0.001")
    noisy.load_state({**again, "log_lambda": [math.log(1e-6)]})
    lambda_ = _measured(noisy, batch, 0.0)[1]["lambda"]
    assert lambda_ == pytest.approx(1 / ((0.001 + MARGIN) * (1 + known)))


def test_a_group_that_is_never_validated_is_refused(build_echo: Build, echo_rows: Rows) -> None:
    batch = _in_groups(echo_rows(4), [0, 1, 2, 0])
    with pytest.raises(ValueError, match="the 2 groups that the validation rows have; got group 2"):
        _measured(_objective(SparseTransformer(build_echo()), n_groups=2), batch)


# Micro-batches.


def _step(
    build: Build, batch: TokenBatch, pieces: int, **settings: Any
) -> tuple[list[Tensor], list[float], dict[str, float]]:
    """Gradient, lambdas and measurements of one step, in so many pieces, as the loop takes it."""
    sparse = SparseTransformer(build(), initial_bias=0.5).double()
    objective = _objective(sparse, **settings)
    total: dict[str, float] = {}
    objective.begin(batch)
    for piece in batch.split(len(batch) // pieces):
        share = int(piece.loss_mask.sum()) / int(batch.loss_mask.sum())
        loss, measured = objective.measure(piece, torch.Generator(), SILENT)
        (share * loss).backward()
        for name, value in measured.items():
            total[name] = total.get(name, 0.0) + share * value
    total |= objective.update(SILENT)
    gradients = [p.grad for p in read_parameters(sparse).values() if p.grad is not None]
    return gradients, objective.constraint.lambda_.tolist(), total


@pytest.mark.parametrize("pieces", [2, 3])
def test_micro_batches_of_one_size_are_one_big_batch(
    build_echo: Build, echo_rows: Rows, pieces: int
) -> None:
    """The same rows in each piece: the same objective, though a size counts by its logarithm."""
    piece = echo_rows(4, seed=3)
    batch = _in_groups(TokenBatch.joined([piece] * pieces), [0, 1, 1, 1] * pieces)
    settings: dict[str, Any] = {
        "n_groups": 2,
        "head_cost": 2.0,
        "edge_cost": torch.rand(8, 8, dtype=torch.float64),
    }
    whole, in_pieces = (_step(build_echo, batch, n, **settings) for n in (1, pieces))
    torch.testing.assert_close(in_pieces[0], whole[0], rtol=1e-9, atol=1e-12)
    assert in_pieces[1] == pytest.approx(whole[1], rel=1e-12)
    assert in_pieces[2] == pytest.approx(whole[2], rel=1e-9)


@pytest.mark.parametrize("pieces", [2, 3])
def test_lambda_moves_by_the_whole_batch(build_echo: Build, echo_rows: Rows, pieces: int) -> None:
    """Other rows in each piece, and groups that some pieces lack."""
    batch = _in_groups(echo_rows(12, seed=3), [0] * 6 + [1, 0] * 3)
    whole, in_pieces = (_step(build_echo, batch, n, n_groups=2) for n in (1, pieces))
    assert in_pieces[1] == pytest.approx(whole[1], rel=1e-12)
    for name in ("loss", "lambda", "over_limit", "expected_per_token"):
        assert in_pieces[2][name] == pytest.approx(whole[2][name], rel=1e-9), name


@pytest.mark.parametrize("pieces", [2, 3])
def test_groups_weigh_the_same_however_the_batch_is_cut(
    build_echo: Build, echo_rows: Rows, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """Without its size, the objective's gradient is exactly that of the whole batch."""

    def none(self: Any, counts: Any, groups: Tensor) -> tuple[Tensor, Tensor]:
        return 0 * counts.expected.sum() + torch.zeros(2), torch.ones(2)

    monkeypatch.setattr(SparsityObjective, "sizes", none)
    plain = LossConstraint.lambda_.fget
    assert plain is not None
    skewed = torch.tensor([1.0, 50.0], dtype=torch.float64)
    monkeypatch.setattr(LossConstraint, "lambda_", property(lambda self: plain(self) * skewed))
    batch = _in_groups(echo_rows(12, seed=3), [0] * 6 + [1, 0] * 3)
    whole, in_pieces = (_step(build_echo, batch, n, n_groups=2) for n in (1, pieces))
    torch.testing.assert_close(in_pieces[0], whole[0], rtol=1e-9, atol=1e-12)

"""Texts and tasks as groups: a constraint each, on loss or divergence, and a verdict on each."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from short_runs import Build, Rows, late_step, short_run

from sparse_tl.backend import Model
from sparse_tl.data import MixedStream, PromptPairs, ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import LossConstraint, PostTraining, evaluate_held_out
from sparse_tl.training.post_train import LEARNING_RATE, SparsityObjective


def _rows(echo_rows: Rows, seed: int = 0) -> dict[str, TokenBatch]:
    """Long and short rows; of the short ones, only the last token counts."""
    short = echo_rows(64, length=6, seed=seed + 10)
    last = torch.zeros_like(short.loss_mask)
    last[:, 4] = True
    return {"long": echo_rows(64, seed=seed), "short": replace(short, loss_mask=last)}


def _streams(echo_rows: Rows) -> dict[str, ShuffledStream]:
    return {name: ShuffledStream(rows, 16, 3) for name, rows in _rows(echo_rows).items()}


def _trained(sparse: SparseTransformer, echo_rows: Rows, **settings: Any) -> PostTraining:
    defaults: dict[str, Any] = {
        "stream": _streams(echo_rows),
        "validation": _rows(echo_rows, 1),
        "target_loss": "kl+0.2",
        "learning_rate": LEARNING_RATE,
    }
    return short_run(sparse, echo_rows, **{**defaults, **settings})


def _divergence(dense: Model, sparse: Any, rows: TokenBatch) -> float:
    """``sum_v p (log p - log q)``, by its definition, in float64."""
    with torch.no_grad():
        p, q = (model(rows.tokens).double().softmax(dim=-1) for model in (dense, sparse))
    return (p * (p.log() - q.log())).sum(dim=-1)[rows.loss_mask].mean().item()


def test_the_divergence_is_its_definition(build_echo: Build, echo_rows: Rows) -> None:
    sparse, rows = SparseTransformer(build_echo(), initial_bias=0.0), echo_rows(40, seed=3)
    dense = sparse.dense_copy()
    expected = _divergence(dense, sparse, rows)
    assert expected > 0.01
    # From a copy, and from the model itself with open gates; in several groups and batches.
    grouped = replace(rows, groups=torch.arange(40) % 2)
    for reference in (dense, sparse):
        measured = evaluate_held_out(sparse, grouped, dense=reference, batch_size=7)
        assert measured.divergence == pytest.approx(expected, rel=1e-4)
        for group, found in measured.group_divergences.items():
            some = grouped.select(grouped.groups == group)
            assert found == pytest.approx(_divergence(dense, sparse, some), rel=1e-4)
    assert evaluate_held_out(dense, rows, dense=dense).divergence == pytest.approx(0, abs=1e-6)
    without = evaluate_held_out(sparse, rows)
    assert without.divergence is None and not without.group_divergences


def test_a_mixed_stream_holds_a_batch_of_each(echo_rows: Rows) -> None:
    streams = _streams(echo_rows)
    batch = MixedStream(streams).batch(5)
    long, short = (stream.batch(5) for stream in streams.values())
    assert batch.groups is not None and batch.groups.tolist() == [0] * 16 + [1] * 16
    assert torch.equal(batch.tokens[:16], long.tokens)
    assert torch.equal(batch.tokens[16:, :6], short.tokens)
    assert batch.attention_mask is not None
    assert batch.attention_mask.sum(dim=1).tolist() == [8] * 16 + [6] * 16
    assert torch.equal(batch.loss_labels(), torch.cat([long.loss_labels(), short.loss_labels()]))


@pytest.mark.parametrize("pieces", [2, 4])
def test_groups_weigh_the_same_in_micro_batches(
    build_echo: Build, echo_rows: Rows, pieces: int
) -> None:
    """Each piece has rows of all groups, else the size of those with few labels hardly counts."""
    stream, sizes = MixedStream(_streams(echo_rows)), list[float]()
    for accumulate in (1, pieces):
        sparse = SparseTransformer(build_echo(), initial_bias=0.0).double()
        objective = SparsityObjective(sparse, None, LossConstraint(torch.ones(2).double()))
        run = late_step(sparse, objective, stream, accumulate=accumulate)
        sizes.append(run.state.history[-1]["size"])
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-9)


def test_a_group_that_no_batch_had_yet_is_in_a_checkpoint(
    build_echo: Build, echo_rows: Rows, tmp_path: Path
) -> None:
    rows = replace(echo_rows(seed=1), groups=torch.arange(len(echo_rows())) % 2)
    for _ in range(2):  # the second run is read from the checkpoint of the first
        sparse = SparseTransformer(build_echo(), initial_bias=0.0)
        found = short_run(sparse, echo_rows, validation=rows, steps=2, checkpoint=tmp_path / "run")
        assert found.history["step"].tolist() == [0, 1, 2]


def test_rows_of_one_length_are_joined_without_padding(echo_rows: Rows) -> None:
    joined = TokenBatch.joined([echo_rows(3), echo_rows(2, seed=1)])
    assert joined.attention_mask is None and joined.groups is not None
    assert joined.groups.tolist() == [0, 0, 0, 1, 1]
    for parts in ([], [joined, echo_rows(2)]):
        with pytest.raises(ValueError, match="each without groups of its own"):
            TokenBatch.joined(parts)


@pytest.mark.long
def test_every_text_is_constrained_and_reported(build_echo: Build, echo_rows: Rows) -> None:
    """Each by itself, on its own rows; and so is one that took no part."""
    sparse, held_out = SparseTransformer(build_echo(), gates="share"), echo_rows(32, seed=9)
    dense = sparse.dense_copy()
    outcome = _trained(sparse, echo_rows, held_out={"other": held_out}, steps=40)
    rows = {**_rows(echo_rows, 1), "other": held_out}
    assert list(outcome.reported) == ["long", "short", "other"]
    for name, found in outcome.reported.items():
        assert found.dense.loss == pytest.approx(evaluate_held_out(dense, rows[name]).loss)
        assert found.sparse.divergence == pytest.approx(
            _divergence(dense, sparse, rows[name]), rel=1e-3, abs=1e-6
        )
    history = outcome.history.dropna(subset="validation_gap_long")
    best = history[history["step"] == outcome.best_step].iloc[0]
    for name in ("long", "short"):
        measured = outcome.groups[name].sparse.divergence
        assert best[f"validation_gap_{name}"] == pytest.approx(measured, rel=1e-3, abs=1e-6)
    worst = history[["validation_gap_long", "validation_gap_short"]].max(axis=1) - 0.2
    pd.testing.assert_series_equal(worst, history["validation_violation"], check_names=False)
    assert outcome.feasible
    assert "Target divergence of 0.2 nats in each of 2 groups met" in outcome.verdict
    for said in ("long: ", "short: ", "other (held out): "):
        assert said in outcome.verdict
    assert outcome.to_pandas().index.tolist() == ["long", "short", "other"]


@pytest.mark.long
def test_other_rows_of_a_group_are_reported_in_its_place(
    build_echo: Build, echo_rows: Rows
) -> None:
    sparse = SparseTransformer(build_echo(), gates="share")
    dense, test = sparse.dense_copy(), _rows(echo_rows, 2)
    outcome = _trained(sparse, echo_rows, held_out=test)
    expected = evaluate_held_out(sparse, test["short"])
    assert outcome.reported["short"].sparse.loss == expected.loss
    assert outcome.groups["short"].sparse.loss != expected.loss
    for found, rows in ((outcome.groups, _rows(echo_rows, 1)), (outcome.held_out, test)):
        before = evaluate_held_out(dense, rows["short"]).loss
        assert found["short"].dense.loss == pytest.approx(before)
    assert "held out" not in outcome.verdict


@pytest.mark.long
def test_learning_a_text_does_not_lower_the_divergence(build_echo: Build, echo_rows: Rows) -> None:
    """The label of every row is wrong; only the dense model's predictions are learned."""
    rows = echo_rows()
    labels = (rows.labels + 1) % 13
    stream = ShuffledStream(replace(rows, labels=labels), 32)
    sparse = SparseTransformer(build_echo(), gates="share")
    right = evaluate_held_out(sparse, echo_rows(seed=1)).loss
    outcome = _trained(
        sparse,
        echo_rows,
        stream=stream,
        validation=replace(echo_rows(seed=1), labels=(echo_rows(seed=1).labels + 1) % 13),
        learning_rate=1e-3,
        steps=30,
    )
    assert outcome.feasible
    assert evaluate_held_out(sparse, echo_rows(seed=1)).loss < right + 0.3


@pytest.mark.parametrize("names", [["short", "long"], ["long"], None])
def test_groups_that_do_not_match(build_echo: Build, echo_rows: Rows, names: Any) -> None:
    rows = _rows(echo_rows, 1)
    validation = rows["long"] if names is None else {name: rows[name] for name in names}
    with pytest.raises(ValueError, match=r"groups \['long', 'short'\]"):
        _trained(SparseTransformer(build_echo()), echo_rows, validation=validation)


def test_prompts_of_a_task_as_rows(build_echo: Build) -> None:
    pairs = PromptPairs(
        clean=torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]),
        corrupted=torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]),
        answers=torch.tensor([[9, -1], [-1, 8]]),
        wrong=torch.tensor([[5], [5]]),
        positions=torch.tensor([2, 3]),
    )
    rows = pairs.answer_rows()
    assert rows.loss_labels().tolist() == [9, 8]
    assert rows.loss_mask.int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    assert rows.attention_mask is not None
    assert rows.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    found = evaluate_held_out(build_echo(), rows).loss
    with torch.no_grad():
        log = [
            build_echo()(pairs.clean[row : row + 1, : end + 1])[0, -1].log_softmax(-1)[answer]
            for row, end, answer in ((0, 2, 9), (1, 3, 8))
        ]
    assert math.isclose(found, -sum(log).item() / 2, rel_tol=1e-4)

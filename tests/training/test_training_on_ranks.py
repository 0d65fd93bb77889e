"""Several ranks train as one process does on their rows together, and end together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import short_runs
import torch
from several_ranks import assert_same, on_ranks, stop
from short_runs import Build, CallingAt, Rows, late_step, short_run
from torch import Tensor

from sparse_tl.backend import read_parameters
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import HeldOut, LossConstraint, TrainingConfig, evaluate_held_out
from sparse_tl.training.loop import Objective, PlainLoss, Run
from sparse_tl.training.post_train import SparsityObjective

# The gradient of a step.


def _uneven(rows: TokenBatch) -> TokenBatch:
    """Rows with different numbers of labels, three without any, in two groups."""
    for row in range(len(rows)):
        rows.loss_mask[row, 1 : 1 + row % 6] = False
    rows.loss_mask[[2, 5, 6]] = False
    return replace(rows, groups=(torch.arange(len(rows)) % 3 == 0).long())


def _objective(build: Build, kind: str) -> tuple[torch.nn.Module, Objective]:
    model = build().double()
    if kind == "plain":
        return model, PlainLoss(model)
    gates: Any = {"initial_threshold": 0.1} if kind == "share" else {"initial_bias": 0.5}
    sparse = SparseTransformer(model, **gates, mlps=kind == "mlps").double()
    constraint = LossConstraint(torch.tensor([0.05, 0.02], dtype=torch.float64))
    cost = torch.rand(2, 1, 8, 1, generator=torch.Generator().manual_seed(0)).double()
    costs = {"edge_cost": cost, "head_cost": 2.0} if kind == "mlps" else {}
    return sparse, SparsityObjective(sparse, sparse.dense_copy(), constraint, **costs)


def _step(
    model: torch.nn.Module, objective: Objective, stream: ShuffledStream, rank: int = 0
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Gradients and measurements of a step late in a run, where gates have no noise."""
    run = late_step(model, objective, stream, clip=None, accumulate=stream.accumulate)
    gradients = {name: p.grad for name, p in run.trained.items() if p.grad is not None}
    measured = {k: v for k, v in run.state.history[-1].items() if k != "seconds"}
    return gradients, measured


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "score", "share", "mlps"])
def test_a_step_on_two_ranks_is_one_process_on_all_rows(
    build_echo: Build, echo_rows: Rows, kind: str, accumulate: int
) -> None:
    stream = ShuffledStream(_uneven(echo_rows(17)), 17, accumulate=accumulate)
    expected, numbers = _step(*_objective(build_echo, kind), stream)
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for found, measured in on_ranks(2, partial(_step, *_objective(build_echo, kind), stream)):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            # Biases of keys have no gradient but rounding: softmax ignores them.
            allowed = 1e-6 * expected[name].norm() + 1e-12 * size
            assert (gradient - expected[name]).norm() < allowed, name
        assert measured == pytest.approx(numbers, rel=1e-9)


class _Drawn(Objective):
    """Notes what the generator of a step draws."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.weight, self.drawn = weight, list[list[float]]()

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Tensor, dict[str, float]]:
        self.drawn.append(torch.rand(4, generator=generator).tolist())
        return self.weight.sum(), {"loss": 0.0}


def test_ranks_draw_other_noise_and_the_first_that_of_one_process(echo_rows: Rows) -> None:
    def job(rank: int = 0) -> list[list[float]]:
        model = torch.nn.ParameterDict({"w": torch.zeros(1)})
        objective = _Drawn(model["w"])
        stream, config = ShuffledStream(echo_rows(8), 8), TrainingConfig(10, 1e-3, seed=3)
        run = Run(model, objective, stream, config, {"w": 1.0})
        for _ in range(3):
            run.step()
        return objective.drawn

    alone = job()
    first, second, third = on_ranks(3, job)
    assert first == alone
    every = [tuple(drawn) for drawn in (*first, *second, *third)]
    assert len(set(every)) == 9


def test_rows_are_dealt_once_and_labels_to_everyone(echo_rows: Rows) -> None:
    rows = _uneven(echo_rows(17))
    shares = [rows.shard(rank, 3) for rank in range(3)]
    assert [int(share.loss_mask.any(dim=1).sum()) for share in shares] == [5, 5, 4]
    assert sorted(len(share) for share in shares) == [5, 6, 6]
    dealt = torch.cat([torch.cat([s.tokens, s.loss_mask.long()], dim=1) for s in shares])
    whole = torch.cat([rows.tokens, rows.loss_mask.long()], dim=1)
    assert sorted(dealt.tolist()) == sorted(whole.tolist())
    assert rows.shard(0, 1) is rows


# Whole runs.


Found = tuple[pd.DataFrame, dict[str, Tensor], HeldOut]


def _run(
    build: Build,
    rows: Rows,
    rank: int = 0,
    *,
    steps: int = 8,
    stream: Any = None,
    model: SparseTransformer | None = None,
    **settings: Any,
) -> Found:
    sparse = model or SparseTransformer(build(), initial_bias=2.0)
    stream = stream or ShuffledStream(rows(), 16)
    settings = {"target_loss": "+0.05", **settings, "stream": stream, "steps": steps}
    outcome = short_run(sparse, rows, **settings)
    history = outcome.history.drop(columns="seconds")
    return history, dict(sparse.state_dict()), outcome.sparse


@pytest.fixture(scope="module", autouse=True)
def often() -> Iterator[None]:
    """Four evaluations, and a checkpoint every other step."""
    with pytest.MonkeyPatch.context() as patch:
        short_runs.often(patch, 4)
        yield


@pytest.fixture(scope="module")
def whole(often: None, build_echo: Build, echo_rows: Rows) -> list[Found]:
    """A run on two ranks."""
    return on_ranks(2, partial(_run, build_echo, echo_rows))


@pytest.fixture(scope="module")
def interrupted(
    often: None, build_echo: Build, echo_rows: Rows, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint of such a run, of which one rank was told to stop; both end there."""
    stream, checkpoint = ShuffledStream(echo_rows(), 16), tmp_path_factory.mktemp("runs") / "c"

    def stopped(rank: int) -> Any:
        told = CallingAt(stream, 4, stop) if rank == 1 else stream
        return _run(build_echo, echo_rows, rank, stream=told, checkpoint=checkpoint)

    assert [type(error) for error in on_ranks(2, stopped)] == [KeyboardInterrupt] * 2
    return checkpoint


def _same(one: Found, other: Found) -> None:
    assert_same(one[:2], other[:2])
    assert one[2] == other[2]


@pytest.mark.long
def test_a_run_on_two_ranks_measures_what_one_process_does(
    build_echo: Build, echo_rows: Rows, whole: list[Found]
) -> None:
    first, second = whole
    _same(first, second)
    _, weights, found = first
    sparse = SparseTransformer(build_echo(), initial_bias=2.0)
    sparse.load_state_dict(weights)
    alone = evaluate_held_out(sparse, echo_rows(seed=1))
    assert alone.active_attention_edges == found.active_attention_edges
    assert alone.loss == pytest.approx(found.loss, rel=1e-6)


@pytest.mark.long
def test_an_interrupted_run_on_two_ranks_resumes_exactly(
    build_echo: Build, echo_rows: Rows, whole: list[Found], interrupted: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(interrupted, tmp_path / "c")
    resumed = on_ranks(2, partial(_run, build_echo, echo_rows, checkpoint=checkpoint))
    for one, other in zip(whole, resumed, strict=True):
        _same(one, other)


@pytest.mark.long
def test_another_number_of_ranks_goes_on(
    build_echo: Build, echo_rows: Rows, interrupted: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(interrupted, tmp_path / "c")
    history, _, _ = _run(build_echo, echo_rows, checkpoint=checkpoint)
    assert history["step"].tolist() == list(range(9))


@pytest.mark.long
def test_a_rank_that_dies_ends_the_others_with_a_whole_checkpoint(
    build_echo: Build, echo_rows: Rows, whole: list[Found], tmp_path: Path
) -> None:
    stream, checkpoint = ShuffledStream(echo_rows(), 16), tmp_path / "c"

    def dying(rank: int) -> Any:
        dies = CallingAt(stream, 5, lambda: os._exit(9)) if rank == 1 else stream
        return _run(build_echo, echo_rows, rank, stream=dies, checkpoint=checkpoint)

    error, nothing = on_ranks(2, dying)
    assert isinstance(error, RuntimeError) and nothing is None
    resumed = on_ranks(2, partial(_run, build_echo, echo_rows, checkpoint=checkpoint))
    _same(whole[0], resumed[0])


# Refused.


def _other_weights(build: Build, rank: int) -> SparseTransformer:
    model = build()
    with torch.no_grad():
        next(iter(read_parameters(model).values())).mul_(1 + rank)
    return SparseTransformer(model, initial_bias=2.0)


@pytest.mark.parametrize("what", ["seed", "weights", "batch of step 0"])
def test_ranks_that_differ_are_refused(build_echo: Build, echo_rows: Rows, what: str) -> None:
    def job(rank: int) -> Any:
        given: dict[str, Any] = {}
        if what == "seed":
            given["seed"] = rank
        elif what == "weights":
            given["model"] = _other_weights(build_echo, rank)
        else:
            given["stream"] = ShuffledStream(echo_rows(), 16, seed=rank)
        return _run(build_echo, echo_rows, rank, **given)

    for error in on_ranks(2, job):
        assert isinstance(error, ValueError), error
        assert "rank 1 differs from rank 0" in str(error) and what in str(error)


def test_a_batch_smaller_than_the_ranks(build_echo: Build, echo_rows: Rows) -> None:
    stream = ShuffledStream(echo_rows(), 1)
    for error in on_ranks(2, partial(_run, build_echo, echo_rows, stream=stream)):
        assert isinstance(error, ValueError)
        assert "at least 2 rows with a label in every batch, one for each rank; got 1" in str(error)

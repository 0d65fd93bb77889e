"""Training lowers the loss, loses nothing when it is stopped, and says what went wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import short_runs
import torch
from short_runs import Build, CallingAt, Killed, Rows, check_resumes, check_same, moved, weights

from sparse_tl.backend import Model
from sparse_tl.data import ShuffledStream, TokenStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import NonFiniteLossError, TrainingConfig, post_train, pretrain


def _pretrain(model: Model, stream: TokenStream, validation: TokenBatch, **config: Any) -> Any:
    defaults: dict[str, Any] = {
        "steps": 8,
        "learning_rate": 1e-2,
        "warmup": 2,
        "evaluate_every": 3,
        "checkpoint_every": 2,
    }
    return pretrain(model, stream, validation=validation, progress=False, **{**defaults, **config})


def _post_train(
    sparse: SparseTransformer, stream: TokenStream, validation: TokenBatch, **config: Any
) -> pd.DataFrame:
    defaults: dict[str, Any] = {
        "target_loss": "+0.05",
        "steps": 8,
        "learning_rate": 1e-2,
    }
    settings = {**defaults, **config}
    return post_train(sparse, stream, validation=validation, progress=False, **settings).history


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps of post-training with three evaluations, and a checkpoint every other step."""
    short_runs.often(monkeypatch, 3)


def _saved_step(checkpoint: Path) -> int:
    return json.loads((checkpoint / "state.json").read_text())["state"]["step"]


# Plain training.


def test_training_lowers_the_loss(build_tiny: Build, echo_rows: Rows) -> None:
    model, validation = build_tiny(), echo_rows(seed=1)
    history = _pretrain(
        model, ShuffledStream(echo_rows(), 32), validation, steps=60, evaluate_every=20, warmup=10
    )
    evaluated = history.dropna(subset=["validation_loss"])
    assert evaluated["step"].tolist() == [0, 20, 40, 60]
    assert evaluated["validation_loss"].iloc[0] > 2
    assert evaluated["validation_loss"].iloc[-1] < 0.6
    assert history["step"].tolist() == list(range(61))
    assert {"step", "seconds", "rate", "loss", "validation_loss", "validation_accuracy"} == set(
        history
    )


def test_the_best_held_out_weights_are_kept(build_tiny: Build, echo_rows: Rows) -> None:
    """A rate that rises all the time ruins the model; what it ends with is not ruined."""
    from sparse_tl.training import evaluate_held_out

    model, validation = build_tiny(), echo_rows(seed=1)
    history = _pretrain(
        model,
        ShuffledStream(echo_rows(), 32),
        validation,
        steps=24,
        learning_rate=2.0,
        warmup=20,
        decay=0.0,
    )
    best, last = history["validation_loss"].min(), history["validation_loss"].iloc[-1]
    assert best < last
    assert evaluate_held_out(model, validation).loss == best


@pytest.mark.parametrize("pieces", [2, 3, 5, 12])
def test_accumulation_equals_one_big_batch(build_tiny: Build, echo_rows: Rows, pieces: int) -> None:
    validation = echo_rows(seed=1)
    examples = echo_rows(24)
    # Micro-batches with unequal numbers of labels: the mean is over labels, not over pieces.
    for row in range(12):
        examples.loss_mask[row, 1 : 1 + row % 6] = False
    losses, models = [], []
    for accumulate in (1, pieces):
        model = build_tiny("float64")
        stream = ShuffledStream(examples, 12)
        history = _pretrain(
            model, stream, validation, steps=4, evaluate_every=4, accumulate=accumulate
        )
        losses.append(torch.tensor(history["loss"].tolist()[1:], dtype=torch.float64))
        models.append(model)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for (name, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        if name.endswith("b_K"):
            continue  # No gradient but rounding: softmax ignores it, and Adam magnifies it.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=name)


def test_rows_without_a_label_can_be_accumulated(build_tiny: Build, echo_rows: Rows) -> None:
    examples = echo_rows(24)
    examples.loss_mask[::2] = False
    history = _pretrain(
        build_tiny(), ShuffledStream(examples, 4), echo_rows(seed=1), steps=3, accumulate=4
    )
    assert history["loss"].iloc[1:].notna().all()


# The rate.


def test_the_rate_warms_up_stays_and_decays() -> None:
    config = TrainingConfig(100, 2.0, warmup=10, decay=0.5, final_rate=0.1)
    rates = [config.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10:51] == [2.0] * 41
    assert all(a > b for a, b in zip(rates[50:], rates[51:], strict=False))
    assert config.rate(75) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert config.rate(100) == pytest.approx(0.2)


def test_a_linear_schedule_falls_along_a_line() -> None:
    config = TrainingConfig(
        steps=10, learning_rate=2.0, warmup=0, decay=1.0, final_rate=0.1, schedule="linear"
    )
    assert [config.rate(step) for step in (0, 5, 9)] == pytest.approx([2.0, 1.1, 0.38])


# When training ends.


def test_good_enough_ends_training(build_tiny: Build, echo_rows: Rows, build_echo: Build) -> None:
    history = _pretrain(
        build_echo(), ShuffledStream(echo_rows(), 8), echo_rows(seed=0), good_enough=10.0
    )
    accurate = history["validation_accuracy"].iloc[0] == 1.0
    assert (len(history) == 1) == accurate


def test_flags_and_gradients_are_put_back(build_echo: Build, echo_rows: Rows) -> None:
    model = build_echo()
    model.embed.W_E.requires_grad_(False)
    sparse = SparseTransformer(model)
    flags = {name: p.requires_grad for name, p in sparse.named_parameters()}
    _post_train(
        sparse,
        ShuffledStream(echo_rows(), 8),
        echo_rows(seed=1),
        learning_rate={"qk": 1e-2},
        steps=2,
    )
    assert {name: p.requires_grad for name, p in sparse.named_parameters()} == flags
    assert all(p.grad is None for p in sparse.parameters())
    stream = CallingAt(ShuffledStream(echo_rows(), 8), 1)
    with pytest.raises(Killed):
        _post_train(sparse, stream, echo_rows(seed=1), learning_rate={"gates": 1e-2}, steps=2)
    assert {name: p.requires_grad for name, p in sparse.named_parameters()} == flags
    assert all(p.grad is None for p in sparse.parameters())


# Interrupted and resumed.


@pytest.mark.parametrize("killed_at", [1, 3, 6])
def test_a_killed_pretraining_resumes_exactly(
    build_tiny: Build, echo_rows: Rows, tmp_path: Path, killed_at: int
) -> None:
    def run(stream: TokenStream, **settings: Any) -> tuple[Model, pd.DataFrame]:
        model = build_tiny()
        return model, _pretrain(model, stream, echo_rows(seed=1), **settings)

    noted, _ = check_resumes(run, ShuffledStream(echo_rows(), 16), tmp_path / "c", killed_at)
    saved = killed_at // 2 * 2
    assert noted.steps == [*([0, saved - 1] if saved else []), *range(saved, 8)]


@pytest.mark.long
def test_threads_do_not_change_what_is_learned(build_tiny: Build, echo_rows: Rows) -> None:
    """Batches so large that several threads would add up an embedding's gradient in any order."""
    stream = ShuffledStream(echo_rows(n=2048), 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        models = [build_tiny() for _ in range(3)]
        for model in models:
            _pretrain(model, stream, echo_rows(seed=1), steps=4)
    finally:
        torch.set_num_threads(before)
    assert not any(moved(weights(models[0]), other) for other in models[1:])
    assert not torch.are_deterministic_algorithms_enabled(), "put back at the end"


@pytest.mark.long
@pytest.mark.parametrize("target", [{}, {"target_loss": None, "target_edges": "3x"}], ids=str)
def test_a_killed_run_with_groups_costs_and_micro_batches_resumes_exactly(
    build_echo: Build, echo_rows: Rows, often: None, tmp_path: Path, target: dict[str, Any]
) -> None:
    """Some batches have no row of the second group."""
    rows, validation = (
        replace(rows, groups=(torch.arange(len(rows)) % 24 == 0).long())
        for rows in (echo_rows(), echo_rows(seed=1))
    )
    stream = ShuffledStream(rows, 16, accumulate=3)
    assert {int(stream.batch(step).label_groups().max()) for step in range(8)} == {0, 1}
    cost = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def run(stream: TokenStream, **settings: Any) -> tuple[SparseTransformer, pd.DataFrame]:
        sparse = SparseTransformer(build_echo(), initial_bias=2.0)
        settings |= {"edge_cost": cost, "head_cost": 2.0, **target}
        return sparse, _post_train(sparse, stream, validation, **settings)

    noted, _ = check_resumes(run, stream, tmp_path / "c", 5)
    assert noted.steps == [0, 3, *range(4, 8)]


def test_a_finished_run_is_read_not_repeated(
    build_tiny: Build, echo_rows: Rows, tmp_path: Path
) -> None:
    stream, validation = ShuffledStream(echo_rows(), 16), echo_rows(seed=1)
    first, again = build_tiny(), build_tiny()
    expected = _pretrain(first, stream, validation, checkpoint=tmp_path / "c")

    noted = CallingAt(stream)
    history = _pretrain(again, noted, validation, checkpoint=tmp_path / "c")
    assert noted.steps == [0, 7]  # is this the data that it was trained on?
    check_same(first, expected, again, history)


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_stop_saves_the_running_step(
    build_tiny: Build, echo_rows: Rows, tmp_path: Path, sent: str
) -> None:
    number = getattr(signal, sent)
    handler = signal.getsignal(number)

    def run(stream: TokenStream, **settings: Any) -> tuple[Model, pd.DataFrame]:
        model = build_tiny()
        return model, _pretrain(model, stream, echo_rows(seed=1), checkpoint_every=100, **settings)

    stream = ShuffledStream(echo_rows(), 16)
    noted, _ = check_resumes(run, stream, tmp_path / "c", 4, lambda: os.kill(os.getpid(), number))
    assert signal.getsignal(number) is handler
    # The step during which it was pressed is complete and saved, far from the next regular save.
    assert noted.steps[2:] == [5, 6, 7]


def test_a_second_signal_stops_at_once(build_tiny: Build, echo_rows: Rows, tmp_path: Path) -> None:
    validation, stream = echo_rows(seed=1), ShuffledStream(echo_rows(), 16)
    whole, stopped, resumed = build_tiny(), build_tiny(), build_tiny()
    settings: dict[str, Any] = {"checkpoint_every": 3}
    expected = _pretrain(whole, stream, validation, **settings)
    handler = signal.getsignal(signal.SIGINT)
    pressed = CallingAt(stream, 4, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        _pretrain(stopped, pressed, validation, checkpoint=tmp_path / "c", **settings)
    assert signal.getsignal(signal.SIGINT) is handler
    assert all(p.requires_grad and p.grad is None for p in stopped.parameters())
    assert _saved_step(tmp_path / "c") == 3  # the running step is lost, and nothing else
    history = _pretrain(resumed, stream, validation, checkpoint=tmp_path / "c", **settings)
    check_same(whole, expected, resumed, history)


def test_a_signal_that_is_ignored_stays_so(
    build_tiny: Build, echo_rows: Rows, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by `nohup`
    try:
        closed = CallingAt(
            ShuffledStream(echo_rows(), 16), 4, lambda: os.kill(os.getpid(), signal.SIGHUP)
        )
        _pretrain(build_tiny(), closed, echo_rows(seed=1), checkpoint=tmp_path / "c")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert _saved_step(tmp_path / "c") == 8


# Numbers that are none.


def _spoil(model: Model) -> Callable[[], None]:
    def spoil() -> None:
        with torch.no_grad():
            model.unembed.W_U.fill_(float("nan"))

    return spoil


def test_a_loss_that_is_no_number_stops_training(
    build_tiny: Build, echo_rows: Rows, tmp_path: Path
) -> None:
    validation, stream = echo_rows(seed=1), ShuffledStream(echo_rows(), 16)
    model, whole, resumed = build_tiny(), build_tiny(), build_tiny()
    with pytest.raises(NonFiniteLossError, match=r"at step 5 .*'loss': nan.*last checkpoint"):
        _pretrain(model, CallingAt(stream, 5, _spoil(model)), validation, checkpoint=tmp_path / "c")
    assert _saved_step(tmp_path / "c") == 4
    history = _pretrain(resumed, stream, validation, checkpoint=tmp_path / "c")
    check_same(whole, _pretrain(whole, stream, validation), resumed, history)


# Checkpoints that do not belong to the run.


def test_a_checkpoint_of_an_earlier_version(
    build_tiny: Build, echo_rows: Rows, tmp_path: Path
) -> None:
    """In version 9, a state had the place of a stream too."""
    data = ShuffledStream(echo_rows(), 16), echo_rows(seed=1)
    _pretrain(build_tiny(), *data, steps=2, checkpoint=tmp_path / "c")
    file = tmp_path / "c" / "state.json"
    content = json.loads(file.read_text())
    content["format"], content["state"]["stream"] = 9, {}
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="from another version"):
        _pretrain(build_tiny(), *data, steps=2, checkpoint=tmp_path / "c")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 5}, "seed: . there, 5 here"),
        ({"learning_rate": 0.5}, r"learning_rate: 0.01 there, 0\.5 here"),
        ({"model": {"seed": 1}}, "different weights"),
        ({"model": {"n_layers": 1}}, "1.0 there, None here"),
        ({"rows": 2}, "the batch of step 0"),
        ({"batch_size": 8}, "the batch of step 0"),
        ({"stream": 3}, "the batch of step 0"),
        ({"validation": 2}, "validation: '.*' there, '.*' here"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_run(
    build_tiny: Build, echo_rows: Rows, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    """Of other settings, weights or data."""

    def run(model: Model, rows: int = 0, batch_size: int = 16, **changed: Any) -> None:
        stream = ShuffledStream(echo_rows(seed=rows), batch_size, changed.pop("stream", 0))
        validation = echo_rows(seed=changed.pop("validation", 1))
        _pretrain(model, stream, validation, checkpoint=tmp_path / "c", **{"steps": 2, **changed})

    run(build_tiny())
    description = changed.get("model", {})
    fresh, untouched = build_tiny(**description), build_tiny(**description)
    with pytest.raises(ValueError, match=f"belongs to another run.*{message}"):
        run(fresh, **{name: value for name, value in changed.items() if name != "model"})
    assert not moved(weights(fresh), untouched)

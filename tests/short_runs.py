"""Short runs of post-training, what is left of them, and a stream that breaks them off."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from architectures import VOCABULARY

from sparse_tl.backend import Model, read_parameters
from sparse_tl.data import ShuffledStream, TokenBatch, TokenStream
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import PostTraining, TrainingConfig, post_train
from sparse_tl.training.loop import Objective, Run

Build = Callable[..., Model]
Rows = Callable[..., TokenBatch]
# The package has a function of the module's name.
post_train_module = sys.modules[post_train.__module__]


def short_run(sparse: SparseTransformer, rows: Rows, **settings: Any) -> PostTraining:
    """Six steps on some rows, validated on others; settings replace what is set here."""
    defaults: dict[str, Any] = {
        "stream": ShuffledStream(rows(), 32),
        "validation": rows(seed=1),
        "target_loss": "+0.2",
        "steps": 6,
        "learning_rate": 1e-2,
        "progress": False,
    }
    settings = {**defaults, **settings}
    return post_train(sparse, settings.pop("stream"), **settings)


def random_rows(n: int = 32, seed: int = 0) -> TokenBatch:
    """Rows of eight tokens of the plain transformers' vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return TokenBatch.next_token(torch.randint(VOCABULARY, (n, 8), generator=generator))


def late_step(model: Any, objective: Objective, stream: TokenStream, **config: Any) -> Run:
    """A run after a step late in it, where gates have no noise."""
    trained = dict.fromkeys(read_parameters(model), 1.0)
    run = Run(model, objective, stream, TrainingConfig(100, 1e-3, **config), trained)
    run.state.step = 95
    run.step()
    return run


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in read_parameters(model).items()}


def moved(before: dict[str, torch.Tensor], model: Any) -> set[str]:
    """The names of the parameters that are no longer what they were."""
    return {name for name, now in weights(model).items() if not torch.equal(now, before[name])}


class Killed(Exception):
    """The process is gone."""


def kill() -> None:
    raise Killed


class CallingAt:
    """A stream that calls something before the batch of a step; it notes the steps asked for."""

    def __init__(self, stream: TokenStream, step: int = -1, call: Callable[[], Any] = kill) -> None:
        self.stream, self.step, self.call = stream, step, call
        self.accumulate = getattr(stream, "accumulate", 1)
        self.steps: list[int] = []

    def batch(self, step: int) -> TokenBatch:
        self.steps.append(step)
        if step == self.step:
            self.call()
        return self.stream.batch(step)


def often(patch: pytest.MonkeyPatch, evaluations: int) -> None:
    """Post-training has so many evaluations, and a checkpoint every other step."""
    patch.setattr(post_train_module, "EVALUATIONS", evaluations)
    config = partial(TrainingConfig, checkpoint_every=2)
    patch.setattr(post_train_module, "TrainingConfig", config)


def check_resumes(
    run: Callable[..., tuple[Any, pd.DataFrame]],
    stream: TokenStream,
    checkpoint: Path,
    at: int,
    call: Callable[[], Any] = kill,
) -> tuple[CallingAt, Any]:
    """Check that a run which is broken off and resumed is one that ran through, bit for bit.

    Args:
        run: takes a stream, and a checkpoint if there is one; returns a model and its history.
        stream: training batches.
        checkpoint: folder for checkpoints.
        at: the step before which it is broken off.
        call: what breaks it off.

    Returns:
        The stream of the resumed run, which has noted its steps, and the resumed model.
    """
    whole, expected = run(stream)
    with pytest.raises((Killed, KeyboardInterrupt)):
        run(CallingAt(stream, at, call), checkpoint=checkpoint)
    torch.manual_seed(at)  # no number may come from the global generator
    noted = CallingAt(stream)
    resumed, history = run(noted, checkpoint=checkpoint)
    check_same(whole, expected, resumed, history)
    return noted, resumed


def check_same(one: Any, history: pd.DataFrame, other: Any, again: pd.DataFrame) -> None:
    """Check that two runs, of models and their histories, are the same bit for bit."""
    assert not moved(weights(one), other)
    pd.testing.assert_frame_equal(
        history.drop(columns="seconds"), again.drop(columns="seconds"), check_exact=True
    )

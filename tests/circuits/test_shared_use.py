"""Gradients that the notebook switched off, and models that two threads want at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd
import pytest
import torch
from analyses import call, check_same, of_prompts
from random_models import random_pairs, shaken

from sparse_tl import (
    SparseTransformer,
    ablate_heads,
    attribute_circuit_edges,
    logit_difference,
    patch_exactly,
    post_train,
    trace_attention,
)
from sparse_tl.backend import Model
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch

Build = Callable[..., Model]
ANALYSES = of_prompts()


def test_gradients_switched_off_change_nothing(build_tiny: Build) -> None:
    """Nor in the checks of a new model, nor in training; `test_training_mode` has all analyses."""

    def run() -> list[float]:
        model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
        scores = attribute_circuit_edges(model, pairs, logit_difference, progress=False)
        rows = TokenBatch.next_token(pairs.clean)
        found = post_train(
            SparseTransformer(model),
            ShuffledStream(rows, 2),
            validation=rows,
            steps=2,
            target_loss="+1.0",
            progress=False,
        )
        return [*scores.values.flatten().tolist(), *found.history["loss"]]

    expected = run()
    torch.set_grad_enabled(False)
    try:
        check_same(expected, run())
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_a_search_for_nan_changes_nothing(build_tiny: Build) -> None:
    model = SparseTransformer(shaken(build_tiny(dtype="float64")))
    tokens = random_pairs().clean[0]
    expected = trace_attention(model, tokens, attribution=True).to_pandas()
    with torch.autograd.set_detect_anomaly(True):
        pd.testing.assert_frame_equal(
            trace_attention(model, tokens, attribution=True).to_pandas(), expected
        )


@pytest.mark.parametrize("name", ["attribute_circuit_edges", "fit_head_gates"])
def test_inference_mode_is_named(build_tiny: Build, name: str) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        call(ANALYSES[name], shaken(build_tiny()), random_pairs())


class _Elsewhere:
    """A pass of a model in another thread, held up in its first layer until the block ends."""

    def __init__(self, model: Any, tokens: torch.Tensor) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()

        def hold(*_: Any) -> None:
            self.inside.set()
            assert self.leave.wait(60)

        self.handle = model.blocks[0].register_forward_pre_hook(hold)
        self.pool = ThreadPoolExecutor(1)
        self.pending = self.pool.submit(lambda: model(tokens))
        assert self.inside.wait(60)
        self.handle.remove()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        self.leave.set()
        self.found = self.pending.result(60)
        self.pool.shutdown()


def _in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(60)


def test_a_model_that_another_thread_runs_is_refused(build_tiny: Build) -> None:
    model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
    plain = model(pairs.clean)
    expected = patch_exactly(model, pairs, logit_difference, progress=False)
    with (held := _Elsewhere(model, pairs.clean)), pytest.raises(RuntimeError, match="thread"):
        patch_exactly(model, pairs, logit_difference, progress=False)
    assert torch.equal(held.found, plain)
    check_same(expected, patch_exactly(model, pairs, logit_difference, progress=False))


def test_an_analysed_model_is_refused_to_other_threads(build_tiny: Build) -> None:
    model, other = shaken(build_tiny()), shaken(build_tiny())
    pairs = random_pairs()
    expected = _in_thread(lambda: patch_exactly(other, pairs, logit_difference, progress=False))
    with ablate_heads(model, ["a0.h1"]):
        for use in (model, lambda tokens: patch_exactly(model, pairs, logit_difference)):
            with pytest.raises(RuntimeError, match="another thread is using this model"):
                _in_thread(lambda use=use: use(pairs.clean))
        again = _in_thread(lambda: patch_exactly(other, pairs, logit_difference, progress=False))
    check_same(expected, again)
    _in_thread(lambda: model(pairs.clean))


def test_calls_under_gates_take_turns_or_are_refused(build_tiny: Build) -> None:
    sparse, tokens = SparseTransformer(shaken(build_tiny())), random_pairs().clean
    expected, start = sparse(tokens), threading.Barrier(4)

    def run() -> tuple[int, int]:
        start.wait(60)
        right = refused = 0
        for _ in range(30):
            try:
                right += torch.equal(sparse(tokens), expected)
            except RuntimeError as error:
                assert "another thread is using this model" in str(error)
                refused += 1
        return right, refused

    with ThreadPoolExecutor(4) as pool:
        found = [job.result(60) for job in [pool.submit(run) for _ in range(4)]]
    assert all(right + refused == 30 for right, refused in found)
    assert sum(right for right, _ in found) > 0
    with sparse.sampled(), pytest.raises(RuntimeError, match="thread"):
        _in_thread(lambda: sparse(tokens))
    assert torch.equal(sparse(tokens), expected)

"""Weights that are dealt to ranks (FSDP2): the same training, in parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import short_runs
import torch
from architectures import plain_transformer
from several_ranks import Trained, assert_same, on_ranks, stop
from short_runs import CallingAt, late_step, random_rows, short_run
from tiny import keep_last_weights
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from sparse_tl.backend import add_lora, boot, processes, read_parameters, shard_model, whole
from sparse_tl.data import ShuffledStream
from sparse_tl.gates import Heads, SparseTransformer, gated
from sparse_tl.training import LossConstraint, evaluate_held_out
from sparse_tl.training.post_train import SparsityObjective

pytestmark = pytest.mark.long


def _model(name: str = "gpt2") -> TransformerBridge:
    fewer: dict[str, Any] = {"n_layer": 2} if name == "gpt2" else {"num_hidden_layers": 2}
    return boot(plain_transformer(name, **fewer))


def _whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: whole(tensor.detach()) for name, tensor in tensors.items()}


def _step(rank: int = 0, *, name: str, shard: bool, accumulate: int) -> dict[str, Tensor]:
    """Gradients of a step late in a run, where gates have no noise, and their norm."""
    model = _model(name).double()
    wrapped = shard_model(model) if shard else model
    sparse = SparseTransformer(wrapped, initial_threshold=0.1, mlps=True)
    constraint = LossConstraint(torch.tensor([0.05], dtype=torch.float64))
    objective = SparsityObjective(sparse, sparse.dense_copy(), constraint, head_cost=2.0)
    rows = random_rows(17)
    for row in range(17):
        rows.loss_mask[row, 1 : 1 + row % 6] = False
    stream = ShuffledStream(rows, 17, accumulate=accumulate)
    run = late_step(sparse, objective, stream, clip=0.01, accumulate=accumulate)
    return _whole({name: p.grad for name, p in run.trained.items() if p.grad is not None})


@pytest.mark.parametrize(("name", "accumulate"), [("gpt2", 2), ("llama", 1)])
def test_a_step_in_parts_is_one_process_on_all_rows(name: str, accumulate: int) -> None:
    """Also after clipping, over weights that are dealt and gates that are not."""
    step = partial(_step, name=name, accumulate=accumulate)
    expected = step(shard=False)
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert size == pytest.approx(0.01, rel=1e-3), "clipped"
    for found in on_ranks(2, partial(step, shard=True)):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            allowed = 1e-6 * expected[name].norm() + 1e-12 * size
            assert (gradient - expected[name]).norm() < allowed, name


# Whole runs.


@pytest.fixture(scope="module", autouse=True)
def often() -> Iterator[None]:
    """An evaluation and a checkpoint every other step; whatever was measured last is kept."""
    with pytest.MonkeyPatch.context() as patch:
        short_runs.often(patch, 3)
        keep_last_weights(patch)
        yield


def _run(
    rank: int = 0,
    *,
    shard: bool = True,
    lora: bool = False,
    dtype: torch.dtype = torch.float32,
    precision: Any = "float32",
    stream: Any = None,
    folder: Path | None = None,
    **settings: Any,
) -> Trained:
    model = _model().to(dtype)
    if lora:
        add_lora(model, 4)
    if shard:
        shard_model(model, precision=precision)
    sparse = SparseTransformer(model, initial_bias=2.0)
    defaults: dict[str, Any] = {"target_loss": "+0.5", "learning_rate": 1e-3, "steps": 4}
    defaults["validation"] = random_rows(17, seed=1)
    stream = stream or ShuffledStream(random_rows(), 16)
    settings = {**defaults, **settings, "stream": stream, "precision": precision}
    outcome = short_run(sparse, random_rows, **settings)
    if folder is not None:
        sparse.save_pretrained(folder)
    return outcome.history.drop(columns="seconds"), _whole(read_parameters(sparse))


@dataclass(frozen=True)
class Runs:
    """Whole runs on two ranks: what each rank found, and where models were saved, by name."""

    found: dict[str, list[Trained]]
    saved: Path


@pytest.fixture(scope="module")
def runs(often: None, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All in the same two processes, since processes take longer to start than a run takes."""
    saved = tmp_path_factory.mktemp("saved")
    settings: dict[str, dict[str, Any]] = {"sharded": {}, "whole": {"shard": False}}
    settings |= {f"{name} lora": {**given, "lora": True} for name, given in settings.items()}
    settings = {name: {**given, "folder": saved / name} for name, given in settings.items()}
    settings["bf16"] = {"precision": "bf16"}
    half = {"dtype": torch.bfloat16}
    settings |= {"sharded half": half, "whole half": {**half, "shard": False}}

    def job(rank: int) -> dict[str, Trained]:
        return {name: _run(rank, **given) for name, given in settings.items()}

    first, second = on_ranks(2, job, seconds=900)
    return Runs({name: [first[name], second[name]] for name in settings}, saved)


def _close(one: Trained, other: Trained) -> None:
    pd.testing.assert_frame_equal(one[0], other[0], rtol=1e-4, atol=1e-5)
    for name, tensor in one[1].items():
        torch.testing.assert_close(tensor, other[1][name], rtol=1e-3, atol=1e-5)


def _nearly(one: Trained, other: Trained) -> None:
    """As in other precision: the same losses, but for what is rounded."""
    for column in ("loss", "validation_loss"):
        found, exact = one[0][column].dropna(), other[0][column].dropna()
        assert (found - exact).abs().max() < 0.02 * exact.abs().max()
        assert not found.equals(exact)


def test_a_run_resumes_exactly_and_on_other_ranks(runs: Runs, tmp_path: Path) -> None:
    whole, checkpoint = runs.found["sharded"], tmp_path / "c"
    assert_same(*whole)

    def stopped(rank: int) -> Any:
        stream = CallingAt(ShuffledStream(random_rows(), 16), 2, stop)
        return _run(rank, stream=stream, checkpoint=checkpoint)

    assert [type(error) for error in on_ranks(2, stopped)] == [KeyboardInterrupt] * 2
    alone = shutil.copytree(checkpoint, tmp_path / "alone")

    def job(rank: int) -> Any:
        return _run(rank, checkpoint=checkpoint)

    for one, other in zip(on_ranks(2, job), whole, strict=True):
        assert_same(one, other)
    history, _ = _run(shard=False, checkpoint=alone)
    assert history["step"].tolist() == list(range(5))


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_in_parts_is_one_of_whole_models(runs: Runs, lora: bool) -> None:
    one, two = (f"{name} lora" if lora else name for name in ("sharded", "whole"))
    _close(runs.found[one][0], runs.found[two][0])
    tokens = random_rows(4, seed=2).tokens
    saved, other = (SparseTransformer.from_pretrained(runs.saved / name) for name in (one, two))
    torch.testing.assert_close(saved(tokens), other(tokens), rtol=1e-3, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(runs.saved / one).eval()
    with torch.no_grad(), saved.opened():
        torch.testing.assert_close(saved(tokens), plain(tokens).logits, rtol=1e-4, atol=1e-4)


def test_bf16_is_what_is_gathered(runs: Runs) -> None:
    """Weights and their gradients stay float32, and so does what is saved of them."""

    def job(rank: int) -> tuple[set[torch.dtype], set[torch.dtype], torch.dtype]:
        model = shard_model(_model(), precision="bf16")
        seen: set[torch.dtype] = set()
        model.blocks[0].attn.q.register_forward_hook(
            lambda module, *_: seen.update(p.dtype for p in module.parameters())
        )
        logits = model(random_rows(4).tokens)
        logits.square().mean().backward()
        kept = {t.dtype for p in model.parameters() for t in (p, p.grad) if t is not None}
        return seen, kept, logits.dtype

    expected = {torch.bfloat16}, {torch.float32}, torch.float32
    assert on_ranks(2, job) == [expected] * 2
    _nearly(runs.found["bf16"][0], runs.found["sharded"][0])


def test_half_weights_are_trained_by_masters_in_parts(runs: Runs) -> None:
    """Gradients are added up over ranks in bfloat16 for parts, in float32 for whole weights."""
    for found in runs.found["sharded half"]:
        _nearly(found, runs.found["sharded"][0])
        _nearly(found, runs.found["whole half"][0])
        kinds = {name: tensor.dtype for name, tensor in found[1].items()}
        assert kinds.pop("gates.bias") == torch.float32
        assert set(kinds.values()) == {torch.bfloat16}


def test_held_out_rows_of_a_sharded_model() -> None:
    def job(rank: int = 0) -> Any:
        model = _model("llama")
        sparse = SparseTransformer(shard_model(model) if processes().num_processes > 1 else model)
        return [evaluate_held_out(sparse, random_rows(n), batch_size=4) for n in (4, 9)]

    for found in on_ranks(2, job):
        for one, other in zip(found, job(), strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-6)
            assert one.active_attention_edges == other.active_attention_edges


# Refused.


def test_calls_that_a_sharded_model_does_not_support() -> None:
    def job(rank: int) -> list[str]:
        model = _model()
        sparse = SparseTransformer(model)
        calls: list[Callable[[], Any]] = [
            lambda: shard_model(model),
            lambda: shard_model(shard_model(sparse.unwrap())),
            lambda: gated(model, Heads(), torch.ones(2, 4)).__enter__(),
        ]
        said = []
        for call in calls:
            with pytest.raises((ValueError, TypeError)) as caught:
                call()
            said.append(str(caught.value))
        return said

    for said in on_ranks(2, job):
        assert not isinstance(said, BaseException), said
        for part, message in zip(
            ["without gates", "sharded already", "sharded"], said, strict=True
        ):
            assert part in message

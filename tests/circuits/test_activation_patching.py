"""Activation patching equals plain hooks, one place at a time, in any order and batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import transformers
from architecture_checks.subject import PAIRS
from architectures import ARCHITECTURES, N_LAYERS, plain_transformer
from random_models import random_pairs
from torch import Tensor

from sparse_tl import SparseTransformer, logit_difference, patch_activations
from sparse_tl.backend import Model, boot
from sparse_tl.circuits import pair_runs
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import NoEffectError

Build = Callable[..., Model]
NAMES = {
    "resid_pre": "hook_resid_pre",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "z": "attn.hook_z",
    "pattern": "attn.hook_pattern",
}


def same_length(n: int = 5) -> PromptPairs:
    """Random pairs that are read at their ends, and differ from the third token on."""
    pairs = random_pairs(n, at=5)
    corrupted = torch.cat([pairs.clean[:, :2], pairs.corrupted[:, 2:]], dim=1)
    return replace(pairs, corrupted=corrupted)


def exchange(at: str, column: int, other: Tensor, value: Tensor, hook: Any) -> Tensor:
    """Put in what the other prompts have at a position, or in a head."""
    value = value.clone()
    if at == "z":
        value[:, :, column] = other[:, :, column]
    else:
        value[:, column] = other[:, column]
    return value


def slow(model: Any, pairs: PromptPairs, at: str, into: str, shape: tuple[int, int]) -> Tensor:
    """The metric with each place patched by a plain hook."""
    run, other = pairs.corrupted, pairs.clean
    if into == "clean":
        run, other = other, run
    _, cache = model.run_with_cache(other)
    found = torch.empty(*shape, len(pairs), dtype=torch.float64)
    for layer, column in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        name = f"blocks.{layer}.{NAMES[at]}"
        logits = model.run_with_hooks(
            run, fwd_hooks=[(name, partial(exchange, at, column, cache[name]))]
        )
        found[layer, column] = logit_difference(pairs.read(logits), pairs)
    return found


@pytest.fixture
def small_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few places in each pass, and not the same number in all."""
    monkeypatch.setattr(pair_runs, "ROWS", 7)


@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize("at", NAMES)
@pytest.mark.parametrize("into", ["clean", "corrupted"])
def test_every_place_equals_plain_hooks(model: Model, at: str, into: str) -> None:
    if at == "mlp_out" and getattr(model.blocks[0], "mlp", None) is None:
        with pytest.raises(ValueError, match="hook_mlp_out"):
            patch_activations(model, same_length(), logit_difference, at)
        return
    pairs = same_length()
    found = patch_activations(
        model, pairs, logit_difference, at, into=into, batch_size=3, progress=False
    )
    shape = (2, model.cfg.n_heads if found.place == "head" else 6)
    expected = slow(model, pairs, at, into, shape)
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-9)
    for side, tokens in (("clean", pairs.clean), ("corrupted", pairs.corrupted)):
        plain = logit_difference(pairs.read(model(tokens)), pairs)
        torch.testing.assert_close(getattr(found, side), plain.detach(), rtol=1e-9, atol=1e-9)
    run, other = (found.clean, found.corrupted)[:: 1 if into == "clean" else -1]
    share = (expected.mean(-1) - run.mean()) / (other.mean() - run.mean())
    torch.testing.assert_close(found.effect, share, rtol=1e-6, atol=1e-9)
    assert found.effect.abs().max() > 0.01


def several_lengths() -> PromptPairs:
    """Random pairs read at columns of their own, whose spans lie elsewhere in every prompt."""
    pairs = random_pairs()
    assert len(pairs.by_length()) > 2
    spans = [{"S": [row % 2], "END": -1} for row in range(len(pairs))]
    return pairs.with_spans(spans)


@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize("at", ["resid_pre", "attn_out", "mlp_out"])
@pytest.mark.parametrize("into", ["clean", "corrupted"])
def test_spans_align_prompts_of_several_lengths(build_tiny: Build, at: str, into: str) -> None:
    model, pairs = build_tiny(dtype="float64"), several_lengths()
    found = patch_activations(
        model, pairs, logit_difference, at, into=into, positions="spans", progress=False
    )
    assert list(found.columns) == ["S", "END", "rest"]
    run, other = pairs.corrupted, pairs.clean
    if into == "clean":
        run, other = other, run
    expected = torch.empty_like(found.values)
    for row, end in enumerate(pairs.positions.tolist()):
        columns = {"S": [row % 2], "END": [end]}
        columns["rest"] = [c for c in range(end) if c != row % 2]
        alone = pairs.select(slice(row, row + 1))
        _, cache = model.run_with_cache(other[row : row + 1])
        for layer in range(2):
            name = f"blocks.{layer}.{NAMES[at]}"
            for place, span in enumerate(columns.values()):
                hooks = [(name, partial(exchange, at, c, cache[name])) for c in span]
                logits = model.run_with_hooks(run[row : row + 1], fwd_hooks=hooks)
                expected[layer, place, row] = logit_difference(alone.read(logits), alone)
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-9)
    assert list(found.to_pandas()) == ["layer", "span", "metric", "effect"]
    assert found.to_pandas()["span"].tolist() == ["S", "END", "rest"] * 2


@pytest.mark.parametrize("at", ["z", "pattern"])
def test_heads_need_no_prompts_of_one_length(build_tiny: Build, at: str) -> None:
    model, pairs = build_tiny(dtype="float64"), several_lengths()
    found = patch_activations(model, pairs, logit_difference, at, batch_size=2, progress=False)
    expected = slow(model, pairs, at, "corrupted", (2, 2))
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("at", "function"),
    [
        ("resid_pre", "get_act_patch_resid_pre"),
        ("attn_out", "get_act_patch_attn_out"),
        ("mlp_out", "get_act_patch_mlp_out"),
        ("z", "get_act_patch_attn_head_out_all_pos"),
        ("pattern", "get_act_patch_attn_head_pattern_all_pos"),
    ],
)
def test_it_is_that_of_transformer_lens(build_tiny: Build, at: str, function: str) -> None:
    """Of all pairs at once: its metric is one number."""
    patching = pytest.importorskip("transformer_lens.patching")
    model, pairs = build_tiny(dtype="float64"), same_length()
    _, cache = model.run_with_cache(pairs.clean)

    def metric(logits: Tensor) -> Tensor:
        return logit_difference(pairs.read(logits), pairs).mean()

    with torch.no_grad():
        expected = getattr(patching, function)(model, pairs.corrupted, cache, metric)
    found = patch_activations(model, pairs, logit_difference, at, progress=False)
    torch.testing.assert_close(found.values.mean(-1), expected.double(), rtol=1e-6, atol=1e-6)


def test_what_no_difference_reaches_has_no_effect_at_all(build_tiny: Build) -> None:
    """The first two tokens are the same, and the last residual stream carries everything."""
    found = patch_activations(build_tiny(), same_length(), logit_difference, progress=False)
    assert (found.effect[:, :2] == 0).all()
    every = patch_activations(build_tiny(), same_length(1), logit_difference, progress=False)
    table = every.to_pandas()
    assert list(table) == ["layer", "position", "token", "metric", "effect"]
    assert every.columns == [str(token) for token in same_length(1).clean[0].tolist()]
    assert table["layer"].tolist() == [0] * 6 + [1] * 6


def test_a_sparse_model_is_patched_as_it_is_run(build_tiny: Build) -> None:
    sparse, pairs = SparseTransformer(build_tiny(dtype="float64"), initial_bias=0.0), same_length()
    for at in NAMES:
        found = patch_activations(sparse, pairs, logit_difference, at, progress=False)
        expected = slow(sparse, pairs, at, "corrupted", tuple(found.effect.shape))
        torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-9)


def test_padding_is_no_column(build_tiny: Build) -> None:
    model, pairs = build_tiny(), same_length()
    wide = {
        side: torch.nn.functional.pad(getattr(pairs, side), (0, 3))
        for side in ("clean", "corrupted")
    }
    found = patch_activations(model, replace(pairs, **wide), logit_difference, progress=False)
    alone = patch_activations(model, pairs, logit_difference, progress=False)
    assert torch.equal(found.values, alone.values)
    assert found.columns == alone.columns == [f"@{i}" for i in range(pairs.clean.shape[1])]


def test_what_cannot_be_patched_is_refused(build_tiny: Build) -> None:
    model, pairs = build_tiny(), same_length()
    mixed = replace(pairs, positions=torch.tensor([3, 5, 5, 5, 5]))
    for change, some, message in (
        ({}, mixed, r'lengths of \[4, 6\] tokens.*with_spans.*positions="spans"'),
        ({"positions": "spans", "at": "z"}, mixed, "'z' patches a head at all positions"),
    ):
        with pytest.raises(ValueError, match=message):
            patch_activations(model, some, logit_difference, **change)
    with pytest.raises(NoEffectError):
        patch_activations(model, replace(pairs, corrupted=pairs.clean), logit_difference)


@pytest.mark.parametrize("at", ["resid_pre", "mlp_out"])
@torch.no_grad()
def test_experts_that_also_return_their_routing(at: Literal["resid_pre", "mlp_out"]) -> None:
    """The last MLP runs at the read positions alone; gpt-oss returns its router's scores too."""
    model = boot(plain_transformer("gpt_oss"))
    found = patch_activations(model, PAIRS, logit_difference, at, progress=False)
    expected = slow(model, PAIRS, at, "corrupted", (N_LAYERS, 8))
    assert torch.allclose(found.values, expected, atol=1e-5)


@pytest.mark.skipif(not hasattr(transformers, "Lfm2Config"), reason="transformers is older")
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_layers_without_attention() -> None:
    """The first layer of this model is a convolution, in which no head can be gated."""
    kinds = ["conv", "full_attention", "full_attention"]
    config = transformers.Lfm2Config(**ARCHITECTURES["llama"][1], layer_types=kinds)
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = boot(plain.eval(), name="lfm2")
    found = patch_activations(model, PAIRS, logit_difference, "resid_pre", progress=False)
    expected = slow(model, PAIRS, "resid_pre", "corrupted", (N_LAYERS, 8))
    assert torch.allclose(found.values, expected, atol=1e-5)
    with pytest.raises(ValueError, match="'lfm2', .* no hook point 'blocks.0.attn.hook_z'"):
        patch_activations(model, PAIRS, logit_difference, "z", progress=False)

"""Fast attribution equals the slow, per-edge formula; and obeys the laws that attribution has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from oracle import slow_scores
from random_models import KINDS, MORE_KINDS, random_pairs, shaken
from torch import Tensor

from sparse_tl.backend import Activations, Adapter, Model, adapt, relevance_rules, source_outputs
from sparse_tl.circuits import attribute_circuit_edges, attribute_heads
from sparse_tl.circuits.methods import attribution
from sparse_tl.circuits.methods.attribution import Method
from sparse_tl.devices import SizeByDevice
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("method", ["eap", "relp"])
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_fast_equals_slow(build_tiny: Build, kind: str, method: str) -> None:
    model = shaken(build_tiny(**MORE_KINDS[kind], dtype="float64"))
    pairs, graph = random_pairs(), adapt(model).graph
    fast = attribute_circuit_edges(model, pairs, logit_difference, method=method, batch_size=3)
    with relevance_rules(adapt(model)) if method == "relp" else nullcontext():
        slow = slow_scores(model, graph, pairs, logit_difference)
    assert slow[graph.exists].abs().min() > 0
    torch.testing.assert_close(fast.values, slow, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_integrated_gradients_are_those_of_eap_ig(build_tiny: Build, kind: str) -> None:
    """EAP-IG's code takes k = 0..4 of 5 steps, ours 1..5: with the same k both agree."""
    model = shaken(build_tiny(**MORE_KINDS[kind], dtype="float64"))
    pairs, graph = random_pairs(), adapt(model).graph
    slow = [slow_scores(model, graph, pairs, logit_difference, k / 5) for k in range(6)]
    fast = attribute_circuit_edges(model, pairs, logit_difference, method="eap-ig", steps=5).values
    torch.testing.assert_close(fast, sum(slow[1:]) / 5, rtol=1e-9, atol=1e-12)
    theirs = sum(slow[:5]) / 5
    torch.testing.assert_close(fast + (slow[0] - slow[5]) / 5, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("attribute", [attribute_circuit_edges, attribute_heads])
def test_small_batches_share_passes(
    build_tiny: Build, monkeypatch: pytest.MonkeyPatch, attribute: Callable[..., Any]
) -> None:
    """Several interpolation steps at once give the same scores, also where the last are fewer."""
    model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
    attribute(model, pairs, logit_difference, steps=1)  # checks run now, once per model
    run, rows = model.unembed.forward, list[int]()

    def counted(residual: Tensor) -> Tensor:
        rows.append(residual.shape[:-1].numel() // len(pairs))
        return run(residual)

    found, seen = [], []
    model.unembed.__dict__["forward"] = counted
    for at_once in (1, 3, 9):
        monkeypatch.setattr(
            attribution, "TOKENS_AT_ONCE", SizeByDevice(at_once * pairs.clean.numel(), 1)
        )
        for steps in (1, 5):
            rows.clear()
            found.append(attribute(model, pairs, logit_difference, steps=steps).values)
            seen.append(sorted(rows))
    assert seen[1::2] == [[1] * 6, [1, 1, 1, 3], [1, 1, 4]]
    assert seen[::2] == [[1, 1]] * 3
    for values, expected in zip(found[2:], found[:2] * 2, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("double_precision")
def test_hooks_see_one_copy_of_the_prompts(build_tiny: Build) -> None:
    """Else a hook that fits the prompts' shape would fail."""
    model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
    shift = torch.randn(*pairs.clean.shape, 1, dtype=torch.float64)
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: value + shift)]):
        scores = attribute_heads(model, pairs, logit_difference, steps=5)
    assert scores.values.isfinite().all()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("by_pair", [False, True])
def test_a_few_places_at_a_time(
    build_tiny: Build, monkeypatch: pytest.MonkeyPatch, by_pair: bool
) -> None:
    model, options = shaken(build_tiny(dtype="float64")), {"by_pair": by_pair, "batch_size": 3}
    attribute = partial(attribute_circuit_edges, model, random_pairs(), logit_difference, **options)
    whole, sizes = attribute().values, []

    def noted(adapter: Adapter, values: Activations) -> torch.Tensor:
        written = source_outputs(adapter, values)
        sizes.append(written.numel())
        return written

    one_place = adapt(model).d_model * len(adapt(model).graph.sources)
    monkeypatch.setattr(attribution, "VALUES_AT_ONCE", SizeByDevice(2 * one_place, 1))
    monkeypatch.setattr(attribution, "source_outputs", noted)
    torch.testing.assert_close(attribute().values, whole, rtol=1e-12, atol=1e-14)
    assert max(sizes) == 2 * one_place


@pytest.mark.parametrize("kind", ["sequential", "parallel", "grouped"])
def test_fast_equals_slow_in_single_precision(build_tiny: Build, kind: str) -> None:
    model, pairs = shaken(build_tiny(**KINDS[kind])), random_pairs()
    fast = attribute_circuit_edges(model, pairs, logit_difference, method="eap").values
    slow = slow_scores(model, adapt(model).graph, pairs, logit_difference)
    assert (fast - slow).abs().max() <= 1e-4 * slow.abs().max()


@pytest.mark.parametrize("method", ["eap", "relp"])
def test_scores_over_sources_add_up_to_a_head_score(model: Model, method: Any) -> None:
    """What reaches the logits and later layers of a head is all that its output can do."""
    pairs, graph = random_pairs(), adapt(model).graph
    edges = attribute_circuit_edges(model, pairs, logit_difference, method=method)
    heads = attribute_heads(model, pairs, logit_difference, method=method)
    for layer in range(graph.n_layers):
        first = graph.source_index(f"a{layer}.h0")
        summed = edges.values[first : first + graph.n_heads].sum(dim=1)
        torch.testing.assert_close(heads.values[layer], summed, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", get_args(Method))
def test_equal_prompts_give_exactly_nothing(model: Model, method: Any) -> None:
    pairs = random_pairs()
    same = replace(pairs, corrupted=torch.cat([pairs.corrupted[:1], pairs.clean[1:]]))
    options = {"method": method, "steps": 2}
    scores = attribute_circuit_edges(model, same, logit_difference, by_pair=True, **options).values
    assert (scores[1:] == 0).all() and (scores[0] != 0).any()
    heads = attribute_heads(model, same, logit_difference, **options).values * len(pairs)
    alone = attribute_heads(model, pairs.select(slice(0, 1)), logit_difference, **options).values
    torch.testing.assert_close(heads, alone, rtol=1e-9, atol=1e-12)


def test_metrics_of_the_wrong_shape(build_tiny: Build) -> None:
    with pytest.raises(ValueError, match=r"expected a metric of shape \(5,\).*got \(\)"):
        attribute_circuit_edges(build_tiny(), random_pairs(), lambda logits, pairs: logits.sum())


def test_a_metric_without_a_gradient(build_tiny: Build) -> None:
    from sparse_tl.metrics import is_right

    with pytest.raises(ValueError, match="metric has no gradient"):
        attribute_circuit_edges(build_tiny(), random_pairs(), lambda *some: is_right(*some).float())


def test_large_activations_in_half_precision(build_tiny: Build) -> None:
    """Squares of an activation of 300 are beyond float16, and would leave scores of 0."""
    model = shaken(build_tiny())
    with torch.no_grad():
        model.blocks[0].attn.b_O[0] += 300
    precise = attribute_circuit_edges(model, random_pairs(), logit_difference, method="eap").values
    rough = attribute_circuit_edges(
        model.to(torch.float16), random_pairs(), logit_difference, method="eap"
    ).values
    assert (rough - precise).abs().max() < 0.1 * precise.abs().max()
    assert (rough != 0).sum() > 0.5 * (precise != 0).sum()

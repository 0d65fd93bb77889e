"""Gates on a pattern with a backward pass of their own: equal to the same, composed by autograd."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from sparse_tl import devices
from sparse_tl.gates.distributions import BernoulliGate, GateSettings, with_pressure
from sparse_tl.gates.sparse.counting import counted_edges
from sparse_tl.gates.sparse.straight_through import gated_pattern

SHAPE = (3, 2, 7, 7)
MASKS = ("causal", "window", "padded", "lowest", "none")


LENGTHS = torch.tensor([7, 5, 2])


def _valid(mask: str) -> Tensor:
    """Pairs of real tokens that a mask allows, ``[prompt, head, query, key]``."""
    seen = torch.ones(7, 7, dtype=torch.bool)
    if mask != "none":
        seen = seen.tril()
    if mask == "window":
        seen = seen & ~seen.tril(-3)
    real = torch.arange(7) < LENGTHS[:, None]
    padded = seen & real[:, None, :, None] & real[:, None, None, :]
    return padded if mask == "padded" else seen[None, None]


def _inputs(mask: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and pattern as models mask them, and biases ``[1, head, 1, 1]``."""
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)
    lowest = torch.finfo(dtype).min if mask == "lowest" else -torch.inf
    causal = _valid("causal") if mask == "padded" else _valid(mask)
    scores = scores.masked_fill(~causal, lowest).requires_grad_()
    if mask == "padded":
        scores = scores.masked_fill(torch.arange(7) >= LENGTHS[:, None, None, None], -1e5)
    bias = torch.tensor([0.3, -0.5], dtype=torch.float64).view(1, 2, 1, 1).requires_grad_()
    return scores, scores.softmax(dim=-1), bias


def _composed(
    scores: Tensor,
    pattern: Tensor,
    bias: Tensor,
    now: GateSettings,
    rule: BernoulliGate,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    logits, valid = scores.to(bias.dtype) + bias, options["valid"]
    gates = rule.sample(logits, now.generator, now.noise)
    chance = with_pressure(rule.open_probability(logits), logits, now.pressure) * valid
    is_open = rule.is_open(logits) & valid
    counts = counted_edges(valid, is_open, chance, options["cost"])
    return gates.to(pattern.dtype) * pattern, counts


@pytest.mark.parametrize("noise", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_values_counts_and_gradients(mask: str, costly: bool, noise: float) -> None:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.rand(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    cost = draw(2, 1, 7) if costly else None
    options = {"cost": cost, "valid": _valid(mask)}
    weights = draw(*SHAPE), draw(3, 2), draw(3, 2)
    rule, found = BernoulliGate(temperature=0.7), []
    for way in (gated_pattern, _composed):
        scores, pattern, bias = _inputs(mask)
        again = torch.Generator().manual_seed(2)
        now = GateSettings(generator=again, noise=noise, counts=[], pressure=0.2)
        if way is gated_pattern:
            gated, counts = gated_pattern(scores, pattern, bias, 0.7, now, **options)
        else:
            gated, counts = _composed(scores, pattern, bias, now, rule, **options)
        total = (gated * weights[0]).sum() + (counts["expected"] * weights[1]).sum()
        if costly:
            total = total + (counts["cost"] * weights[2]).sum()
        by = torch.autograd.grad(total, (scores, bias))
        found.append({"gated": gated, **counts, "by scores": by[0], "by bias": by[1]})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-12, atol=1e-13, msg=name)
    assert found[0]["by bias"].abs().min() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "broken"])
@pytest.mark.parametrize("by_share", [False, True])
def test_the_compiled_form(monkeypatch: pytest.MonkeyPatch, by_share: bool, backend: str) -> None:
    """Equals the one that is written, at several scales of noise; so does what runs without it."""
    compile_with = partial(torch.compile, backend=backend) if backend != "broken" else _broken
    devices._compiled.cache_clear()

    def step(noise: float) -> list[Tensor]:
        scores, pattern, bias = _inputs("padded")
        now = GateSettings(
            generator=torch.Generator().manual_seed(2), noise=noise, counts=[], pressure=0.2
        )
        given = None if by_share else scores
        gated, counts = gated_pattern(given, pattern, bias, 0.7, now, None, _valid("padded"))
        total = gated.square().sum() + counts["expected"].sum()
        return [gated, *counts.values(), *torch.autograd.grad(total, (scores, bias))]

    expected = [step(noise) for noise in (0.25, 0.0, 0.1)]
    # Shapes are symbols to the compiler.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(torch, "compile", compile_with)
    monkeypatch.setattr(devices, "COMPILED_ON", ("cpu",))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [step(noise) for noise in (0.25, 0.0, 0.1)]
    devices._compiled.cache_clear()
    said = [str(w.message) for w in told if "torch.compile failed" in str(w.message)]
    assert len(said) == (2 if backend == "broken" else 0)  # of each pass, once
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def _broken(function: Any, **_: Any) -> Any:
    def run(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler found")

    return run


def test_the_estimator_has_the_slope_of_the_sampled_loss_in_expectation() -> None:
    """Of a loss that is linear in every gate, at a low temperature; the noise is held fixed."""
    n, step = 40_000, 0.3
    scores, pattern, bias = (values.detach() for values in _inputs("causal"))
    scores, pattern = scores[:1, :, :3, :3], pattern[:1, :, :3, :3]
    weights = torch.linspace(-1, 2, 18, dtype=torch.float64).view(1, 2, 3, 3)

    def loss(scores: Tensor, temperature: float = 1.0) -> Tensor:
        now = GateSettings(generator=torch.Generator().manual_seed(0))
        many = [values.expand(n, -1, -1, -1) for values in (scores, pattern)]
        gated, _ = gated_pattern(*many, bias, temperature, now)
        return (gated * weights).mean(dim=0)

    given = scores.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(given, 0.1).sum(), given)
    sampled = (loss(scores + step) - loss(scores - step)) / (2 * step)
    logits = scores[0] + bias[0]
    chance = torch.sigmoid(logits)
    exact = weights[0] * pattern[0] * chance * (1 - chance)
    # Four standard errors of each mean are below 0.02, and so are both step's and kernel's biases.
    torch.testing.assert_close(found[0], exact, rtol=0, atol=0.02)
    torch.testing.assert_close(found[0], sampled, rtol=0, atol=0.02)
    assert exact.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pattern_keeps_its_precision(dtype: torch.dtype) -> None:
    scores, pattern, bias = _inputs("causal", dtype)
    now = GateSettings(generator=torch.Generator().manual_seed(0), counts=[])
    gated, counts = gated_pattern(scores, pattern, bias, 1.0, now, valid=_valid("causal"))
    assert gated.dtype == dtype and counts["expected"].dtype == torch.float64
    (by,) = torch.autograd.grad(gated.sum(), scores)
    assert by.dtype == dtype


def test_what_is_kept_for_the_backward_pass() -> None:
    """Scores, pattern and noise; noise that is 0 is not kept."""
    sizes = []
    for noise in (1.0, 0.0):
        scores, pattern, bias = _inputs("causal")
        kept: dict[int, int] = {}

        def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        now = GateSettings(generator=torch.Generator(), noise=noise, counts=[], pressure=0.2)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            gated_pattern(scores, pattern, bias, 1.0, now, valid=_valid("causal"))
        sizes.append(sum(size for size in kept.values() if size >= scores.nbytes) / scores.nbytes)
    assert sizes == [3, 2]

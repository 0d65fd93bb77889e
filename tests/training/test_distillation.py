"""Cross-entropy with labels and predictions: equal to the formula, differentiated by autograd."""

from __future__ import annotations

import pytest
import torch
from finite_differences import derivative
from torch import Tensor

from sparse_tl.devices import SizeByDevice
from sparse_tl.training import distillation
from sparse_tl.training.distillation import distilled, distilled_from, losses_and_divergences

N_LABELS, VOCABULARY, SHARE = 7, 11, 0.3


@pytest.fixture(params=[1, 2 * VOCABULARY, 2**19], ids=["one label", "two labels", "all labels"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "LOGITS_PER_CHUNK", SizeByDevice(request.param, 1))


def _drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, the dense model's, labels, and the weight of each label."""
    generator = torch.Generator().manual_seed(0)
    logits, dense = 3 * torch.randn(2, N_LABELS, VOCABULARY, generator=generator, dtype=dtype)
    labels = torch.randint(VOCABULARY, (N_LABELS,), generator=generator)
    return logits.requires_grad_(), dense, labels, torch.rand(N_LABELS, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_dense", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradient_are_the_formula(
    at_once: None, dtype: torch.dtype, of_dense: torch.dtype
) -> None:
    logits, dense, labels, weights = _drawn(dtype)
    dense = dense.to(of_dense)
    precise = torch.promote_types(dtype, torch.float32)
    log_p = logits.to(precise).log_softmax(-1)
    loss = -log_p[range(N_LABELS), labels]
    q = dense.to(precise).softmax(-1)
    expected = (1 - SHARE) * loss - SHARE * (q * log_p).sum(-1)
    (by_hand,) = torch.autograd.grad((weights * expected).sum(), logits)
    minimised, found = distilled(logits, dense, labels, SHARE)
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=0)
    torch.testing.assert_close(minimised, expected)
    assert not found.requires_grad
    (gradient,) = torch.autograd.grad((weights * minimised).sum(), logits)
    torch.testing.assert_close(gradient, by_hand)


def test_divergences_are_the_definition(at_once: None) -> None:
    logits, dense, labels, _ = _drawn(torch.float64)
    logits = logits.detach()
    before = logits.clone(), dense.clone()
    losses, divergences = losses_and_divergences(logits, dense, labels)
    p, q = logits.softmax(-1), dense.softmax(-1)
    torch.testing.assert_close(losses, -p[range(N_LABELS), labels].log())
    torch.testing.assert_close(divergences, (q * (q / p).log()).sum(-1))
    assert torch.equal(logits, before[0]) and torch.equal(dense, before[1])


def test_the_gradient_is_a_difference_quotient() -> None:
    logits, dense, labels, weights = _drawn(torch.float64)

    def total() -> Tensor:
        return (weights * distilled(logits, dense.clone(), labels, SHARE)[0]).sum()

    (gradient,) = torch.autograd.grad(total(), logits)
    for index in [(0, int(labels[0])), (0, 3), (6, 10)]:
        assert gradient[index].item() == pytest.approx(derivative(total, logits, index), rel=1e-6)


@pytest.mark.parametrize("trained", [False, True])
def test_from_the_final_residual_stream(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    """Chunk by chunk, with no logits kept, unless the unembedding is trained."""
    monkeypatch.setattr(distillation, "LOGITS_AT_ONCE", SizeByDevice(3 * VOCABULARY, 1))
    generator = torch.Generator().manual_seed(0)
    final, dense = torch.randn(2, N_LABELS, 5, generator=generator, dtype=torch.float64)
    weight, other = torch.randn(2, 5, VOCABULARY, generator=generator, dtype=torch.float64)
    _, _, labels, weights = _drawn(torch.float64)
    final.requires_grad_()
    weight.requires_grad_(trained)
    wanted = [final, weight] if trained else [final]
    seen: list[int] = []

    def unembed(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return rows @ weight

    expected = distilled(final @ weight, dense @ other, labels, SHARE)
    by_hand = torch.autograd.grad((weights * expected[0]).sum(), wanted)
    found = distilled_from(final, unembed, dense, lambda rows: rows @ other, labels, SHARE)
    for one, other_one in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other_one, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((weights * found[0]).sum(), wanted)
    for one, other_one in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(one, other_one, rtol=1e-12, atol=1e-12)
    assert max(seen) == (N_LABELS if trained else 3)

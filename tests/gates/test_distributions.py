"""Gate distributions against their formulas, finite differences and sampled frequencies."""

import math

import pytest
import torch

from sparse_tl.gates import BernoulliGate, HardConcreteGate, SigmoidGate
from sparse_tl.gates.distributions import with_pressure

ALL = [BernoulliGate(), HardConcreteGate(), SigmoidGate()]


def logits(n: int = 9) -> torch.Tensor:
    return torch.linspace(-3, 3, n, dtype=torch.float64)


@pytest.mark.parametrize("distribution", [BernoulliGate(), HardConcreteGate()])
def test_open_probability_is_the_frequency_of_open_samples(distribution):
    many = logits(7)[:, None].expand(7, 40_000)
    generator = torch.Generator().manual_seed(0)
    frequency = (distribution.sample(many, generator) > 0).double().mean(dim=1)
    # Four standard errors of a frequency over 40,000 draws are at most 0.01.
    torch.testing.assert_close(
        frequency, distribution.open_probability(logits(7)), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("distribution", ALL)
def test_modes_agree_with_is_open(distribution):
    mode = distribution.mode(logits())
    threshold = 0.5 if isinstance(distribution, SigmoidGate) else 0.0
    assert torch.equal(distribution.is_open(logits()), mode > threshold)
    assert mode.min() >= 0 and mode.max() <= 1


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_bernoulli_gradient_is_that_of_the_noisy_sigmoid(temperature):
    distribution = BernoulliGate(temperature)
    at = logits().requires_grad_()
    sample = distribution.sample(at, torch.Generator().manual_seed(3))
    (gradient,) = torch.autograd.grad(sample.sum(), at)
    assert set(sample.tolist()) <= {0.0, 1.0}
    uniform = torch.rand(9, generator=torch.Generator().manual_seed(3)).double()
    soft = torch.sigmoid((logits() + torch.logit(uniform)) / temperature)
    torch.testing.assert_close(gradient, soft * (1 - soft) / temperature, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("distribution", [HardConcreteGate(), SigmoidGate()])
def test_smooth_gates_have_the_gradient_of_finite_differences(distribution):
    at = logits().requires_grad_()

    def gates(values: torch.Tensor) -> torch.Tensor:
        return distribution.sample(values, torch.Generator().manual_seed(1))

    # Float32 noise is added to float64 logits, so the same noise serves both sides.
    (gradient,) = torch.autograd.grad(gates(at).sum(), at)
    step = 1e-6
    numeric = (gates(logits() + step) - gates(logits() - step)) / (2 * step)
    torch.testing.assert_close(gradient, numeric, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("distribution", ALL)
def test_open_probabilities_have_the_gradient_of_finite_differences(distribution):
    assert torch.autograd.gradcheck(distribution.open_probability, logits().requires_grad_())


def test_hard_concrete_reaches_both_ends():
    gates = HardConcreteGate().mode(torch.tensor([-10.0, 0.0, 10.0]))
    assert gates.tolist() == [0.0, pytest.approx(0.5), 1.0]


@pytest.mark.parametrize("distribution", ALL)
@pytest.mark.parametrize("mode", ["mode", "sample"])
def test_a_masked_logit_is_a_closed_gate_with_no_gradient(distribution, mode):
    at = torch.tensor([-math.inf, 2.0], requires_grad=True)
    gates = getattr(distribution, mode)(at)
    (gates.sum() + distribution.open_probability(at).sum()).backward()
    assert gates[0] == 0
    assert at.grad is not None and at.grad[0] == 0 and torch.isfinite(at.grad).all()


@pytest.mark.parametrize("distribution", ALL)
def test_without_noise_a_sample_is_the_mode(distribution):
    sample = distribution.sample(logits(), torch.Generator().manual_seed(0), noise=0.0)
    assert torch.equal(sample, distribution.mode(logits()))


def test_pressure_changes_gradients_of_open_gates_and_no_value():
    at = torch.tensor([-math.inf, -6.0, -1.0, 1.0, 12.0], dtype=torch.float64, requires_grad=True)
    plain = torch.sigmoid(at)
    pressed = with_pressure(plain, at, 0.05)
    assert torch.equal(pressed, plain)
    (gradient,) = torch.autograd.grad(pressed.sum(), at)
    slope = (plain * (1 - plain)).detach()
    torch.testing.assert_close(gradient, slope + torch.tensor([0, 0, 0, 0.05, 0.05]).double())

"""Map gate logits to gates in [0, 1]: sampled in training, deterministic otherwise.

A gate with a logit of minus infinity is always 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Gates = Float[Tensor, "*gate"]


class GateDistribution:
    """Base class: gates are open with probability ``sigmoid(logit)`` unless overridden."""

    def squash(self, noisy: Gates) -> Gates:
        """The gate of a logit plus noise."""
        raise NotImplementedError

    def sample(
        self, logits: Gates, generator: torch.Generator | None = None, noise: float = 1.0
    ) -> Gates:
        """A random gate, differentiable in the logit; `noise` scales the logistic noise."""
        uniform = uniform_noise(logits, generator)
        return self.squash(logits + noise * logistic(uniform).to(logits.dtype))

    def mode(self, logits: Gates) -> Gates:
        """The deterministic gate that evaluation uses."""
        return self.squash(logits)

    def open_probability(self, logits: Gates) -> Gates:
        """Probability that a gate is open, differentiable; the expected size is its sum."""
        return torch.sigmoid(logits)

    def is_open(self, logits: Gates) -> Bool[Tensor, "*gate"]:
        """Whether each deterministic gate counts as open: above 0, or a sigmoid gate above 1/2."""
        return logits > 0


@dataclass(frozen=True)
class BernoulliGate(GateDistribution):
    """Binary gates: ``A ~ Bernoulli(sigmoid(logit))``, straight-through.

    The sample is ``[logit + noise > 0]`` with logistic noise, which has exactly the Bernoulli
    probability; the backward pass uses the gradient of ``sigmoid((logit + noise) / temperature)``.
    The mode is ``[logit > 0]``.

    Reference: SPARTAN, arXiv 2411.06890; arXiv 2512.05865, section 3.
    """

    temperature: float = 1.0

    def squash(self, noisy: Gates) -> Gates:
        soft = torch.sigmoid(noisy / self.temperature)
        return (noisy > 0).to(noisy.dtype) + (soft - soft.detach())  # the value of the first term

    def mode(self, logits: Gates) -> Gates:
        return self.is_open(logits).to(logits.dtype)


@dataclass(frozen=True)
class HardConcreteGate(GateDistribution):
    """Gates in [0, 1] with point masses at 0 and 1: ``clamp(s (zeta - gamma) + gamma, 0, 1)``.

    ``s = sigmoid((logit + noise) / beta)`` with logistic noise; the mode has no noise. A gate is
    open with probability ``sigmoid(logit - beta log(-gamma / zeta))``.

    Reference: Louizos et al., arXiv 1712.01312, equations 10 to 12. The mode divides by beta, as
    the sample does; the paper's test-time estimator (equation 13) does not.
    """

    beta: float = 2 / 3
    gamma: float = -0.1
    zeta: float = 1.1

    def squash(self, noisy: Gates) -> Gates:
        concrete = torch.sigmoid(noisy / self.beta)
        return (concrete * (self.zeta - self.gamma) + self.gamma).clamp(0, 1)

    def open_probability(self, logits: Gates) -> Gates:
        return torch.sigmoid(logits - self.beta * math.log(-self.gamma / self.zeta))

    def is_open(self, logits: Gates) -> Bool[Tensor, "*gate"]:
        return self.mode(logits) > 0


@dataclass(frozen=True)
class SigmoidGate(GateDistribution):
    """Soft gates without noise: ``sigmoid(logit)``; a gate counts as open above one half.

    Reference: causal head gating, arXiv 2505.13737.
    """

    def sample(self, logits: Gates, generator: Any = None, noise: float = 1.0) -> Gates:
        return self.mode(logits)  # no noise

    def squash(self, noisy: Gates) -> Gates:
        return torch.sigmoid(noisy)


def with_pressure(probability: Gates, logits: Gates, strength: float) -> Gates:
    """The same probabilities, plus a gradient of about `strength` where a gate is open.

    The derivative of ``sigmoid(logit)`` vanishes for confidently open gates, so the expected size
    alone cannot close redundant edges. This adds the gradient of ``strength * relu(logit)`` and
    leaves the value unchanged.
    """
    pull = strength * torch.relu(logits)
    return probability + pull - pull.detach()


@dataclass
class GateSettings:
    """Settings of a forward pass: how gates are set, and what is counted.

    Args:
        mode: how gates are set.
        generator: random generator of sampled gates.
        noise: scale of the noise of sampled gates.
        counts: list to which every layer appends its counts; None to count nothing.
        keep_gates: whether to keep every gate in `counts`, not only the totals.
        pressure: extra gradient of the expected count for confidently open gates, by
            `with_pressure`.
        edge_cost: cost per attention edge for `AttentionEdgeCounts.cost`; 1 by default.
        real: attention mask, 0 at padding; padding is not counted.
        by_blocks: whether long patterns are computed by blocks even if no gate has an effect; this
            changes results by rounding.
        again: whether a layer runs again in the backward pass, under the settings it had.
    """

    mode: Literal["deterministic", "sampled", "open"] = "deterministic"
    generator: torch.Generator | None = None
    noise: float = 1.0
    counts: list[dict[str, Tensor]] | None = None
    keep_gates: bool = False
    pressure: float = 0.0
    edge_cost: Tensor | None = None
    real: Tensor | None = None
    by_blocks: bool = False
    again: bool = False

    @property
    def does_nothing(self) -> bool:
        """Whether a pass neither closes nor counts any gate."""
        return self.mode == "open" and self.counts is None


DISTRIBUTIONS: dict[str, type[BernoulliGate | HardConcreteGate | SigmoidGate]] = {
    kind.__name__: kind for kind in (BernoulliGate, HardConcreteGate, SigmoidGate)
}
"""Distribution classes by name, for saved gates."""


def uniform_noise(logits: Gates, generator: torch.Generator | None) -> Gates:
    """Uniform noise for every gate, in float32."""
    options: Any = {"device": logits.device, "dtype": torch.float32, "generator": generator}
    return torch.rand(logits.shape, **options)


def logistic(uniform: Gates) -> Gates:
    """Standard logistic noise, made from uniform noise."""
    # The open interval (0, 1): an exact 0 or 1 would make the noise infinite.
    return uniform.clamp(torch.finfo(torch.float32).tiny, 1 - 2**-24).logit()

"""Weights in bfloat16 are trained by float32 copies of them, the master weights.

A step changes a weight by a few parts in ten thousand, and late in a run by far less; a bfloat16
number has eight bits, so that most steps would change nothing. The optimizer therefore moves the
master weights, with gradients that add up in float32 too, and the model computes with their
rounded values. In float16, small gradients would be 0 before they reach any copy.

Reference: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from sparse_tl import shards
from sparse_tl.scopes import autograd, scope


class MasterWeights:
    """What the optimizer trains in place of a model's weights; float32 weights are their own.

    Args:
        weights: trained weights of the model by name.

    Raises:
        ValueError: a weight is float16.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        if torch.float16 in {weight.dtype for weight in weights.values()}:
            raise ValueError(
                "expected weights to train in float32, float64 or bfloat16; got float16, in which "
                'small gradients are 0. Load the model with dtype="bfloat16", or train low-rank '
                "adapters (add_lora), which are float32."
            )
        self.by_name = {
            name: nn.Parameter(weight.detach().float()) if is_half(weight) else weight
            for name, weight in weights.items()
        }
        """Master weights by name."""
        self._copied = [
            (weight, self.by_name[name]) for name, weight in weights.items() if is_half(weight)
        ]

    @scope
    def taking_gradients(self) -> Iterator[None]:
        """Each weight's gradient goes to its master at once, so that few are held twice."""
        for weight, _ in self._copied:
            weight.grad = None  # of an earlier backward pass by the user
        handles = [
            weight.register_post_accumulate_grad_hook(lambda _, pair=(weight, master): _move(*pair))
            for weight, master in self._copied
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take_gradients(self) -> None:
        """Take the gradients that come without a hook: those of weights dealt to several ranks."""
        for weight, master in self._copied:
            _move(weight, master)

    @autograd(False)
    def write(self) -> None:
        """Round the master weights into the model."""
        for weight, master in self._copied:
            shards.part(weight).copy_(shards.part(master))


def is_half(weight: nn.Parameter) -> bool:
    """Whether a weight is trained through a copy."""
    return weight.dtype == torch.bfloat16


@autograd(False)
def _move(weight: nn.Parameter, master: nn.Parameter) -> None:
    if weight.grad is None:
        return
    gradient = weight.grad.float()
    master.grad = gradient if master.grad is None else master.grad + gradient
    weight.grad = None

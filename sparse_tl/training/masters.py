"""Master weights: float32 copies through which bfloat16 weights are trained.

A step changes a weight by a few parts in ten thousand, and late in a run by far less. A bfloat16
number has eight significant bits, so most steps would change nothing. The optimizer therefore moves
the master weights, by gradients that are also accumulated in float32, and the model computes with
their rounded values. In float16, small gradients would vanish before they reached any copy.

Reference: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from sparse_tl.calls.scopes import autograd, scope
from sparse_tl.parallel import shards


class MasterWeights:
    """The parameters that the optimizer trains: copies of bfloat16 weights, and all other weights.

    Args:
        weights: trained weights of the model by name.

    Raises:
        ValueError: a weight is float16.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        if torch.float16 in {weight.dtype for weight in weights.values()}:
            raise ValueError(
                "expected weights to train in float32, float64 or bfloat16; got float16, in which "
                'small gradients vanish. Load the model with dtype="bfloat16", or train low-rank '
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
        """Move each gradient to its master as soon as it exists, so that few are held twice."""
        for weight, _ in self._copied:
            weight.grad = None  # from an earlier backward pass by the user
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
        """Take the gradients that no hook moved: those of sharded weights."""
        for weight, master in self._copied:
            _move(weight, master)

    @autograd(False)
    def write(self) -> None:
        """Write the rounded master weights into the model."""
        for weight, master in self._copied:
            shards.local(weight).copy_(shards.local(master))


def is_half(weight: nn.Parameter) -> bool:
    """Whether a weight is in bfloat16, and so trained through a copy."""
    return weight.dtype == torch.bfloat16


@autograd(False)
def _move(weight: nn.Parameter, master: nn.Parameter) -> None:
    if weight.grad is None:
        return
    gradient = weight.grad.float()
    master.grad = gradient if master.grad is None else master.grad + gradient
    weight.grad = None

"""Recover merged low-rank adapters from the difference between a model and its base."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers.pytorch_utils import Conv1D

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.lens.core.lora import NAME, SCALE, add_lora, projections
from sparse_tl.lens.core.points import Model

_ROUNDING = 1e-3
"""Largest share of a difference in weights, by norm, that adapters may leave out."""


@checked
@autograd(False)
def extract_lora(model: Model, tuned: Model, rank: AtLeastOne = 16) -> TransformerBridge:
    """Give a model, in place, the adapters that turn it into `tuned`; undoes `merge_lora`.

    ``2 B A`` is the difference between the two models' weights, factored by its singular values.

    Args:
        model: the model before training.
        tuned: the same model after its adapters were trained and merged.
        rank: rank of the adapters.

    Returns:
        The model.

    Raises:
        ValueError: a model is not a TransformerBridge, weights without adapters differ, or a
            difference is of a higher rank; the model is then unchanged.
    """
    if not (isinstance(model, TransformerBridge) and isinstance(tuned, TransformerBridge)):
        kinds = f"a {type(model).__name__} and a {type(tuned).__name__}"
        raise ValueError(f"expected two TransformerBridges, which can have adapters; got {kinds}")
    before, after = projections(model), projections(tuned)
    adapted = {_memory(component.original_component.weight) for component in before}
    others = dict(tuned.named_parameters())
    for name, parameter in model.named_parameters():
        if _memory(parameter) not in adapted and not torch.equal(parameter, others[name]):
            raise ValueError(f"expected models that differ in their projections alone; got {name}")
    pairs = zip(before, after, strict=True)
    factors = [_factors(one.original_component, two.original_component, rank) for one, two in pairs]
    add_lora(model, rank)
    for component, (a, b) in zip(before, factors, strict=True):
        component.original_component.lora_A[NAME].weight.copy_(a)
        component.original_component.lora_B[NAME].weight.copy_(b)
    return model


def _memory(parameter: Tensor) -> int:
    """The address of a parameter's storage, which parts of a joint parameter may share."""
    return parameter.untyped_storage().data_ptr()


def _factors(before: Any, after: Any, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of the difference between two projections."""
    difference = (after.weight - before.weight).float()
    u, s, v = torch.linalg.svd(
        difference.T if isinstance(before, Conv1D) else difference, full_matrices=False
    )
    if s[rank:].norm() > _ROUNDING * s.norm():
        raise ValueError(
            f"expected weights that adapters of rank {rank} account for; a projection differs by "
            f"{s[rank:].norm() / s.norm():.2%} more"
        )
    root = s[:rank].sqrt()
    return root[:, None] * v[:rank], u[:, :rank] * root / SCALE

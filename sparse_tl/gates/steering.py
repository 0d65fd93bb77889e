"""Steering: add a vector to the activations at a hook point, ``activation + scale * vector``.

Unlike a gate, which takes something away, this adds something that the model did not compute.

Reference: Turner et al., arXiv 2308.10248 (activation addition).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.lens import Hook, HookedModel, Order, adapt, attached
from sparse_tl.scopes import scope


@checked
@scope
def steer(
    model: HookedModel,
    name: str,
    vector: Float[Tensor, "*size"],
    *,
    scale: float = 1.0,
    positions: Sequence[int] | None = None,
) -> Iterator[None]:
    """Inside the block, add ``scale * vector`` to the activations at a hook point.

    Args:
        model: dense or sparse model.
        name: hook point, such as "blocks.3.hook_resid_pre".
        vector: vector of the size of one position's activation: ``[d_model]`` in the residual
            stream, ``[head, d_head]`` at ``attn.hook_z``. Gradients reach it.
        scale: factor; negative to steer the other way.
        positions: columns to steer; negative ones count from the end of the prompts. All by
            default, and also those of generated tokens.

    Raises:
        ValueError: the model lacks the hook point; when the model is run, the vector has another
            size than the activation, a position lies outside the prompts, or positions are given
            for a run with a key-value cache.
    """
    adapter = adapt(model)

    def add(value: Float[Tensor, "batch pos *size"]) -> Tensor:
        if value.shape[2:] != vector.shape:
            raise ValueError(
                f"expected a vector of shape {tuple(value.shape[2:])} for each position at {name}; "
                f"got {tuple(vector.shape)}"
            )
        change = scale * vector.to(value)
        if positions is None:
            return value + change
        n = value.shape[1]
        outside = [column for column in positions if not -n <= column < n]
        if outside:
            raise ValueError(
                f"expected positions in {-n}..{n - 1} of prompts of {n} tokens; got {outside[0]}"
            )
        chosen = torch.zeros(n, dtype=torch.bool, device=value.device)
        chosen[[column % n for column in positions]] = True
        return value + chosen.view(n, *[1] * vector.ndim) * change

    def check(cached: Int[Tensor, ""]) -> None:
        if int(cached):
            raise ValueError(
                "expected whole prompts, to steer at positions; got a run with a key-value cache, "
                "which has the last tokens alone: steer at all positions, or run without a cache"
            )

    hooks: list[Hook] = [(name, Order.FIRST, add)]
    if positions is not None:
        hooks.append(("blocks.0.attn.cached_columns", Order.FIRST, check))
    with attached(adapter, hooks):
        yield

"""A site at any hook points and axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.calls.arguments import checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.gates.sites import HookPoints
from sparse_tl.lens import HookedModel, Order, adapt, attached


@checked
def hook_points(
    model: HookedModel,
    names: str | Sequence[str],
    axes: int | Sequence[int],
    *,
    sample: Int[Tensor, "batch pos"] | None = None,
) -> HookPoints:
    """A site at some hook points and axes, with sizes taken from a run of the model.

    Args:
        model: dense or sparse model; left unchanged.
        names: hook points whose activations have the same size along `axes`.
        axes: axes with one gate per index (negative axes count from the end).
        sample: tokens to run in order to find the sizes; required if a position axis is gated.

    Raises:
        ValueError: a hook point is unknown, an axis is out of range, or sizes differ.
    """
    chosen = (names,) if isinstance(names, str) else tuple(names)
    wanted = [axes] if isinstance(axes, int) else list(axes)
    adapter = adapt(model)
    if sample is None:
        sample = torch.zeros(1, 1, dtype=torch.long, device=adapter.device)
    seen: dict[str, list[Tensor]] = {name: [] for name in chosen}
    notes = [(name, Order.FIRST, seen[name].append) for name in chosen]
    with attached(adapter, notes), autograd(False):
        model(sample, return_type=None)
    silent = [name for name in chosen if not seen[name]]
    if silent:
        raise ValueError(f"expected every hook point to fire; {silent} did not")
    shapes = {name: tuple(values[-1].shape) for name, values in seen.items()}
    ranks = {len(shape) for shape in shapes.values()}
    if len(ranks) != 1:
        raise ValueError(f"expected hook points of one rank; got {shapes}")
    rank = ranks.pop()
    positive = sorted(axis + rank if axis < 0 else axis for axis in wanted)
    if not positive or positive[0] < 1 or positive[-1] >= rank or len(set(positive)) < len(wanted):
        raise ValueError(
            f"expected distinct axes in 1..{rank - 1} (axis 0 is the batch); got {wanted} for "
            f"activations of shape {shapes[chosen[0]]}"
        )
    sizes = {tuple(shape[axis] for axis in positive) for shape in shapes.values()}
    if len(sizes) != 1:
        raise ValueError(f"expected the same sizes along axes {positive}; got {shapes}")
    return HookPoints(chosen, tuple(positive), sizes.pop())

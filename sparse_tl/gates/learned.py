"""Trainable gates at any site: one logit per gate, and a distribution that maps it to a gate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sparse_tl.calls.arguments import Logit, NotNegative, checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.gates.distributions import (
    GateDistribution,
    GateMode,
    SigmoidGate,
    expected_size,
    gate_values,
)
from sparse_tl.gates.sites import HookPoints, Site
from sparse_tl.lens import HookedModel, Order, adapt, attached


@checked
class LearnedGates(nn.Module):
    """Trainable gates at a site; apply them to a model with `gated`.

    Args:
        model: model that sets the size, device and precision of the gates; left unchanged.
        site: `Heads`, `CircuitEdges` or `HookPoints`.
        distribution: how gates are sampled and evaluated; a plain sigmoid by default.
        initial_logit: initial value of all logits.

    Raises:
        ValueError: the number of gates at the site depends on the prompt.
    """

    def __init__(
        self,
        model: HookedModel,
        site: Site,
        *,
        distribution: GateDistribution | None = None,
        initial_logit: Logit = 4.0,
    ) -> None:
        super().__init__()
        adapter = adapt(model)
        shape = site.shape(adapter)
        if -1 in shape:
            raise ValueError(
                f"expected a site with the same gates for all prompts; those of {site} depend on "
                "the prompt. SparseTransformer has gates on attention edges"
            )
        self.site, self.distribution = site, distribution or SigmoidGate()
        self.logits = nn.Parameter(
            torch.full(shape, float(initial_logit), device=adapter.device, dtype=adapter.gate_dtype)
        )

    def forward(
        self,
        mode: GateMode = GateMode.DETERMINISTIC,
        generator: torch.Generator | None = None,
        noise: NotNegative = 1.0,
    ) -> Float[Tensor, "*gate"]:
        """The gates in [0, 1], deterministic or sampled; differentiable in the logits."""
        return gate_values(self.distribution, self.logits, mode, generator, noise)

    def expected_size(self) -> Float[Tensor, ""]:
        """The expected number of open gates; differentiable, for use as a sparsity penalty."""
        return expected_size(self.distribution, self.logits)


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

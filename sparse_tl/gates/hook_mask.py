"""Learnable masks on any hook point and axis: ``gate * clean + (1 - gate) * patch``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sparse_tl.gates.distributions import (
    GateDistribution,
    GateMode,
    SigmoidGate,
    expected_size,
    gate_values,
)
from sparse_tl.lens import (
    HookedModel,
    Order,
    attached,
    check_hook_points,
    embedding_matrix,
    layer_points,
)


class HookMask(nn.Module):
    """Gates over chosen axes of the activations at some hook points.

    ``gate * clean + (1 - gate) * patch``, with gates in [0, 1]: 1 keeps, 0 patches. Used inside
    ``with mask.attached(model):``; the hooks come off at the end of the block.

    Args:
        model: the model whose activations are masked; a SparseTransformer too.
        hook_points: names of hook points whose activations have the same size along `axes`.
        axes: the axes that get one gate per index (negative ones count from the end); all other
            axes share it. Axis 0, the batch, cannot be gated.
        sample: tokens of one run that tells the sizes; needed when a position axis is gated, since
            the mask then fits prompts of exactly this length.
        patch: what a closed gate shows: a number, or activations by hook point (mean or corrupted
            ones, say, from `run_with_cache`) that broadcast to the clean activation.
        distribution: how gates are sampled and evaluated.
        initial_logit: the gates' logits at the start.

    Raises:
        ValueError: an unknown hook point, an axis that is out of range, sizes that differ
            between hook points, or a missing patch.
    """

    def __init__(
        self,
        model: HookedModel,
        hook_points: str | Sequence[str],
        axes: int | Sequence[int],
        *,
        sample: Int[Tensor, "batch pos"] | None = None,
        patch: float | Mapping[str, Tensor] = 0.0,
        distribution: GateDistribution | None = None,
        initial_logit: float = 4.0,
    ) -> None:
        super().__init__()
        self.hook_points = [hook_points] if isinstance(hook_points, str) else list(hook_points)
        check_hook_points(model, self.hook_points)
        weight = embedding_matrix(model)
        if sample is None:
            sample = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        self._rank, self.axes, sizes = _measure(
            model, self.hook_points, [axes] if isinstance(axes, int) else list(axes), sample
        )
        if not isinstance(patch, float | int):
            missing = [name for name in self.hook_points if name not in patch]
            if missing:
                raise ValueError(f"expected a patch for every hook point; none for {missing}")
        self.patch = patch
        self.distribution = distribution or SigmoidGate()
        self.mode = GateMode.DETERMINISTIC
        self.generator: torch.Generator | None = None
        self.logits = nn.Parameter(
            torch.full(
                (len(self.hook_points), *sizes),
                float(initial_logit),
                device=weight.device,
                dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32,
            )
        )

    @property
    def gates(self) -> Float[Tensor, "*gate"]:
        """The deterministic gates."""
        return gate_values(self.distribution, self.logits, GateMode.DETERMINISTIC)

    def expected_size(self) -> Float[Tensor, ""]:
        """The expected number of open gates; differentiable, a penalty for sparse masks."""
        return expected_size(self.distribution, self.logits)

    @contextmanager
    def attached(
        self,
        model: HookedModel,
        mode: GateMode = GateMode.DETERMINISTIC,
        generator: torch.Generator | None = None,
    ) -> Iterator[None]:
        """The mask is on the model inside the block, and off after it, also after an exception."""
        before = self.mode, self.generator
        self.mode, self.generator = mode, generator
        hooks = [
            (name, Order.FIRST, partial(self._apply_gate, index, name))
            for index, name in enumerate(self.hook_points)
        ]
        try:
            with attached(model, hooks):
                yield
        finally:
            self.mode, self.generator = before

    def _apply_gate(self, index: int, name: str, clean: Tensor) -> Tensor:
        gate = gate_values(self.distribution, self.logits[index], self.mode, self.generator)
        shape = [1] * self._rank
        for axis, size in zip(self.axes, gate.shape, strict=True):
            if clean.shape[axis] != size:
                raise ValueError(
                    f"the mask on {name} has {size} gates along axis {axis}, where this run has "
                    f"{clean.shape[axis]} entries; gated prompts need the length of the sample"
                )
            shape[axis] = size
        gate = gate.reshape(shape).to(clean.dtype)
        patch = self.patch if isinstance(self.patch, float | int) else self.patch[name]
        if isinstance(patch, float | int) and patch == 0:
            return gate * clean
        return gate * clean + (1 - gate) * patch


class HeadGates(HookMask):
    """One gate per head on ``hook_z``: ``logits`` and ``gates`` are ``[layer, head]``.

    Args:
        model: the model whose heads are gated.
        patch: what a closed head shows: 0, or its mean or corrupted ``z`` by hook point.
        distribution: how gates are sampled and evaluated; a plain sigmoid by default.
        initial_logit: the gates' logits at the start.
    """

    def __init__(
        self,
        model: HookedModel,
        *,
        patch: float | Mapping[str, Tensor] = 0.0,
        distribution: GateDistribution | None = None,
        initial_logit: float = 4.0,
    ) -> None:
        super().__init__(
            model,
            layer_points(model, "attn.hook_z"),
            axes=2,
            patch=patch,
            distribution=distribution,
            initial_logit=initial_logit,
        )


def _measure(
    model: HookedModel, hook_points: Sequence[str], axes: Sequence[int], sample: Tensor
) -> tuple[int, list[int], list[int]]:
    """Rank of the activations, the axes in increasing order, and the sizes along them."""
    shapes: dict[str, torch.Size] = {}

    def note(name: str, activation: Tensor) -> None:
        shapes[name] = activation.shape

    notes = [(name, Order.FIRST, partial(note, name)) for name in hook_points]
    with attached(model, notes), torch.no_grad():
        model(sample, return_type=None)
    silent = [name for name in hook_points if name not in shapes]
    if silent:
        raise ValueError(f"expected every hook point to fire; {silent} did not")
    ranks = {len(shape) for shape in shapes.values()}
    if len(ranks) != 1:
        raise ValueError(f"expected hook points of one rank; got {dict(shapes)}")
    rank = ranks.pop()
    positive = sorted(axis + rank if axis < 0 else axis for axis in axes)
    if not positive or positive[0] < 1 or positive[-1] >= rank or len(set(positive)) < len(axes):
        raise ValueError(
            f"expected distinct axes in 1..{rank - 1} (axis 0 is the batch); got {list(axes)} for "
            f"activations of shape {tuple(next(iter(shapes.values())))}"
        )
    sizes = {tuple(shape[axis] for axis in positive) for shape in shapes.values()}
    if len(sizes) != 1:
        raise ValueError(f"expected the same sizes along axes {positive}; got {dict(shapes)}")
    return rank, positive, list(sizes.pop())

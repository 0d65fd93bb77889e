"""Forward passes that leave out what nobody reads, with the same result where somebody does.

TransformerLens computes every position of every layer, and each normalisation in six operations
with a hook point in between. A loss at a few positions needs neither: what the last MLP writes
elsewhere is never read, and a normalisation that nobody hooks inside is one operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from sparse_tl.lens.points import HookedModel
from sparse_tl.lens.reading import normalised

_MOSTLY = 0.7
"""Share of read positions above which picking them out costs more than it saves."""


@contextmanager
def lean(model: HookedModel, read: Bool[Tensor, "batch pos"]) -> Iterator[None]:
    """Inside the block, passes over prompts of this shape compute what `read` needs, and no more.

    Logits at the other positions are meaningless. Everything before the last MLP, the attention of
    all layers among it, is computed everywhere. Parts that are hooked inside are left as they are.

    Args:
        model: dense or sparse; nothing is left on it after the block.
        read: the positions whose logits or final residual stream are read.
    """
    with _only_at(getattr(model.blocks[-1], "mlp", None), read), _fused_norms(model):
        yield


@contextmanager
def _only_at(mlp: nn.Module | None, read: Bool[Tensor, "batch pos"]) -> Iterator[None]:
    """The MLP sees some positions, as one row, and writes nothing at the others."""
    if mlp is None or _watched(mlp) or read.float().mean() > _MOSTLY:
        yield
        return

    def select(module: nn.Module, args: Any) -> tuple[Any, ...]:
        return (args[0][read][None], *args[1:])

    def scatter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        everywhere = output.new_zeros(*read.shape, output.shape[-1])
        everywhere[read] = output[0]
        return everywhere

    handles = [mlp.register_forward_pre_hook(select), mlp.register_forward_hook(scatter)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _fused_norms(model: HookedModel) -> Iterator[None]:
    """The normalisations of the residual stream in one operation each."""
    found = [getattr(block, name, None) for block in model.blocks for name in ("ln1", "ln2")]
    found.append(getattr(model, "ln_final", None))
    norms = [norm for norm in found if isinstance(norm, nn.Module) and not _watched(norm)]
    try:
        for norm in norms:
            norm.forward = partial(normalised, model, norm)
        yield
    finally:
        for norm in norms:
            norm.__dict__.pop("forward", None)


def _watched(module: nn.Module) -> bool:
    """Whether somebody hooks the inside of a module: what its hooks see must be all there."""
    return any(
        point._forward_hooks or point._backward_hooks
        for point in module.modules()
        if isinstance(point, HookPoint)
    )

"""Forward passes that leave out what nobody reads, with the same result where somebody does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn

from sparse_tl.lens.norms import Norm
from sparse_tl.lens.points import HookedModel

_MOSTLY = 0.7
"""Share of read positions above which picking them out costs more than it saves."""


@contextmanager
def only_at(model: HookedModel, read: Bool[Tensor, "batch pos"]) -> Iterator[None]:
    """Inside the block, passes over prompts of this shape compute what `read` needs, and no more.

    Logits at the other positions are meaningless. Everything before the last MLP, the attention of
    all layers among it, is computed everywhere. Where somebody hooks what would be left out, it is
    computed too: hooks see what a plain pass shows them.

    Args:
        model: dense or sparse; nothing is left on it after the block.
        read: the positions whose logits or final residual stream are read.
    """
    with _last_mlp_at(model, read), _fused_norms(model):
        yield


@contextmanager
def _last_mlp_at(model: HookedModel, read: Bool[Tensor, "batch pos"]) -> Iterator[None]:
    """The last MLP sees some positions, as one row, and writes nothing at the others."""
    block = model.blocks[-1]
    mlp = getattr(block, "mlp", None)
    # All that comes after: a hook there would see zeros at the other positions.
    after = [mlp, block.hook_resid_post, getattr(model, "ln_final", None)]
    after += [getattr(block, name, None) for name in ("hook_mlp_out", "ln2_post")]
    after += [getattr(model, "unembed", None)]
    parts = [block, *(part for some in after if some is not None for part in some.modules())]
    if mlp is None or any(map(_hooked, parts)) or read.float().mean() > _MOSTLY:
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
    # Hooks on the module itself see the same input and output; those inside would see nothing.
    norms = [
        norm
        for norm in found
        if isinstance(norm, nn.Module) and not any(map(_hooked, norm.children()))
    ]
    try:
        for norm in norms:
            norm.forward = Norm.of(model.cfg, norm).__call__
        yield
    finally:
        for norm in norms:
            norm.__dict__.pop("forward", None)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )

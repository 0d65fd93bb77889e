"""Weights on several ranks: whole on each, or dealt to them, each holding a part (FSDP2).

A layer's dealt weights are gathered while a pass is in it. Outside a pass, a weight is a `DTensor`:
of the whole weight's shape, with a part of its rows here. So all ranks have to make the same
passes, and what reads or writes weights takes the own `part`, or gathers the `whole`. Of all other
tensors, both are the tensor itself.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparse_tl import ranks
from sparse_tl.scopes import autograd

_precisions: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def shard(root: nn.Module, layers: Iterable[nn.Module], precision: str) -> None:
    """Deal the weights of a model to the ranks, in place, and move the parts to their devices.

    Args:
        root: module that a pass calls.
        layers: modules inside it whose weights are gathered one after the other.
        precision: "bf16" gathers and computes in bfloat16; the weights themselves, gradients and
            what the model returns stay as they are in "float32".

    Reference: `torch.distributed.fsdp.fully_shard`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = torch.device(ranks.device() or "cpu").type
    inner = outer = MixedPrecisionPolicy()
    if precision == "bf16":
        half: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        inner = MixedPrecisionPolicy(**half)
        outer = MixedPrecisionPolicy(**half, output_dtype=torch.float32)
        # Some parts compute in float32, such as norms, and are followed by others in bfloat16.
        root.forward = torch.autocast(kind, torch.bfloat16)(root.forward)
    mesh = init_device_mesh(kind, (ranks.count(),))
    for parameter in root.parameters():
        parameter.data = parameter.data.contiguous()
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=inner)
    # By default, the weights of the root stay gathered after a pass.
    fully_shard(root, mesh=mesh, mp_policy=outer, reshard_after_forward=True)
    _precisions[root] = precision
    # Logits are a view, and nothing here changes them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def precision_of(root: nn.Module) -> str | None:
    """The precision that a model was dealt with; None if it was not."""
    return _precisions.get(root)


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold other parts of a tensor."""
    kinds = sys.modules.get("torch.distributed.tensor")  # unless it is imported, there are none
    return kinds is not None and isinstance(tensor, kinds.DTensor)


def has_sharded_weights(module: nn.Module) -> bool:
    """Whether weights of a module are dealt to the ranks."""
    return (
        dist.is_available() and dist.is_initialized() and any(map(is_sharded, module.parameters()))
    )


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this rank holds: some of its rows, or none."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full(tensor: Any) -> Tensor:
    """A tensor from the parts of all ranks, on the CPU; all ranks have to call this."""
    return tensor.detach().full_tensor().cpu() if is_sharded(tensor) else tensor


def local_rows(values: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of whole values, if they are dealt as another tensor is."""
    if not is_sharded(like):
        return values
    parts = values.chunk(ranks.count())
    return parts[ranks.rank()] if ranks.rank() < len(parts) else values[:0]


def from_local(values: Tensor, like: Any) -> Tensor:
    """A tensor whose part on this rank is given, dealt as another tensor of its shape is."""
    if not is_sharded(like):
        return values
    return type(like.data).from_local(
        values.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace gradients by their means over ranks; a rank without one counts as zero.

    Those of dealt weights are means already, made in the backward pass.
    """
    if ranks.count() == 1:
        return
    trained = [parameter for parameter in parameters if not is_sharded(parameter)]
    present = ranks.gathered([parameter.grad is not None for parameter in trained])
    pending: list[Any] = []
    with ranks.together():
        for parameter, anywhere in zip(trained, map(any, zip(*present, strict=True)), strict=True):
            if not anywhere:
                continue
            gradient = parameter.grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
            parameter.grad = gradient
            pending.append(dist.all_reduce(gradient, async_op=True))
        for work in pending:
            work.wait()
    for parameter in trained:
        if parameter.grad is not None:
            parameter.grad /= ranks.count()


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale all gradients down until their common norm is at most `most`; return it as it was."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(map(is_sharded, trained)):
        return nn.utils.clip_grad_norm_(trained, most).item()
    gradients = [local(parameter.grad) for parameter in trained]
    squares = torch.zeros(2, dtype=torch.float64)  # of what all ranks have alike, and of parts
    for parameter, gradient in zip(trained, gradients, strict=True):
        squares[int(is_sharded(parameter))] += gradient.double().square().sum().cpu()
    norm = math.sqrt(squares[0] + ranks.summed(squares[1]))
    if norm > most:
        for gradient in gradients:
            gradient.mul_(most / (norm + 1e-6))
    return norm


@autograd(False)
def copy_first(parameters: Iterable[Tensor]) -> None:
    """Replace tensors by the first rank's; what is dealt stays as it is."""
    if ranks.count() == 1:
        return
    with ranks.together():
        for parameter in parameters:
            if is_sharded(parameter):
                continue
            first = parameter.detach().contiguous()
            dist.broadcast(first, src=0)
            parameter.copy_(first)

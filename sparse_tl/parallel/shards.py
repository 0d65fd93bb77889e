"""Sharded weights (FSDP2): each rank holds some rows of every weight.

A layer's weights are gathered while a pass is in it. Outside a pass, a sharded weight is a
`DTensor`: it has the full weight's shape, but only this rank's rows. All ranks therefore have to
run the same passes, and code that reads or writes weights uses the `local` tensor, or gathers the
`full` one. For all other tensors, both are the tensor itself.
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

from sparse_tl.calls.scopes import autograd
from sparse_tl.parallel import ranks

_precisions: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def shard(root: nn.Module, layers: Iterable[nn.Module], precision: str) -> None:
    """Shard the weights of a model over the ranks, in place, and move each shard to its device.

    Args:
        root: module that a pass calls.
        layers: modules inside it, whose weights are gathered one layer after the other.
        precision: "bf16" gathers and computes in bfloat16; the weights themselves, gradients and
            outputs keep their dtypes, as in "float32".

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
        # Some modules, such as norms, compute in float32, and bfloat16 modules read their outputs.
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
    """The precision that a model was sharded with; None if it was not sharded."""
    return _precisions.get(root)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is sharded over the ranks."""
    kinds = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    return kinds is not None and isinstance(tensor, kinds.DTensor)


def has_sharded_weights(module: nn.Module) -> bool:
    """Whether any weights of a module are sharded."""
    return (
        dist.is_available() and dist.is_initialized() and any(map(is_sharded, module.parameters()))
    )


def local(tensor: Any) -> Tensor:
    """This rank's shard of a tensor: some of its rows, or none."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full(tensor: Any) -> Tensor:
    """The full tensor, gathered from all ranks onto the CPU; all ranks have to call this."""
    return tensor.detach().full_tensor().cpu() if is_sharded(tensor) else tensor


def local_rows(values: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of full values, if they are sharded like another tensor."""
    if not is_sharded(like):
        return values
    chunks = values.chunk(ranks.count())
    return chunks[ranks.rank()] if ranks.rank() < len(chunks) else values[:0]


def from_local(values: Tensor, like: Any) -> Tensor:
    """A tensor from this rank's shard, sharded like another tensor of its full shape."""
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
    """Replace gradients with their means over ranks; a missing gradient counts as zero.

    The gradients of sharded weights are already averaged in the backward pass.
    """
    if ranks.count() == 1:
        return
    trained = [parameter for parameter in parameters if not is_sharded(parameter)]
    present = ranks.gathered([parameter.grad is not None for parameter in trained])
    pending: list[Any] = []
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


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients so that their joint norm is at most `max_norm`; return the original norm."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(map(is_sharded, trained)):
        return nn.utils.clip_grad_norm_(trained, max_norm).item()
    gradients = [local(parameter.grad) for parameter in trained]
    squares = torch.zeros(2, dtype=torch.float64)  # of full gradients, and of shards
    for parameter, gradient in zip(trained, gradients, strict=True):
        squares[int(is_sharded(parameter))] += gradient.double().square().sum().cpu()
    norm = math.sqrt(squares[0] + ranks.summed(squares[1]))
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))
    return norm


@autograd(False)
def copy_first(parameters: Iterable[Tensor]) -> None:
    """Replace tensors with the first rank's, except sharded ones."""
    if ranks.count() == 1:
        return
    for parameter in parameters:
        if is_sharded(parameter):
            continue
        first = parameter.detach().contiguous()
        dist.broadcast(first, src=0)
        parameter.copy_(first)

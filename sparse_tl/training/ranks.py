"""Ranks: the processes of a run that was started by `accelerate launch`, `torchrun` or a notebook.

Every rank runs the same program and takes its own rows of every micro-batch. Means over rows are
joined by `mean` and `total` before anything nonlinear uses them, and gradients are averaged, so
that all ranks continue as one process on all rows would. A lone process is the only rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast, broadcast_object_list, gather_object, reduce
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from sparse_tl.backend import HookedModel, has_sharded_weights, is_sharded, processes
from sparse_tl.data.batches import TokenBatch

Value = TypeVar("Value")


def own_parts(batch: TokenBatch, model: HookedModel) -> list[TokenBatch]:
    """This rank's rows, grouped by length: in one group if ranks have to make equal passes."""
    ranks = processes()
    rows = batch.shard(ranks.process_index, ranks.num_processes)
    assert isinstance(model, nn.Module)
    return rows.by_length(1) if has_sharded_weights(model) else rows.by_length()


def gathered(value: Value) -> list[Value]:
    """The values of all ranks, in the order of ranks; tensors have to be on the CPU."""
    processes()
    return gather_object([value])


def from_first(value: Value) -> Value:
    """The first rank's value."""
    processes()
    return broadcast_object_list([value])[0]


def check_alike(facts: Mapping[str, Any]) -> None:
    """Check that some facts, by name, are the same on every rank; all ranks raise the error."""
    first, *others = gathered(dict(facts))
    for number, there in enumerate(others, start=1):
        if names := [name for name in first if first[name] != there.get(name)]:
            raise ValueError(
                f"rank {number} differs from rank 0 in {', '.join(names[:5])}; give every rank the "
                "same command, model and data"
            )


def total(values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The sum over ranks, from which every rank computes the joint objective.

    Its gradient is that of the rank's own values, times the number of ranks: averaged over ranks,
    that of the joint objective.
    """
    n = processes().num_processes
    if n == 1:
        return values
    summed = reduce(values.detach().contiguous(), "sum")
    return summed + n * (values - values.detach())  # the difference is 0, with a gradient


def mean(values: Float[Tensor, "*shape"], dim: int = 0) -> Tensor:
    """The mean along an axis that is split over ranks; differentiable, like `total`."""
    if processes().num_processes == 1:
        return values.mean(dim=dim)
    n = torch.tensor(float(values.shape[dim]), dtype=torch.float64, device=values.device)
    return total(values.sum(dim=dim)) / total(n).to(values.dtype)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace gradients with their means over ranks; one that a rank lacks counts as zero there.

    The gradients of sharded weights are already averaged in the backward pass.
    """
    if processes().num_processes == 1:
        return
    trained = [parameter for parameter in parameters if not is_sharded(parameter)]
    present = gathered([parameter.grad is not None for parameter in trained])
    for parameter, anywhere in zip(trained, map(any, zip(*present, strict=True)), strict=True):
        if anywhere:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(gradient.detach().contiguous(), "mean")


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients so that their joint norm is at most `max_norm`; return the original norm."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(map(is_sharded, trained)):
        return nn.utils.clip_grad_norm_(trained, max_norm).item()
    gradients: list[Any] = [parameter.grad for parameter in trained]
    n_holders = [1 if is_sharded(g) else processes().num_processes for g in gradients]
    gradients = [g.to_local() if is_sharded(g) else g for g in gradients]
    squares = [g.double().square().sum() / n for g, n in zip(gradients, n_holders, strict=True)]
    norm = reduce(torch.stack(squares).sum(), "sum").sqrt().item()
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))
    return norm


def spread(value: Tensor | None, like: Any) -> Tensor:
    """The first rank's value, on the device of another tensor, and sharded if that is."""
    if value is None:
        assert not processes().is_main_process
        value = torch.empty(like.shape, dtype=like.dtype)
    value = value.to(like.device).contiguous()
    if is_sharded(like):
        from torch.distributed.tensor import distribute_tensor  # slow import

        return distribute_tensor(value, like.device_mesh, like.placements)
    processes()
    return broadcast(value)

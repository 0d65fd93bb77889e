"""Ranks: the processes of a job started by `accelerate launch`, `notebook_launcher` or `torchrun`.

Every rank runs the same program on the same model and data, and takes its share of the rows. The
results of all shares are joined before anything depends on them, so all ranks continue alike. A
process that was started alone is the only rank: every function here then returns what it is given.

A process that was launched as one of several joins the others at its first call. From then on, all
ranks have to make the same calls in the same order; one that waits longer than `TIMEOUT`, or loses
another rank, raises an error of torch.distributed.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others."""

Value = TypeVar("Value")


def count() -> int:
    """Number of ranks."""
    return dist.get_world_size() if _joined() else 1


def rank() -> int:
    """Number of this rank, from 0."""
    return dist.get_rank() if _joined() else 0


def is_first() -> bool:
    """Whether this rank is the one that writes and shows progress."""
    return rank() == 0


def device() -> str | None:
    """The device of this rank: its own GPU, or the CPU; None if there is only one rank.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    if count() == 1:
        return None
    return f"cuda:{_local_rank()}" if _on_gpus() else "cpu"


def gathered(value: Value) -> list[Value]:
    """The values of all ranks, in the order of ranks; tensors have to be on the CPU."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Value) -> Value:
    """The first rank's value."""
    if count() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_first(call: Callable[[], Value]) -> Value:
    """Call a function on the first rank; all ranks return its result, or raise its error."""
    if count() == 1:
        return call()
    result, failed = from_first(_tried(call) if is_first() else ([], None))
    if failed is not None:
        raise failed
    return result[0]


def on_each(call: Callable[[], Value]) -> Value:
    """Call a function on every rank; if it fails on any rank, raise that error on all ranks."""
    if count() == 1:
        return call()
    result, failed = _tried(call)
    for error in gathered(failed):
        if error is not None:
            raise error
    return result[0]


def share(items: Sequence[Value]) -> Sequence[Value]:
    """This rank's share of some items: every n-th one, starting with the rank's number."""
    return items[rank() :: count()]


def in_order(results: Sequence[Value]) -> list[Value]:
    """The results of all ranks for their `share` of the items, in the order of the items.

    Args:
        results: one result for every item of this rank's share; tensors have to be on the CPU.

    Raises:
        ValueError: the ranks took shares of different numbers of items.
    """
    by_rank, n = gathered(results), count()
    items = sum(map(len, by_rank))
    if any(len(some) != len(range(number, items, n)) for number, some in enumerate(by_rank)):
        raise ValueError(
            "expected all ranks to work on the same data; they have results for "
            f"{list(map(len, by_rank))} pieces of it. Give every rank the same data."
        )
    return [by_rank[item % n][item // n] for item in range(items)]


def summed(values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The sum over ranks, in their order, of tensors on the CPU; bit-identical on all ranks."""
    first, *others = gathered(values)
    for values in others:
        first = first + values
    return first


def largest_share(n: int) -> int:
    """The largest size of a rank's `share` of `n` items."""
    return -(-n // count())


def total(values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The sum over ranks, differentiable for `shards.average_gradients`.

    Every rank computes the joint objective from such sums. Its gradient is that of its own share,
    times the number of ranks. Averaged over ranks, this is the gradient of the joint objective, as
    it also is for terms that do not depend on shares.
    """
    if count() == 1:
        return values
    summed = _Total.apply(values)
    assert isinstance(summed, Tensor)
    return summed


def mean(values: Float[Tensor, "*shape"], dim: int = 0) -> Tensor:
    """The mean along an axis that is split over ranks; differentiable, like `total`."""
    if count() == 1:
        return values.mean(dim=dim)
    n = torch.tensor(float(values.shape[dim]), dtype=torch.float64, device=values.device)
    return total(values.sum(dim=dim)) / total(n).to(values.dtype)


def check_alike(facts: Mapping[str, Any]) -> None:
    """Check that all ranks were started alike.

    Args:
        facts: values that have to be the same on every rank, by name.

    Raises:
        ValueError: a rank differs from the first; raised on every rank, with that rank's number.
    """
    first, *others = gathered(dict(facts))
    for number, there in enumerate(others, start=1):
        names = [name for name in first | there if first.get(name) != there.get(name)]
        if names:
            differences = ", ".join(
                f"{name}: {there.get(name)!r} there, {first.get(name)!r} on rank 0"
                for name in names[:5]
            )
            raise ValueError(
                f"expected all ranks to be started alike; rank {number} differs from rank 0 "
                f"({differences}). Give every rank the same installation, command and data."
            )


def leave() -> None:
    """Leave the other ranks, at the end of the program."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # type: ignore[override]
        summed = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * count()


def _joined() -> bool:
    """Whether there are several ranks; joins them if this process was launched as one."""
    if not dist.is_available():
        return False
    if not dist.is_initialized() and _launched():
        if _on_gpus():
            torch.cuda.set_device(_local_rank())
        else:
            _share_cores()
        dist.init_process_group("cpu:gloo,cuda:nccl" if _on_gpus() else "gloo", timeout=TIMEOUT)
    return dist.is_initialized()


def _share_cores() -> None:
    """Divide this machine's cores among its ranks, as `torchrun` does."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))


def _launched() -> bool:
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return True
    if _cpu_asked_for() and "MASTER_PORT" in os.environ and "RANK" not in os.environ:
        raise ValueError(
            "expected to be started as several ranks; `accelerate launch --cpu` starts one "
            "process and ignores --num_processes. Use `accelerate launch --multi_gpu "
            "--num_processes 2`, which also works without GPUs, or `torchrun --nproc-per-node 2`."
        )
    return False


def _cpu_asked_for() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def _on_gpus() -> bool:
    return torch.cuda.is_available() and not _cpu_asked_for()


def _local_rank() -> int:
    """Number of this rank on its machine, and of its GPU."""
    number, n_gpus = int(os.environ.get("LOCAL_RANK", rank())), torch.cuda.device_count()
    if number >= n_gpus:
        raise ValueError(
            f"expected a GPU for every rank; there are {n_gpus} on this machine, too few for its "
            f"rank {number}. Start at most {n_gpus} ranks on it."
        )
    return number


def _tried(call: Callable[[], Value]) -> tuple[list[Value], Exception | None]:
    """A function's result, or its error in a form that other ranks can raise."""
    try:
        return [call()], None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return [], RuntimeError(f"{type(error).__name__} on rank {rank()}: {error}")
        return [], error

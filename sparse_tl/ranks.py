"""Ranks: the processes of one job, as `accelerate launch`, `notebook_launcher` or `torchrun` start.

Every rank runs the same program on the same model and data and takes its own share of the rows.
What is computed from shares is joined before anything depends on it, so all ranks go on alike. A
process that was started alone is the only rank: every function here then returns what it is given.

A process that was launched as one of several joins the others at its first call. From there on,
all ranks have to make the same calls in the same order; a rank that waits in vain for
`TIMEOUT`, or that loses another one, raises `LostRankError`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from sparse_tl.scopes import scope

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others."""
_LAST_WORD = "sparse_tl/last word"

Value = TypeVar("Value")


class LostRankError(ConnectionError):
    """Another rank ended, or did not answer in time."""


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
    """The device of this rank: a GPU of its own, or the CPU; None if there is only one rank.

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
    with together():
        dist.all_gather_object(values, value)
    return values


def from_first(value: Value) -> Value:
    """The first rank's value."""
    if count() == 1:
        return value
    values = [value]
    with together():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def on_first(call: Callable[[], Value]) -> Value:
    """What a function returns, or raises, on the first rank; the others wait for it."""
    if count() == 1:
        return call()
    found, failed = from_first(_tried(call) if is_first() else ([], None))
    if failed is not None:
        raise failed
    return found[0]


def on_each(call: Callable[[], Value]) -> Value:
    """What a function returns on this rank; raises on all ranks what it raises on any."""
    if count() == 1:
        return call()
    found, failed = _tried(call)
    for error in gathered(failed):
        if error is not None:
            raise error
    return found[0]


def share(items: Sequence[Value]) -> Sequence[Value]:
    """This rank's share of some work: items are dealt to the ranks in turn."""
    return items[rank() :: count()]


def in_order(found: Sequence[Value]) -> list[Value]:
    """What all ranks found for their `own` items, in the order of the items.

    Args:
        found: one result for every own item; tensors have to be on the CPU.

    Raises:
        ValueError: ranks were dealt from different numbers of items.
    """
    parts, n = gathered(found), count()
    items = sum(map(len, parts))
    if any(len(part) != len(range(number, items, n)) for number, part in enumerate(parts)):
        raise ValueError(
            "expected all ranks to work on the same data; what they found is for "
            f"{[len(part) for part in parts]} pieces of it. Give every rank the same data."
        )
    return [parts[place % n][place // n] for place in range(items)]


def summed(values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The sum over ranks, in their order, of tensors on the CPU; the same bits on all ranks."""
    first, *others = gathered(values)
    for values in others:
        first = first + values
    return first


def largest_share(n: int) -> int:
    """The largest number of items, out of `n`, that a rank gets if they are dealt in turn."""
    return -(-n // count())


def total(values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The sum over ranks, differentiable for `shards.average_gradients`.

    Every rank computes the joint objective from such sums, so every rank gives the gradient of its
    own share, times the number of ranks; averaged over ranks that is the gradient of the joint
    objective, as it is for what does not depend on shares.
    """
    if count() == 1:
        return values
    summed = _Total.apply(values)
    assert isinstance(summed, Tensor)
    return summed


def mean(values: Float[Tensor, "*shape"], dim: int = 0) -> Tensor:
    """The mean along an axis whose entries are spread over ranks; differentiable, as `total`."""
    if count() == 1:
        return values.mean(dim=dim)
    n = torch.tensor(float(values.shape[dim]), dtype=torch.float64, device=values.device)
    return total(values.sum(dim=dim)) / total(n).to(values.dtype)


def check_alike(facts: Mapping[str, Any]) -> None:
    """Check that all ranks were started alike.

    Args:
        facts: what has to be the same on every rank, by name.

    Raises:
        ValueError: a rank differs from the first; raised on every rank, and names it.
    """
    first, *others = gathered(dict(facts))
    for number, there in enumerate(others, start=1):
        names = [name for name in first | there if first.get(name) != there.get(name)]
        if names:
            said = ", ".join(
                f"{name}: {there.get(name)!r} there, {first.get(name)!r} on rank 0"
                for name in names[:5]
            )
            raise ValueError(
                f"expected all ranks to be started alike; rank {number} differs from rank 0 "
                f"({said}). Give every rank the same installation, command and data."
            )


def announce_end(said: str) -> None:
    """Tell the other ranks why this one ends, if they can still be told."""
    if count() > 1:
        with suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            store.set(_LAST_WORD, f"rank {rank()} ended with {said}")


def announced_end() -> str | None:
    """What another rank said when it ended, if it did."""
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        if store.check([_LAST_WORD]):
            return store.get(_LAST_WORD).decode()
    return None


def leave() -> None:
    """Leave the other ranks, at the end of the program."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # type: ignore[override]
        summed = values.detach().clone(memory_format=torch.contiguous_format)
        with together():
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
        with together():
            dist.init_process_group("cpu:gloo,cuda:nccl" if _on_gpus() else "gloo", timeout=TIMEOUT)
    return dist.is_initialized()


def _share_cores() -> None:
    """Give each rank of this machine its share, as `torchrun` does."""
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
    """Number of this rank on its machine, which is that of its GPU."""
    number, n_gpus = int(os.environ.get("LOCAL_RANK", rank())), torch.cuda.device_count()
    if number >= n_gpus:
        raise ValueError(
            f"expected a GPU for every rank; rank {number} of this machine has none of its "
            f"{n_gpus}. Start at most {n_gpus} on it."
        )
    return number


@scope
def together() -> Iterator[None]:
    """What ranks do together; fails if one of them is gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LostRankError(
            "another rank ended, or did not answer within "
            f"{TIMEOUT.total_seconds() / 60:.0f} minutes; its own output says why ({reason[:300]})"
        ) from error


def _tried(call: Callable[[], Value]) -> tuple[list[Value], Exception | None]:
    """What a function returns, or raises, in a form that other ranks can raise."""
    try:
        return [call()], None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return [], RuntimeError(f"{type(error).__name__} on rank {rank()}: {error}")
        return [], error

"""Several ranks on this machine: forked processes that talk by gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor
from type_checks import checks_end


def on_ranks(n: int, job: Callable[[int], Any], seconds: float = 300) -> list[Any]:
    """What a function returns on each of `n` ranks, or the exception that it raises there.

    It is called with the number of the rank. A rank that ends without either gives None.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs processes that can be forked")
    forked = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [forked.Pipe(duplex=False) for _ in range(n)]
        ranks = [
            forked.Process(target=_rank, args=(number, n, Path(folder) / "store", job, end))
            for number, (_, end) in enumerate(ends)
        ]
        for rank in ranks:
            rank.start()
        for _, end in ends:
            end.close()  # so that the end of a rank is seen here
        found = [_answer(end, seconds) for end, _ in ends]
        for rank in ranks:
            rank.join(seconds)
            if rank.is_alive():
                rank.kill()
    return found


def _rank(number: int, n: int, store: Path, job: Callable[[int], Any], end: Any) -> None:
    checks_end()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    os.environ |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    PartialState._reset_state()  # that of the process that forked
    torch.set_num_threads(1)  # the threads of the process that forked are not here
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), n),
        rank=number,
        world_size=n,
        timeout=timedelta(minutes=5),
    )
    try:
        answer = job(number)
    except BaseException as error:
        answer = error
    end.send_bytes(pickle.dumps(answer))


def _answer(end: Any, seconds: float) -> Any:
    try:
        return pickle.loads(end.recv_bytes()) if end.poll(seconds) else TimeoutError(seconds)
    except EOFError:
        return None


Trained = tuple[pd.DataFrame, dict[str, Tensor]]
"""A run's history, and its tensors by name."""


def assert_same(one: Trained, other: Trained) -> None:
    """Check that two runs are the same bit for bit."""
    pd.testing.assert_frame_equal(one[0], other[0], check_exact=True)
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


def stop() -> None:
    """Tell this process to end, as a cluster does."""
    os.kill(os.getpid(), signal.SIGTERM)

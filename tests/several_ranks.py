"""Several ranks on this machine: forked processes that talk by gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


def on_ranks(n: int, job: Callable[[int], Any], seconds: float = 60) -> list[Any]:
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
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # the threads of the process that forked are not here
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), n),
        rank=number,
        world_size=n,
        timeout=timedelta(seconds=30),
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

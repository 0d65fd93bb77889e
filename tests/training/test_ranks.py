"""What ranks tell each other, also those of a notebook."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from accelerate import notebook_launcher
from several_ranks import on_ranks
from short_runs import Build, Rows, short_run
from torch import nn

from sparse_tl import SparseTransformer
from sparse_tl.backend import checked_device, processes
from sparse_tl.training import ranks


def test_the_first_rank_speaks_for_all() -> None:
    assert on_ranks(3, lambda rank: ranks.from_first(rank * 7 + 1)) == [1, 1, 1]
    assert on_ranks(3, lambda rank: ranks.gathered(rank)) == [[0, 1, 2]] * 3


def test_a_gradient_that_a_rank_lacks_counts_as_zero() -> None:
    def job(rank: int) -> list[torch.Tensor | None]:
        one, other, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
        (one * 4).sum().backward()
        if rank == 1:
            (other * 6).sum().backward()
        ranks.average_gradients([one, other, unused])
        return [one.grad, other.grad, unused.grad]

    for one, other, unused in on_ranks(2, job):
        assert one.tolist() == [4.0, 4.0] and other.tolist() == [3.0, 3.0] and unused is None


@pytest.mark.long
def test_a_notebook_launches_ranks(build_tiny: Build, echo_rows: Rows, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def job() -> None:
        rank = processes().process_index
        said = [rank, processes().num_processes, checked_device(None), ranks.gathered(rank)]
        outcome = short_run(SparseTransformer(build_tiny()), echo_rows, steps=2)
        said += outcome.history["loss"].dropna().tolist()
        (tmp_path / str(rank)).write_text(json.dumps(said))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        notebook_launcher(job, num_processes=2, use_port=str(port))
    said = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [some[:4] for some in said] == [[rank, 2, "cpu", [0, 1]] for rank in range(2)]
    assert len(said[0]) == 6 and said[0][4:] == said[1][4:], "the loss of both steps, on both"
    assert processes().num_processes == 1 and "RANK" not in os.environ

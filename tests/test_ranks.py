"""What ranks tell each other, and that one process alone is left as it is."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from accelerate import notebook_launcher
from several_ranks import on_ranks
from torch import nn

from sparse_tl import AdditionTask, ShuffledStream, load_addition_models, post_train
from sparse_tl.parallel import ranks, shards


def test_one_process_is_the_only_rank() -> None:
    assert (ranks.count(), ranks.rank(), ranks.is_first(), ranks.device()) == (1, 0, True, None)
    values = torch.randn(5, 3, requires_grad=True)
    assert ranks.total(values) is values
    assert torch.equal(ranks.mean(values, dim=1), values.mean(dim=1))
    assert ranks.share([1, 2, 3]) == ranks.in_order([1, 2, 3]) == [1, 2, 3]
    assert ranks.from_first(values) is values and ranks.on_first(lambda: values) is values
    ranks.check_alike({"anything": 1})


@pytest.mark.parametrize("n_items", [1, 2, 7])
def test_work_is_dealt_and_put_back_in_order(n_items: int) -> None:
    def job(rank: int) -> tuple[list[int], int]:
        return ranks.in_order(
            [10 * item for item in ranks.share(range(n_items))]
        ), ranks.largest_share(7)

    assert on_ranks(3, job) == [([10 * item for item in range(n_items)], 3)] * 3


def test_work_on_different_data_is_refused() -> None:
    for error in on_ranks(2, lambda rank: ranks.in_order([0] * (3 if rank else 5))):
        assert isinstance(error, ValueError)
        assert "all ranks to work on the same data" in str(error) and "[5, 3]" in str(error)


def test_the_first_rank_speaks_for_all() -> None:
    assert on_ranks(3, lambda rank: ranks.from_first(rank * 7 + 1)) == [1, 1, 1]
    asked = on_ranks(3, lambda rank: (ranks.on_first(os.getpid), os.getpid()))
    assert {pid for pid, _ in asked} == {asked[0][1]} and asked[0][1] != asked[1][1]

    def fail() -> None:
        raise FileNotFoundError(2, "no such folder")

    for error in on_ranks(2, lambda rank: ranks.on_first(fail)):
        assert isinstance(error, FileNotFoundError) and error.errno == 2


def test_the_gradient_of_joint_means() -> None:
    """Of a product of means and of what does not depend on shares, against one process's."""
    torch.manual_seed(0)
    rows = torch.randn(7, 3, dtype=torch.float64)

    def gradient(some: torch.Tensor) -> tuple[float, torch.Tensor]:
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        first, second = (ranks.mean(f(some * weight), dim=0) for f in (torch.exp, torch.tanh))
        objective = (first * second).sum().log1p() + weight.pow(3).sum()
        objective.backward()
        shards.average_gradients([weight])
        assert weight.grad is not None
        return objective.item(), weight.grad

    expected = gradient(rows)
    for found in on_ranks(3, lambda rank: gradient(rows[rank::3])):
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=0)


def test_a_gradient_that_a_rank_lacks_counts_as_zero() -> None:
    def job(rank: int) -> list[torch.Tensor | None]:
        one, other, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
        (one * 4).sum().backward()
        if rank == 1:
            (other * 6).sum().backward()
        shards.average_gradients([one, other, unused])
        return [one.grad, other.grad, unused.grad]

    for one, other, unused in on_ranks(2, job):
        assert one.tolist() == [4.0, 4.0] and other.tolist() == [3.0, 3.0] and unused is None


@pytest.mark.long
def test_a_notebook_launches_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def job() -> None:
        said = [ranks.rank(), ranks.count(), ranks.device(), ranks.gathered(ranks.rank())]
        _, sparse = load_addition_models()
        rows = AdditionTask().split()[0].select(slice(0, 32))
        outcome = post_train(
            sparse,
            ShuffledStream(rows, 16),
            validation=rows,
            target_loss="+1",
            steps=2,
            progress=False,
        )
        said += [torch.get_num_threads(), *outcome.history["loss"].dropna()]
        (tmp_path / str(ranks.rank())).write_text(json.dumps(said))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.delenv("OMP_NUM_THREADS", raising=False)
        notebook_launcher(job, num_processes=2, use_port=str(port))
    said = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [some[:4] for some in said] == [[rank, 2, "cpu", [0, 1]] for rank in range(2)]
    assert {some[4] for some in said} == {max(1, torch.get_num_threads() // 2)}, "shared cores"
    assert len(said[0]) == 7 and said[0][5:] == said[1][5:], "the loss of both steps, on both"
    assert ranks.count() == 1


def test_one_process_where_several_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --cpu --num_processes 2` sets these, and starts one process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match="accelerate launch --multi_gpu --num_processes 2"):
        ranks.count()

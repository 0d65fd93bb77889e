"""Contrastive gates keep the sub-task that is retained and lose the other, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_tl.backend import Model
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles import ContrastiveGates, fit_contrastive_head_gates
from sparse_tl.head_roles.likelihood import Contrast, GatedHeads

LOW, HIGH = 0, 6
SETTINGS: dict[str, Any] = {"updates": 60, "batch_size": 16, "progress": False}


def _rows(task: int, n: int = 48) -> TokenBatch:
    """Two equal tokens t, below 6 or from 6 on, to be answered with t + 1."""
    tokens = (task + torch.arange(n) % 6)[:, None].repeat(1, 2)
    return TokenBatch(tokens, tokens + 1, torch.tensor([[False, True]]).repeat(n, 1))


@pytest.fixture(scope="module")
def two_tasks(build_looking_up: Callable[..., Model]) -> Model:
    """Head 0 does one sub-task, head 1 the other."""
    return build_looking_up(split=6)


def _fit(model: Model, retain: int, forget: int, **settings: Any) -> ContrastiveGates:
    return fit_contrastive_head_gates(
        model,
        TargetDataset(_rows(retain)),
        TargetDataset(_rows(forget)),
        seeds=2,
        **{**SETTINGS, **settings},
    )


@pytest.mark.long
def test_the_retained_task_stays_likely_and_swapping_reverses_it(two_tasks: Model) -> None:
    for retain, forget in ((LOW, HIGH), (HIGH, LOW)):
        found = _fit(two_tasks, retain, forget)
        assert max(found.dense_retained_loss, found.dense_forgotten_loss) < 0.1
        assert (found.retained_losses < 0.5).all()
        assert (found.forgotten_losses > found.retained_losses + 1).all()
        kept, lost = found.gates[:, 0, retain // 6], found.gates[:, 0, forget // 6]
        assert (kept > 3 * lost).all()


def test_the_contrast_is_the_stated_loss(two_tasks: Model) -> None:
    gated = GatedHeads(two_tasks, torch.tensor([[[1.0, -2]], [[-6.0, 5]]]))
    forget = ShuffledStream(_rows(HIGH), 8)
    objective = Contrast(gated, 0.2, 10, forget)
    batch = _rows(LOW).select(slice(0, 8))
    found, _ = objective.measure(batch, torch.Generator(), 0.0)
    kept, lost = -gated(batch).mean(dim=1), -gated(forget.batch(0)).mean(dim=1)
    expected = sum(
        -k + max(n - k, -5) - 0.2 * theta.clamp(-4, 4).mean().item()
        for k, n, theta in zip(kept.tolist(), lost.tolist(), gated.theta, strict=True)
    )
    assert found.item() == pytest.approx(expected, abs=1e-5)
    found.backward()
    assert gated.theta.grad is not None
    # The margin's reference is held fixed: what is retained is not made less likely for its sake.
    by_hand = GatedHeads(two_tasks, gated.theta.detach())
    kept, lost = -by_hand(batch).mean(dim=1), -by_hand(forget.batch(0)).mean(dim=1)
    margin = torch.where(lost - kept > -5, lost, torch.zeros_like(lost))
    (margin - kept - 0.2 * by_hand.mean_theta()).sum().backward()
    assert by_hand.theta.grad is not None
    assert torch.allclose(gated.theta.grad, by_hand.theta.grad, atol=1e-6)


def test_contrastive_gates_are_resumed(two_tasks: Model, tmp_path: Path) -> None:
    few = {"updates": 6}
    found = _fit(two_tasks, LOW, HIGH, checkpoint=tmp_path / "checkpoint", **few)
    again = _fit(two_tasks, LOW, HIGH, checkpoint=tmp_path / "checkpoint", **few)
    assert torch.equal(again.gates, found.gates)
    assert torch.equal(again.forgotten_losses, found.forgotten_losses)
    with pytest.raises(ValueError, match="belongs to another run"):
        _fit(two_tasks, HIGH, LOW, checkpoint=tmp_path / "checkpoint", **few)

"""Heads whose roles are known come out with these roles, and ablating them does what it must."""

from __future__ import annotations

import pytest
import torch
from planted_heads import DEAD, INTERFERER

from sparse_tl.backend import Model
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles import AblationCurve, HeadRoles, ablation_curve, fit_head_gates
from sparse_tl.head_roles.likelihood import target_log_probabilities

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def roles(planted: Model, echo_targets: TargetDataset) -> HeadRoles:
    """At a pressure of 0.01 nats per head, so that what does not matter matters less than that."""
    return fit_head_gates(
        planted, echo_targets, seeds=2, updates=80, batch_size=16, lambda_=0.01, progress=False
    )


def _curve(
    planted: Model, roles: HeadRoles, echo_targets: TargetDataset, by: str, **options: object
) -> AblationCurve:
    rows = echo_targets.select(slice(0, 64))
    return ablation_curve(planted, roles, rows, by, progress=False, **options)  # type: ignore[arg-type]


def _planted_damage(model: Model, rows: TargetDataset, gates: torch.Tensor) -> float:
    """Log P without the interferer, minus that with it, all other heads at these gates."""
    both = gates.repeat(2, 1, 1)
    both[:, *INTERFERER] = torch.tensor([0.0, 1.0])
    without, given = target_log_probabilities(model, rows.rows, both).mean(dim=1).tolist()
    return without - given


def test_a_dead_head_is_irrelevant(roles: HeadRoles) -> None:
    assert (roles.score("irrelevance")[:, *DEAD] >= 0.9).all()


def test_the_interferer_ranks_first(roles: HeadRoles) -> None:
    layer, head = INTERFERER
    assert (roles.order("interference")[:, 0] == 4 * layer + head).all()
    assert (roles.score("interference")[:, *INTERFERER] > 0.5).all()


def test_trained_heads_facilitate(roles: HeadRoles) -> None:
    trained = roles.score("facilitation")[:, :, :2]
    assert (trained >= 0.5).any(dim=2).any(dim=1).all()
    assert (roles.score("facilitation")[:, :, 2:] < 0.5).all()


def test_ablating_the_interferer_gives_back_what_it_took(
    planted: Model, roles: HeadRoles, echo_targets: TargetDataset
) -> None:
    rows = echo_targets.select(slice(0, 64))
    found = _curve(planted, roles, echo_targets, "interference").values[:, 1]
    assert _planted_damage(planted, rows, torch.ones(2, 4)) > 1
    damages = [_planted_damage(planted, rows, gates) for gates in roles.g_plus[roles.fitted]]
    assert found.tolist() == pytest.approx(damages, rel=1e-4)


def test_each_role_moves_the_likelihood_its_own_way(
    planted: Model, roles: HeadRoles, echo_targets: TargetDataset
) -> None:
    curves = {
        by: _curve(planted, roles, echo_targets, by)
        for by in ("facilitation", "irrelevance", "interference")
    }
    for curve, by in zip(curves.values(), curves, strict=True):
        spaced = {0, 1, 2, 3, 4, 6, 8}
        assert curve.counts == tuple(sorted(spaced.union(curve.in_role)))
        assert (curve.values[:, 0] == 0).all()
        for values, count in zip(curve.values, curve.in_role, strict=True):
            there = values[: curve.counts.index(count) + 1]
            steps = there.diff()
            if by == "facilitation":
                assert count and (steps < 0).all()
            elif by == "irrelevance":
                assert there.abs().max() < 0.01
            else:
                assert count and (steps > 0).all()
    control = curves["facilitation"].control
    assert control is not None and control.shape == curves["facilitation"].values.shape
    between, four = control.mean(dim=0), curves["facilitation"].counts.index(4)
    assert curves["facilitation"].mean[four] < between[four]  # four heads facilitate
    assert between[1] < curves["interference"].mean[1]  # one interferes

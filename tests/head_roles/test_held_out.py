"""What fitted gates are worth: seeds that did not fit, heads that matter when they are gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sparse_tl.backend import Model
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles import HeadRoles, ablation_curve, fit_head_gates, fitting
from sparse_tl.head_roles.fitting import has_fitted

SETTINGS = {"updates": 25, "batch_size": 16, "progress": False}


@pytest.fixture(scope="module")
def one_stuck(
    build_echo: Callable[[], Model], echo_targets: TargetDataset
) -> tuple[HeadRoles, HeadRoles]:
    """Two seeds, the second so far shut that no gradient reaches its gates; and the first alone."""
    given = fitting.first_gates

    def first_gates(model: Model, seeds: tuple[int, ...]) -> torch.Tensor:
        theta = given(model, seeds)
        theta[1:] = -30
        return theta

    rows = echo_targets.select(slice(0, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "first_gates", first_gates)
        with pytest.warns(
            UserWarning, match=r"1 of 2 seeds did not fit .* seed 5: 4\.\d+ with G\+"
        ):
            both = fit_head_gates(build_echo(), rows, seeds=[0, 5], **SETTINGS)
    alone = {
        "seeds": (0,),
        "fitted": both.fitted[:1],
        "losses": both.losses[:, :1],
        "trajectories": both.trajectories[:, :1],
        "removed_together": both.removed_together[..., :1],
    }
    return both, replace(both, **alone)


@pytest.mark.long
def test_a_seed_that_never_fits_is_in_no_class(one_stuck: tuple[HeadRoles, HeadRoles]) -> None:
    both, alone = one_stuck
    assert both.fitted.tolist() == [True, False]
    assert both.losses[1, 1] > 2 > 0.3 > both.losses[1, 0]
    # By the gates alone every head of the second seed interferes.
    assert (both.g_plus[1] < 0.01).all()
    for role in ("facilitation", "irrelevance", "interference"):
        assert torch.allclose(both.score(role), alone.score(role), atol=1e-3)
        assert torch.equal(both.order(role), alone.order(role))
    assert both.consistency().equals(alone.consistency())
    assert torch.allclose(both.mean_scores(), alone.mean_scores(), atol=1e-3)
    table = both.to_pandas().set_index("seed")
    assert table.loc[5, "interference"].isna().all() and table.loc[0].notna().all().all()
    assert "1 of 2 seeds fitted" in repr(both)
    assert "left out of all classes" in both._repr_html_()


@pytest.mark.long
def test_ablation_leaves_a_stuck_seed_out(
    one_stuck: tuple[HeadRoles, HeadRoles],
    build_echo: Callable[[], Model],
    echo_targets: TargetDataset,
) -> None:
    both, alone = one_stuck
    rows = echo_targets.select(slice(0, 8))
    found, expected = (
        ablation_curve(build_echo(), roles, rows, progress=False) for roles in one_stuck
    )
    assert torch.allclose(found.values, expected.values, atol=1e-3)
    assert found.in_role == expected.in_role and len(found.in_role) == 1
    nothing = HeadRoles(**{**vars(both), "fitted": torch.tensor([False, False])})
    with pytest.raises(ValueError, match="no seed fitted. .* 2 of 2 seeds"):
        ablation_curve(build_echo(), nothing, rows, progress=False)
    with pytest.raises(ValueError, match="no seed fitted"):
        nothing.mean_scores()
    assert "0 of 2 seeds fitted" in repr(nothing)


def test_a_minimiser_is_never_said_not_to_fit() -> None:
    """All heads shut at a loss of just what the penalty pays is the worst that G- can be."""
    n_rows, n_labels, lambda_ = 10, 20, 0.1
    worst = torch.full((2, 1, n_rows), 0.799 * n_labels / n_rows)
    assert has_fitted(worst, n_labels, lambda_).tolist() == [True]
    assert has_fitted(worst + 0.1, n_labels, lambda_).tolist() == [False]
    assert has_fitted(worst + 0.1, n_labels, -0.11).tolist() == [True]
    # One odd prompt is no evidence; the same excess on every prompt is.
    odd = torch.zeros(2, 1, n_rows)
    odd[:, :, 0] = 20
    assert has_fitted(odd, n_labels, lambda_).tolist() == [True]
    assert has_fitted(odd.mean() + 0 * odd, n_labels, lambda_).tolist() == [False]


@pytest.fixture(scope="module")
def essential(build_looking_up: Callable[..., Model]) -> HeadRoles:
    """Head 0 alone writes what is asked for, ten times what the final norm needs of it."""
    with pytest.warns(UserWarning, match=r"irrelevant matter .* a0.h0 \+\d.*alone"):
        return fit_head_gates(
            build_looking_up(), _next_in_line(), seeds=[1, 4], **{**SETTINGS, "updates": 60}
        )


def _next_in_line() -> TargetDataset:
    """Two equal tokens t, to be answered with t + 1."""
    tokens = (torch.arange(48) % 12)[:, None].repeat(1, 2)
    mask = torch.tensor([[False, True]]).repeat(48, 1)
    return TargetDataset(TokenBatch(tokens, tokens + 1, mask))


@pytest.mark.long
def test_removal_tells_an_essential_head_that_its_gate_does_not(
    essential: HeadRoles, build_looking_up: Callable[..., Model]
) -> None:
    assert essential.fitted.all()
    assert (essential.g_minus[:, 0, 0] < 0.5).all()  # the norm undoes what the gate takes
    assert essential.members("irrelevance")[:, 0, 0].all()
    assert essential.removed[0, 0] > 1.7 > essential.price > essential.removed[0, 1].abs()
    table = essential.to_pandas()
    assert table.query("head == 0")["removed"].tolist() == [essential.removed[0, 0].item()] * 2
    # The oracle: the model's own logits with the head's output set to 0.
    model, (_, held_out) = build_looking_up(), _next_in_line().split(0.1)

    def nll(*removed: int) -> float:
        def remove(z: torch.Tensor, hook: object) -> torch.Tensor:
            z[:, :, list(removed)] = 0
            return z

        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", remove)]):
            chosen = model(held_out.rows.tokens)[:, -1].log_softmax(dim=-1)
        return -chosen.gather(1, held_out.rows.labels[:, 1:]).mean().item()

    for head in (0, 1):
        expected = nll(head) - nll()
        assert essential.removed[0, head].item() == pytest.approx(expected, abs=1e-5)
    both = nll(0, 1) - nll()
    assert essential.classes().loc["irrelevance"].tolist() == pytest.approx(
        [2, both, nll(0, 1) - essential.losses[1].mean().item()], abs=1e-4
    )

"""Head gates are fitted to the stated loss, seed by seed, resumably, and reported truly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finite_differences import derivative

from sparse_tl.backend import Model
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.data.targets import TargetDataset
from sparse_tl.gates import SparseTransformer
from sparse_tl.head_roles import (
    HeadRoles,
    fit_head_gates,
    likelihood,
    target_log_probabilities,
)
from sparse_tl.head_roles.fitting import check_fits, first_gates
from sparse_tl.head_roles.likelihood import GatedHeads, Likelihood

Build = Callable[..., Model]
SETTINGS: dict[str, Any] = {"updates": 6, "batch_size": 8, "record_every": 2, "progress": False}


def _dataset(n: int = 40, length: int = 6) -> TargetDataset:
    tokens = torch.randint(13, (n, length), generator=torch.Generator().manual_seed(5))
    return TargetDataset.from_tokens(tokens.tolist(), [(3, 5)] * n)


def _batch() -> TokenBatch:
    return _dataset(4).rows


def _nll(model: Model, rows: TokenBatch, gates: torch.Tensor) -> torch.Tensor:
    """By the model's own logits and a hook of its own."""

    def gate(z: torch.Tensor, hook: Any) -> torch.Tensor:
        return z * gates[hook.layer(), :, None]

    with model.hooks(fwd_hooks=[(lambda name: name.endswith("hook_z"), gate)]):
        logits = model(rows.tokens, **rows.model_kwargs)
    chosen = logits[rows.loss_mask].log_softmax(dim=-1)
    return -chosen[range(len(chosen)), rows.labels[rows.loss_mask]]


# The loss


def test_losses_are_those_of_the_models_logits(build_tiny: Build) -> None:
    model, batch = build_tiny("float64"), _batch()
    gates = torch.rand(3, 2, 2, dtype=torch.float64)
    found = GatedHeads(model, gates.logit())(batch)
    expected = torch.stack([_nll(model, batch, one) for one in gates])
    assert torch.allclose(found, expected, atol=1e-12)


def test_few_logits_at_a_time_change_nothing(
    build_tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = build_tiny("float64"), _batch()
    results = []
    for at_once in (2**24, 3 * 13 * 2):
        monkeypatch.setattr(likelihood, "LOGITS_AT_ONCE", at_once)
        gated = GatedHeads(model, torch.full((3, 2, 2), 0.4, dtype=torch.float64))
        losses = gated(batch)
        losses.square().sum().backward()
        results.append((losses.detach(), gated.theta.grad))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 1_000, 2**25])
def test_log_probabilities_are_summed_over_each_target(
    build_tiny: Build, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(likelihood, "ACTIVATIONS_AT_ONCE", at_once)
    model, rows = build_tiny("float64"), _dataset(7).rows
    gates = torch.rand(5, 2, 2, dtype=torch.float64)
    gates[2:4, 0] = 1  # of these, the first layer is that of the model alone
    expected = torch.stack([-_nll(model, rows, one).view(7, 2).sum(dim=1) for one in gates])
    found = target_log_probabilities(model, rows, gates)
    assert torch.allclose(found, expected, atol=1e-12)


def test_gradients_agree_with_finite_differences(build_tiny: Build) -> None:
    model, batch = build_tiny("float64"), _batch()
    gated = GatedHeads(model, torch.randn(2, 2, 2, dtype=torch.float64) * 2)
    objective = Likelihood(gated, 0.3, 10)

    def value() -> torch.Tensor:
        return objective.measure(batch, torch.Generator(), 0.0)[0]

    value().backward()
    found, step = gated.theta.grad, 1e-6
    assert found is not None
    for place in range(gated.theta.numel()):
        slope = derivative(value, gated.theta.detach().flatten(), place, step)
        assert found.flatten()[place].item() == pytest.approx(slope, abs=1e-7)


def test_the_penalty_pushes_within_its_range_alone(build_tiny: Build) -> None:
    gated = GatedHeads(build_tiny("float64"), torch.tensor([[[-5.0, -3.9], [0.0, 4.1]]]).double())
    (-0.2 * gated.mean_theta()).sum().backward()
    assert gated.theta.grad is not None
    assert gated.theta.grad.flatten().tolist() == pytest.approx([0, -0.2 / 4, -0.2 / 4, 0])


# The fit


@pytest.fixture(scope="module")
def fitted(build_tiny: Build) -> HeadRoles:
    return fit_head_gates(build_tiny("float64"), _dataset(), seeds=3, **SETTINGS)


def test_g_plus_and_g_minus_start_from_g0(fitted: HeadRoles) -> None:
    for stage in (1, 2):
        assert torch.equal(fitted.trajectories[stage, :, 0], fitted.g0)
    assert fitted.trajectories.shape == (3, 3, 4, 2, 2)
    assert (fitted.g_plus > fitted.g_minus).all()


def test_the_last_gates_are_recorded(build_tiny: Build) -> None:
    found = fit_head_gates(build_tiny(), _dataset(), seeds=1, **{**SETTINGS, "updates": 3})
    assert found.recorded_at == (0, 2, 3)
    assert found.trajectories.shape[2] == 3
    assert not torch.equal(found.trajectories[:, :, 1], found.trajectories[:, :, 2])


def test_first_gates_are_uniform_and_each_seeds_own(build_tiny: Build) -> None:
    gates = first_gates(build_tiny(n_layers=8, n_heads=16, d_head=1), range(20)).sigmoid()
    assert gates.min() < 0.01 and gates.max() > 0.99
    assert gates.mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.equal(first_gates(build_tiny(), [4]), first_gates(build_tiny(), range(5))[4:])


def test_a_stack_is_so_many_single_fits(build_tiny: Build, fitted: HeadRoles) -> None:
    for seed in (0, 2):
        alone = fit_head_gates(build_tiny("float64"), _dataset(), seeds=[seed], **SETTINGS)
        for name in ("losses", "trajectories"):
            found, expected = getattr(alone, name), getattr(fitted, name)
            assert torch.allclose(found, expected[:, seed : seed + 1], atol=1e-9), name
        assert alone.dense_loss == pytest.approx(fitted.dense_loss, abs=1e-12)


def test_pieces_of_a_batch_change_nothing(build_tiny: Build, fitted: HeadRoles) -> None:
    model = build_tiny("float64")
    pieces = fit_head_gates(model, _dataset(), seeds=3, accumulate=3, **SETTINGS)
    assert torch.allclose(pieces.g_minus, fitted.g_minus, atol=1e-9)


def test_the_other_sign_of_lambda_swaps_the_gates(build_tiny: Build, fitted: HeadRoles) -> None:
    model = build_tiny("float64")
    swapped = fit_head_gates(model, _dataset(), seeds=3, lambda_=-0.1, **SETTINGS)
    assert torch.equal(swapped.g_plus, fitted.g_minus)
    assert torch.equal(swapped.g_minus, fitted.g_plus)


def test_reported_losses_are_the_real_ones(build_tiny: Build, fitted: HeadRoles) -> None:
    model, (_, held_out) = build_tiny("float64"), _dataset().split(0.1)
    for stage, gates in enumerate((fitted.g0, fitted.g_plus, fitted.g_minus)):
        for seed in range(3):
            expected = _nll(model, held_out.rows, gates[seed]).mean().item()
            assert fitted.losses[stage, seed].item() == pytest.approx(expected, abs=1e-10)
    plain = _nll(model, held_out.rows, torch.ones(2, 2, dtype=torch.float64)).mean().item()
    assert fitted.dense_loss == pytest.approx(plain, abs=1e-10)


def test_left_and_right_padding_give_the_same_fit(build_tiny: Build) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(1, 13, (4 + n % 4,), generator=generator).tolist() for n in range(30)]
    fits = []
    for width in (0, 7):
        left = [[0] * (width - len(row)) + row for row in rows]
        spans = [(max(width - len(row), 0) + 2, max(width, len(row))) for row in rows]
        dataset = TargetDataset.from_tokens(left, spans, pad_token=0)
        fits.append(fit_head_gates(build_tiny("float64"), dataset, seeds=2, **SETTINGS))
    for name in ("trajectories", "losses", "removed"):
        assert torch.allclose(getattr(fits[0], name), getattr(fits[1], name), atol=1e-9)


def test_a_sparse_model_is_fitted_under_its_gates(build_tiny: Build) -> None:
    sparse = SparseTransformer(build_tiny(), initial_bias=0.0)
    few = {**SETTINGS, "updates": 1}
    found = fit_head_gates(sparse, _dataset(), seeds=1, **few)
    rows = _dataset().split(0.1)[1].rows
    losses = token_losses(sparse(rows.tokens)[rows.loss_mask], rows.loss_labels())
    assert found.dense_loss == pytest.approx(losses.mean().item())
    assert (
        found.dense_loss != fit_head_gates(sparse.unwrap(), _dataset(), seeds=1, **few).dense_loss
    )


@pytest.mark.parametrize("last", [4, 6 + 4, 12 + 4], ids=["g0", "g_plus", "g_minus"])
def test_an_interrupted_fit_goes_on(
    build_tiny: Build, fitted: HeadRoles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    original, calls = GatedHeads.forward, {"n": 0}

    def killed(self: GatedHeads, batch: TokenBatch) -> torch.Tensor:
        calls["n"] += 1
        if calls["n"] == last:
            raise RuntimeError("killed")
        return original(self, batch)

    settings = {**SETTINGS, "seeds": 3, "checkpoint": tmp_path / "c", "checkpoint_every": 2}
    model = build_tiny("float64")
    monkeypatch.setattr(GatedHeads, "forward", killed)
    with pytest.raises(RuntimeError, match="killed"):
        fit_head_gates(model, _dataset(), **settings)
    again = fit_head_gates(model, _dataset(), **settings)
    assert calls["n"] <= 18 + 2 + 1
    for name in ("trajectories", "losses", "removed", "removed_together"):
        assert torch.equal(getattr(again, name), getattr(fitted, name)), name
    # Its gates were recorded at other updates.
    with pytest.raises(ValueError, match="record_every: 2 there, 3 here"):
        fit_head_gates(model, _dataset(), **{**settings, "record_every": 3})


# Bad input


def test_prompts_that_do_not_fit_are_refused(build_tiny: Build) -> None:
    model = build_tiny()
    rows = [[1] * 5, [1] * 20]
    with pytest.raises(ValueError, match="at most 16 tokens, the model's context; got 19"):
        long = TargetDataset.from_tokens(rows, [(2, 3), (3, 20)])
        fit_head_gates(model, long, seeds=1, held_out=_dataset(), **SETTINGS)
    # What comes after the target is never read, nor are rows that were left out.
    few = TargetDataset.from_tokens([[1] * 20, [1] * 5], [(2, 3)] * 2)
    check_fits(model, few)
    check_fits(model, long.select(torch.tensor([0])))


# Results


def _roles(
    g_plus: list[list[float]],
    g_minus: list[list[float]],
    fitted: tuple[bool, bool] = (True, True),
    removed: tuple[float, float] = (0.0, 0.0),
) -> HeadRoles:
    """Two seeds of one layer of two heads."""
    plus, minus = torch.tensor(g_plus)[:, None], torch.tensor(g_minus)[:, None]
    return HeadRoles(
        seeds=(7, 9),
        lambda_=0.1,
        trajectories=torch.stack([plus, plus, minus])[:, :, None],
        recorded_at=(0,),
        losses=torch.tensor([[0.1, 0.1], [0.1, 5.0], [0.2, 6.0]]),
        dense_loss=0.1,
        fitted=torch.tensor(fitted),
        removed=torch.tensor([removed]),
        removed_together=torch.zeros(2, 3, 2),
    )


def test_scores_and_classes_by_hand() -> None:
    roles = _roles([[0.9, 0.2], [0.8, 0.6]], [[0.7, 0.1], [0.4, 0.0]])
    assert torch.allclose(roles.score("facilitation"), torch.tensor([[[0.7, 0.1]], [[0.4, 0.0]]]))
    assert torch.allclose(roles.score("interference"), torch.tensor([[[0.1, 0.8]], [[0.2, 0.4]]]))
    assert torch.allclose(roles.score("irrelevance"), torch.tensor([[[0.27, 0.18]], [[0.48, 0.6]]]))
    assert roles.members("facilitation").tolist() == [[[True, False]], [[False, False]]]
    assert roles.order("interference").tolist() == [[1, 0], [1, 0]]
    table = roles.consistency().set_index(["role", "layer", "head"])
    assert table.loc[("facilitation", 0, 0), "share"] == 0.5
    assert table.loc[("facilitation", 0, 0), ["always", "any"]].tolist() == [False, True]
    assert table.loc[("interference", 0, 1), "share"] == 0.5
    frame = roles.to_pandas()
    assert len(frame) == 4
    assert frame.query("seed == 9 and head == 1")["irrelevance"].item() == pytest.approx(0.6)

"""Models that differ: bidirectional, of other outputs, with hooks of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_tl.backend import Model
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles import fit_head_gates
from sparse_tl.head_roles.fitting import check_fits
from sparse_tl.head_roles.likelihood import GatedHeads

SETTINGS: dict[str, Any] = {"updates": 2, "batch_size": 8, "seeds": 1, "progress": False}


def _own_losses(model: Model, rows: TokenBatch) -> torch.Tensor:
    logits = model(rows.tokens, **rows.model_kwargs)[rows.loss_mask]
    return token_losses(logits, rows.loss_labels()).detach()


def _random_rows(n: int = 12, length: int = 6) -> TargetDataset:
    """Answers at several positions of one prompt, apart from each other, the end not among them."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(13, (2, n, length), generator=generator)
    mask = torch.zeros(n, length, dtype=torch.bool)
    mask[:, [1, 4]] = True
    return TargetDataset(TokenBatch(tokens, labels, mask))


def test_bidirectional_models_see_what_follows_the_answers_position(
    build_looking_up: Callable[..., Model],
) -> None:
    """Read at position 0, the answer depends on position 1; cut to one token nobody can know it."""
    model = build_looking_up(attention_dir="bidirectional")
    asked = torch.arange(12).repeat(2)
    tokens = torch.stack([torch.full_like(asked, 12), asked], dim=1)
    mask = torch.tensor([[True, False]]).repeat(len(asked), 1)
    dataset = TargetDataset(TokenBatch(tokens, (asked + 1)[:, None].repeat(1, 2), mask))
    expected = _own_losses(model, dataset.rows)
    assert expected.mean() < 0.1
    opened = GatedHeads(model, torch.full((1, 1, 2), torch.inf))
    assert torch.allclose(opened(dataset.rows)[0], expected)
    found = fit_head_gates(model, dataset, held_out=dataset, **SETTINGS)
    assert found.dense_loss == pytest.approx(expected.mean().item(), abs=1e-6)
    with pytest.raises(ValueError, match="padded prompts .* bidirectional attention"):
        check_fits(model, TargetDataset.from_tokens([[1, 2, 3], [1, 2]], [(1, 2)] * 2))


def test_answers_apart_from_each_other_and_models_of_other_outputs(
    build_tiny: Callable[..., Model],
) -> None:
    model, dataset = build_tiny("float64", d_vocab_out=17), _random_rows()
    dataset.rows.labels[0, 1] = 16  # beyond the input's vocabulary
    assert model.tokenizer is None
    found = fit_head_gates(model, dataset, held_out=dataset, **SETTINGS)
    assert found.dense_loss == pytest.approx(_own_losses(model, dataset.rows).mean().item())


def test_a_hook_of_the_users_own_is_part_of_the_model(build_tiny: Callable[..., Model]) -> None:
    model, dataset = build_tiny("float64"), _random_rows()
    plain = _own_losses(model, dataset.rows)
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: 3 * z, is_permanent=True)
    model.add_hook("blocks.1.hook_mlp_out", lambda out, hook: out.cumsum(dim=1), is_permanent=True)
    expected = _own_losses(model, dataset.rows)
    assert (expected - plain).abs().max() > 0.1
    found = fit_head_gates(model, dataset, held_out=dataset, **SETTINGS)
    assert found.dense_loss == pytest.approx(expected.mean().item(), abs=1e-9)


@pytest.mark.parametrize("kind", ["batch size", "rows", "last column"])
def test_a_hook_that_is_meant_for_one_batch_is_refused(
    build_tiny: Callable[..., Model], kind: str
) -> None:
    model, dataset = build_tiny(), _random_rows()
    noise = torch.randn(12, 1, 16)
    hooks: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "batch size": lambda out: out + noise,
        "rows": lambda out: torch.cat([out[:1], 0 * out[1:]]),
        "last column": lambda out: torch.cat([0 * out[:, :-1], 5 + out[:, -1:]], dim=1),
    }
    point = "blocks.0.hook_attn_out"
    model.add_hook(point, lambda out, hook: hooks[kind](out), is_permanent=True)
    said = "size of tensor" if kind == "batch size" else "Remove hooks"
    with pytest.raises((RuntimeError, ValueError), match=said):
        fit_head_gates(model, dataset, **SETTINGS)

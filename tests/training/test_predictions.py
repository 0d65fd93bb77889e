"""The dense model's predictions: its own logits, from as few passes as there are new rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from architectures import VOCABULARY, plain_transformer
from short_runs import Build
from torch import Tensor, nn

from sparse_tl.backend import Model, adapt, add_lora, boot, check_gates, lora_parameters
from sparse_tl.data import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training.distillation import KEPT, DensePredictions


def _rows(n: int = 6, seed: int = 0) -> TokenBatch:
    """Rows of several lengths, with loss at some positions; the third has none."""
    generator = torch.Generator().manual_seed(seed)
    batch = TokenBatch.next_token(torch.randint(VOCABULARY, (n, 8), generator=generator))
    loss_mask = batch.loss_mask & (torch.rand(n, 8, generator=generator) < 0.6)
    loss_mask[:, 2], loss_mask[2] = True, False
    real = (torch.arange(8) < torch.tensor([8, 5, 8, 8, 3, 8])[:n, None]).long()
    return replace(batch, loss_mask=loss_mask & real.bool(), attention_mask=real)


def _by_hand(model: Model, batch: TokenBatch) -> Tensor:
    with torch.no_grad():
        return model(batch.tokens, **batch.model_kwargs)[batch.loss_mask]


@contextmanager
def _noted(model: Model) -> Iterator[list[int]]:
    """The number of rows of every pass."""
    check_gates(adapt(model))  # passes of their own, once
    found: list[int] = []
    embed = model.embed
    assert isinstance(embed, nn.Module)
    handle = embed.register_forward_hook(lambda _module, _args, output: found.append(len(output)))
    yield found
    handle.remove()


def _same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_only_new_rows_are_run(name: str) -> None:
    """And all logits are the dense model's own, in the rows' order, whichever were kept."""
    model = boot(plain_transformer(name))
    batch, predictions = _rows(), DensePredictions(model)
    expected = _by_hand(model, batch)
    with _noted(model) as passes:
        first = predictions.logits(batch)
        again = predictions.logits(batch)
        assert passes == [5], "one row has no label"
        _same(first, expected)
        _same(again, expected)
        turned = batch.select(torch.tensor([5, 1, 2, 0, 1]))
        _same(predictions.logits(turned), _by_hand(model, turned))
        del passes[:]
        new = _rows(seed=1).select(slice(0, 2))
        mixed = TokenBatch(
            *(torch.cat([getattr(new, f), getattr(batch, f)]) for f in vars(new) if f != "groups")
        )
        found = predictions.logits(mixed)
    assert passes == [2]
    _same(found, _by_hand(model, mixed))


def test_a_row_is_its_tokens_its_labels_and_its_padding() -> None:
    model = boot(plain_transformer("llama"))
    batch, predictions = _rows(), DensePredictions(model)
    predictions.logits(batch)
    tokens, loss_mask = batch.tokens.clone(), batch.loss_mask.clone()
    real = batch.attention_mask
    assert real is not None
    tokens[0, 0] = (tokens[0, 0] + 1) % VOCABULARY
    loss_mask[1, 0] ^= True
    shorter = real.clone()
    shorter[3, 0] = 0
    for other, n_new in [
        (replace(batch, tokens=tokens), 1),
        (replace(batch, loss_mask=loss_mask), 1),
        (replace(batch, attention_mask=shorter), 1),
        (replace(batch, labels=batch.labels.flip(0)), 0),
    ]:
        with _noted(model) as passes:
            found = predictions.logits(other)
        assert sum(passes) == n_new
        _same(found, _by_hand(model, other))


def test_what_is_trained_moves_no_prediction() -> None:
    """Logits may be overwritten, and adapters and gates trained: kept rows stay the dense ones."""
    sparse = SparseTransformer(add_lora(boot(plain_transformer("llama")), 4), gates="share")
    batch, predictions = _rows(), DensePredictions(sparse)
    before = predictions.logits(batch).clone()
    with torch.no_grad():
        for parameter in [*lora_parameters(sparse), *sparse.gates.parameters()]:
            parameter += 0.1
    kept, again = predictions.logits(batch), DensePredictions(sparse).logits(batch)
    assert torch.equal(again, before)
    _same(kept, before)
    kept.zero_()
    _same(predictions.logits(batch), before)


def test_no_more_is_kept_than_there_is_room_for(build_tiny: Build) -> None:
    model = build_tiny()
    batch = TokenBatch.next_token(torch.randint(13, (4, 8)))
    row = 7 * model.cfg.d_model * 4
    for capacity, passes_again in [(2 * row, 2), (2 * row - 1, 3), (0, 4), (KEPT, 0)]:
        predictions = DensePredictions(model, capacity)
        predictions.logits(batch)
        with _noted(model) as passes:
            found = predictions.logits(batch)
        assert sum(passes) == passes_again
        _same(found, _by_hand(model, batch))


def test_what_was_kept_is_read_back_bit_for_bit(build_tiny: Build) -> None:
    model, batch = build_tiny(), TokenBatch.next_token(torch.randint(13, (4, 8)))
    predictions, resumed = DensePredictions(model), DensePredictions(model)
    assert predictions.state() == {}
    predictions.logits(batch.select(slice(0, 3)))
    resumed.load_state(predictions.state())
    with _noted(model) as passes:
        assert torch.equal(resumed.logits(batch), predictions.logits(batch))
    assert passes == [1, 1]


def test_nothing_is_kept_under_dropout(build_tiny: Build) -> None:
    model, batch = build_tiny(), TokenBatch.next_token(torch.randint(13, (4, 8)))
    predictions = DensePredictions(model.train())
    with _noted(model) as passes:
        for _ in range(2):
            predictions.logits(batch)
    assert passes == [4, 4] and predictions.state() == {}


def test_a_dense_model_under_the_gates_of_a_sparse_one_is_refused() -> None:
    sparse = SparseTransformer(boot(plain_transformer("llama")))
    with pytest.raises(ValueError, match="wrapped already: use its SparseTransformer"):
        DensePredictions(sparse.model).logits(_rows())
    assert DensePredictions(sparse).logits(_rows()).isfinite().all()
    sparse.unwrap()
    DensePredictions(sparse.model).logits(_rows())

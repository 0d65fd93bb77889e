"""Post-training with gates on MLPs: what they cost, what is kept, and a planted answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from short_runs import Build, Rows, moved, short_run, weights
from tiny import small_model

from sparse_tl.backend import Model
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import LossConstraint, evaluate_held_out
from sparse_tl.training.loop import choose_trained
from sparse_tl.training.post_train import SparsityObjective

N_TOKENS = 6


def _mlp_gates(sparse: SparseTransformer) -> Any:
    assert sparse.mlp_gates is not None
    return sparse.mlp_gates


# A planted answer.


def _half_useless_mlp() -> Model:
    """Each token has an answer of its own; those of the first three are known to the MLP alone.

    The other answers are read off the embedding. There the MLP is as busy, but writes what nothing
    reads. Heads do nothing.
    """
    token, output, unread = (slice(start, start + N_TOKENS) for start in (0, 6, 12))
    model: Any = small_model(
        model_name="half_useless",
        n_layers=1,
        n_heads=2,
        d_model=18,
        d_head=9,
        d_mlp=N_TOKENS,
        n_ctx=8,
        d_vocab=N_TOKENS,
        act_fn="relu",
        normalization_type="LN",
    )
    half, gain = N_TOKENS // 2, 12.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        answers = gain * torch.eye(N_TOKENS).roll(1, dims=1)
        model.embed.W_E[:, token] = torch.eye(N_TOKENS)
        model.embed.W_E[half:, output] = answers[half:]
        model.unembed.W_U[output] = 4 * torch.eye(N_TOKENS)
        for norm in (model.blocks[0].ln2, model.ln_final):
            norm.w.fill_(1.0)
        mlp = model.blocks[0].mlp
        mlp.W_in[token] = torch.eye(N_TOKENS)
        mlp.W_out[:half, output] = answers[:half]
        mlp.W_out[half:, unread] = answers[half:]
    return model


def _answers(n: int = 96, length: int = 8, seed: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(N_TOKENS, (n, length), generator=generator)
    return TokenBatch(tokens, (tokens + 1) % N_TOKENS, torch.ones_like(tokens, dtype=torch.bool))


@pytest.mark.long
def test_an_mlp_stays_open_just_where_it_is_of_use() -> None:
    sparse = SparseTransformer(_half_useless_mlp(), mlps=True, initial_bias=2.0)
    outcome = short_run(
        sparse, _answers, target_loss="+0.02", steps=250, learning_rate={"gates": 0.05}
    )
    assert outcome.feasible and outcome.sparse.accuracy == 1.0
    held_out = _answers(seed=1)
    gates = sparse.run_with_counts(held_out.tokens, keep_gates=True)[1].mlp_gates
    assert gates is not None
    assert torch.equal(gates[0], held_out.tokens < N_TOKENS // 2)
    assert outcome.sparse.active_attention_edges == 0
    of_use = (held_out.tokens < N_TOKENS // 2).sum().item() / len(held_out)
    assert outcome.sparse.active_mlps == pytest.approx(of_use)
    assert outcome.sparse.possible_mlps == 8


# What is minimised, and what is measured.


@pytest.mark.parametrize("costly", [False, True])
def test_an_open_mlp_output_counts_one(build_echo: Build, echo_rows: Rows, costly: bool) -> None:
    sparse, batch = SparseTransformer(build_echo(), mlps=True, initial_bias=0.5), echo_rows()
    gates = _mlp_gates(sparse)
    with torch.no_grad():
        gates.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    edge_cost = torch.tensor(0.25) if costly else None
    objective = SparsityObjective(sparse, None, LossConstraint(torch.tensor([0.1])), edge_cost)
    _, counts = sparse.run_with_counts(batch.tokens, edge_cost=edge_cost)
    _, cache = sparse.run_with_cache(batch.tokens)
    by_hand = counts.expected.sum().item() * (0.25 if costly else 1.0)
    for layer in range(2):
        block = f"blocks.{layer}"
        read = sparse.blocks[layer].ln2(
            cache[f"{block}.hook_resid_pre"] + cache[f"{block}.hook_attn_out"]
        )
        by_hand += torch.sigmoid(gates.logits(layer, read)).sum().item()
    (size,), _ = objective.sizes(counts, batch.row_groups())
    assert size.item() == pytest.approx(by_hand / len(batch), rel=1e-5)
    size.backward()
    assert gates.weight.grad.abs().sum(dim=1).min() > 0 and (gates.bias.grad > 0).all()


def test_held_out_measurements_count_mlps(build_echo: Build, echo_rows: Rows) -> None:
    sparse, rows = SparseTransformer(build_echo(), mlps=True), echo_rows(seed=1)
    gates = _mlp_gates(sparse)
    with torch.no_grad():
        gates.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
        gates.bias.zero_()
    found = evaluate_held_out(sparse, rows, edge_cost=torch.tensor([[[[0.5]]], [[[2.0]]]]))
    _, counts = sparse.run_with_counts(rows.tokens, keep_gates=True)
    assert counts.mlp_gates is not None
    active = counts.mlp_gates.sum().item() / len(rows)
    assert 0 < active < 16
    assert found.active_mlps == pytest.approx(active) and found.possible_mlps == 16
    by_layer = counts.active.sum(dim=(1, 2)) / len(rows)
    assert found.active_size == pytest.approx((0.5 * by_layer[0] + 2 * by_layer[1]).item() + active)
    assert f"{active:.2f} of 16 MLP outputs active" in repr(found)
    dense = evaluate_held_out(sparse.unwrap(), rows)
    assert dense.active_mlps is dense.possible_mlps is dense.active_size is None
    assert "mlp" not in str(dense.numbers).lower() and "MLP" not in repr(dense)


def test_costs_by_column_are_those_of_shorter_rows_too(build_tiny: Build) -> None:
    """Rows of like length are run together, without the columns that are padding in all of them."""
    tokens = torch.randint(13, (8, 8), generator=torch.Generator().manual_seed(0))
    rows = TokenBatch.next_token(tokens)
    real = torch.arange(8) < torch.tensor([4, 4, 5, 5, 6, 7, 8, 8])[:, None]
    rows = TokenBatch(tokens, rows.labels, rows.loss_mask & real, real.long())
    sparse = SparseTransformer(build_tiny("float64"), mlps=True, initial_bias=0.0)
    with torch.no_grad():
        _mlp_gates(sparse).weight.normal_(generator=torch.Generator().manual_seed(0))
    cost = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = evaluate_held_out(sparse, rows, edge_cost=cost)
    _, counts = sparse.run_with_counts(tokens, attention_mask=rows.attention_mask, keep_gates=True)
    assert counts.gates is not None and counts.active_mlps is not None
    both = (counts.gates * cost[:, None]).sum() + counts.active_mlps.sum()
    assert found.active_size == pytest.approx(both.item() / 8, rel=1e-9)


# The outcome.


@pytest.mark.long
@pytest.mark.parametrize("edge_cost", [None, 0.01, 100.0])
def test_edges_and_mlp_outputs_are_weighed_when_weights_are_chosen(
    build_echo: Build, echo_rows: Rows, edge_cost: float | None
) -> None:
    sparse = SparseTransformer(build_echo(), mlps=True, initial_bias=2.0)
    outcome = short_run(
        sparse,
        echo_rows,
        steps=40,
        target_loss="+0.3",
        edge_cost=None if edge_cost is None else torch.tensor(edge_cost),
    )
    evaluated = outcome.history.dropna(subset=["validation_loss"])
    meets = evaluated[evaluated["validation_loss"] <= outcome.dense.loss + 0.3]
    assert len(meets) > 3
    size = (1.0 if edge_cost is None else edge_cost) * meets["validation_active_attention_edges"]
    size = size + meets["validation_active_mlps"]
    assert meets["validation_active_size"].to_numpy() == pytest.approx(size.to_numpy(), rel=1e-6)
    assert meets["validation_log_size"].to_numpy() == pytest.approx(np.log1p(size.to_numpy()))
    assert outcome.best_step == meets.loc[size.idxmin(), "step"]
    assert evaluate_held_out(sparse, echo_rows(seed=1)).active_mlps == outcome.sparse.active_mlps
    assert "MLP outputs active" in outcome.verdict
    assert {"expected_mlps", "validation_possible_mlps"} <= set(outcome.history)
    assert "active_mlps" in outcome.to_pandas().index


def test_gates_are_trained_by_name(build_echo: Build, echo_rows: Rows) -> None:
    sparse = SparseTransformer(build_echo(), mlps=True)
    gates = {"gates.bias", "gates.weight", "mlp_gates.weight", "mlp_gates.bias"}
    assert set(choose_trained(sparse, {"gates": 1.0})) == gates
    assert gates < set(choose_trained(sparse, {"all": 1.0}))
    assert not gates & set(choose_trained(sparse, {"qk": 1.0}))
    before = weights(sparse)
    outcome = short_run(sparse, echo_rows, target_loss=50.0, learning_rate={"gates": 0.1})
    assert outcome.best_step > 0
    assert moved(before, sparse) == gates

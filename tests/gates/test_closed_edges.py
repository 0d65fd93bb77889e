"""Edges that are closed by choice stay closed, whatever their scores say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_tl import SparseTransformer
from sparse_tl.gates import AttentionGates, GateDistribution, HardConcreteGate, SigmoidGate
from sparse_tl.lens import Model, adapt

Build = Callable[..., Model]
LONGEST = 10


def some_closed(model: Model) -> Tensor:
    """Other edges in every layer and head, in no pattern."""
    shape = adapt(model)
    size = (shape.n_layers, shape.n_heads, LONGEST, LONGEST)
    return torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.4


@pytest.mark.parametrize("kind", ["plain", "grouped", "float64"])
def test_closed_edges_are_shut_and_all_others_are_as_they_were(
    build_tiny: Build, tokens: Tensor, kind: str
) -> None:
    model = build_tiny(kind)
    dense = model(tokens)
    closed = some_closed(model)
    sparse = SparseTransformer(model, initial_bias=0.0, closed=closed)
    _, counts = sparse.run_with_counts(tokens, keep_gates=True)
    _, cache = sparse.run_with_cache(tokens)
    assert counts.gates is not None
    for layer in range(2):
        free = cache[f"blocks.{layer}.attn.hook_attn_scores"] > 0
        expected = free & ~closed[layer, :, :8, :8]
        assert 0 < expected.sum() < free.sum()
        assert torch.equal(counts.gates[layer], expected)
        assert torch.equal(cache[f"blocks.{layer}.attn.hook_pattern"] > 0, expected)
        assert torch.equal(counts.active[layer], expected.sum(dim=(-2, -1)))
    # They can be closed, so they are possible; and opened, they are those of the model.
    assert sparse.count_attention_edges(tokens).possible.unique().tolist() == [36]
    with sparse.opened():
        assert torch.equal(sparse(tokens), dense)


def test_closed_edges_count_nothing_and_get_no_gradient(build_tiny: Build, tokens: Tensor) -> None:
    model = build_tiny("plain")
    sparse = SparseTransformer(model, closed=torch.ones_like(some_closed(model)))
    with sparse.sampled(torch.Generator().manual_seed(0)):
        logits, counts = sparse.run_with_counts(tokens, pressure=1.0)
    loss = logits.square().mean()
    assert counts.expected.sum().item() == counts.active.sum().item() == 0
    (loss + counts.expected.sum()).backward()
    for name, parameter in sparse.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name
    assert sparse.gates.bias.grad is not None
    assert sparse.gates.bias.grad.abs().max() == 0


def test_while_closing_all_edges_of_a_query_are_closed_in_that_share_of_the_draws(
    build_tiny: Build,
) -> None:
    model = build_tiny("plain", n_layers=1)
    closed = some_closed(model)
    # Every gate is open but those that are closed: what is shut is what was drawn.
    sparse = SparseTransformer(model, initial_bias=1e4, closed=closed)
    prompts = torch.randint(0, 13, (1000, 8), generator=torch.Generator().manual_seed(6))
    name = "blocks.0.attn.hook_pattern"
    generator = torch.Generator().manual_seed(0)
    with sparse.sampled(generator, closed_share=0.3), torch.no_grad():
        _, cache = sparse.run_with_cache(prompts, names_filter=name)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    shut = (cache[name] == 0) & causal
    wanted = closed[0, :, :8, :8] & causal
    drawn = shut.any(dim=(1, 3))
    assert torch.equal(shut, wanted & drawn[:, None, :, None])
    # 8,000 draws: a standard deviation of 0.005.
    has_closed = wanted.any(dim=(0, 2))
    assert drawn[:, has_closed].float().mean().item() == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("distribution", [HardConcreteGate(), SigmoidGate()])
@pytest.mark.parametrize("sampled", [False, True])
def test_closed_edges_are_shut_under_every_distribution(
    build_tiny: Build, tokens: Tensor, distribution: GateDistribution, sampled: bool
) -> None:
    model = build_tiny("plain")
    closed = some_closed(model)
    sparse = SparseTransformer(model, distribution=distribution, closed=closed)
    block = sparse.sampled(torch.Generator().manual_seed(0)) if sampled else nullcontext()
    with block:
        _, cache = sparse.run_with_cache(tokens)
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert pattern[closed[layer, :, :8, :8].expand_as(pattern)].abs().max() == 0
        assert torch.isfinite(pattern).all()


def test_padding_on_the_left_is_refused(build_tiny: Build, tokens: Tensor) -> None:
    """Columns would name other edges there; padding on the right moves no column."""
    model = build_tiny("plain")
    sparse = SparseTransformer(model, initial_bias=0.0, closed=some_closed(model))
    padding = torch.zeros(3, 2, dtype=torch.long)
    real = torch.ones_like(tokens)
    with pytest.raises(ValueError, match="without padding on the left"):
        left = torch.cat([padding, tokens], dim=1)
        sparse(left, attention_mask=torch.cat([padding, real], dim=1))
    right = torch.cat([tokens, padding], dim=1)
    found = sparse(right, attention_mask=torch.cat([real, padding], dim=1))[:, :8]
    torch.testing.assert_close(found, sparse(tokens))


def test_a_key_value_cache_closes_the_same_edges(
    build_tiny: Build, tokens: Tensor, generate_both_ways: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    model = build_tiny("grouped")
    sparse = SparseTransformer(model, initial_bias=0.0, closed=some_closed(model))
    generated, expected = generate_both_ways(sparse, tokens[:, :6])
    assert torch.equal(generated, expected)


def test_saved_and_copied_with_the_gates(build_tiny: Build, tokens: Tensor, tmp_path: Path) -> None:
    model = build_tiny("plain")
    sparse = SparseTransformer(model, initial_bias=0.0, closed=some_closed(model))
    expected = sparse(tokens)
    assert f"{int(some_closed(model).tril().sum())} edges closed" in repr(sparse)
    assert torch.equal(copy.deepcopy(sparse)(tokens), expected)
    sparse.save_pretrained(tmp_path / "sparse")
    loaded = SparseTransformer.from_pretrained(tmp_path / "sparse", device="cpu")
    assert torch.equal(loaded(tokens), expected)
    gates = load_file(tmp_path / "sparse" / "gates.safetensors")
    save_file({**gates, "closed": gates["closed"][:1]}, tmp_path / "sparse" / "gates.safetensors")
    with pytest.raises(ValueError, match=r"gates of this model in .*sparse; expected `closed`"):
        SparseTransformer.from_pretrained(tmp_path / "sparse")
    assert loaded.gates.closed is not None
    assert torch.equal(loaded.gates.closed, some_closed(model).tril())


def test_prompts_that_are_longer_than_the_edges_are_named_for(build_tiny: Build) -> None:
    model = build_tiny("plain")
    sparse = SparseTransformer(model, closed=some_closed(model))
    with pytest.raises(ValueError, match=f"at most {LONGEST} tokens.*got 11"):
        sparse(torch.zeros(1, 11, dtype=torch.long))


@pytest.mark.parametrize(
    "closed",
    [
        torch.zeros(3, 2, 4, 4, dtype=torch.bool),
        torch.zeros(2, 2, 4, 5, dtype=torch.bool),
    ],
)
def test_closed_edges_of_another_shape(build_tiny: Build, closed: Tensor) -> None:
    model = build_tiny("plain")
    with pytest.raises(ValueError, match="expected `closed` to be booleans of shape .2 layers, 2"):
        SparseTransformer(model, closed=closed)
    # Refused before anything was put on the model.
    SparseTransformer(model).unwrap()


def test_either_gates_or_what_they_are_made_of(build_tiny: Build) -> None:
    model = build_tiny("plain")
    gates = AttentionGates(model.cfg.n_layers, model.cfg.n_heads)
    with pytest.raises(ValueError, match="expected either `gates` or `closed`"):
        SparseTransformer(model, gates=gates, closed=some_closed(model))

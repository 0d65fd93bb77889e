"""Gates on the share of attention: formula, invariance, gradients, blocks, folders, arguments."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_checks import Subject
from architectures import ARCHITECTURES, VOCABULARY
from double_precision import DoublePrecision
from finite_differences import derivative
from small_models import random_model
from torch import Tensor

from sparse_tl import SparseTransformer
from sparse_tl.backend import adapt, boot, deferred
from sparse_tl.devices import SizeByDevice
from sparse_tl.gates import HardConcreteGate, ShareGates
from sparse_tl.gates.distributions import GateSettings
from sparse_tl.gates.sparse import blockwise
from sparse_tl.gates.sparse.straight_through import gated_pattern
from sparse_tl.storage.files import read_json, write_json

LENGTH = 12
CASES = ("gpt2", "llama", "gemma2", "mistral")


def _tokens(length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (3, length), generator=generator)


def _share(name: str, dtype: str = "float64", **options: Any) -> SparseTransformer:
    """Gates whose thresholds differ from head to head and query to query."""
    sparse = SparseTransformer(
        Subject(name).build(dtype), gates="share", initial_threshold=0.1, **options
    )
    generator = torch.Generator().manual_seed(1)
    assert isinstance(sparse.gates, ShareGates)
    with torch.no_grad():
        for parameter in sparse.gates.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.5 * noise.to(parameter)
    return sparse


def _by_hand(sparse: SparseTransformer, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, expected and active edges by plain hooks on the dense model, layer by layer."""
    gates, model = sparse.gates, sparse.unwrap()
    assert isinstance(gates, ShareGates)
    queries: dict[int, Tensor] = {}
    expected, active = [], []

    def note(layer: int, q: Tensor, hook: Any) -> None:
        queries[layer] = q if q.shape[1] == LENGTH else q.transpose(1, 2)  # latent attention

    def close(layer: int, p: Tensor, hook: Any) -> Tensor:
        along = torch.einsum("bqhd,hd->bhq", queries[layer], gates.weight[layer])
        t = torch.exp(-(gates.bias[layer][:, None] + along))[..., None]
        expected.append((p / (p + t)).sum(dim=(-2, -1)))
        active.append((p > t).sum(dim=(-2, -1)))
        return p * (p > t)

    hooks: list[Any] = []
    for layer in range(model.cfg.n_layers):
        hooks.append((f"blocks.{layer}.attn.hook_q", partial(note, layer)))
        hooks.append((f"blocks.{layer}.attn.hook_pattern", partial(close, layer)))
    logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
    return logits, torch.stack(expected), torch.stack(active)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_an_edge_is_open_if_its_share_exceeds_the_threshold_of_its_query(name: str) -> None:
    sparse = _share(name)
    with DoublePrecision():
        found, counts = sparse.run_with_counts(_tokens())
        logits, expected, active = _by_hand(sparse, _tokens())
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(counts.expected, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(counts.active, active)
    assert 0.05 < counts.active_share < 0.95


@torch.no_grad()
def test_a_head_closes_at_a_query_whatever_it_attends_to() -> None:
    """A threshold above 1 closes an attention sink too; another query's stays where it was."""
    sparse = SparseTransformer(Subject("llama").build("float64"), gates="share")
    assert isinstance(sparse.gates, ShareGates)
    tokens = _tokens()[:1]
    q = sparse.run_with_cache(tokens)[1]["blocks.0.attn.hook_q"][0, :, 2]
    # The direction that tells query 4 from query 7, and nothing at the mean of both.
    direction = q[4] - q[7]
    sparse.gates.weight[0, 2] = -40 * direction / (direction @ direction)
    sparse.gates.bias[0, 2] += 40 * (direction @ q[7]) / (direction @ direction)
    gates = sparse.run_with_counts(tokens, keep_gates=True)[1].gates
    assert gates is not None and not gates[0, 0, 2, 4].any() and gates[0, 0, 2, 7].any()


@pytest.mark.parametrize("name", CASES)
def test_the_expected_count_has_the_gradient_of_finite_differences(name: str) -> None:
    sparse = _share(name, distribution=HardConcreteGate())

    def loss() -> Tensor:
        with DoublePrecision(), sparse.sampled(torch.Generator().manual_seed(0)):
            logits, counts = sparse.run_with_counts(_tokens())
        return logits.logsumexp(-1).mean() + 1e-2 * counts.expected.sum()

    loss().backward()
    gates = sparse.gates
    assert isinstance(gates, ShareGates)
    query = next(p for p in adapt(sparse).parameters("qk") if p.ndim == 2)
    for parameter, index in ((gates.bias, (1, 2)), (gates.weight, (0, 1, 3)), (query, (2, 3))):
        assert parameter.grad is not None
        found = parameter.grad[index].item()
        assert abs(found) > 1e-7
        assert found == pytest.approx(derivative(loss, parameter, index, 1e-6), rel=1e-4, abs=1e-9)


def test_score_gates_are_share_gates_whose_threshold_follows_the_log_sum_exp() -> None:
    """With ``log t = -(b + log sum_j exp(s_j))``: values, counts and gradients by the scores."""
    found = []
    valid = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    for kind in ("score", "share"):
        generator = torch.Generator().manual_seed(0)
        scores = 2 * torch.randn(3, 2, 7, 7, generator=generator, dtype=torch.float64)
        scores = scores.masked_fill(~valid, -torch.inf).requires_grad_()
        bias = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
        row = bias[None, :, None, None]
        if kind == "share":
            row = row + scores.logsumexp(dim=-1, keepdim=True)
        now = GateSettings(generator=torch.Generator().manual_seed(2), counts=[], pressure=0.2)
        read = scores if kind == "score" else None
        gated, counts = gated_pattern(read, scores.softmax(-1), row, 0.7, now, valid=valid)
        weights = torch.rand(gated.shape, generator=generator, dtype=torch.float64)
        total = (gated * weights).sum() + counts["expected"].sum()
        by = torch.autograd.grad(total, (scores, bias))
        found.append((gated, counts["expected"], counts["active"], *by))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    assert found[0][4].abs().min() > 1e-3


def test_shares_that_underflow_have_finite_gradients() -> None:
    scores = torch.tensor([0.0, -200.0, 300.0]).expand(1, 1, 3, 3).clone().requires_grad_()
    for r in (-1e4, 0.0, 5.0, 1e4):
        row = torch.full((1, 1, 3, 1), r, requires_grad=True)
        now = GateSettings(counts=[], noise=0.0, pressure=0.1)
        valid = torch.ones(1, 1, 3, 3, dtype=torch.bool)
        gated, counts = gated_pattern(None, scores.softmax(-1), row, 1.0, now, valid=valid)
        by = torch.autograd.grad(gated.sum() + counts["expected"].sum(), (scores, row))
        assert all(value.isfinite().all() for value in by)


@pytest.mark.parametrize("name", CASES)
def test_long_prompts_by_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(blockwise, "EDGES_AT_ONCE", SizeByDevice(150, 1))
    sparse, found = _share(name), []
    mask = (torch.arange(24) < torch.tensor([24, 17, 3])[:, None]).long()
    for long in (25, 24):
        monkeypatch.setattr(deferred, "LONG", long)
        sparse.zero_grad()
        with DoublePrecision(), sparse.sampled(torch.Generator().manual_seed(0), 0.0):
            logits, counts = sparse.run_with_counts(_tokens(24), attention_mask=mask, pressure=0.1)
            logits = logits[mask.bool()]  # elsewhere, windows may hold nothing but padding
            (logits.logsumexp(-1).sum() + 0.1 * counts.expected.sum()).backward()
        values = {n: p.grad for n, p in sparse.named_parameters() if p.grad is not None}
        found.append(values | {"logits": logits, "possible": counts.possible.double()})
    assert found[0].keys() == found[1].keys() and "gates.weight" in found[0]
    for key, value in found[0].items():
        scale = max(value.abs().max().item(), 1e-3)  # key biases shift rows: their gradient is 0
        torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-10 * scale, msg=key)


def test_new_gates_are_share_gates_at_a_small_threshold() -> None:
    gates = SparseTransformer(Subject("llama").build()).gates
    assert isinstance(gates, ShareGates)
    assert gates.bias.exp().reciprocal().allclose(torch.tensor(0.005))


@torch.no_grad()
def test_folders_say_which_gates_they_hold(tmp_path: Path) -> None:
    sparse = _share("llama", "float32", mlps=True)
    folder = sparse.save_pretrained(tmp_path / "share")
    loaded = SparseTransformer.from_pretrained(folder, device="cpu")
    assert isinstance(loaded.gates, ShareGates)
    assert torch.equal(loaded(_tokens()), sparse(_tokens()))
    assert torch.equal(SparseTransformer.dense_copy(loaded)(_tokens()), sparse.unwrap()(_tokens()))
    content = read_json(folder / "gates.json")
    write_json(folder / "gates.json", {**content, "gates": "other"})
    with pytest.raises(ValueError, match="'score' or 'share'"):
        SparseTransformer.from_pretrained(folder, device="cpu")


@torch.no_grad()
def test_positions_biases_that_softmax_ignores_are_no_obstacle() -> None:
    """MPT counts positions from the last key, for which score gates are refused."""
    model = boot(random_model("MptForCausalLM"))
    tokens = _tokens()[:1] % model.cfg.d_vocab
    with pytest.raises(ValueError, match="stay the same when tokens follow"):
        SparseTransformer(model, gates="score")
    sparse = SparseTransformer(model, gates="share", initial_threshold=0.1)
    gates = [
        sparse.run_with_counts(some, keep_gates=True)[1].gates[:, 0, :, :6, :6]  # type: ignore[index]
        for some in (tokens, tokens[:, :6])
    ]
    assert torch.equal(*gates) and not gates[0].all()

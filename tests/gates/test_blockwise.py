"""Gated attention by blocks: the same as with whole patterns, in memory that grows linearly."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architecture_checks import Subject
from architectures import ARCHITECTURES, VOCABULARY
from double_precision import DoublePrecision
from finite_differences import derivative
from torch import Tensor

from sparse_tl import SparseTransformer
from sparse_tl.backend import AttentionMask, Deferred, deferred
from sparse_tl.devices import SizeByDevice
from sparse_tl.gates import BernoulliGate, HardConcreteGate, distributions
from sparse_tl.gates.sparse import blockwise, straight_through
from sparse_tl.training.distillation import predicting

Build = Callable[..., Any]
N_PROMPTS, LENGTH = 3, 24


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(blockwise, "EDGES_AT_ONCE", SizeByDevice(150, 1))


def _tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (N_PROMPTS, LENGTH), generator=generator)


def _step(sparse: SparseTransformer, long: int, **settings: Any) -> dict[str, Tensor]:
    """Logits, counts and gradients of a training step, with scores deferred from `long` tokens."""
    noise, mask = settings.pop("noise", 0.0), settings.pop("attention_mask", None)
    options = {} if mask is None else {"attention_mask": mask}
    before, deferred.LONG = deferred.LONG, long
    try:
        sparse.zero_grad()
        with DoublePrecision(), sparse.sampled(torch.Generator().manual_seed(0), noise):
            logits, counts = sparse.run_with_counts(_tokens(), **settings, **options)
            size = counts.expected if counts.cost is None else counts.cost
            (logits.logsumexp(-1).sum() + logits[..., 0].sum() + 0.1 * size.sum()).backward()
    finally:
        deferred.LONG = before
    found = {name: p.grad.clone() for name, p in sparse.named_parameters() if p.grad is not None}
    found |= {name: values for name, values in vars(counts).items() if values is not None}
    return {name: values.detach() for name, values in (found | {"logits": logits}).items()}


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert "gates.bias" in found
    for name, values in expected.items():
        scale = values.abs().max().item() if values.is_floating_point() else 0
        torch.testing.assert_close(
            found[name], values, rtol=0, atol=1e-10 * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


PADDED = {"gpt2": "left", "llama": "right", "gemma2": "right", "mistral": "left"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_counts_and_gradients(name: str, blocks: list[Any]) -> None:
    """Grouped queries, rotary embeddings, soft caps, sliding windows: whatever the model does."""
    sparse = SparseTransformer(Subject(name).build("float64"), initial_bias=0.3)
    mask = None
    if name in PADDED:
        mask = (torch.arange(LENGTH) < torch.tensor([24, 17, 3])[:, None]).long()
        mask = mask.flip(1) if PADDED[name] == "left" else mask
    settings = {
        "pressure": 0.2,
        "edge_cost": torch.linspace(0.5, 2, LENGTH),
        "attention_mask": mask,
    }
    expected = _step(sparse, LENGTH + 1, **settings)
    assert not blocks
    found = _step(sparse, LENGTH, **settings)
    # gpt-oss appends a sink to every row of scores, which needs whole rows.
    assert not blocks if name == "gpt_oss" else len(blocks) > 10 * sparse.cfg.n_layers
    _compare(found, expected)


def test_later_tokens_and_those_before_a_window_are_left_out(blocks: list[Any]) -> None:
    for name, before in (("llama", 0), ("mistral", 3)):
        blocks.clear()
        _step(SparseTransformer(Subject(name).build("float64")), LENGTH)
        ranges = {(b.queries.start, b.keys.start, b.keys.stop) for b in blocks}
        first = [max(0, q - before) if before else 0 for q in range(0, LENGTH, 5)]
        assert sorted(ranges) == [
            (q, f, min(q + 5, LENGTH)) for q, f in zip(range(0, LENGTH, 5), first, strict=True)
        ]


@pytest.mark.parametrize("rule", [None, HardConcreteGate()], ids=["binary", "hard concrete"])
def test_both_passes_draw_the_same_noise(
    rule: Any, blocks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole pattern, given the noise that the blocks drew, has the same gradients."""
    sparse = SparseTransformer(
        Subject("qwen2").build("float64"), initial_bias=0.3, distribution=rule
    )
    drawn: list[Tensor] = []
    plain = distributions.uniform_noise

    def draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
        drawn.append(plain(logits, generator))
        return drawn[-1]

    for module in (distributions, straight_through):
        monkeypatch.setattr(module, "uniform_noise", draw)
    found = _step(sparse, LENGTH, noise=0.7)
    per_layer = len(blocks) // (2 * sparse.cfg.n_layers)
    n_forward = per_layer * sparse.cfg.n_layers
    whole = torch.zeros(sparse.cfg.n_layers, N_PROMPTS, sparse.cfg.n_heads, LENGTH, LENGTH)
    for number, (block, noise) in enumerate(zip(blocks, drawn, strict=True)):
        layer = number // per_layer if number < n_forward else -1 - (number // per_layer)
        layer = layer if number < n_forward else layer + sparse.cfg.n_layers
        part = block.of(whole[layer])
        if number < n_forward:
            part.copy_(noise.view_as(part))
        else:
            assert torch.equal(part, noise.view_as(part))
    layers = iter(whole)
    for module in (distributions, straight_through):
        monkeypatch.setattr(module, "uniform_noise", lambda logits, _: next(layers).view_as(logits))
    _compare(found, _step(sparse, LENGTH + 1, noise=0.7))


@pytest.mark.parametrize(
    "rule", [HardConcreteGate(), BernoulliGate(1e12)], ids=["hard concrete", "binary"]
)
def test_the_sampled_loss_has_the_gradient_of_finite_differences(
    rule: Any, blocks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fixed noise; so hot, the straight-through gradient of a binary gate is 0, as its own."""
    monkeypatch.setattr(deferred, "LONG", LENGTH)
    monkeypatch.setattr(blockwise, "EDGES_AT_ONCE", SizeByDevice(2**20, 1))
    model = Subject("mistral").build("float64")
    sparse = SparseTransformer(model, initial_bias=0.3, distribution=rule)

    def loss() -> Tensor:
        with DoublePrecision(), sparse.sampled(torch.Generator().manual_seed(0)):
            logits, counts = sparse.run_with_counts(_tokens())
        return logits.logsumexp(-1).mean() + 1e-3 * counts.expected.sum()

    loss().backward()
    assert blocks
    named = dict(model.original_model.named_parameters())
    chosen = [p for n, p in named.items() if "attn" in n and p.ndim == 2][:3]
    for parameter, index in [*((p, (5, 3)) for p in chosen), (sparse.gates.bias, (1, 2))]:
        assert parameter.grad is not None
        found = parameter.grad[index].item()
        assert abs(found) > 1e-6
        assert found == pytest.approx(derivative(loss, parameter, index, 1e-6), rel=1e-5, abs=1e-9)


def test_automatic_casts_are_those_of_whole_patterns() -> None:
    sparse = SparseTransformer(Subject("llama").build(), initial_bias=3.0)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = _step(sparse, LENGTH), _step(sparse, LENGTH + 1)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        off = (found[name].double() - values.double()).norm() / values.double().norm()
        assert off < 0.03, name


def test_nothing_of_the_pattern_s_size_is_kept() -> None:
    sparse = SparseTransformer(Subject("llama").build())
    kept: dict[int, int] = {}

    def keep(values: Tensor) -> Tensor:
        kept[values.untyped_storage().data_ptr()] = values.untyped_storage().nbytes()
        return values

    def census(long: int) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
            _step(sparse, long, noise=1.0)
        pattern = N_PROMPTS * sparse.cfg.n_heads * LENGTH * LENGTH * 4
        return sum(size >= pattern for size in kept.values())

    assert census(LENGTH + 1) >= 2 * sparse.cfg.n_layers
    assert census(LENGTH) == 0


def test_nothing_waits_for_a_gpu_in_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "EDGES_AT_ONCE", SizeByDevice(2**20, 1))
    sparse = SparseTransformer(Subject("llama").build())
    with torch.profiler.profile() as profiled:
        _step(sparse, LENGTH, noise=1.0)
    assert not {"aten::item", "aten::nonzero"} & {event.key for event in profiled.key_averages()}


def test_evaluation_needs_no_pattern(blocks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = SparseTransformer(Subject("gpt_neox").build("float64"), initial_bias=0.1)
    with torch.no_grad():
        expected, one = sparse.run_with_counts(_tokens())
        monkeypatch.setattr(deferred, "LONG", LENGTH)
        found, other = sparse.run_with_counts(_tokens())
        assert blocks
        blocks.clear()
        kept = sparse.run_with_counts(_tokens(), keep_gates=True)[1]
        with sparse.opened():
            assert torch.equal(sparse(_tokens()), sparse.unwrap()(_tokens()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(one.active, other.active) and torch.equal(one.tokens, other.tokens)
    assert not blocks and kept.gates is not None


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_model_without_gates(
    name: str, blocks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "LONG", LENGTH)
    model = Subject(name).build("float64")
    with torch.no_grad(), DoublePrecision():
        expected = model(_tokens())
        assert not blocks
        with predicting(model):
            found = model(_tokens())
        assert len(blocks) > 10 * model.cfg.n_layers
        assert torch.equal(model(_tokens()), expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not any("forward" in block.attn.__dict__ for block in model.blocks)


def test_what_hooks_see_is_whole(blocks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "LONG", LENGTH)
    sparse = SparseTransformer(Subject("llama").build("float64"), initial_bias=0.1)
    name = "blocks.1.attn.hook_pattern"
    with torch.no_grad(), DoublePrecision():
        plain = sparse(_tokens())
        blocks.clear()
        logits, cache = sparse.run_with_cache(_tokens(), names_filter=name)
    assert {type(cache[name]), type(logits)} == {Tensor} and cache[name].shape[-1] == LENGTH
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-12)
    assert blocks, "the other layers have no hooks of the user's"


def _deferred_scores(q: Tensor, k: Tensor) -> Any:
    with deferred._Deferring(q.shape[1]):
        return q @ k.mT


SOMETHING = {
    "addition": lambda s, m: (s + m)[0],
    "in place": lambda s, m: s.mul_(2).add_(m).sum(),
    "an entry": lambda s, m: s.softmax(-1).exp().sum(),
    "set": lambda s, m: (s.__setitem__((0, 0), 1.0), s.sum())[1],
    "other axis": lambda s, m: s.softmax(dim=1),
    "larger": lambda s, m: s + torch.ones(2, *s.shape, dtype=s.dtype),
    "joined": lambda s, m: torch.cat([s, s[..., :1]], dim=-1).softmax(-1),
    "matrix": lambda s, m: s.softmax(-1) @ s.mT,
    "cast": lambda s, m: (
        torch.nn.functional.softmax(s, dim=-1, dtype=torch.float32).to(m.dtype) * m
    ),
    "dropout": lambda s, m: F.dropout(s + m, 0.5, training=False) * 1,
}


@pytest.mark.parametrize("name", SOMETHING)
def test_deferred_scores_are_scores_to_all_other_code(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, m = (
        torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((9, 4), (9, 4), (9, 9))
    )
    scores = _deferred_scores(q, k)
    assert isinstance(scores, Deferred)
    found = SOMETHING[name](scores, m)
    expected = SOMETHING[name]((q @ k.mT).clone(), m)
    gradients = []
    for value in (found, expected):
        q.grad = k.grad = m.grad = None
        value = value.explicit() if isinstance(value, Deferred) else value
        value.square().sum().backward()
        gradients.append([value.detach(), q.grad, k.grad, m.grad])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_function_that_would_lose_the_gradient_is_refused() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return 2 * values.sum(dim=-1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * gradient[..., None].expand(2, 3, 9, 9)

    q = torch.randn(2, 3, 9, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="their gradient would be lost"):
        Twice.apply(_deferred_scores(q, q)).sum().backward()


def test_sums_over_blocks_are_not_rounded_to_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blockwise, "QUERIES_AT_ONCE", 1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 2, 3, 64, 8, generator=generator).bfloat16()
    gradients = []
    for dtype, by_blocks in (
        (torch.float64, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        q, k, v = (part.to(dtype).requires_grad_() for part in drawn)
        if by_blocks:
            scores = _deferred_scores(q, k)
            gate = lambda block, s, p, *_: (p, {})  # noqa: E731
            parts = scores.softmax(-1).expression, None, AttentionMask(causal=False)
            attention = blockwise.GatedAttention(*parts, torch.zeros(1, 3, 1, 1), gate, None)
            output = attention(v)[0]
        else:
            output = (q @ k.mT).softmax(-1) @ v
        output.square().sum().backward()
        gradients.append([part.grad.double() for part in (q, k, v) if part.grad is not None])
    for exact, whole, blocks in zip(*gradients, strict=True):
        assert (blocks - exact).norm() < 1.2 * (whole - exact).norm()


def test_keys_that_no_query_sees_are_left_out() -> None:
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    given = torch.zeros(2, 1, 9, 9, dtype=torch.float16)
    given = given.masked_fill(~seen, torch.finfo(torch.float16).min)
    mask = AttentionMask(causal=False, given=given)
    assert mask.keys_allowed([slice(2, 4), slice(0, 1)], (9, 9)) == [slice(0, 4), slice(0, 1)]
    assert AttentionMask(False, given=given > 0).keys_allowed([slice(1)], (9, 9)) == [slice(0, 9)]


def test_values_asked_for_without_gradients_keep_theirs() -> None:
    q = torch.randn(2, 3, 9, 4, requires_grad=True)
    scores = _deferred_scores(q, q)
    with torch.no_grad():
        assert not scores.exp().requires_grad
    scores.sum().backward()
    assert q.grad is not None


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("long", [LENGTH, LENGTH + 1], ids=["blocks", "whole"])
def test_a_step_leaves_no_tensor_behind(build_tiny: Build, long: int, collector_off: None) -> None:
    """A cycle through an autograd graph is never freed; any other, only by the collector."""
    sparse = SparseTransformer(build_tiny("grouped", n_ctx=LENGTH, d_vocab=VOCABULARY))
    left = []
    for _ in range(3):
        _step(sparse, long, noise=0.25)
        left.append(sum(issubclass(type(one), Tensor) for one in gc.get_objects()))
    assert left[1] == left[2]


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()

"""Passes that skip positions which do not matter: what is read is the same, and so are gradients.

What is skipped is chosen by its cost, which is nothing in models as small as these: here whatever
can be skipped is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sparse_tl.circuits import attribute_circuit_edges, attribute_heads, evaluate_circuit_edges
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import EMBEDDED, Held, Model, adapt, attached, held_between, record
from sparse_tl.lens.hooks import skipping
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]
KINDS = ["plain", "grouped", "attention_only"]
TOKENS = torch.randint(13, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def skip_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "COPIED", 0)
    monkeypatch.setattr(skipping, "LEAST", {"cpu": -1})


@pytest.fixture
def counted() -> Iterator[Callable[[torch.nn.Module], list[int]]]:
    """Counts the positions at which a module computes something, call by call."""
    handles = []

    def count(module: torch.nn.Module) -> list[int]:
        seen: list[int] = []
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            seen.append(args[0].shape[:-1].numel())
            return forward(*args, **kwargs)

        module.__dict__["forward"] = run
        handles.append(module)
        return seen

    yield count
    for module in handles:
        del module.__dict__["forward"]


def pairs() -> PromptPairs:
    """Pairs that begin alike (for 3, 1 and 0 tokens), read at positions of their own."""
    generator = torch.Generator().manual_seed(1)
    corrupted = torch.randint(13, TOKENS.shape, generator=generator)
    for row, n in enumerate((3, 1, 0)):
        corrupted[row, :n] = TOKENS[row, :n]
        corrupted[row, n] = (TOKENS[row, n] + 1) % 13
    answers = torch.tensor([[1], [2], [3]])
    return PromptPairs(TOKENS, corrupted, answers, answers + 1, torch.tensor([4, 6, 5]))


def read_at(some: PromptPairs) -> torch.Tensor:
    return torch.nn.functional.one_hot(some.positions, some.clean.shape[1]).bool()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_and_its_gradients_are_those_of_a_plain_pass(
    build_tiny: Build, kind: str
) -> None:
    model, some = build_tiny(kind, dtype="float64"), pairs()
    adapter, read = adapt(model), read_at(some)
    names = [f"blocks.{layer}.attn.hook_{slot}" for layer in range(2) for slot in "qkvz"]
    options: dict[str, Any] = {"differentiable": True}
    plain, expected = record(adapter, some.clean, names, **options)
    found, final = record(adapter, some.clean, names, read=read, **options)
    assert torch.allclose(final[read], expected[read], rtol=0, atol=1e-12)
    kept = [*names, EMBEDDED]
    slopes = torch.autograd.grad(final[read].sin().sum(), [found[name] for name in kept])
    right = torch.autograd.grad(expected[read].sin().sum(), [plain[name] for name in kept])
    for name, slope, wanted in zip(kept, slopes, right, strict=True):
        assert torch.allclose(slope, wanted, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_begin_alike_share_keys_and_values(build_tiny: Build, kind: str) -> None:
    model, some = build_tiny(kind, dtype="float64"), pairs()
    adapter, read = adapt(model), read_at(some)
    _, expected = record(adapter, some.clean, [], differentiable=True)
    held = held_between(adapter, some.clean, some.corrupted, read)
    assert held is not None and held.alike.sum(dim=1).tolist() == [3, 1, 0]
    _, other = record(adapter, some.corrupted, [], read=read, held=held)
    assert torch.allclose(other[read], adapter.final(some.corrupted)[read], rtol=0, atol=1e-12)
    found, final = record(adapter, some.clean, [], read=read, held=held, differentiable=True)
    assert torch.allclose(final[read], expected[read], rtol=0, atol=1e-12)


def test_only_what_matters_is_computed(
    build_tiny: Build, counted: Callable[[torch.nn.Module], list[int]]
) -> None:
    """Of 21 positions: 18 up to those that are read, of which 4 are held; 3 are read."""
    model, some = build_tiny(), pairs()
    adapter, read = adapt(model), read_at(some)
    held = held_between(adapter, some.clean, some.corrupted, read)
    seen = [counted(block.mlp) for block in model.blocks]
    record(adapter, some.corrupted, [], read=read, held=held)
    record(adapter, some.clean, [], read=read, held=held)
    assert seen == [[18, 14], [3, 3]]


def test_pairs_that_do_not_differ_before_they_are_read_hold_nothing(build_tiny: Build) -> None:
    adapter, some = adapt(build_tiny()), pairs()
    corrupted = some.clean.clone()
    corrupted[:, -1] = (corrupted[:, -1] + 1) % 13
    held = held_between(adapter, some.clean, corrupted, read_at(some))
    assert held is not None and held.alike.sum(dim=1).tolist() == [0, 6, 0]
    assert held_between(adapter, some.clean, some.clean, read_at(some)) is None


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"])
def test_a_hook_of_the_users_own_sees_every_position(build_tiny: Build, name: str) -> None:
    """It may move what is read, from where it is not."""
    model, some = build_tiny(dtype="float64"), pairs()
    adapter, read = adapt(model), read_at(some)

    def mix(value: torch.Tensor, hook: object) -> torch.Tensor:
        return value + value.mean(dim=1, keepdim=True)

    with model.hooks(fwd_hooks=[(name, mix)]):
        plain = adapter.final(some.clean)
        assert held_between(adapter, some.clean, some.corrupted, read) is None
        _, final = record(adapter, some.clean, [], read=read)
        assert torch.allclose(final, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_evaluations_are_those_without_skipping(
    build_tiny: Build, kind: str, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, some = build_tiny(kind, dtype="float64"), pairs()
    if sparse:
        model = SparseTransformer(model, initial_bias=0.0)

    def results() -> list[torch.Tensor]:
        found = []
        for method in ("eap", "eap-ig", "eap-ig-activations"):
            options: dict[str, Any] = {"method": method, "steps": 3, "progress": False}
            scores = attribute_circuit_edges(model, some, logit_difference, **options)
            heads = attribute_heads(model, some, logit_difference, **options)
            found += [scores.values, heads.values]
        sizes = (0, 3, 10, 30, scores.grid.n_parts)
        shown = evaluate_circuit_edges(model, some, logit_difference, scores, sizes, progress=False)
        return [*found, shown.values, shown.clean, shown.none]

    skipped = results()
    monkeypatch.setattr(skipping, "LEAST", {"cpu": 2**40})
    for found, expected in zip(skipped, results(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6 if kind == "grouped" else 1e-10)


def test_nothing_is_left_after_an_exception(build_tiny: Build) -> None:
    model = build_tiny()
    adapter, read = adapt(model), read_at(pairs())
    plain = model(TOKENS)
    with pytest.raises(RuntimeError, match="stop"), skipping.only_needed(adapter, read):
        raise RuntimeError("stop")
    assert torch.equal(model(TOKENS), plain)


def test_keys_and_values_are_held_in_all_copies(build_tiny: Build) -> None:
    model, some = build_tiny(dtype="float64"), pairs()
    adapter, expected = adapt(model), adapt(model).final(some.clean)
    held = Held(adapter, (some.clean == some.corrupted).cumprod(dim=1).bool())
    record(adapter, some.corrupted, [], held=held)
    with attached(adapter, held.hooks()):
        final = adapter.final(some.clean, copies=2)
    assert torch.allclose(final, expected.repeat(2, 1, 1), rtol=0, atol=1e-12)

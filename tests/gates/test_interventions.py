"""Interventions equal plain hooks written by hand, in whole passes, with a cache and generating."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import D_MODEL, plain_transformer
from by_hand import PROMPT, WIDTH, check, generated
from tiny import HAS_HOOKED
from torch import Tensor

from sparse_tl import (
    HookPoints,
    Intervention,
    SparseTransformer,
    ablate_heads,
    gated,
    intervene,
    load_addition_models,
    load_language_model,
    steer,
)
from sparse_tl.backend import Model, boot

Build = Callable[..., Model]
Change = Callable[[Tensor, Tensor], Tensor]
"""New activations of a column, from those there and those of the source."""
NAMES = ["blocks.0.hook_resid_pre", "blocks.1.attn.hook_z", "blocks.0.mlp.hook_post"]


@pytest.fixture
def prompts() -> tuple[Tensor, Tensor]:
    """Those that are run, and their sources."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(13, (3, WIDTH), generator=generator), torch.randint(
        13, (3, 6), generator=generator
    )


def by_hand(model: Any, name: str, columns: dict[int, int], source: Tensor, change: Change) -> Any:
    """A plain hook that changes some columns, each with one of the source's."""

    def hook(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        for column, of in columns.items():
            if column < value.shape[1]:
                value[:, column] = change(value[:, column], source[:, of])
        return value

    return lambda tokens: model.run_with_hooks(tokens, fwd_hooks=[(name, hook)])


WAYS: dict[str, tuple[dict[str, Any], Change]] = {
    "swap": ({}, lambda a, s: s),
    "add": ({"keep": 1.0, "scale": 0.5}, lambda a, s: a + 0.5 * s),
    "mix": ({"keep": 0.25, "scale": 0.75}, lambda a, s: 0.25 * a + 0.75 * s),
}
PLACES: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    "the same": ({"positions": slice(0, PROMPT)}, {n: n for n in range(PROMPT)}),
    "others": ({"positions": [3, 1], "source_positions": [5, -6]}, {3: 5, 1: 0}),
    "one for all": ({"source_positions": 2}, dict.fromkeys(range(WIDTH), 2)),
}


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("given", ["tokens", "cache"])
@torch.no_grad()
def test_activations_of_another_prompt(
    build_tiny: Build,
    prompts: tuple[Tensor, Tensor],
    kind: str,
    name: str,
    way: str,
    place: str,
    given: str,
) -> None:
    model, (tokens, other) = build_tiny(kind), prompts
    cache = model.run_with_cache(other)[1]
    (factors, change), (positions, columns) = WAYS[way], PLACES[place]
    source = other if given == "tokens" else cache
    some = Intervention(name, source, **factors, **positions)
    run = by_hand(model, name, columns, cache[name], change)
    check(model, tokens, lambda: intervene(model, some), run, 0)


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_subspace_of_another_prompt(
    build_tiny: Build, prompts: tuple[Tensor, Tensor], kind: str, way: str
) -> None:
    """By the projection's formula, from vectors that are not orthonormal."""
    model, (tokens, other) = build_tiny(kind, dtype="float64"), prompts
    name, size = "blocks.1.hook_resid_pre", model.cfg.d_model
    basis = torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    projection = basis.T @ torch.linalg.inv(basis @ basis.T) @ basis
    (factors, change), (positions, columns) = WAYS[way], PLACES["others"]

    def within(a: Tensor, s: Tensor) -> Tensor:
        return a + (change(a, s) - a) @ projection

    run = by_hand(model, name, columns, model.run_with_cache(other)[1][name], within)
    some = Intervention(name, other, subspace=basis, **factors, **positions)
    check(model, tokens, lambda: intervene(model, some), run, 1e-10)


UNITS: list[tuple[str, list[int]]] = [(NAMES[2], [4, 0]), (NAMES[1], [1])]


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@pytest.mark.parametrize(("name", "units"), UNITS)
@pytest.mark.parametrize("keep", [0.0, 2.5])
@torch.no_grad()
def test_neurons_and_heads_are_scaled(
    build_tiny: Build,
    prompts: tuple[Tensor, Tensor],
    kind: str,
    name: str,
    units: Sequence[int],
    keep: float,
) -> None:
    model, (tokens, _) = build_tiny(kind), prompts

    def scale(a: Tensor, s: Tensor) -> Tensor:
        a = a.clone()
        a[:, units] *= keep
        return a

    run = by_hand(model, name, dict.fromkeys(range(WIDTH), 0), tokens[..., None], scale)
    some = Intervention(name, keep=keep, subspace=units)
    check(model, tokens, lambda: intervene(model, some), run, 0)


@torch.no_grad()
def test_a_feature_is_scaled_by_a_function(build_tiny: Build, prompts: Any) -> None:
    """What an autoencoder's feature writes, times 3; the rest, and its error, stay."""
    model, (tokens, _) = build_tiny(), prompts
    generator = torch.Generator().manual_seed(1)
    encode, decode = torch.randn(2, model.cfg.d_model, generator=generator)

    def feature(a: Tensor) -> Tensor:
        return (a @ encode).relu()[..., None] * decode

    name = "blocks.1.hook_resid_pre"
    everywhere = dict.fromkeys(range(WIDTH), 0)

    def change(a: Tensor, s: Tensor) -> Tensor:
        return a + 2 * feature(a)

    run = by_hand(model, name, everywhere, tokens[..., None], change)
    some = Intervention(name, feature, keep=1, scale=2)
    check(model, tokens, lambda: intervene(model, some), run)


@torch.no_grad()
def test_several_act_in_order_on_a_sparse_model_under_an_ablation(
    build_tiny: Build, prompts: tuple[Tensor, Tensor]
) -> None:
    sparse, (tokens, other) = SparseTransformer(build_tiny("grouped"), initial_bias=0.0), prompts
    name, ones = "blocks.1.hook_resid_pre", torch.ones(sparse.cfg.d_model)
    source = sparse.run_with_cache(other[:1])[1][name]
    several = [
        Intervention(name, other[:1], positions=[2]),
        Intervention(name, ones, keep=2.0, positions=[2]),
    ]
    run = by_hand(sparse, name, {2: 2}, source, lambda a, s: (2 * s + ones).expand_as(a))
    with ablate_heads(sparse, [(1, 0)]):
        check(sparse, tokens, lambda: intervene(sparse, several), run, 0)


def test_a_subspace_can_be_learned(build_tiny: Build, prompts: tuple[Tensor, Tensor]) -> None:
    """Distributed alignment search."""
    model, (tokens, other) = build_tiny().requires_grad_(False), prompts
    basis = torch.randn(2, model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    basis.requires_grad_()
    with intervene(
        model, Intervention("blocks.0.hook_resid_mid", other, positions=[3], subspace=basis)
    ):
        model(tokens)[:, -1, 3].sum().backward()
    assert basis.grad is not None and basis.grad.abs().max() > 0


POSITIONS: list[tuple[Any, Sequence[int]]] = [
    (None, range(WIDTH)),
    (slice(0, PROMPT), range(PROMPT)),
    ([0, 3], [0, 3]),
    (PROMPT - 1, [PROMPT - 1]),
    (slice(PROMPT, None), range(PROMPT, WIDTH)),
    (lambda column: column % 2 == 1, range(1, WIDTH, 2)),
]
MORE_NAMES = ["hook_embed", "blocks.0.attn.hook_v", "blocks.0.attn.hook_rot_k"]


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@pytest.mark.parametrize("name", [*NAMES, *MORE_NAMES])
@pytest.mark.parametrize(("positions", "columns"), POSITIONS)
def test_positions_are_steered_by_a_rule(
    build_tiny: Build,
    prompts: tuple[Tensor, Tensor],
    kind: str,
    name: str,
    positions: Any,
    columns: Sequence[int],
) -> None:
    model, (tokens, _) = build_tiny(kind), prompts
    if HAS_HOOKED and name == "hook_embed" and kind == "grouped":
        pytest.skip("HookedTransformer's `generate` does not call it")
    if "rot" in name and (kind == "plain" or positions is None):
        pytest.skip("no rotary positions; or softmax ignores what is added to every key")
    there = model.run_with_cache(tokens)[1][name]
    vector = 3 * torch.randn(there.shape[2:], generator=torch.Generator().manual_seed(1))
    run = by_hand(model, name, dict.fromkeys(columns, 0), there, lambda a, s: a + vector)
    check(model, tokens, lambda: steer(model, name, vector, positions=positions), run)


@pytest.mark.parametrize("positions", [[-1], slice(-2, None), slice(0, -1)])
def test_positions_from_an_end_that_moves_are_refused(
    build_tiny: Build, prompts: tuple[Tensor, Tensor], positions: Any
) -> None:
    model = build_tiny()
    vector = torch.ones(model.cfg.d_model)
    with (
        steer(model, "blocks.0.hook_resid_pre", vector, positions=positions),
        pytest.raises(ValueError, match="the end moves with every token"),
    ):
        generated(model, prompts[0][:, :PROMPT])


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2", "gemma2"])
@torch.no_grad()
def test_the_stream_between_attention_and_mlp_is_edited_whole(
    name: str, prompts: tuple[Tensor, Tensor]
) -> None:
    """On a bridge, ``hook_resid_mid`` is the MLP's input; attention adds to the whole stream."""
    model, vector = boot(plain_transformer(name)), torch.ones(D_MODEL)
    tokens = prompts[1]
    point, every = "blocks.1.hook_resid_mid", dict.fromkeys(range(6), 0)
    run = by_hand(model, "blocks.1.hook_attn_out", every, tokens, lambda a, s: a + 2 * vector)
    expected = run(tokens)
    with steer(model, point, vector, scale=2.0):
        torch.testing.assert_close(model(tokens), expected)
    before: list[Tensor] = []
    cancel: Any = [
        ("blocks.1.hook_resid_pre", lambda value, hook: before.append(value)),
        ("blocks.1.hook_attn_out", lambda value, hook: -before[-1]),
    ]
    expected = model.run_with_hooks(tokens, fwd_hooks=cancel)
    with gated(model, HookPoints((point,), ()), torch.zeros(1)):
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)


def test_a_hook_point_that_never_fires_is_refused(prompts: tuple[Tensor, Tensor]) -> None:
    """A model with rotary embeddings adds none at positions."""
    model = boot(plain_transformer("llama"))
    with (
        pytest.raises(ValueError, match="hook_pos_embed .* never fired"),
        steer(model, "hook_pos_embed", torch.ones(D_MODEL)),
    ):
        model(prompts[1])


PROMPTS = "36+28=?????", "36+21=?????"


@torch.no_grad()
def test_a_swap_turns_one_sum_into_another() -> None:
    """At the last layer's input, where each position is read for itself in the sparse adder."""
    _, sparse = load_addition_models()
    with intervene(sparse, Intervention("blocks.3.hook_resid_post", PROMPTS[1], positions=[-1])):
        found = sparse(PROMPTS[0])[0, -1]
    assert torch.equal(found, sparse(PROMPTS[1])[0, -1])


@pytest.mark.slow
@torch.no_grad()
def test_a_real_language_model_under_hooks_by_hand(smollm2: Path) -> None:
    model = load_language_model(device="cpu")
    texts = "The capital of France is", "The capital of Italy is"
    tokens, name = model.to_tokens(texts[0]), "blocks.12.hook_resid_pre"
    source = model.run_with_cache(texts[1])[1][name]
    last = tokens.shape[1] - 1
    for way, (factors, change) in WAYS.items():
        run = by_hand(model, name, {last - 1: last - 1, last: last}, source, change)
        some, expected = Intervention(name, texts[1], positions=[-2, -1], **factors), run(tokens)
        with intervene(model, some):
            assert torch.equal(model(tokens), expected), way


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"positions": slice(0, 8)}, "position 6 lies outside the source of 6 tokens"),
        ({"source": torch.zeros(2, 8).long()}, "the source has 2 prompts for 3"),
        ({"subspace": torch.ones(1, 3), "positions": [2]}, "each vector of the subspace has shape"),
        ({"subspace": torch.ones(2, 16)}, "linearly dependent"),
        (
            {"positions": slice(0, 2), "source_positions": [0, 1]},
            "source_positions for each",
        ),
        ({"source": torch.ones(3)}, r"the vector has shape \(3,\)"),
        ({"name": "blocks.0.attn.hook_pattern"}, "for each query and key"),
        ({"name": "blocks.2.hook_resid_pre"}, "no hook point .* 'blocks.1.hook_resid_pre'"),
    ],
)
def test_what_does_not_fit_is_refused(
    build_tiny: Build, prompts: tuple[Tensor, Tensor], wrong: Any, said: str
) -> None:
    model, (tokens, other) = build_tiny(), prompts
    with pytest.raises(ValueError, match=said):
        some = Intervention(**{"name": "blocks.1.hook_resid_pre", "source": other, **wrong})
        with intervene(model, some):
            model(tokens)
    assert not model.hook_dict["blocks.1.hook_resid_pre"].fwd_hooks

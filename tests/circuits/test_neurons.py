"""Neurons of an MLP against hooks by hand: exact effects, slopes, sums, and one that is planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import run_split
from random_models import KINDS, random_pairs, shaken
from small_models import random_model
from test_gated_mlps import NAMES, gated_model
from tiny import tokenizer_of
from torch import Tensor
from wiring import attend, blank_model, embed, move, spaces

from sparse_tl.backend import Model, adapt, boot
from sparse_tl.circuits import (
    Circuit,
    attribute_circuit_edges,
    neuron_effects,
    pair_runs,
)
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import PositionedGraph
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]
Q: dict[str, Any] = {"progress": False}
WITH_MLPS = ["sequential", "parallel", "grouped", "unnormalised"]
"""The third is gated: ``silu(gate) * up``."""

pytestmark = pytest.mark.usefixtures("double_precision")


def built(build_tiny: Build, kind: str) -> Model:
    return shaken(build_tiny(**KINDS[kind], dtype="float64", n_layers=3))


def parts(model: Any, layer: int, pairs: PromptPairs) -> Tensor:
    """Clean minus corrupted part of every neuron, by hand: ``[pair, pos, neuron, d_model]``."""
    name = f"blocks.{layer}.mlp.hook_post"
    with torch.no_grad():
        clean, corrupted = (
            model.run_with_cache(tokens)[1][name] for tokens in (pairs.clean, pairs.corrupted)
        )
    return (clean - corrupted)[..., None] * model.blocks[layer].mlp.W_out.detach()


def patched(
    model: Model, pairs: PromptPairs, change: Tensor, readers: list[str], at: Tensor | None = None
) -> Tensor:
    """The metric where these readers alone read the stream less a change, mean over pairs."""
    graph = adapt(model).graph
    here = torch.ones(pairs.clean.shape) if at is None else at

    def read(destination: Any, written: Tensor) -> Tensor:
        less = change * here[..., None] if str(destination) in readers else 0.0
        return written.sum(dim=0) - less

    logits = run_split(model, graph, pairs.clean, read)
    return logit_difference(pairs.read(logits), pairs).mean()


@pytest.mark.long
@pytest.mark.parametrize("kind", WITH_MLPS)
def test_effects_are_those_of_readers_patched_by_hand(
    build_tiny: Build, pairs: PromptPairs, kind: str
) -> None:
    model = built(build_tiny, kind)
    shared = "kv" if kind == "grouped" else "h"
    readers = ["m2", f"a1.{shared}1<v>", "a2.h0<q>", "logits"]
    found = neuron_effects(model, pairs, logit_difference, "m0", readers=readers, n=4, **Q)
    assert sorted(found.readers) == sorted(readers) and found.n_pairs == len(pairs)
    change = parts(model, 0, pairs)
    with torch.no_grad():
        clean = patched(model, pairs, change[:, :, 0], [])
        exact = found.effect.isfinite().nonzero().flatten().tolist()
        for neuron in exact:
            by_hand = patched(model, pairs, change[:, :, neuron], readers) - clean
            assert found.effect[neuron].item() == pytest.approx(by_hand.item(), rel=1e-9)
    shares = torch.zeros(change.shape[2], dtype=torch.float64, requires_grad=True)
    patched(model, pairs, torch.einsum("n,bpnd->bpd", shares, change), readers).backward()
    torch.testing.assert_close(found.score, shares.grad, rtol=1e-9, atol=1e-12)
    assert set(exact) == set(found.score.abs().topk(4).indices.tolist())
    if kind == "grouped":  # the activation is gate times up
        mlp: Any = model.blocks[0].mlp
        _, cache = model.run_with_cache(pairs.clean)
        pre, up, post = (
            cache[f"blocks.0.mlp.hook_{name}"] for name in ("pre", "pre_linear", "post")
        )
        bias = 0.0 if mlp.b_in is None else mlp.b_in  # HookedTransformers add it to the product
        torch.testing.assert_close(torch.nn.functional.silu(pre) * up + bias, post)


@pytest.mark.long
@pytest.mark.parametrize("kind", WITH_MLPS)
def test_scores_of_all_neurons_add_up_to_those_of_the_edges(
    build_tiny: Build, pairs: PromptPairs, kind: str
) -> None:
    model = built(build_tiny, kind)
    scores = attribute_circuit_edges(model, pairs, logit_difference, method="eap", **Q)
    circuit = scores.top(scores.grid.n_parts // 2)
    for mlp in ("m0", "m1", "m2"):
        for readers in (None, circuit):
            found = neuron_effects(model, pairs, logit_difference, mlp, readers=readers, n=1, **Q)
            edges = [f"{mlp}->{reader}" for reader in found.readers]
            of = circuit.edges if readers is circuit else scores.grid.edges
            assert sorted(edges) == sorted(str(e) for e in of if str(e).startswith(f"{mlp}->"))
            expected = sum(scores[edge] for edge in edges)
            assert found.score.sum().item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("kind", WITH_MLPS)
def test_readers_at_positions(build_tiny: Build, pairs: PromptPairs, kind: str) -> None:
    model = built(build_tiny, kind)
    pairs = replace(pairs, positions=torch.full((5,), 4)).with_spans({"A": [1, 2], "END": -1})
    graph = adapt(model).graph
    for site, name, column in (
        (PositionedGraph(graph, ("A", "END", "rest")), "A", [1, 2]),
        (PositionedGraph(graph, tuple("01234")), "3", [3]),
    ):
        circuit = Circuit.of(site, [f"m0->m2@{name}", f"a1.h0->m2@{name}"])
        found = neuron_effects(model, pairs, logit_difference, "m0", readers=circuit, n=2, **Q)
        assert found.readers == (f"m2@{name}",)
        change, at = parts(model, 0, pairs), torch.zeros(pairs.clean.shape)
        at[:, column] = 1
        with torch.no_grad():
            clean = patched(model, pairs, change[:, :, 0], [])
            for neuron in found.effect.isfinite().nonzero().flatten().tolist():
                by_hand = patched(model, pairs, change[:, :, neuron], ["m2"], at) - clean
                assert found.effect[neuron].item() == pytest.approx(by_hand.item(), rel=1e-9)
        assert all(t.position in column for some in found.tokens.values() for t in some)


def planted() -> tuple[Model, PromptPairs]:
    """Head 0 brings the first token to the end, where neuron 5 of m0 turns "2" into the answer.

    Neuron 3 does the same at half the strength; all others read anything and write what the
    unembedding ignores.
    """
    space = spaces(token=7, place=3, moved=7, output=7, unread=8)
    size: dict[str, Any] = {"d_model": 32, "d_head": 16, "d_vocab": 7, "n_ctx": 3, "d_mlp": 24}
    model: Any = blank_model(n_layers=1, n_heads=2, **size)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embed(model, space)
        sharp = torch.zeros(3, 3)
        sharp[:, 0] = 40.0
        attend(model, 0, 0, space["place"], space["place"], sharp)
        move(model, 0, 0, space["token"], space["moved"])
        mlp = model.blocks[0].mlp
        mlp.W_in[:] = torch.randn(mlp.W_in.shape, generator=generator)
        mlp.W_out[:, space["unread"]] = torch.randn(24, 8, generator=generator).double()
        for neuron, strength in ((5, 3.0), (3, 1.5)):
            mlp.W_in[:, neuron] = 0
            mlp.W_in[space["moved"].start + 2, neuron] = 1.0
            mlp.W_out[neuron] = 0
            mlp.W_out[neuron, space["output"].start + 6] = strength
    clean = torch.tensor([[2, 0, 1], [2, 1, 0], [3, 0, 1]])
    corrupted = torch.tensor([[4, 0, 1], [3, 1, 0], [2, 0, 1]])
    answers, wrong = torch.full((3, 1), 6), torch.full((3, 1), 5)
    return model, PromptPairs(clean, corrupted, answers, wrong, torch.full((3,), 2))


def test_a_planted_neuron_comes_first() -> None:
    model, pairs = planted()
    found = neuron_effects(model, pairs, logit_difference, "m0", n=3, **Q)
    table = found.to_pandas()
    assert table["neuron"].tolist()[:2] == ["m0.n5", "m0.n3"] and len(table) == 24
    # It fires in two clean prompts and in one corrupted prompt: -3, -3 and +3 logits.
    assert table["effect"].tolist()[:3] == pytest.approx([-1.0, -0.5, 0.0], abs=1e-12)
    assert found.effect.isfinite().sum() == 3 and table["effect"][3:].isna().all()
    assert table["score"].tolist() == pytest.approx([-1.0, -0.5] + [0.0] * 22, abs=1e-12)
    assert (table["clean"][0], table["corrupted"][0]) == pytest.approx((2 / 3, 1 / 3), abs=1e-9)
    tokens = found.tokens["m0.n5"]
    assert [(t.pair, t.position, t.token, t.before) for t in tokens] == [
        (0, 2, "1", "2 0 "),
        (1, 2, "0", "2 1 "),
        (2, 2, "1", "3 0 "),
    ]
    ends = [(t.clean, t.corrupted, t.score) for t in tokens]
    for values, expected in zip(ends, [(1, 0, -3), (1, 0, -3), (0, 1, 3)], strict=True):
        assert values == pytest.approx(expected, abs=1e-9)
    assert found.promotes["m0.n5"][0] == "6"
    assert "m0.n5 -1, m0.n3 -0.5" in repr(found) and "3 of 24 neurons exactly" in repr(found)


def test_the_text_of_prompts_is_read_by_the_tokenizer(tmp_path: Path, build_tiny: Build) -> None:
    words = ["<s>", *"abcdefghijkl"]
    model = shaken(build_tiny(tokenizer=tokenizer_of(words, tmp_path), dtype="float64"))
    pairs = random_pairs()
    found = neuron_effects(model, pairs, logit_difference, "m1", n=2, **Q)
    for some in found.tokens.values():
        for token in some:
            prompt = pairs.clean[token.pair, : int(pairs.positions[token.pair]) + 1]
            assert token.before + token.token + token.after == " ".join(words[i] for i in prompt)
            assert token.token.strip() == words[int(prompt[token.position])]
    assert set(found.promotes["m1.n" + str(int(found.score.abs().argmax()))]) <= set(words)


def test_batches_and_stacks_make_no_difference(
    build_tiny: Build, pairs: PromptPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(build_tiny, "grouped")
    one = neuron_effects(model, pairs, logit_difference, "m1", n=5, **Q)
    monkeypatch.setattr(pair_runs, "ROWS", 4)
    two = neuron_effects(model, pairs, logit_difference, "m1", n=5, batch_size=2, **Q)
    assert one.tokens.keys() == two.tokens.keys()
    for name in ("effect", "score", "clean", "corrupted"):
        torch.testing.assert_close(
            getattr(one, name), getattr(two, name), rtol=1e-9, atol=1e-12, equal_nan=True
        )


def test_hooks_of_the_user_act_in_every_pass(build_tiny: Build, pairs: PromptPairs) -> None:
    model: Any = built(build_tiny, "sequential")
    scaled = ("blocks.0.mlp.hook_post", lambda value, hook: 2.0 * value)
    with model.hooks(fwd_hooks=[scaled]):
        found = neuron_effects(model, pairs, logit_difference, "m0", readers=["logits"], n=2, **Q)
    with torch.no_grad():
        mlp: Any = model.blocks[0].mlp
        weight = mlp.W_out if not hasattr(mlp, "out") else mlp.out.original_component.weight
        weight.mul_(2.0)
    same = neuron_effects(model, pairs, logit_difference, "m0", readers=["logits"], n=2, **Q)
    torch.testing.assert_close(found.effect, same.effect, rtol=1e-9, atol=0, equal_nan=True)
    edited = ("blocks.0.hook_mlp_out", lambda value, hook: value + torch.ones_like(value[:1, :1]))
    with (
        model.hooks(fwd_hooks=[edited]),
        pytest.raises(ValueError, match="does not write the sum of its neurons"),
    ):
        neuron_effects(model, pairs, logit_difference, "m0", **Q)


@pytest.mark.parametrize("name", NAMES)
def test_gates_on_mlps_and_norms_after_them(
    build_tiny: Build, pairs: PromptPairs, name: str
) -> None:
    """With the bias at 0, all that a gate or a norm lets through comes from neurons."""
    sparse: Any = gated_model(build_tiny, name)
    with torch.no_grad():
        for block in sparse.blocks:
            if block.mlp.b_out is not None:
                block.mlp.b_out.zero_()
    scores = attribute_circuit_edges(sparse, pairs, logit_difference, method="eap", **Q)
    found = neuron_effects(sparse, pairs, logit_difference, "m0", n=99, **Q)
    expected = sum(scores[f"m0->{reader}"] for reader in found.readers)
    assert found.score.sum().item() == pytest.approx(expected, rel=1e-7)
    assert found.score.abs().max() > 1e-3
    name, neuron = "blocks.0.mlp.hook_post", int(found.score.abs().argmax())
    with torch.no_grad():
        weight, change = sparse.blocks[0].mlp.W_out, torch.tensor(0.0)
        for tokens, sign in ((pairs.clean, 1), (pairs.corrupted, -1)):
            _, cache = sparse.run_with_cache(tokens)
            # Entry by entry: the weight over the scale of a norm, or a gate.
            ratio = cache["blocks.0.hook_mlp_out"] / (cache[name] @ weight)
            change = change + sign * cache[name][..., neuron, None] * weight[neuron] * ratio
        clean = patched(sparse, pairs, change, [])
        by_hand = patched(sparse, pairs, change, list(found.readers)) - clean
    assert found.effect[neuron].item() == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["Phi3", "Granite", "Gemma2", "GPTNeoX", "Bloom"])
def test_other_architectures(pairs: PromptPairs, name: str) -> None:
    """Fused gate and up, a multiplier, norms after the MLP, parallel, another activation."""
    model = boot(random_model(f"{name}ForCausalLM").double(), name=name)
    scores = attribute_circuit_edges(model, pairs, logit_difference, method="eap", **Q)
    found = neuron_effects(model, pairs, logit_difference, "m0", n=1, **Q)
    expected = sum(scores[f"m0->{reader}"] for reader in found.readers)
    assert found.score.sum().item() == pytest.approx(expected, rel=1e-5)


def test_half_precision_is_close(build_tiny: Build, pairs: PromptPairs) -> None:
    whole, half = (built(build_tiny, "sequential") for _ in range(2))
    half.to(torch.bfloat16)
    exact = neuron_effects(whole, pairs, logit_difference, "m2", n=99, **Q).effect
    found = neuron_effects(half, pairs, logit_difference, "m2", n=99, **Q)
    assert torch.corrcoef(torch.stack([found.effect, exact]))[0, 1] > 0.98
    assert torch.corrcoef(torch.stack([found.score, exact]))[0, 1] > 0.9


def test_experts_are_refused(pairs: PromptPairs) -> None:
    model = boot(random_model("MixtralForCausalLM").double(), name="experts")
    with pytest.raises(ValueError, match="m1 .* does not write the sum of its neurons"):
        neuron_effects(model, pairs, logit_difference, "m1", **Q)

"""Latent attention (DeepSeek): every analysis, against plain hooks and hand-written PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from architecture_checks import Subject
from architecture_checks.subject import PAIRS, QUIET
from architectures import ARCHITECTURES, LATENT, N_HEADS, N_LAYERS, plain_transformer
from double_precision import DoublePrecision
from oracle import by_head, mask_of, run_patched_each
from torch import Tensor

from sparse_tl import (
    HookPoints,
    SparseTransformer,
    ablate_heads,
    attribute_circuit_edges,
    gated,
    logit_difference,
    patch_activations,
    patch_exactly,
    steer,
)
from sparse_tl.backend import (
    SLOTS,
    Order,
    adapt,
    add_lora,
    attached,
    boot,
    check_circuits,
    check_gates,
    merge_lora,
    record,
)
from sparse_tl.graph import Slot
from sparse_tl.training.loop import choose_trained

EDGES = ["input->a0.h1<k>", "m0->a2.h3<k>", "a0.h2->a1.h0<v>", "m1->a2.h1<q>", "a1.h3->m1"]
NAMES = {"deepseek_v3": "q_a_proj q_b_proj", "deepseek_v2": "q_proj"}


def build(name: str, **changed: Any) -> Any:
    return boot(plain_transformer(name, **changed), name=name).requires_grad_(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LATENT)
def test_single_edges_against_the_oracle(name: str) -> None:
    """Among them keys of one head, whose rotated part all heads share."""
    model = Subject(name).exact
    graph = adapt(model).graph
    with DoublePrecision():
        found = patch_exactly(model, PAIRS, logit_difference, EDGES, **QUIET).to_list()
        whole = logit_difference(PAIRS.read(model(PAIRS.clean)), PAIRS)
        masks = torch.stack([graph.exists & ~mask_of(graph, [edge]) for edge in EDGES])
        each = run_patched_each(model, graph, PAIRS, masks)
        for logits, moved in zip(each, found, strict=True):
            patched = logit_difference(logits, PAIRS)
            assert moved == pytest.approx((patched - whole).mean().item(), abs=1e-9)
            assert abs(moved) > 1e-4


@pytest.mark.parametrize(
    "changed",
    [{"rope_interleave": False}, {"attention_bias": False}, {"q_lora_rank": None}],
    ids=["halves", "unbiased", "direct queries"],
)
def test_other_forms_are_the_sum_of_their_parts(changed: dict[str, Any]) -> None:
    """Heads given another prompt's reads write what they write there: checked for every form."""
    check_circuits(adapt(build("deepseek_v3", **changed)))


@pytest.mark.parametrize("name", LATENT)
@torch.no_grad()
def test_heads_are_those_of_the_output_matrix(name: str) -> None:
    """A head's columns of the output matrix at 0 are that head ablated, and its z."""
    model, tokens = build(name), PAIRS.clean
    with ablate_heads(model, [(1, 2)]):
        found = model(tokens)
    plain = plain_transformer(name)
    size = plain.config.v_head_dim
    plain.model.layers[1].self_attn.o_proj.weight[:, 2 * size : 3 * size] = 0
    assert torch.allclose(found, plain(tokens).logits, atol=1e-5)
    assert not torch.allclose(found, model(tokens), atol=1e-2)


@pytest.mark.parametrize("name", LATENT)
@torch.no_grad()
def test_patched_heads(name: str) -> None:
    model = build(name)
    found = patch_activations(model, PAIRS, logit_difference, "z", into="clean", **QUIET)
    point, kept = "blocks.1.attn.hook_z", dict[str, Tensor]()
    model.run_with_hooks(
        PAIRS.corrupted, fwd_hooks=[(point, lambda z, hook: kept.update(z=by_head(model, z)))]
    )
    for head in range(N_HEADS):

        def replaced(z: Tensor, hook: Any, head: int = head) -> Tensor:
            parts = by_head(model, z).clone()
            parts[:, :, head] = kept["z"][:, :, head]
            return parts.reshape(z.shape)

        logits = model.run_with_hooks(PAIRS.clean, fwd_hooks=[(point, replaced)])
        expected = logit_difference(PAIRS.read(logits), PAIRS).double()
        assert torch.allclose(found.values[1, head], expected, atol=1e-5)


@pytest.mark.parametrize("slot", "qkv")
@torch.no_grad()
def test_all_hook_points_of_heads_are_seen_alike(slot: str) -> None:
    """``[batch, pos, head, d_head]``, though the bridge has ``[batch, head, pos, d_head]``."""
    model, name = build("deepseek_v3"), f"blocks.1.attn.hook_{slot}"
    gates = torch.ones(1, N_HEADS)
    gates[0, 2] = 0
    with gated(model, HookPoints((name,), (2,)), gates):
        found = model(PAIRS.clean)

    def closed(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, 2] = 0
        return value

    assert torch.equal(found, model.run_with_hooks(PAIRS.clean, fwd_hooks=[(name, closed)]))


@pytest.mark.parametrize("name", LATENT)
def test_parameters_of_queries_and_keys(name: str) -> None:
    model = build(name)
    found = choose_trained(SparseTransformer(model.requires_grad_(True)), {"qk": 1.0})
    parts = [*NAMES[name].split(), "kv_a_proj_with_mqa", "kv_b_proj"]
    for layer in range(N_LAYERS):
        for part in parts:
            assert any(f"blocks.{layer}." in known and f".{part}." in known for known in found)
    biases = 2 if name == "deepseek_v3" else 0
    assert len(found) == N_LAYERS * (len(parts) + biases)


def test_low_rank_adapters_count() -> None:
    model = build("deepseek_v3", dtype="float64")
    without = attribute_circuit_edges(model, PAIRS, logit_difference, **QUIET).values
    add_lora(model, rank=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    found = attribute_circuit_edges(model, PAIRS, logit_difference, **QUIET).values
    merged = merge_lora(model).requires_grad_(False)
    expected = attribute_circuit_edges(merged, PAIRS, logit_difference, **QUIET).values
    assert torch.allclose(found, expected, atol=1e-12)
    assert not torch.allclose(found, without, atol=1e-2)


@pytest.mark.parametrize("slot", SLOTS)
def test_what_is_read_is_seen_after_earlier_edits(slot: Slot) -> None:
    """As at a hook point: the later of two functions gets what the earlier one returned."""
    model = build("deepseek_v3")
    adapter, final = adapt(model), []
    name = adapter.read_point(1, slot)

    def shifted(value: Tensor) -> Tensor:
        value = value.clone()
        value[:, :, 2] += torch.arange(value.shape[-1])
        return value

    for differentiable in (False, True):  # then even unchanged reads are computed from
        with attached(adapter, [(name, Order.FIRST, shifted)]):
            kept, end = record(adapter, PAIRS.clean, [name], differentiable=differentiable)
        plain, _ = record(adapter, PAIRS.clean, [name])
        assert torch.allclose(kept[name], shifted(plain[name]), atol=1e-6)
        final.append(end.detach())
    assert torch.allclose(*final, atol=1e-5)
    assert not torch.allclose(final[0], adapter.final(PAIRS.clean), atol=1e-3)


# ---- refused -------------------------------------------------------------------------------------


def test_hooks_between_latents_and_queries_are_named() -> None:
    """They would not act on heads that are run on their own."""
    model = build("deepseek_v3")
    with (
        steer(model, "blocks.1.attn.hook_kv_latent", torch.ones(10)),
        pytest.raises(
            ValueError,
            match=r"a hook on attn.hook_kv_latent would not act on heads",
        ),
    ):
        attribute_circuit_edges(model, PAIRS, logit_difference, **QUIET)
    with steer(model, "blocks.1.attn.hook_k", torch.ones(N_HEADS, 10)):
        attribute_circuit_edges(model, PAIRS, logit_difference, **QUIET)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek_v3", "no rule for the norms inside its attention"),
        ("mixtral", "experts have no hook points around their activation functions"),
        ("gpt_oss", "experts have no hook points around their activation functions"),
    ],
)
def test_relevance_needs_a_rule_for_every_part(name: str, why: str) -> None:
    """Experts were taken for one activation function of d_model entries."""
    with pytest.raises(
        ValueError, match=f"'{name}' cannot be used for the method 'relp', since .*{why}"
    ):
        attribute_circuit_edges(build(name), PAIRS, logit_difference, method="relp", **QUIET)


def sparse_attention() -> Any:
    """GLM with DeepSeek's sparse attention: layers also hand on which keys they chose."""
    sizes = {**ARCHITECTURES["deepseek_v3"][1], "attention_bias": False}
    sizes |= {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
    config = transformers.GlmMoeDsaConfig(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    return boot(plain.eval(), name="glm").requires_grad_(False)


@pytest.mark.skipif(not hasattr(transformers, "GlmMoeDsaConfig"), reason="transformers is older")
@torch.no_grad()
def test_what_works_where_an_index_chooses_keys() -> None:
    model = sparse_attention()
    check_gates(adapt(model))
    analyses: list[Callable[..., Any]] = [attribute_circuit_edges, patch_exactly]
    for analysis in analyses:
        with pytest.raises(ValueError, match="an index of its own.*Gates on attention edges and"):
            analysis(model, PAIRS, logit_difference, **QUIET)
    found = patch_activations(model, PAIRS, logit_difference, "mlp_out", into="clean", **QUIET)
    point, kept = "blocks.2.hook_mlp_out", dict[str, Tensor]()
    model.run_with_hooks(PAIRS.corrupted, fwd_hooks=[(point, lambda x, hook: kept.update(x=x))])

    def replaced(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, -1] = kept["x"][:, -1]
        return value

    logits = model.run_with_hooks(PAIRS.clean, fwd_hooks=[(point, replaced)])
    expected = logit_difference(PAIRS.read(logits), PAIRS).double()
    assert torch.allclose(found.values[2, -1], expected, atol=1e-5)

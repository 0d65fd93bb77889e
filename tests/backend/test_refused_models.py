"""Models that the package would get wrong are refused, in a sentence that says why."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, LATENT, N_HEADS, VOCABULARY, plain_transformer
from packaging.version import Version
from small_models import native, random_model
from tiny import hooked_alone, tiny_model
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module

from sparse_tl import (
    CircuitEdges,
    GatedRun,
    PromptPairs,
    SparseTransformer,
    attribute_circuit_edges,
    logit_difference,
)
from sparse_tl.backend import adapt, boot, check_circuits, check_gates, load_model

OLD = Version(version("transformer-lens")) < Version("4.1")
DELEGATED = "edits to its attention scores do not reach the pattern"
UNSHARED = "its MLPs read what a normalisation makes for attention"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["OPT", "GPTJ", "GPTNeo", "native"])
def test_models_without_gates(name: str) -> None:
    model = native() if name == "native" else boot(random_model(f"{name}ForCausalLM"))
    with pytest.raises(ValueError, match=f"in layer 0 of .* {DELEGATED}: gates would have no"):
        SparseTransformer(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("OPT", "blocks.0.mlp_input never fires in .* by other means"),
        ("GPTJ", UNSHARED),
        ("Phi", UNSHARED),
        pytest.param("Cohere", UNSHARED, marks=pytest.mark.skipif(OLD, reason="refused at once")),
    ],
)
def test_models_without_circuits(name: str, why: str) -> None:
    model = boot(random_model(f"{name}ForCausalLM"))
    ones = torch.ones(3, 1, dtype=torch.long)
    pairs = PromptPairs(*torch.randint(VOCABULARY, (2, 3, 6)), ones, ones + 1, 5 * ones[:, 0])
    if name in ("Phi", "Cohere"):
        check_gates(adapt(model))
    with pytest.raises(ValueError, match=why):
        attribute_circuit_edges(model, pairs, logit_difference, progress=False)
    with pytest.raises(ValueError, match=why):
        check_circuits(adapt(model))


@pytest.mark.skipif(not OLD, reason="later versions know how Cohere rotates its pairs")
def test_cohere_is_another_model_in_old_versions() -> None:
    with pytest.raises(
        ValueError, match="not compute what transformers does; around the CohereFor"
    ):
        boot(random_model("CohereForCausalLM"))


@hooked_alone
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"positional_embedding_type": "shortformer"}, "read position embeddings besides"),
        ({"attention_dir": "bidirectional"}, "its attention is not causal"),
    ],
)
def test_hooked_transformers_without_circuits(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"'tiny' cannot be used for circuits, since .*{why}"):
        check_circuits(adapt(tiny_model(**fields)))


@hooked_alone
def test_a_model_without_mlps_has_no_gates_on_them() -> None:
    model = tiny_model("attention_only")
    with pytest.raises(ValueError, match="expected a model with MLPs.*'tiny' has attention alone"):
        SparseTransformer(model, mlps=True)
    SparseTransformer(model)  # nothing of the attempt is left


def test_a_bridge_that_drops_edits_to_what_heads_read() -> None:
    model = boot(plain_transformer("llama"))
    project = model.blocks[1].attn.q.original_component
    model.blocks[1].attn.q.__dict__["forward"] = lambda x: (
        model.blocks[1].attn.q.hook_out(project(x)),
        project(x),
    )[1]
    check_gates(adapt(model))
    with pytest.raises(
        ValueError, match="blocks.1.attn.hook_z after edits to what its layer reads"
    ):
        check_circuits(adapt(model))


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_layers_that_add_the_residual_stream_themselves() -> None:
    """Bloom's attention and MLPs get it to add to it, and are no less the sum of their parts."""
    model = boot(random_model("BloomForCausalLM"))
    clean, corrupted = torch.randint(VOCABULARY, (2, 3, 6))
    read = torch.zeros_like(clean, dtype=torch.bool)
    read[:, -1] = True
    run = GatedRun(model, CircuitEdges(), clean, read, "corrupted", reference=corrupted)
    shape = run.adapter.graph.exists.shape
    assert torch.allclose(run.logits(torch.ones(shape)), model(clean)[read], atol=1e-5)
    assert torch.allclose(run.logits(torch.zeros(shape)), model(corrupted)[read], atol=1e-5)


def change(module: torch.nn.Module, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what a module returns, in a way that no weight or configuration shows."""
    forward = module.forward

    def altered(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (changed(out[0]), *out[1:]) if isinstance(out, tuple) else changed(out)

    module.__dict__["forward"] = altered


WRONG: dict[str, tuple[Callable[[Any], torch.nn.Module], str]] = {
    "queries": (lambda block: block.attn.q.original_component, "q of layer 1 differs"),
    "values": (lambda block: block.attn.v.original_component, "v of layer 1 differs"),
    "heads": (lambda block: block.attn.o.original_component, "what the heads of layer 1 write"),
    "stream": (lambda block: block, "the residual stream after layer 1 differs"),
}
WRONG_LATENTS = {
    "queries": (
        lambda block: getattr(block.attn, "q_proj" if block.attn.q_a_proj is None else "q_a_proj"),
        "q of layer 1 differs",
    ),
    "values": (lambda block: block.attn.kv_b_proj, "blocks.1.attn.hook_z after edits to"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_models_that_are_ten_percent_off(name: str, dtype: str) -> None:
    for part, why in ({**WRONG, **WRONG_LATENTS} if name in LATENT else WRONG).values():
        model = boot(plain_transformer(name, dtype))
        change(part(model.blocks[1]), lambda out: 1.1 * out)
        with pytest.raises(ValueError, match=why):
            check_circuits(adapt(model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_activation_hides_no_error(dtype: str) -> None:
    """Real models have activations of 26,368 in one dimension, and of 1 to 10 in all others."""
    for extra in (0.0, 2.0):
        plain = plain_transformer("gpt2", dtype)
        plain.transformer.h[0].mlp.c_proj.bias.data[5] = 26_368
        model = boot(plain)
        added = extra * torch.eye(32)[9]
        change(model.blocks[1], lambda out, added=added: out + added.to(out))
        if extra:
            with pytest.raises(ValueError, match="the residual stream after layer 1 differs"):
                check_circuits(adapt(model))
        else:
            check_circuits(adapt(model))


def test_padding_on_the_left_in_float64() -> None:
    """transformers computes softmax in float32, where the lowest float64 is minus infinity."""
    adapter = adapt(boot(plain_transformer("llama", "float64")))
    prompts = torch.full((1, 6), 5)
    mask = (torch.arange(6) >= 2).long()[None]
    assert adapter.final(prompts, attention_mask=mask.flip(1)).isfinite().all()
    sparse = SparseTransformer(adapter.model)
    for use in (sparse, sparse.run_with_counts, sparse.count_attention_edges):
        with pytest.raises(ValueError, match="float64.*padded on the right"):
            use(prompts, attention_mask=mask)
    sparse.unwrap()
    plain = SparseTransformer(boot(plain_transformer("gpt2", "float64")))
    assert plain(prompts, attention_mask=mask)[:, 2:].isfinite().all()


def test_two_wrappers_around_one_model() -> None:
    model = boot(plain_transformer("llama"))
    sparse = SparseTransformer(model)
    with pytest.raises(ValueError, match="wrapped already"):
        SparseTransformer(model)
    with pytest.raises(ValueError, match="has a TransformerBridge around it already. Use that"):
        load_model(model.original_model)
    sparse.unwrap()
    SparseTransformer(sparse.model)


@torch.no_grad()
def test_two_bridges_around_one_model() -> None:
    """TransformerLens makes a second one, which takes the model away from the first."""
    plain = plain_transformer("llama")
    first = boot(plain)
    prompts = torch.full((1, 6), 5)
    sparse = SparseTransformer(first, initial_bias=-100.0)
    gated = sparse(prompts)
    second = build_bridge_from_module(plain, "LlamaForCausalLM", hf_config=plain.config)
    why = "shares its LlamaForCausalLM with another TransformerBridge"
    for model in (first, second):
        with pytest.raises(ValueError, match=why):
            adapt(model)
    with pytest.raises(ValueError, match=why):
        sparse(prompts)
    assert gated.isfinite().all()


@torch.no_grad()
def test_hooks_that_were_reset() -> None:
    model = boot(plain_transformer("olmo2"))
    prompts = torch.full((1, 6), 5)
    sparse = SparseTransformer(model, initial_bias=-100.0)
    expected = sparse(prompts)
    model.reset_hooks()
    assert torch.equal(sparse(prompts), expected)
    model.reset_hooks(including_permanent=True)
    ones = torch.ones(1, 1, dtype=torch.long)
    pairs = PromptPairs(prompts, prompts + 1, ones, ones + 1, 5 * ones[0])
    for use in (
        lambda: sparse(prompts),
        lambda: sparse.generate(prompts),
        lambda: sparse.count_attention_edges(prompts),
        lambda: attribute_circuit_edges(sparse, pairs, logit_difference, progress=False),
    ):
        with pytest.raises(RuntimeError, match="hooks were removed; unwrap and wrap the model"):
            use()
    again = SparseTransformer(sparse.unwrap(), initial_bias=-100.0)
    assert torch.equal(again(prompts), expected)


class Interleaved:
    """Heads in strides, as z of another model might be laid out."""

    def convert(self, z: Tensor) -> Tensor:
        return z.unflatten(-1, (-1, N_HEADS)).transpose(2, 3)

    def revert(self, z: Tensor) -> Tensor:
        return z.transpose(2, 3).flatten(2)


@torch.no_grad()
def test_heads_that_are_mixed() -> None:
    """The right number of entries, each with a part of every head."""
    model = boot(plain_transformer("llama"))
    model.blocks[1].attn.o.hook_in.hook_conversion = Interleaved()
    with pytest.raises(ValueError, match="layer 1 of .* no axis with one entry for each head"):
        check_gates(adapt(model))

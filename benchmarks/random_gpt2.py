"""Random models to be measured, of the kind that is asked for, and random prompt pairs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from sparse_tl.backend import Model, build_model, load_model
from sparse_tl.data.pairs import PromptPairs

GPT2_SMALL: dict[str, Any] = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
}
"""Fields of `transformers.GPT2Config`."""


def random_gpt2(
    fields: Mapping[str, Any] = GPT2_SMALL, *, hooked: bool = False, device: str = "cpu"
) -> Model:
    """A bridge around a model of `transformers`, or a HookedTransformer, where there is such.

    Both have an unembedding of their own, no dropout, and weights drawn from the same distribution.
    """
    if hooked:
        return build_model(_of_hooked(fields), device=device)
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model: Any = GPT2LMHeadModel(GPT2Config(**fields, **dropout, tie_word_embeddings=False))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.8 / fields["n_embd"] ** 0.5, generator=generator)
    return load_model(model.to(device))


def random_smollm2(device: str = "cpu") -> Model:
    """A bridge around a random Llama of the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return load_model(LlamaForCausalLM(config).to(device))  # type: ignore[arg-type]


def random_pairs(n: int) -> PromptPairs:
    """Prompt pairs of 16 tokens below 100."""
    generator = torch.Generator().manual_seed(0)
    clean, corrupted = torch.randint(100, (2, n, 16), generator=generator)
    answer = torch.randint(100, (n, 1), generator=generator)
    wrong = (answer + 1) % 100
    return PromptPairs(clean, corrupted, answer, wrong, torch.full((n,), 15))


def add_hooked(parser: argparse.ArgumentParser) -> None:
    """The option that says which kind."""
    parser.add_argument(
        "--hooked",
        action="store_true",
        help="HookedTransformers (transformer-lens 3.9) instead of TransformerBridges",
    )


def _of_hooked(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_name": "random GPT-2",
        "n_layers": fields["n_layer"],
        "n_heads": fields["n_head"],
        "d_model": fields["n_embd"],
        "d_head": fields["n_embd"] // fields["n_head"],
        "d_mlp": fields.get("n_inner") or 4 * fields["n_embd"],
        "n_ctx": fields["n_positions"],
        "d_vocab": fields["vocab_size"],
        "act_fn": fields["activation_function"],
        "normalization_type": "LN",
        "seed": 0,
    }

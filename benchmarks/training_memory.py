"""Memory of post-training at the shapes of 125M, 1B and 7B, estimated and, where it fits, measured.

The estimate is that of `sparse-tl doctor --window`. For the larger shapes it is taken with one and
with two layers, and grows by as much for each further one. What is measured is the peak of a
process that takes two steps on one window, over that of one without a model.

    OMP_NUM_THREADS=1 python benchmarks/training_memory.py [--measured gpt2-512,llama-512]
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import astuple
from itertools import product
from typing import Any

import torch
from own_process import own_process, peak
from random_gpt2 import GPT2_SMALL, random_gpt2

from sparse_tl.backend import Model, checkpointed_activations, load_model, read_parameters
from sparse_tl.data import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training.constraint import LossConstraint
from sparse_tl.training.loop import MasterWeights
from sparse_tl.training.memory import TrainingMemory, training_memory
from sparse_tl.training.post_train import SparsityObjective

LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
OLMO_7B: dict[str, Any] = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11_008,
}
LARGE = {
    "Llama 3.2 1B": ("LlamaConfig", LLAMA_1B, 16),
    "OLMo 7B": ("OlmoConfig", OLMO_7B, 32),
}
WINDOWS = (1024, 4096)


def random_model(kind: str, fields: dict[str, Any], n_layers: int, window: int) -> Model:
    """A random model of transformers with so many layers."""
    import transformers

    config = getattr(transformers, kind)(
        **fields, num_hidden_layers=n_layers, max_position_embeddings=window
    )
    config._attn_implementation = "eager"
    return load_model(transformers.AutoModelForCausalLM.from_config(config))


def estimate(name: str, window: int) -> TrainingMemory:
    """The memory of a step at one of the shapes."""
    if name not in LARGE:
        return training_memory(random_gpt2(GPT2_SMALL | {"n_positions": window}), window)
    kind, fields, n_layers = LARGE[name]
    one, two = (training_memory(random_model(kind, fields, n, window), window) for n in (1, 2))
    more = [
        first + (n_layers - 1) * (second - first)
        for first, second in zip(astuple(one)[1:], astuple(two)[1:], strict=True)
    ]
    # `checkpointed` has one layer's activations, a share of all with one layer and with two.
    return TrainingMemory(window, *more)


def measured(shape: str, window: int, checkpointed: bool, half: bool) -> tuple[float, float]:
    """Peak over the process without a model in MB, and the estimate, without a dense model."""
    before = peak()
    if shape == "llama":
        model = random_model("LlamaConfig", LLAMA_1B, 2, window)
    else:
        model = random_gpt2(GPT2_SMALL | {"n_positions": window})
    if half:
        model = model.to(torch.bfloat16)
    sparse = SparseTransformer(model, initial_bias=2.0)
    objective = SparsityObjective(sparse, None, LossConstraint(torch.tensor([0.05])))
    masters = MasterWeights(read_parameters(sparse))
    parameters = [*masters.by_name.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, (1, window), generator=generator)
    batch = TokenBatch.next_token(tokens)
    kept = checkpointed_activations(sparse) if checkpointed else nullcontext()
    with kept:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            loss, _ = objective.measure(batch, generator, 0.0)
            loss.backward()
            masters.take_gradients()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            masters.write()
    found = peak() - before
    optimizer.zero_grad(set_to_none=True)
    memory = training_memory(sparse, window)
    expected = memory.least_peak if checkpointed else memory.peak
    return found, (expected - memory.dense) / 1e6


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help = "shapes and windows; llama is two layers of Llama 3.2 1B"
    parser.add_argument("--measured", default="gpt2-512,gpt2-1024,llama-512", help=help)
    for name in filter(None, parser.parse_args().measured.split(",")):
        shape, window = name.split("-")
        for half, checkpointed in product((False, True), repeat=2):
            found, expected = own_process(measured, shape, int(window), checkpointed, half)
            how = ", bfloat16" * half + ", checkpointed" * checkpointed
            print(f"{name}{how}: measured {found:,.0f} MB, estimated {expected:,.0f}", flush=True)
    for name in ("GPT-2 small", *LARGE):
        for window in WINDOWS:
            print(f"{name}, {window}: {own_process(estimate, name, window)}", flush=True)


if __name__ == "__main__":
    main()

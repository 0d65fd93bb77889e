"""What post-training and attribution cost on a GPU, in one run.

- A step of post-training, forward passes in bfloat16, at the shape of Llama 3.2 1B on one window of
  1,024 tokens, and of SmolLM2-135M on 128 windows of 256: tokens per second and peak memory of the
  plain model, of the same with PyTorch's fused attention (SDPA, without hooks), under gates, and
  under gates with low-rank adapters.
- Sampling of windows of 256 tokens from SmolLM2-135M: tokens per second.
- EAP in float32 at the shapes of GPT-2 small and of 1B, 32 pairs of 16 tokens.
- The largest window at 7B with low-rank adapters and checkpointed activations.

    python benchmarks/gpu.py [--tiny]

`--tiny` tries the script itself, on small models and any device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from own_process import own_process, peak
from post_training_step import stepper
from random_gpt2 import GPT2_SMALL, random_gpt2, random_pairs, random_smollm2
from training_memory import LARGE, random_model

from sparse_tl import (
    attribute_circuit_edges,
    checkpointed_activations,
    logit_difference,
)
from sparse_tl.backend import Model, adapt
from sparse_tl.data import TokenBatch
from sparse_tl.training.text import sampled

TINY = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 200}
SMOLLM2 = "SmolLM2-135M"
STEPS = 10


def build(name: str, window: int, tiny: bool) -> Model:
    """A random model of a shape, on the GPU if there is one."""
    if name == SMOLLM2:
        return build("Llama 3.2 1B", window, tiny) if tiny else random_smollm2(_device())
    kind, fields, n_layers = LARGE[name]
    fields, n_layers = (fields | TINY, 2) if tiny else (fields, n_layers)
    return random_model(kind, fields, n_layers, window).to(_device())


def step_cost(name: str, variant: str, n: int, window: int, tiny: bool) -> str:
    """Tokens per second and peak memory of a training step on some windows."""
    vocabulary = 49152 if name == SMOLLM2 else LARGE[name][1]["vocab_size"]
    vocabulary = TINY["vocab_size"] if tiny else vocabulary
    tokens = torch.randint(vocabulary, (n, window), generator=torch.Generator().manual_seed(0))
    if variant == "plain, fused attention":
        step = _fused_step(build(name, window, tiny).original_model, tokens)
    else:
        batch = TokenBatch.next_token(tokens)
        step = stepper(variant, partial(build, name, window, tiny), batch)
    seconds = _seconds(step, 2 if tiny else STEPS)
    return f"{n * window / seconds:,.0f} tokens/s, {peak():,.0f} MB"


def sampling(n: int, window: int, tiny: bool) -> str:
    """Tokens per second of sampling."""
    adapter = adapt(build(SMOLLM2, window, tiny))
    sample = partial(sampled, adapter, [[0]], window, range(n), 0, lambda: None, check=False)
    seconds = _seconds(sample, 1, half=False)
    return f"{n * window / seconds:,.0f} tokens/s, {peak():,.0f} MB"


def eap_cost(name: str, tiny: bool) -> str:
    """Seconds and peak memory of EAP."""
    model = build(name, 16, tiny) if name in LARGE else random_gpt2(_gpt2(tiny), device=_device())
    score = partial(
        attribute_circuit_edges,
        model,
        random_pairs(32),
        logit_difference,
        method="eap",
        progress=False,
    )
    return f"{_seconds(score, 2, half=False):.2f} s, {peak():,.0f} MB"


def fits(window: int, tiny: bool) -> str | None:
    """Peak memory of a step at 7B with adapters; None if there is not enough."""
    vocabulary = TINY["vocab_size"] if tiny else LARGE["OLMo 7B"][1]["vocab_size"]
    batch = TokenBatch.next_token(torch.randint(vocabulary, (1, window)))
    try:
        model = build("OLMo 7B", window, tiny)
        step = stepper("lora", lambda: model, batch)
        with checkpointed_activations(model):
            _seconds(step, 1)
    except torch.OutOfMemoryError:
        return None
    return f"{peak():,.0f} MB"


def _fused_step(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    import transformers

    fused = transformers.AutoModelForCausalLM.from_config(
        model.config, attn_implementation="sdpa"
    ).to(_device())
    tokens = tokens.to(_device())
    optimizer = torch.optim.AdamW(fused.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        fused(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(fused.parameters(), 1.0)
        optimizer.step()

    return step


def _seconds(work: Callable[[], Any], times: int, *, half: bool = True) -> float:
    """Mean seconds after one run that is not counted; `half` casts to bfloat16 automatically."""
    with torch.autocast(_device(), torch.bfloat16, enabled=half):
        work()
        _wait()
        started = time.perf_counter()
        for _ in range(times):
            work()
        _wait()
    return (time.perf_counter() - started) / times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _gpt2(tiny: bool) -> dict[str, Any]:
    return GPT2_SMALL | {"n_embd": 48, "vocab_size": 200} if tiny else GPT2_SMALL


def main() -> None:
    """Print the device and a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small models, on any device")
    tiny = parser.parse_args().tiny
    if not tiny and not torch.cuda.is_available():
        parser.error("expected a GPU; --tiny tries the script without one")
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    window = 256 if tiny else 1024
    for name, n, length in (("Llama 3.2 1B", 1, window), (SMOLLM2, 2 if tiny else 128, 256)):
        for variant in ("plain", "plain, fused attention", "gated", "paired", "lora"):
            found = own_process(step_cost, name, variant, n, length, tiny)
            print(f"step, {name}, {variant}: {found}", flush=True)
    n = 4 if tiny else 2048
    print(f"sampling, {SMOLLM2}: {own_process(sampling, n, 256, tiny)}", flush=True)
    for name in ("GPT-2 small", "Llama 3.2 1B"):
        print(f"EAP, {name}: {own_process(eap_cost, name, tiny)}", flush=True)
    while (found := own_process(fits, window, tiny)) is not None:
        print(f"7B with adapters, window {window:,}: {found}", flush=True)
        if tiny:
            break
        window *= 2


if __name__ == "__main__":
    main()

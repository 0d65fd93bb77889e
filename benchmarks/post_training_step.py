"""Time of a post-training step over the same training step without gates.

Four variants of one step (forward, backward, clipping, AdamW on what is trained), taken in turn, so
that a machine that slows down slows all of them:

- plain: the dense model on its loss;
- gated: sampled attention gates and the absolute loss constraint;
- paired: the same with the constraint relative to the frozen dense model, which adds one forward
  pass without gradients (a third of a training step) to any implementation;
- lora: the same with low-rank adapters of rank 16 trained in place of the weights, without a copy
  of the dense model (not with --hooked).

The shapes: the addition model; GPT-2 small with 4 windows of 128 tokens; "smollm2", SmolLM2-135M
with 2 windows of 64; and "layer-T", one layer of GPT-2's width with one window of T tokens.

Printed beside the time is the number of operations of a step, views included.

Usage: python benchmarks/post_training_step.py [--hooked] [--runs 15] [--shapes addition,gpt2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from own_process import own_process, peak
from random_gpt2 import GPT2_SMALL, add_hooked, random_gpt2, random_smollm2
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_tl.backend import Model, adapt, add_lora, merged_lora, read_parameters
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.tasks import AdditionTask
from sparse_tl.training.constraint import LossConstraint
from sparse_tl.training.distillation import reference_of
from sparse_tl.training.loop import Objective, PlainLoss, choose_trained
from sparse_tl.training.post_train import SparsityObjective
from sparse_tl.zoo import addition_recipe

VARIANTS = ("plain", "gated", "paired", "lora")


def shape(name: str, hooked: bool) -> tuple[Callable[[], Model], TokenBatch]:
    """A model builder and a batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "smollm2":
        drawn = torch.randint(49152, (2, 64), generator=torch.Generator().manual_seed(0))
        return partial(random_smollm2, device), TokenBatch.next_token(drawn)
    if name == "addition":
        batch, fields = (
            AdditionTask("autoregressive").split()[0].select(slice(0, 256)),
            addition_recipe().architecture,
        )
    else:
        rows, window, fields = 4, 128, GPT2_SMALL
        if name.startswith("layer-"):  # a small vocabulary, so that attention is what is measured
            rows, window = 1, int(name.removeprefix("layer-"))
            fields = fields | {"n_layer": 1, "n_positions": window, "vocab_size": 1000}
        drawn = torch.randint(
            fields["vocab_size"], (rows, window), generator=torch.Generator().manual_seed(0)
        )
        batch = TokenBatch.next_token(drawn)
    return partial(random_gpt2, fields, hooked=hooked, device=device), batch


def stepper(variant: str, build: Callable[[], Model], batch: TokenBatch) -> Callable[[], None]:
    """One training step as a function."""
    model = build()
    device = adapt(model).device
    batch = batch.to(device)
    objective: Objective
    if variant == "plain":
        module: torch.nn.Module = model
        objective = PlainLoss(model)
    else:
        if variant == "lora":
            add_lora(model)
        module = sparse = SparseTransformer(model, initial_bias=2.0)
        objective = SparsityObjective(
            sparse,
            None
            if variant == "gated"
            else reference_of(sparse, choose_trained(sparse, {"all": 1.0})),
            LossConstraint(torch.tensor([0.05])),
        )
    chosen = choose_trained(module, {"all": 1.0})
    parameters = [weight for name, weight in read_parameters(module).items() if name in chosen]
    fused = all(weight.is_contiguous() for weight in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=fused)
    merging = merged_lora(module, None) if variant == "lora" else nullcontext(lambda: None)
    merge = merging.__enter__()
    generator = torch.Generator(device).manual_seed(0)

    def step(kept: Any = merging) -> None:  # a generator that nothing holds would end
        optimizer.zero_grad(set_to_none=True)
        loss, _ = objective.measure(batch, generator, 0.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        merge()
        objective.update(0.0)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def variants(hooked: bool) -> tuple[str, ...]:
    """What is measured on this kind of model."""
    return VARIANTS[:-1] if hooked else VARIANTS


def times(name: str, hooked: bool, runs: int) -> dict[str, list[float]]:
    """Seconds per step of every variant, taken in turn after two warm-up rounds."""
    build, batch = shape(name, hooked)
    steps = {variant: stepper(variant, build, batch) for variant in variants(hooked)}
    taken: dict[str, list[float]] = {variant: [] for variant in steps}
    for run in range(runs + 2):
        for variant, step in steps.items():
            started = time.perf_counter()
            step()
            if run >= 2:
                taken[variant].append(time.perf_counter() - started)
    return taken


class Operations(TorchDispatchMode):
    """Counts the operations of a block, as they reach the backend."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def cost(name: str, hooked: bool, variant: str) -> tuple[float, int]:
    """Peak memory in MB of a process that takes three steps, and the operations of the next one."""
    step = stepper(variant, *shape(name, hooked))
    for _ in range(3):
        step()
    memory = peak()
    with Operations() as counted:
        step()
    return memory, counted.n


def main() -> None:
    """Print a table per shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_hooked(parser)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--shapes", default="addition,gpt2")
    options = parser.parse_args()
    shapes = options.shapes.split(",")
    costs = {
        (name, variant): own_process(cost, name, options.hooked, variant)
        for name in shapes
        for variant in variants(options.hooked)
    }
    for name in shapes:
        taken = times(name, options.hooked, options.runs)
        print(f"\n{name}: {options.runs} steps of each, {torch.get_num_threads()} threads")
        for variant in taken:
            memory, n_operations = costs[name, variant]
            ratios = [a / b for a, b in zip(taken[variant], taken["plain"], strict=True)]
            print(
                f"  {variant:8} median {1e3 * statistics.median(taken[variant]):8.1f} ms   "
                f"{statistics.median(ratios):5.2f}x plain   "
                f"peak memory {memory:7.0f} MB   "
                f"{n_operations:7,} operations"
            )


if __name__ == "__main__":
    main()

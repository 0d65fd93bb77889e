"""What fitting head gates costs: stacked seeds against single fits, and memory by vocabulary.

*Time*: one update of K stacked gate matrices against K updates of one, on the addition model's
shape with its 11 tokens and 5 targets. *Memory*: the largest resident size while a fresh process
does one update at GPT-2 small's shape, over that of the model alone, by vocabulary and by how many
positions have logits: only those of the targets, or all of them as ``model(...)`` does.

    python benchmarks/head_gating.py [--hooked] [--seeds 10 --batch-size 64 --repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from jaxtyping import Float
from own_process import own_process, rise
from random_gpt2 import GPT2_SMALL, add_hooked, random_gpt2
from torch import Tensor

from sparse_tl.backend import Model
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.head_roles.fitting import first_gates
from sparse_tl.head_roles.likelihood import GatedHeads, Likelihood
from sparse_tl.tasks import AdditionTask
from sparse_tl.zoo import addition_recipe

LENGTH, ROWS, SEEDS = 128, 2, 2
"""Of the memory's measurement."""


def _update(objective: Likelihood, batch: TokenBatch) -> None:
    loss, _ = objective.measure(batch, torch.Generator(), 0.0)
    loss.backward()


def _seconds(objectives: list[Likelihood], batch: TokenBatch, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for objective in objectives:
            _update(objective, batch)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _objective(model: Model, seeds: list[int]) -> Likelihood:
    return Likelihood(GatedHeads(model, first_gates(model, seeds)), 0.1, 10)


def _prompts() -> TokenBatch:
    """One target of one token at the end of each."""
    tokens = torch.randint(1000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, -1] = True
    return TokenBatch(tokens, tokens, mask)


def _everywhere(model: Model, batch: TokenBatch) -> None:
    """The same update with logits at every position, written out."""
    theta = first_gates(model, range(SEEDS)).requires_grad_()
    each = theta.sigmoid().repeat_interleave(ROWS, dim=0)
    hooks = [
        (f"blocks.{layer}.attn.hook_z", partial(_times, gates[:, None, :, None]))
        for layer, gates in enumerate(each.unbind(dim=1))
    ]
    rows = [t.repeat(SEEDS, 1) for t in (batch.tokens, batch.labels, batch.loss_mask)]
    with model.hooks(fwd_hooks=hooks):
        logits = model(rows[0])
    every = TokenBatch(*rows)
    token_losses(logits[every.loss_mask], every.loss_labels()).mean().backward()


def _times(
    gates: Float[Tensor, "row 1 head 1"], z: Float[Tensor, "row pos head d_head"], hook: object
) -> Float[Tensor, "row pos head d_head"]:
    return z * gates


def _memory(kind: str, vocabulary: int, hooked: bool) -> float:
    """What one update takes on top of the model, in MB."""
    sizes = {"n_positions": LENGTH, "vocab_size": vocabulary}
    model, batch = random_gpt2({**GPT2_SMALL, **sizes}, hooked=hooked), _prompts()
    model.requires_grad_(False)
    model(batch.tokens[:1, :2])  # what is allocated once
    if kind == "targets":
        return rise(lambda: _update(_objective(model, list(range(SEEDS))), batch))
    return rise(lambda: _everywhere(model, batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_hooked(parser)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    model = random_gpt2(addition_recipe().architecture, hooked=args.hooked).requires_grad_(False)
    batch = AdditionTask("placeholder").split()[0].select(slice(0, args.batch_size))
    seeds = list(range(args.seeds))
    stacked = _seconds([_objective(model, seeds)], batch, args.repeats)
    single = _seconds([_objective(model, [seed]) for seed in seeds], batch, args.repeats)
    print(
        f"one update of {args.seeds} seeds x {args.batch_size} sums: stacked {stacked:.3f} s, "
        f"{args.seeds} single {single:.3f} s: {stacked / single:.2f} of them"
    )
    print(f"GPT-2 small's shape, {SEEDS} seeds x {ROWS} prompts of {LENGTH} tokens, 1 target each:")
    for kind in ("targets", "everywhere"):
        for vocabulary in (1000, 50257):
            memory = own_process(_memory, kind, vocabulary, args.hooked, as_on_gpu=False)
            print(f"logits at {kind:10}, vocabulary {vocabulary:6,}: +{memory:,.0f} MB")


if __name__ == "__main__":
    main()

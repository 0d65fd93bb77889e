"""Do heads that score high for a behaviour do what it says? Ablation, on a language model.

1. Score all heads by behaviour, on random tokens and on IOI.
2. Induction: the share of prompts right without the best induction heads.
3. IOI: the logit difference without the heads of each kind.
4. What the movers' attention really loses when an inhibiting head's output at the last position is
   that of the corrupted prompt, beside its score, which is a first-order estimate.

Heads are ablated by zeros. Beside each measurement stand three controls: as many other heads of the
same layers, drawn at random: from heads of no kind or sinks, where the layer has enough of them.

    python benchmarks/head_behaviour.py
    python benchmarks/head_behaviour.py --sparse
    python benchmarks/head_behaviour.py --model gpt2
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sparse_tl import (
    InductionTask,
    IOITask,
    PromptPairs,
    SparseTransformer,
    ablate_heads,
    head_behaviour,
    load_language_model,
    load_language_models,
    load_model,
    logit_difference,
)
from sparse_tl.circuits import HeadBehaviour, accuracy

Head = tuple[int, int]
SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="name or folder; SmolLM2-135M-Instruct by default")
    parser.add_argument("--sparse", action="store_true", help="its sparse version instead")
    parser.add_argument("--pairs", type=int, default=64, help="prompt pairs of each task")
    asked = parser.parse_args()
    model = _model(asked.model, asked.sparse)
    ioi = IOITask().pairs(model, asked.pairs, seed=0)
    found = head_behaviour(model, ioi)
    for kind, heads in found.heads.items():
        print(f"{kind} ({len(heads)}): {_named(heads[:10])}")
    induction = InductionTask().pairs(model, asked.pairs, seed=1)
    right = partial(accuracy, model, induction)
    print(f"induction, share of prompts right: {right():.3f}")
    for size in (3, 6, 10):
        _ablate(model, found, found.top("induction", size), right)
    others = IOITask().pairs(model, asked.pairs, seed=1)
    difference = partial(_difference, model, others)
    print(f"IOI, logit difference: {difference():.3f}")
    for kind in ("mover", "negative mover", "suppression", "inhibition", "induction"):
        print(f"without {kind}")
        _ablate(model, found, found.heads[kind], difference)
    preferred = _preference(model, ioi, found)
    print(f"movers' attention to the answer, minus that to the wrong one: {preferred:.4f}")
    for head in found.top("inhibition", 5):
        lost, estimate = preferred - _preference(model, ioi, found, head), found["inhibition"][head]
        print(f"  lost without {_named([head])}: {lost:.4f}; to first order {estimate:.4f}")


def _model(name: str | None, sparse: bool) -> Any:
    if name is None:
        return load_language_models()[1] if sparse else load_language_model()
    return SparseTransformer.from_pretrained(name) if sparse else load_model(name)


def _named(heads: Sequence[Head]) -> str:
    return ", ".join(f"a{layer}.h{head}" for layer, head in heads)


def _difference(model: Any, pairs: PromptPairs) -> float:
    found = [logit_difference(some.read(model(some.clean)), some) for some in pairs.split(16)]
    return torch.cat(found).mean().item()


def _ablate(
    model: Any, found: HeadBehaviour, heads: Sequence[Head], measure: Callable[[], float]
) -> None:
    """Print a measurement without some heads, and without as many others of their layers."""
    if not heads:
        return
    with ablate_heads(model, heads):
        without = measure()
    kinds = {place for kind, places in found.heads.items() if kind != "sink" for place in places}
    controls = list[float]()
    for seed in range(SEEDS):
        rng, chosen = random.Random(seed), list[Head]()
        for layer, _ in heads:
            every = [(layer, head) for head in range(found.grid.n_heads)]
            free = [place for place in every if place not in {*heads, *chosen}]
            chosen.append(rng.choice([place for place in free if place not in kinds] or free))
        with ablate_heads(model, chosen):
            controls.append(measure())
    others = ", ".join(f"{value:.3f}" for value in controls)
    print(f"  {len(heads)} heads: {without:.3f}; others of their layers: {others}", flush=True)


def _preference(
    model: Any, pairs: PromptPairs, found: HeadBehaviour, patched: Head | None = None
) -> float:
    """The movers' attention to answers minus that to wrong ones, weighted by what they move."""
    weights = found["mover"].clamp(min=0)
    weights, total = weights / weights.sum(), 0.0
    for some in pairs.split(16):
        rows, ends, patterns = torch.arange(len(some)), some.positions, dict[str, torch.Tensor]()
        sign = (some.clean == some.answers).double() - (some.clean == some.wrong).double()
        hooks: list[Any] = []
        if patched is not None:
            name, head = f"blocks.{patched[0]}.attn.hook_z", patched[1]
            _, corrupted = model.run_with_cache(some.corrupted, names_filter=name)

            def patch(z: torch.Tensor, hook: Any, head=head, other=corrupted[name]) -> torch.Tensor:
                z = z.clone()
                z[rows, ends, head] = other[rows, ends, head]  # noqa: B023 - runs in this round
                return z

            hooks.append((name, patch))

        def keep(pattern: torch.Tensor, hook: Any) -> None:
            patterns[hook.name] = pattern  # noqa: B023

        points = [f"blocks.{layer}.attn.hook_pattern" for layer in range(found.grid.n_layers)]
        model.run_with_hooks(some.clean, fwd_hooks=[*hooks, *((at, keep) for at in points)])
        seen = torch.stack([pattern[rows, :, ends] for pattern in patterns.values()]).double()
        total += torch.einsum("lphk,pk,lh->", seen, sign, weights).item()
    return total / len(pairs)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

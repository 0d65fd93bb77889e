"""How many prompt pairs suffice: to rank circuit edges, and to evaluate the circuits.

*Evaluating*: circuits are evaluated once on many pairs. Then a few of these pairs are drawn, again
and again: how wide is the interval of the explained effect, how often does it hold the effect on
all pairs, and how far does the size for 0.9 vary? *Ranking*: edges are ranked on more and more
pairs, and the circuits evaluated on the same others.

    python benchmarks/number_of_pairs.py [--task ioi] [--side dense]
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from sparse_tl import attribute_circuit_edges, evaluate_circuit_edges, load_task_models
from sparse_tl.circuits import EffectCurve, Evaluation
from sparse_tl.zoo import TASKS

COUNTS = (4, 8, 16, 32, 64, 128)
RANKED_ON, EVALUATED_ON, SAME = 64, 192, 64
DRAWS = 40
LEVELS = (0.5, 0.9)


def size_at(sizes: tuple[int, ...], effect: Tensor) -> float:
    """The size for 0.9, or infinity."""
    size = EffectCurve("", sizes, *[effect.tolist()] * 3).size_at(0.9)
    return math.inf if size is None else size


def drawn(found: Evaluation, count: int) -> str:
    """What a few of the pairs say, over draws."""
    whole, generator = found.effect, torch.Generator().manual_seed(0)
    near = [int((whole - level).abs().argmin()) for level in LEVELS]
    halves, held, sizes = [], [], []
    for _ in range(DRAWS):
        some = torch.randperm(len(found.clean), generator=generator)[:count]
        part = Evaluation(
            *(found.sizes, found.total, found.values[:, some], found.clean[some], found.none[some])
        )
        low, high = part.interval()
        halves.append(((high - low) / 2)[near].tolist())
        held.append(((low <= whole) & (whole <= high))[near].tolist())
        sizes.append(size_at(part.sizes, part.effect))
    sizes.sort()
    said = [
        f"near {level}: half width {half:.3f}, held in {hold:.0%}"
        for level, half, hold in zip(LEVELS, _means(halves), _means(held), strict=True)
    ]
    return f"{count} pairs; {'; '.join(said)}; size for 0.9 {sizes[1]:,.0f} to {sizes[-2]:,.0f}"


def _means(rows: list[list[float]]) -> list[float]:
    return torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="ioi", choices=[task.name for task in TASKS])
    parser.add_argument("--side", default="dense", choices=("dense", "sparse"))
    asked = parser.parse_args()
    model = dict(zip(("dense", "sparse"), load_task_models(), strict=True))[asked.side]
    task = next(task for task in TASKS if task.name == asked.task)
    pool = task.pairs(model, max(COUNTS), seed=0)
    others = task.pairs(model, EVALUATED_ON, seed=1)
    for count in COUNTS:
        ranked = pool.select(slice(0, count))
        scores = attribute_circuit_edges(model, ranked, task.metric, progress=False)
        some = others if count == RANKED_ON else others.select(slice(0, SAME))
        found = evaluate_circuit_edges(model, some, task.metric, scores, progress=False)
        same = slice(0, SAME)
        effect = (found.values[:, same] - found.none[same]).mean(dim=1)
        effect /= (found.clean[same] - found.none[same]).mean()
        print(f"ranked on {count} pairs: {size_at(found.sizes, effect):,.0f} edges for 0.9")
        if count == RANKED_ON:
            print(f"{EVALUATED_ON} pairs: {size_at(found.sizes, found.effect):,.0f} edges for 0.9")
            print("\n".join(drawn(found, few) for few in COUNTS))


if __name__ == "__main__":
    main()

"""How close attribution comes to exact patching of single circuit edges.

For each built-in task and model: the Pearson correlation of a method's scores with the exact change
of the metric, over circuit edges drawn at random, those out of heads and those out of MLPs apart;
then over circuit edges at one position (PEAP): a token or, for IOI, a named span. Prints two rows
in Markdown for each model and task. A second table has attention edges: the correlation of their
scores with the exact effect of closing each, over the best `--attention` of EAP and of EAP-IG and
as many at random, and the root of the mean square error as a share of that of the effects.

    python benchmarks/attribution_accuracy.py [--edges 400 --pairs 8]
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch

from sparse_tl import (
    IOITask,
    PromptPairs,
    Scores,
    ablate_attention_edges,
    attribute_attention_edges,
    attribute_circuit_edges,
    load_task_models,
    measure_skill,
    patch_exactly,
)
from sparse_tl.backend import HookedModel
from sparse_tl.metrics import Metric
from sparse_tl.zoo import TASKS, task_pairs

METHODS = ("eap", "eap-ig", "relp")
KINDS = {"a": "heads", "m": "MLPs"}
AT_POSITIONS = 4
"""How many times as many edges are drawn by position: fewer of those have an effect."""


def correlation(scores: Scores, exact: pd.Series) -> float:
    """The Pearson correlation over some edges, by name; NaN where none has an effect."""
    return exact.corr(pd.Series({name: scores[name] for name in exact.index}))


def correlations(
    model: HookedModel, pairs: PromptPairs, metric: Metric, positions: str | None, n_edges: int
) -> list[float]:
    """The correlation of every method, over edges out of heads and then over those out of MLPs.

    At one position, edges are drawn from those with a score: most others carry the same in both
    prompts, or lead nowhere from there.
    """
    options = {"positions": positions, "progress": False}
    scores = [
        attribute_circuit_edges(model, pairs, metric, method=method, **options)
        for method in METHODS
    ]
    grid, row = scores[0].grid, []
    places = grid.places
    if positions is not None:
        places = (scores[0].values != 0).nonzero()
    generator = torch.Generator().manual_seed(0)
    for letter in KINDS:
        names = [name for name in grid.names(places) if name.startswith(letter)]
        chosen = torch.randperm(len(names), generator=generator)[:n_edges]
        some = [names[i] for i in chosen.tolist()]
        exact = patch_exactly(model, pairs, metric, some, **options)
        row += [correlation(one, exact) for one in scores]
    return row


def attention_edges(
    model: HookedModel, pairs: PromptPairs, metric: Metric, n_edges: int
) -> list[str]:
    """Correlation with, and error against, closing single attention edges, by EAP and EAP-IG."""
    methods: list[Any] = ["eap", "eap-ig"]
    scores = [
        attribute_attention_edges(model, pairs, metric, method=method, progress=False)
        for method in methods
    ]
    means = [one.values.mean(dim=0) for one in scores]
    places = means[0].nonzero()
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randperm(len(places), generator=generator)]
    drawn += [mean[tuple(places.T)].abs().argsort(descending=True) for mean in means]
    edges = sorted({tuple(row) for order in drawn for row in places[order[:n_edges]].tolist()})
    exact = pd.Series([closed(model, pairs, metric, [edge]) for edge in edges])
    exact -= closed(model, pairs, metric, [])
    cells = []
    for mean in means:
        found = pd.Series([mean[edge].item() for edge in edges])
        error = ((found - exact) ** 2).mean() / (exact**2).mean()
        cells.append(f"{found.corr(exact):.3f}, {error**0.5:.2f}")
    return cells


@torch.no_grad()
def closed(model: HookedModel, pairs: PromptPairs, metric: Metric, edges: list[Any]) -> float:
    """The mean metric without some attention edges."""
    with ablate_attention_edges(model, edges) if edges else nullcontext():
        return measure_skill(model, pairs, metric, progress=False).clean.mean().item()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", type=int, default=400, help="of each kind")
    parser.add_argument("--attention", type=int, default=40, help="attention edges of each kind")
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    header = [f"{kind}, {method}" for kind in KINDS.values() for method in METHODS]
    print("| model | task | positions | " + " | ".join(header) + " |")
    print("|---" * (3 + len(header)) + "|")
    for side, model in zip(("dense", "sparse"), load_task_models(), strict=True):
        for task in TASKS:
            pairs = task.pairs(model, options.pairs, seed=0)
            by = "tokens"
            if isinstance(task, IOITask):
                pairs, by = pairs.with_spans(task.spans(pairs)), "spans"
            for positions in (None, by):
                n_edges = options.edges * (1 if positions is None else AT_POSITIONS)
                row = correlations(model, pairs, task.metric, positions, n_edges)
                shown = " | ".join(f"{r:.3f}" for r in row)
                print(f"| {side} | {task.name} | {positions or 'all'} | {shown} |", flush=True)
    print("\n| model | task | attention edges, eap | eap-ig |\n|---|---|---|---|")
    for side, model in zip(("dense", "sparse"), load_task_models(), strict=True):
        for task in TASKS:
            pairs = task_pairs(task, options.pairs, seed=0)
            cells = attention_edges(model, pairs, task.metric, options.attention)
            print(f"| {side} | {task.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

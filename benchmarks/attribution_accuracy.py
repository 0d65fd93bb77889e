"""How close attribution comes to exact patching of single circuit edges.

For each built-in task and model: the Pearson correlation of a method's scores with the exact change
of the metric, over circuit edges drawn at random, those out of heads and those out of MLPs apart;
then over circuit edges at one position (PEAP): a token or, for IOI, a named span. Prints two rows
in Markdown for each model and task.

    python benchmarks/attribution_accuracy.py [--edges 400 --pairs 8]
"""

from __future__ import annotations

import argparse

import pandas as pd
import torch

from sparse_tl import (
    IOITask,
    PromptPairs,
    Scores,
    attribute_circuit_edges,
    load_task_models,
    patch_exactly,
)
from sparse_tl.backend import HookedModel
from sparse_tl.metrics import Metric
from sparse_tl.zoo import TASKS

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", type=int, default=400, help="of each kind")
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


if __name__ == "__main__":
    main()

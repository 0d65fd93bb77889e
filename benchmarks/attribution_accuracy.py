"""How close attribution comes to exact patching of single circuit edges.

For each built-in task and model: the Pearson correlation of a method's scores with the exact change
of the metric, over circuit edges drawn at random, those out of heads and those out of MLPs apart.
Prints a row in Markdown for each model and task.

    python benchmarks/attribution_accuracy.py [--edges 400 --pairs 8]
"""

from __future__ import annotations

import argparse

import pandas as pd
import torch

from sparse_tl import attribute_circuit_edges, load_task_models, patch_exactly
from sparse_tl.circuits.scores import Scores
from sparse_tl.models import TASKS

METHODS = ("eap", "eap-ig", "relp")
KINDS = {"a": "heads", "m": "MLPs"}


def correlation(scores: Scores, exact: pd.Series) -> float:
    """The Pearson correlation over some edges, by name; NaN where none has an effect."""
    return exact.corr(pd.Series({name: scores[name] for name in exact.index}))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", type=int, default=400, help="of each kind")
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    header = [f"{kind}, {method}" for kind in KINDS.values() for method in METHODS]
    print("| model | task | " + " | ".join(header) + " |")
    print("|---" * (2 + len(header)) + "|")
    for side, model in zip(("dense", "sparse"), load_task_models(), strict=True):
        for task in TASKS:
            pairs = task.pairs(model, options.pairs, seed=0)
            scores = {
                method: attribute_circuit_edges(
                    model, pairs, task.metric, method=method, progress=False
                )
                for method in METHODS
            }
            graph, row = scores["eap"].site, []
            generator = torch.Generator().manual_seed(0)
            for letter in KINDS:
                names = [str(edge) for edge in graph.edges if str(edge).startswith(letter)]
                chosen = torch.randperm(len(names), generator=generator)[: options.edges]
                some = [names[i] for i in chosen.tolist()]
                exact = patch_exactly(model, pairs, task.metric, some, progress=False)
                row += [correlation(one, exact) for one in scores.values()]
            print(f"| {side} | {task.name} | " + " | ".join(f"{r:.3f}" for r in row) + " |")


if __name__ == "__main__":
    main()

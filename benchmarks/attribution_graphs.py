"""How many nodes an attribution graph needs, on the dense and the sparse SmolLM2.

For prompts of four tasks (target: right minus wrong answer; corrupted: the task's prompt) and for
sentences (target: the prediction; corrupted: the next sentence), prints what graphs of several
sizes explain and carry:

- replacement and completeness score, as circuit-tracer defines them;
- the share of the effect when only the graph's nodes have their own values, with the attention
  patterns of this run, and with those of the prompt;
- the number of attention edges among the nodes;
- the correlation of predicted and exact effects of single nodes.

    python benchmarks/attribution_graphs.py --text sentences.txt [--each 16] [--nodes 300 1000]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sparse_tl import load_language_models
from sparse_tl.circuits import attribution_graph, check_graph, graph_effect
from sparse_tl.tasks import TASKS_BY_NAME

TASKS = ("greater_than", "ioi", "ioi_long", "docstring")
LENGTH = 14  # tokens of a sentence


def prompts(model: Any, text: Path, each: int) -> list[tuple[str, Any, Any, Any]]:
    """The kind of each prompt, its tokens, those of its corrupted prompt, and its target."""
    found: list[tuple[str, Any, Any, Any]] = []
    for name in TASKS:
        pairs = TASKS_BY_NAME[name].pairs(model, each, seed=0)
        for row in range(each):
            end = int(pairs.positions[row]) + 1
            target = int(pairs.answers[row, 0]), int(pairs.wrong[row, 0])
            found.append((name, pairs.clean[row, :end], pairs.corrupted[row, :end], target))
    lines = (line.strip() for line in text.read_text(encoding="utf-8").splitlines())
    tokens = [model.tokenizer(line)["input_ids"] for line in lines if line]
    rows = [torch.tensor(line[:LENGTH]) for line in tokens if len(line) >= LENGTH]
    for row, other in zip(rows[: 4 * each], rows[1:], strict=False):
        found.append(("sentences", row, other, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--each", type=int, default=16)
    parser.add_argument("--nodes", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    models = dict(zip(("dense", "sparse"), load_language_models(), strict=True))
    rows: list[dict[str, Any]] = []
    for kind, clean, corrupted, target in prompts(models["dense"], options.text, options.each):
        for name, model in models.items():
            for n in options.nodes:
                graph = attribution_graph(model, clean, target=target, max_nodes=n)
                row = {"model": name, "prompts": kind, "nodes": n}
                row["attention edges"] = int((graph.nodes["kind"] == "attention edge").sum())
                row["replacement"] = graph.replacement_score
                row["completeness"] = graph.completeness_score
                for patterns in ("run", "prompt"):
                    row[f"effect, {patterns}"] = graph_effect(
                        model, graph, corrupted, patterns=patterns
                    )
                if n == options.nodes[0]:
                    row["correlation"] = check_graph(model, graph, n=30).correlation
                rows.append(row)
        if options.out:
            options.out.write_text(json.dumps(rows))
    table = pd.DataFrame(rows).groupby(["prompts", "nodes", "model"])
    print(table.mean().round(3).to_string())
    print("\n95 % intervals, half width")
    print((1.96 * table.sem()).round(3).to_string())


if __name__ == "__main__":
    main()

"""How many nodes an attribution graph needs, on the dense and the sparse SmolLM2.

For prompts of four tasks (target: right minus wrong answer; corrupted: the task's prompt) and for
sentences (target: the prediction; corrupted: the next sentence), the nodes with the largest
absolute flow keep their own values, and all others have those of the corrupted prompt, with the
attention patterns of this run, and with those of the prompt. Prints

- the share of the effect that 300 and 1,000 nodes carry, and the attention edges among them;
- the number of nodes, of 100, 200, 400, ..., that carry 80 % of the effect, and the attention edges
  among them;
- the number of nodes that hold 80 % of the absolute flow, and the attention edges among them;

or, with ``--scores``, of a graph of 300 nodes, replacement and completeness score as circuit-tracer
defines them, and the correlation of predicted and exact effects of its 50 strongest nodes. A run
that was stopped goes on from its rows in ``--out``.

    python benchmarks/attribution_graphs.py --text sentences.txt [--each 16] [--scores]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from sparse_tl import load_language_models
from sparse_tl.backend import adapt
from sparse_tl.circuits import attribution_graph, check_graph
from sparse_tl.circuits.prompt.graph_checks import GraphRun
from sparse_tl.circuits.prompt.linearised import Linearised
from sparse_tl.tasks import TASKS_BY_NAME

TASKS = ("greater_than", "ioi", "ioi_long", "docstring")
LENGTH = 14  # tokens of a sentence
SHARE = 0.8
SHOWN = (300, 1000)


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
    return found[::4] + [prompt for start in (1, 2, 3) for prompt in found[start::4]]


class ByFlow(GraphRun):
    """Runs in which rows are sizes: edges and neurons act whose flow has at least that size."""

    def __init__(self, model: Any, graph: Any, flows: dict[str, Tensor]) -> None:
        self.flows = flows
        super().__init__(model, graph, "neurons")

    def factors(self, rows: Sequence[Any], default: float, place: str, value: Tensor) -> Tensor:
        if not isinstance(rows[0], float):
            return super().factors(rows, default, place, value)
        return torch.stack([self.flows[place] >= least for least in rows]).to(value)


def measure(model: Any, clean: Tensor, corrupted: Tensor, target: Any) -> dict[str, float]:
    """What the strongest nodes of one prompt carry."""
    graph, adapter = attribution_graph(model, clean, target=target, max_nodes=1), adapt(model)
    linear = Linearised(adapter, clean, None)
    linear.explain(graph.answers, graph.weights)
    flows = dict[str, Tensor]()
    for layer in range(adapter.n_layers):
        flows[f"attention edge.{layer}"] = linear.edge_flows(layer).abs()
        flows[f"neuron.{layer}"] = linear.unit_flows(layer).abs()
    with torch.no_grad():
        return _shares(ByFlow(model, graph, flows), corrupted)


def _shares(run: ByFlow, corrupted: Tensor) -> dict[str, float]:
    sizes = torch.cat([flow.flatten() for flow in run.flows.values()]).sort(descending=True).values
    edges = torch.cat([run.flows[at].flatten() for at in run.flows if at.startswith("attention")])
    grid = [100 * 2**k for k in range(20)]
    all_nodes = int((sizes > 0).sum())
    counts = [*SHOWN, *(n for n in grid if n < all_nodes), all_nodes]
    least = sizes[torch.tensor(counts) - 1]
    least[-1] = 0.0  # also what has no flow, such as closed edges
    low, others = run.values(tokens=corrupted)
    high, own = run.whole
    flowing = edges[edges > 0]
    in_graph = (flowing >= least[:, None]).sum(dim=1).tolist()
    row: dict[str, float] = {f"edges of {n}": in_graph[k] for k, n in enumerate(SHOWN)}
    frozen = {at: own[at] for at in own if at.startswith("attention")}
    for name, patterns in ("run", {}), ("prompt", frozen):
        values = [
            run.values(some.tolist(), others=others, patterns=patterns)[0]
            for some in least.split(8)
        ]
        effect = ((torch.cat(values) - low) / (high - low)).tolist()
        row |= {f"effect of {n}, {name}": effect[k] for k, n in enumerate(SHOWN)}
        reached = next(k for k in range(len(SHOWN), len(counts)) if effect[k] >= SHARE)
        row |= {f"nodes, {name}": counts[reached], f"edges, {name}": in_graph[reached]}
    row["nodes of flow"] = int((sizes.cumsum(0) < SHARE * sizes.sum()).sum()) + 1
    row["edges of flow"] = int((flowing >= sizes[row["nodes of flow"] - 1]).sum())
    row |= {"all nodes": all_nodes, "all edges": len(flowing)}
    return row


def scores(model: Any, clean: Tensor, target: Any) -> dict[str, float]:
    """The scores of the graph of one prompt, and how well it predicts what its nodes do."""
    graph = attribution_graph(model, clean, target=target)
    check = check_graph(model, graph)
    return {
        "replacement": graph.replacement_score,
        "completeness": graph.completeness_score,
        "correlation": check.correlation,
        "misses": len(check.misses) / len(check.nodes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--each", type=int, default=16)
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    models = dict(zip(("dense", "sparse"), load_language_models(), strict=True))
    all_prompts = prompts(models["dense"], options.text, options.each)
    out, rows = options.out, list[dict[str, Any]]()
    if out is not None and out.exists():
        rows = json.loads(out.read_text())
    for kind, clean, corrupted, target in all_prompts[len(rows) // 2 :]:
        for name, model in models.items():
            if options.scores:
                row = scores(model, clean, target)
            else:
                row = measure(model, clean, corrupted, target)
            rows.append({"model": name, "prompts": kind, **row})
        if out is not None:
            out.write_text(json.dumps(rows))
    table = pd.DataFrame(rows).groupby(["prompts", "model"])
    by_model = pd.DataFrame(rows).groupby("model")
    dense, sparse = (by_model.get_group(name).reset_index(drop=True) for name in models)
    more = (sparse.drop(columns=["model", "prompts"]) - dense[sparse.columns[2:]]).groupby(
        sparse["prompts"]
    )
    for title, shown in ("by model", table), ("sparse less dense, prompt by prompt", more):
        print(f"{title}: n", shown.size().T.to_string(), sep="\n")
        print(f"{title}: mean", shown.mean().T.round(3).to_string(), sep="\n")
        print(f"{title}: half of 95 %", (1.96 * shown.sem()).T.round(3).to_string(), sep="\n")
        print(f"{title}: median", shown.median().T.round(3).to_string(), sep="\n")


if __name__ == "__main__":
    main()

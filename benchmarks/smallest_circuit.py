"""How small a circuit `find_circuit` finds, and what other methods explain with as many edges.

All methods search on the same prompt pairs, and all circuits are evaluated on the same held-out
pairs. Every row of the table in Markdown is the run of one circuit: its edges, the explained effect
on held-out pairs with its 95 % interval, the deviation there, and the time that the method took to
search. The whole time of `find_circuit`, with the attribution and all evaluations, comes below the
table.

With ``--fresh``, the circuit, and those of EAP-IG's ranking by the mean absolute score, are run on
further pairs, which neither the search nor the choice among sizes has seen.

With ``--deviation``, the search is for circuits that are close to the whole model in every pair: by
minus the distance of a pair's metric from the whole model's, whose explained effect is 1 minus the
deviation, as a share of that with everything patched. ``--level 0.8`` allows a fifth.

With ``--others``, as many edges as `find_circuit` has, or hardly fewer, are also searched by

- EAP-IG's ranking;
- `prune_circuit_edges`, from equal gates and from EAP-IG's scores;
- `acdc`, from as many of EAP-IG's best edges as the ranking needs for the level.

SmolLM2 takes three to ten minutes of one core, a task model one, with all others some minutes:

    python benchmarks/smallest_circuit.py --model smollm2 --pairs 16 --seconds 600 --fresh 48
    python benchmarks/smallest_circuit.py --model sparse-smollm2 --pairs 16 --seconds 600
    python benchmarks/smallest_circuit.py --model dense --task ioi --others
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from sparse_tl import find_circuit, load_language_models, measure_skill
from sparse_tl.backend import HookedModel
from sparse_tl.circuits import (
    Circuit,
    FoundCircuit,
    Scores,
    acdc,
    attribute_circuit_edges,
    evaluate,
    evaluate_circuit_edges,
    prune_circuit_edges,
)
from sparse_tl.circuits.evaluation import log_sizes
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import Metric
from sparse_tl.zoo import TASKS, load_task_models, task_pairs

SIDES = ("dense", "sparse")
MODELS = (*SIDES, "smollm2", "sparse-smollm2")
QUIET: dict[str, Any] = {"progress": False}


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="dense", choices=MODELS)
    parser.add_argument("--task", default="ioi", choices=[task.name for task in TASKS])
    parser.add_argument("--pairs", type=int, default=16, help="to search on; and to hold out")
    parser.add_argument("--fresh", type=int, default=0, help="further pairs to evaluate on")
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--seconds", type=float, help="time limit of find_circuit")
    parser.add_argument("--deviation", action="store_true", help="search by deviation")
    parser.add_argument("--others", action="store_true", help="run other methods at the same size")
    parser.add_argument("--pruning-steps", type=int, default=300)
    parser.add_argument("--device")
    return parser.parse_args(words)


def _prompts(args: argparse.Namespace) -> tuple[HookedModel, Any, PromptPairs]:
    """The model, its task, as many pairs to search on as to hold out, and the further ones."""
    task, n = next(task for task in TASKS if task.name == args.task), 2 * args.pairs + args.fresh
    if args.model not in SIDES:
        models = load_language_models(device=args.device)
        model = models[args.model == "sparse-smollm2"]
        return model, task, task.pairs(model, n, seed=0)
    model = load_task_models(0, device=args.device)[SIDES.index(args.model)]
    return model, task, task_pairs(task, n, seed=0)


def _others(
    found: FoundCircuit, model: HookedModel, searched: PromptPairs, steps: int
) -> Iterator[tuple[str, Callable[[], Circuit]]]:
    """The name and the search of each other method, for as many edges as were found."""

    def prune(start: Scores | None) -> Circuit:
        options = {"size": size, "start": start, "steps": steps, **QUIET}
        return prune_circuit_edges(model, searched, **options).circuit

    size, scores = len(found.circuit), found.scores
    table = found.to_pandas().set_index("method")["size"]
    begin = scores.top(max(size, int(table["eap-ig"])))
    yield "EAP-IG ranking", lambda: scores.top(size).connected()
    yield "learned pruning", lambda: prune(None)
    yield "learned pruning, from EAP-IG", lambda: prune(scores)
    yield "ACDC", lambda: acdc(model, searched, size=size, start=begin, **QUIET).circuit


def distance(model: HookedModel, pairs: PromptPairs, metric: Metric) -> Metric:
    """Minus how far a metric of some of the pairs is from the whole model's."""
    whole = measure_skill(model, pairs, metric, progress=False).clean.tolist()
    by_prompt = dict(zip(map(tuple, pairs.clean.tolist()), whole, strict=True))

    def measure(logits: torch.Tensor, some: PromptPairs) -> torch.Tensor:
        found = metric(logits, some)
        return -(found - found.new_tensor([by_prompt[tuple(p)] for p in some.clean.tolist()])).abs()

    return measure


def main(words: Sequence[str] | None = None) -> None:
    """Find a circuit, and print it beside those of other methods."""
    args = _arguments(words)
    model, task, pairs = _prompts(args)
    ends = [0, args.pairs, 2 * args.pairs, len(pairs)]
    searched, held_out, fresh = (pairs.select(slice(*both)) for both in pairwise(ends))
    began = time.monotonic()
    options = {"at": args.level, "held_out": held_out, "seconds": args.seconds, **QUIET}
    metric = distance(model, pairs, task.metric) if args.deviation else task.metric
    found = find_circuit(model, searched, metric, **options)
    whole = time.monotonic() - began
    print("| model | task | method | circuit edges | explained effect | deviation | seconds |")
    print("|---|---|---|---|---|---|---|")

    def say(method: str, row: Any, seconds: float) -> None:
        effect = f"{row.explained_effect:.3f} ({row.low:.3f} to {row.high:.3f})"
        numbers = (f"{row.size:,}", effect, f"{row.deviation:.3f}", f"{seconds:.0f}")
        print(f"| {' | '.join((args.model, args.task, method, *numbers))} |", flush=True)

    for row in found.to_pandas().itertuples():
        say(f"find_circuit: {row.method}", row, row.seconds)
    if args.fresh:
        attribution = attribute_circuit_edges(model, searched, task.metric, by_pair=True, **QUIET)
        scores = replace(attribution, values=attribution.values.abs().mean(dim=0))
        sizes = log_sizes(scores.grid.n_parts, per_doubling=1)
        run = evaluate(model, fresh, task.metric, found.circuit, **QUIET)
        ranked = evaluate_circuit_edges(model, fresh, task.metric, scores, sizes, **QUIET)
        for name, one in (found.method, run), ("EAP-IG ranking", ranked):
            for row in one.to_pandas().itertuples():
                say(f"{name}, {args.fresh} further pairs", row, math.nan)
    if args.others:
        for name, search in _others(found, model, searched, args.pruning_steps):
            start = time.monotonic()
            circuit = search()
            seconds = time.monotonic() - start
            table = evaluate(model, held_out, task.metric, circuit, **QUIET).to_pandas()
            say(name, next(table.itertuples()), seconds)
    print(f"\n{found!r}\n{whole:.0f} s in all; on the pairs of the search: {found.searched}")


if __name__ == "__main__":
    main()

"""Does a sparse model need fewer circuit edges whichever method looks for them?

For a dense model and its sparse one, or one of the two, on one task, circuits of growing size from:

- the ranking by EAP-IG, cut at many sizes;
- `prune_circuit_edges`, towards each of several sizes, and the same started from EAP-IG's scores;
- `acdc`, at each of several thresholds.

All see the same half of the prompt pairs, and all circuits are evaluated on the other half; edges
without effect are not counted. Each circuit is printed as it is found, with the explained effect of
EAP-IG's at the same size, and kept in ``--out``: called again, the script resumes where it stopped,
even within a search by ACDC. At the end it prints a table in Markdown: circuit edges for the level
of explained effect by each method, dense and sparse, and how many times fewer; ``<=`` and ``>``
mark bounds, which more sizes or thresholds would turn into numbers.

    python benchmarks/circuit_methods.py --task ioi
    python benchmarks/circuit_methods.py --model gpt2 --sparse runs/gpt2/sparse --acdc-start 3000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sparse_tl.backend import HookedModel, load_model, read_parameters
from sparse_tl.circuits import (
    Circuit,
    EffectCurve,
    Evaluation,
    Scores,
    acdc,
    attribute_circuit_edges,
    evaluate,
    evaluate_circuit_edges,
    multiplier,
    prune_circuit_edges,
)
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import SparseTransformer
from sparse_tl.jobs.folder import RunFolder, saved
from sparse_tl.metrics import Metric
from sparse_tl.storage.files import digest
from sparse_tl.zoo import TASKS, load_task_models, task_pairs

METHODS = {
    "eap-ig": "EAP-IG ranking",
    "pruning": "learned pruning",
    "warm": "learned pruning, from EAP-IG",
    "acdc": "ACDC",
}
TASK_NAMES = tuple(task.name for task in TASKS)
SIDES = ("dense", "sparse")


def _numbers(kind: type) -> Callable[[str], list[Any]]:
    return lambda text: [kind(number) for number in text.split(",")]


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", help="the dense model: a hub name or a folder")
    parser.add_argument("--sparse", help="folder of its sparse model; default: the built-in pair")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, pruning, built-in pair")
    parser.add_argument("--task", default="ioi", choices=TASK_NAMES)
    parser.add_argument("--side", choices=SIDES, action="append", help="default: both")
    parser.add_argument("--pairs", type=int, default=64, help="half search, half evaluate")
    parser.add_argument("--level", type=float, default=0.9)
    sizes, thresholds = [16, 64, 256, 1024, 4096], [0.1, 0.03, 0.01, 0.003, 0.001, 0.0003]
    parser.add_argument("--sizes", type=_numbers(int), default=sizes, help="of pruning")
    help = "of ACDC, in nats of divergence"
    parser.add_argument("--thresholds", type=_numbers(float), default=thresholds, help=help)
    help = "ACDC begins with so many of EAP-IG's best edges instead of all: less to test"
    parser.add_argument("--acdc-start", type=int, help=help)
    parser.add_argument("--pruning-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device")
    parser.add_argument("--out", default="runs/circuit-methods")
    parser.add_argument("--restart", action="store_true")
    args = parser.parse_args(words)
    if (args.model is None) != (args.sparse is None):
        parser.error("--model and --sparse go together; without both, the built-in pair is taken")
    if args.pairs < 2:
        parser.error("--pairs: one half searches and the other evaluates; at least 2")
    return args


def _models(args: argparse.Namespace) -> dict[str, HookedModel]:
    if args.model is None:
        dense, sparse = load_task_models(args.seed, device=args.device)
    else:
        dense = load_model(args.model, device=args.device)
        sparse = SparseTransformer.from_pretrained(args.sparse, device=args.device)
    return dict(zip(SIDES, (dense, sparse), strict=True))


class _Search:
    """The methods on one model, with what they found in a folder."""

    def __init__(
        self,
        model: HookedModel,
        pairs: PromptPairs,
        metric: Metric,
        folder: RunFolder,
        side: str,
        args: argparse.Namespace,
    ) -> None:
        half = len(pairs) // 2
        self.model, self.metric, self.args = model, metric, args
        self.searched, self.held_out = pairs.select(slice(0, half)), pairs.select(slice(half, None))
        self.folder, self.side = folder, side
        self.options = {"batch_size": args.batch_size, "progress": False}

    def curves(self) -> dict[str, EffectCurve | None]:
        """Of every method, as far as it was asked for; prints each circuit as it is found."""
        model = self.model
        scores = self._kept(
            "scores",
            Scores,
            lambda: attribute_circuit_edges(model, self.searched, self.metric, **self.options),
        )
        ranked = self._kept(
            "eap-ig",
            Evaluation,
            lambda: evaluate_circuit_edges(
                model, self.held_out, self.metric, scores, **self.options
            ),
        ).curve("eap-ig")
        self._say("EAP-IG ranking", f"{len(ranked.sizes)} sizes")
        found: dict[str, list[tuple[int, float]]] = {"pruning": [], "warm": [], "acdc": []}
        for method, name, search in self._searches(scores):
            began = time.monotonic()
            circuit = self._kept(name, Circuit, search)
            measured = self._kept(f"{name}-effect", Evaluation, partial(self._effect, circuit))
            size, effect = len(circuit), measured.effect[0].item()
            found[method].append((size, effect))
            same = ranked.effect_at(size)
            seconds = time.monotonic() - began
            self._say(name, f"{size:,} edges, {effect:.3f}; EAP-IG {same:.3f}; {seconds:.0f} s")
        return {"eap-ig": ranked, **{name: curve_of(name, some) for name, some in found.items()}}

    def _searches(self, scores: Scores) -> Iterator[tuple[str, str, Callable[[], Circuit]]]:
        """Method, name and search of each circuit."""
        model, args = self.model, self.args
        begin: Any = "circuit_edges"
        if args.acdc_start is not None:
            begin = scores.top(min(args.acdc_start, scores.grid.n_parts))

        def prune(size: int, start: Scores | None) -> Circuit:
            found = prune_circuit_edges(
                model,
                self.searched,
                size=size,
                start=start,
                steps=args.pruning_steps,
                seed=args.seed,
                **self.options,
            )
            return found.circuit

        def search(threshold: float) -> Circuit:
            return acdc(
                model,
                self.searched,
                threshold=threshold,
                start=begin,
                **self.options,
            ).circuit

        for size in sorted(set(args.sizes)):
            yield "pruning", f"pruning-{size}", partial(prune, size, None)
            yield "warm", f"warm-{size}", partial(prune, size, scores)
        for threshold in sorted(set(args.thresholds), reverse=True):
            yield "acdc", f"acdc-{threshold:g}", partial(search, threshold)

    def _effect(self, circuit: Circuit) -> Evaluation:
        return evaluate(self.model, self.held_out, self.metric, circuit, **self.options)

    def _kept(self, name: str, kind: Any, make: Callable[[], Any]) -> Any:
        """What was found before, or is found now and kept."""
        place = f"{self.side}/{name}"
        with self.folder.stage(place):
            return saved(self.folder / place, kind, make)

    def _say(self, name: str, what: str) -> None:
        print(f"{self.side:6} {name:16} {what}", flush=True)


def curve_of(name: str, found: list[tuple[int, float]]) -> EffectCurve | None:
    """Through circuits of any order; of two with one size, the one that explains more."""
    best = {size: effect for size, effect in sorted(found)}
    effects = list(best.values())
    return EffectCurve(name, list(best), effects, effects, effects) if best else None


def needed(curve: EffectCurve | None, level: float) -> str:
    """The size at the level as far as it is known."""
    if curve is None:
        return "-"
    size = curve.size_at(level)
    if size is None:
        return f"> {curve.sizes[-1]:,}"
    bound = "<= " if min(curve.mean) >= level else ""
    return f"{bound}{size:,.0f}"


def ratio(dense: EffectCurve | None, sparse: EffectCurve | None, level: float) -> str:
    """The multiplier; a bound has none."""
    curves = [curve for curve in (dense, sparse) if curve is not None]
    if len(curves) < 2 or any(min(curve.mean) >= level for curve in curves):
        return "-"
    found = multiplier(*curves, level=level)
    return "-" if found is None else f"{found:.1f}x"


def main(words: Sequence[str] | None = None) -> None:
    """Search with all methods in both models, and print the table."""
    args = _arguments(words)
    task = next(task for task in TASKS if task.name == args.task)
    names = ("model", "sparse", "seed", "task", "pairs", "acdc_start", "pruning_steps")
    settings = {"script": "circuit methods", **{name: getattr(args, name) for name in names}}
    folder = RunFolder(args.out, settings, restart=args.restart)
    models = _models(args)
    for side, model in models.items():
        folder.pin(f"{side} model", digest(read_parameters(model)))
    draw = partial(task_pairs, task)
    if args.model is not None:
        draw = partial(task.pairs, models["dense"])
    pairs = draw(args.pairs, seed=args.seed)
    found = {
        side: _Search(model, pairs, task.metric, folder, side, args).curves()
        for side, model in models.items()
        if side in (args.side or SIDES)
    }
    print(f"\nCircuit edges for an explained effect of {args.level}, {task.title}:\n")
    print("| method | dense | sparse | dense / sparse |\n|---|---|---|---|")
    for method, title in METHODS.items():
        both = [found[side][method] if side in found else None for side in SIDES]
        cells = [needed(curve, args.level) for curve in both]
        print(f"| {title} | {' | '.join(cells)} | {ratio(*both, level=args.level)} |")


if __name__ == "__main__":
    main()

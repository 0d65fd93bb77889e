"""The sparse SmolLM2 beside the dense one: attention edges, loss, tasks, and sizes of circuits.

1. On every text, in windows of several lengths, and on its sentences alone, cut to 24 tokens:
   open attention edges, loss, and divergence from the dense model.
2. On every task: the share of prompts whose most likely next token is right; open attention edges,
   and divergence at the answer.
3. On four tasks: the fewest heads and circuit edges with an explained effect of 0.9. Scores
   (EAP-IG) come from half of the pairs, effects from the other half. The edges of these circuits
   are counted by kind too: many lead to MLPs, which attention gates do not affect.

Prints tables in Markdown, and draws the explained effect against the number of heads and edges
kept, as means over pairs, in figures beside the report. Every measurement is written to a JSON file
as soon as it is known, and a rerun with the same options goes on there.

    python benchmarks/sparse_language_model.py --text wikitext.txt stories.txt --out report.json
    python benchmarks/sparse_language_model.py --text wikitext.txt --window 64 128 256 512 \
        --tasks --circuits
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from sparse_tl import (
    SparseTransformer,
    attribute_circuit_edges,
    attribute_heads,
    compare_skills,
    evaluate_circuit_edges,
    evaluate_heads,
    load_language_model,
    load_language_models,
    load_model,
)
from sparse_tl.circuits import Circuit, EffectCurve, SeedCurves, log_sizes
from sparse_tl.data import TokenBatch, read_documents, text_rows
from sparse_tl.plots import effect_figure
from sparse_tl.storage.files import read_json, write_json
from sparse_tl.tasks import TASKS_BY_NAME
from sparse_tl.training import evaluate_held_out, short_rows

CIRCUITS = ("greater_than", "ioi", "ioi_long", "docstring")
LEVEL = 0.9
SENTENCE = 24
"""Tokens of a sentence."""
METHODS = {
    "heads": (attribute_heads, evaluate_heads),
    "circuit edges": (attribute_circuit_edges, evaluate_circuit_edges),
}
Models = dict[str, Any]


def measure(models: Models, rows: TokenBatch) -> dict[str, Any]:
    """Loss, divergence and attention edges of both models."""
    dense = models["dense"]
    return {side: evaluate_held_out(m, rows, dense=dense).numbers for side, m in models.items()}


def on_text(models: Models, file: Path, tokens: int, window: int) -> dict[str, Any]:
    """What `measure` finds on the first tokens of a text, in windows."""
    documents, tokenizer = read_documents(file), models["dense"].tokenizer
    return measure(models, text_rows(documents, tokenizer, window, limit=tokens // window))


def on_sentences(models: Models, file: Path, n: int, length: int) -> dict[str, Any]:
    """What `measure` finds on the beginnings of sentences, without BOS."""
    tokenizer = models["dense"].tokenizer
    windows = text_rows(read_documents(file), tokenizer, 256, limit=2 * n).tokens
    rows = short_rows(windows, tokenizer)["short"]
    assert rows.attention_mask is not None
    whole = rows.select((rows.attention_mask.sum(dim=1) >= length).nonzero()[:n, 0])
    return measure(models, TokenBatch.next_token(whole.tokens[:, :length]))


def on_task(models: Models, name: str, n: int) -> dict[str, Any]:
    """Shares of right answers, open edges, and the divergence at the answers of prompts."""
    found = compare_skills(**models, families=[TASKS_BY_NAME[name]], n=n, progress=False)
    return found.table.to_dict("records")[0]


def on_circuits(model: Any, name: str, parts: str, n: int) -> dict[str, Any]:
    """The curve of explained effect, the size at `LEVEL`, and the kinds of that circuit's edges."""
    task, (attribute, evaluate) = TASKS_BY_NAME[name], METHODS[parts]
    pairs = task.pairs(model, 2 * n)
    searched, others = pairs.select(slice(0, n)), pairs.select(slice(n, 2 * n))
    scores = attribute(model, searched, task.metric, progress=False)
    sizes = log_sizes(scores.grid.n_parts)
    found = evaluate(model, others, task.metric, scores, sizes, progress=False)
    curve = found.curve(name)
    size = curve.size_at(LEVEL)
    kinds = {} if size is None or parts == "heads" else kinds_of(scores.top(round(size)))
    return {"sizes": [*curve.sizes], "effects": [*curve.mean], "size": size, "kinds": kinds}


def kinds_of(circuit: Circuit) -> dict[str, int]:
    """Edges by what they join, such as ``head -> q`` and ``mlp -> mlp``."""
    return dict(Counter(map(_kind, circuit.to_pandas()["edge"])).most_common())


def _kind(edge: str) -> str:
    source, destination = edge.split("->")
    node, _, slot = destination.partition("<")
    ends = {"a": "head", "m": "MLP", "i": "input", "l": "logits"}
    return f"{ends[source[0]]} -> {slot.rstrip('>') or ends[node[0]]}"


class Report:
    """Measurements by name, in a file that a rerun goes on with."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file = file
        self.content = read_json(file) if file.exists() else {"settings": settings, "found": {}}
        if self.content["settings"] != settings:
            raise SystemExit(
                f"expected the settings of {file}; got {settings}. Choose another file"
            )

    def get(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured before, or is now."""
        found = self.content["found"]
        if name not in found:
            found[name] = measure()
            write_json(self.file, self.content)
        return found[name]


def draw(report: Report, tasks: list[str]) -> None:
    """Draw the curves of both models, one panel per task, for heads and for circuit edges."""
    found, names = report.content["found"], {"dense": "SmolLM2", "sparse": "Sparse SmolLM2"}
    for parts in METHODS:
        panels = {}
        for task in tasks:
            panels[TASKS_BY_NAME[task].title] = curves = []
            for side, name in names.items():
                curve = found[f"circuit {task}, {parts}, {side}"]
                mean = curve["effects"]
                curves.append(
                    SeedCurves((0,), [EffectCurve(name, curve["sizes"], mean, mean, mean)])
                )
        kind = parts.replace(" ", "_")
        figure = effect_figure(panels, parts=kind)  # type: ignore[bad-argument-type]
        print(figure.save(report.file.with_name(f"{report.file.stem}_{kind}.png")))


def table(header: str, rows: list[list[str]]) -> None:
    print(f"\n| {header} |\n|{'---|' * (header.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def times(one: float | None, other: float | None) -> str:
    return "-" if not one or not other else f"{one / other:.2f}x"


def shown(size: float | None) -> str:
    return "-" if size is None else f"{size:,.0f}"


def edges(dense: float, sparse: float, heads: int) -> list[str]:
    """Open and possible attention edges per token, the factor, and open ones by head and query."""
    return [f"{dense:,.0f}", f"{sparse:,.1f}", times(dense, sparse), f"{sparse / heads:.2f}"]


def main() -> None:
    """Measure both models, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dense", type=Path, help="folder of a dense model; default SmolLM2")
    parser.add_argument("--sparse", type=Path, help="folder of the sparse model made from it")
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--window", type=int, nargs="+", default=[64], help="tokens of a window")
    parser.add_argument("--sentences", type=int, default=96, help="sentences of a text")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a task")
    parser.add_argument("--pairs", type=int, default=32, help="pairs that score, and that evaluate")
    parser.add_argument("--tasks", nargs="*", default=[*TASKS_BY_NAME], help="tasks to measure")
    parser.add_argument("--circuits", nargs="*", default=CIRCUITS, help="tasks to find circuits of")
    parser.add_argument("--out", type=Path, default=Path("sparse_language_model.json"))
    args = parser.parse_args()
    names = ("tokens", "sentences", "prompts", "pairs")
    settings = {name: getattr(args, name) for name in names}
    settings |= {side: str(getattr(args, side) or "smollm2") for side in ("dense", "sparse")}
    report = Report(args.out, settings)
    if args.sparse:
        dense = load_model(args.dense) if args.dense else load_language_model()
        pair = dense, SparseTransformer.from_pretrained(args.sparse)
    else:
        pair = load_language_models()
    models = dict(zip(("dense", "sparse"), pair, strict=True))
    heads = pair[0].cfg.n_layers * pair[0].cfg.n_heads

    counted = "edges per token | open | fewer | per head and query"
    rows = []
    for file, window in product(args.text, [*args.window, None]):
        measured = partial(on_text, models, file, args.tokens, window)
        if window is None:
            measured = partial(on_sentences, models, file, args.sentences, SENTENCE)
        window = window or f"{SENTENCE} (sentences)"
        found = report.get(f"text {file.name}, {window}", measured)
        dense, sparse = found["dense"], found["sparse"]
        losses = [f"{dense['loss']:.3f}", f"{sparse['loss']:.3f}", f"{sparse['divergence']:.3f}"]
        counts = [one["active_attention_edges_per_token"] for one in (dense, sparse)]
        rows.append([file.name, str(window), *edges(counts[0], counts[1], heads), *losses])
    table(f"text | window | {counted} | loss, dense | sparse | divergence", rows)

    rows = []
    for name in args.tasks:
        found = report.get(f"task {name}", partial(on_task, models, name, args.prompts))
        sides = [f"{kind}_{side}" for kind in ("right", "above") for side in models]
        shares = [f"{found[side]:.1%}" for side in sides]
        counts = edges(found["possible"], found["edges"], heads)
        rows.append([name, *counts, *shares, f"{found['divergence']:.3f}"])
    table(f"task | {counted} | right, dense | sparse | choice, dense | sparse | divergence", rows)

    rows, kinds = [], []
    for name in args.circuits:
        row = [name]
        for parts in METHODS:
            sizes = []
            for side, model in models.items():
                measured = partial(on_circuits, model, name, parts, args.pairs)
                found = report.get(f"circuit {name}, {parts}, {side}", measured)
                sizes.append(found["size"])
                if found["kinds"]:
                    of_kind = ", ".join(f"{n:,} {kind}" for kind, n in found["kinds"].items())
                    kinds.append([name, side, of_kind])
            row += [*map(shown, sizes), times(*sizes)]
        rows.append(row)
    table("task | heads, dense | sparse | fewer | edges, dense | sparse | fewer", rows)
    table("task | model | circuit edges of each kind", kinds)
    if args.circuits:
        draw(report, args.circuits)


if __name__ == "__main__":
    main()

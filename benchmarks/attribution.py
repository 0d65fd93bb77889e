"""What attribution and evaluation cost, in passes of the plain model.

Of GPT-2 small's shape with random weights and random prompts that differ in one token; with
``--model smollm2`` also of SmolLM2-135M-Instruct on IOI prompts.

F is two forward passes and one backward pass of the plain model on the same batch, as
``model(...)`` does them, with logits at every position. The *floor* of attribution patching is the
same with logits only where they are read. Gradients reach the input alone; no weight gets one.
Times are CPU seconds of this process: with ``OMP_NUM_THREADS=1`` their ratios hardly change when
the machine is busy. Memory is the largest resident size while a fresh process does just this, over
that of the model, and over that of the floor.

    python benchmarks/attribution.py [--model smollm2] [--hooked] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from own_process import own_process, rise
from random_gpt2 import add_hooked, random_gpt2

from sparse_tl import load_language_model
from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import (
    acdc,
    attribute_circuit_edges,
    attribute_heads,
    evaluate_circuit_edges,
)
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import logit_difference
from sparse_tl.tasks import TASKS_BY_NAME


def _pairs(n: int, length: int) -> PromptPairs:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(50257, shape, generator=generator)  # noqa: E731
    clean = draw(n, length)
    corrupted = clean.clone()
    corrupted[:, length // 2] = draw(n)
    return PromptPairs(clean, corrupted, draw(n, 1), draw(n, 1), torch.full((n,), length - 1))


def _measured(name: str, args: argparse.Namespace) -> tuple[Model, PromptPairs]:
    """A model and the prompt pairs that it runs."""
    if name == "smollm2":
        model = load_language_model(name, device="cpu")
        return model, TASKS_BY_NAME["ioi"].pairs(model, args.ioi_pairs)
    return random_gpt2(hooked=args.hooked), _pairs(args.pairs, args.length)


def _jobs(model: Model, pairs: PromptPairs) -> dict[str, Callable[[], Any]]:
    scores = None

    adapter, read = adapt(model), pairs.forced.read

    def forward() -> None:
        with torch.no_grad():
            model(pairs.clean)

    def chosen(tokens: torch.Tensor, everywhere: bool) -> torch.Tensor:
        """Logits where they are read, of those at every position or by themselves."""
        if everywhere:
            return pairs.read(model(tokens))
        return adapter.logits_at(adapter.final(tokens), read)

    def plain(everywhere: bool) -> None:
        """Two passes forward and one back to what enters the first layer."""
        entering: list[torch.Tensor] = []

        def enter(value: torch.Tensor, hook: object) -> torch.Tensor:
            entering.append(value.detach().requires_grad_())
            return entering[-1]

        with torch.no_grad():
            chosen(pairs.corrupted, everywhere)
        model.requires_grad_(False)
        with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", enter)]):
            logits = chosen(pairs.clean, everywhere)
        torch.autograd.grad(logit_difference(logits, pairs).sum(), entering)
        model.requires_grad_(True)

    def attribute(method: str) -> Callable[[], Any]:
        return lambda: attribute_circuit_edges(
            model, pairs, logit_difference, method=method, steps=5, progress=False
        )

    def evaluation() -> None:
        nonlocal scores
        scores = scores or attribute("eap")()
        sizes = [round(scores.grid.n_parts ** (k / 10)) for k in range(1, 11)]
        evaluate_circuit_edges(model, pairs, logit_difference, scores, sizes, progress=False)

    return {
        "forward": forward,
        "F": lambda: plain(everywhere=True),
        "floor": lambda: plain(everywhere=False),
        "EAP": attribute("eap"),
        "EAP-IG, 5 steps": attribute("eap-ig"),
        "heads, EAP-IG, 5 steps": lambda: attribute_heads(
            model, pairs, logit_difference, steps=5, progress=False
        ),
        "evaluation at 10 sizes": evaluation,
    }


def _seconds(jobs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Of every job, taken in turn after a round to warm up: a slow machine slows down all."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for run in range(repeats + 1):
        for name, job in jobs.items():
            started = time.process_time()
            job()
            if run:
                taken[name].append(time.process_time() - started)
    return taken


def _ratio(taken: list[float], unit: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(taken, unit, strict=True))


def _memory(name: str, which: str, args: argparse.Namespace) -> float:
    """What a job takes on top of its model, in MB."""
    return rise(_jobs(*_measured(which, args))[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_hooked(parser)
    parser.add_argument("--model", choices=["gpt2", "smollm2"], default="gpt2")
    parser.add_argument("--ioi-pairs", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--acdc-pairs", type=int, default=1)
    parser.add_argument("--acdc-length", type=int, default=8)
    parser.add_argument("--acdc-threshold", type=float, default=1e-4)
    args = parser.parse_args()
    _report("gpt2", args)
    if args.model == "smollm2":
        _report("smollm2", args)
    else:
        _report_acdc(args)


def _report(which: str, args: argparse.Namespace) -> None:
    """The cost of every job on one model, and the memory of two."""
    model, pairs = _measured(which, args)
    print(f"{model.cfg.model_name}: {len(pairs)} pairs of {pairs.clean.shape[1]} tokens")
    seconds = _seconds(_jobs(model, pairs), args.repeats)
    for name, taken in seconds.items():
        per_size = _ratio(taken, seconds["forward"]) / 10
        also = f", {per_size:.2f} forward passes per size" if name.startswith("evalu") else ""
        ratios = f"{_ratio(taken, seconds['F']):5.2f} F = {_ratio(taken, seconds['floor']):5.2f}"
        print(f"{name:24} {statistics.median(taken):7.3f} s = {ratios} floors{also}")
    plain = own_process(_memory, "floor", which, args, as_on_gpu=False)
    for name in ("EAP", "EAP-IG, 5 steps"):
        memory = own_process(_memory, name, which, args, as_on_gpu=False)
        print(f"{name:24} {memory:7.0f} MB over the model, {memory - plain:.0f} over the floor")


def _report_acdc(args: argparse.Namespace) -> None:
    """ACDC on all edges: tests, and how many plain forward passes they take.

    A few short prompts: what a test costs in forward passes does not depend on them.
    """
    model = random_gpt2(hooked=args.hooked)
    pairs = _pairs(args.acdc_pairs, args.acdc_length)
    n_edges = adapt(model).graph.n_edges
    started = time.process_time()
    found = acdc(model, pairs, threshold=args.acdc_threshold)
    taken, n_tested = time.process_time() - started, len(found.history)
    with torch.no_grad():
        passes = _seconds({"forward": lambda: model(pairs.clean)}, 9)["forward"]
    forward = statistics.median(passes)
    print(
        f"ACDC on {n_edges:,} edges at {args.acdc_threshold:g} nats: {n_tested:,} tested in "
        f"{taken:.0f} s, {taken / n_tested / forward:.2f} plain forward passes per tested edge and "
        f"{taken / n_edges / forward:.2f} per edge; "
        f"{len(found.circuit):,} edges left"
    )


if __name__ == "__main__":
    main()

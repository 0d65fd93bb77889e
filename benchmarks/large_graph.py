"""What discovery costs on the graph of a 7B model, and at its width.

The graph: 32 layers of 32 heads, 1,592,881 circuit edges. The model has small widths and random
weights, so that what is measured is the graph and not the model: every line is the wall time of one
step and the largest resident size of the process until then, over that of the model alone.

The width: 2 layers of 32 heads with d_model 4,096, 32 prompt pairs of 16 tokens. Every line is the
largest resident size of a process that attributes, or that runs one plain forward and backward
pass, over that of the model alone.

    OMP_NUM_THREADS=2 python benchmarks/large_graph.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from own_process import own_process, peak
from random_gpt2 import random_gpt2, random_pairs

from sparse_tl import attribute_circuit_edges, evaluate_circuit_edges, logit_difference
from sparse_tl.backend import adapt
from sparse_tl.circuits import log_sizes

SHAPE = {
    "n_layer": 32,
    "n_head": 32,
    "n_embd": 64,
    "n_inner": 128,
    "n_positions": 32,
    "vocab_size": 100,
    "activation_function": "gelu_new",
}
WIDE = SHAPE | {"n_layer": 2, "n_embd": 4096, "n_inner": 16384}


def _wide(method: str) -> float:
    model, pairs = random_gpt2(WIDE), random_pairs(32)
    with torch.no_grad():
        model(pairs.clean[:1])
    before = peak()
    if method.startswith("plain"):
        for parameter in model.parameters():
            parameter.requires_grad_(method == "plain")
        with model.hooks(fwd_hooks=[("hook_embed", lambda value, hook: value.requires_grad_())]):
            model(pairs.clean)[:, -1, 0].sum().backward()
    else:
        attribute_circuit_edges(model, pairs, logit_difference, method=method, progress=False)
    return peak() - before


def main() -> None:
    """Print a row for each step."""
    for method in ("plain", "plain, weights frozen", "eap", "eap-ig"):
        print(f"{method:22} {own_process(_wide, method, as_on_gpu=False):6.0f} MB")
    model, pairs = random_gpt2(SHAPE), random_pairs(2)
    with torch.no_grad():
        model(pairs.clean)
    before = peak()

    def timed(name: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = step()
        print(f"{name:20} {time.perf_counter() - start:6.2f} s  {peak() - before:6.0f} MB")
        return found

    graph = timed("graph", lambda: adapt(model).graph)
    print(f"{graph.n_parts:,} circuit edges")
    metric, quiet = logit_difference, {"progress": False}
    scores = timed(
        "EAP", lambda: attribute_circuit_edges(model, pairs, metric, method="eap", **quiet)
    )
    best = timed("top 2,000", lambda: scores.top(2000))
    timed("print", lambda: repr(scores))
    timed("table in a notebook", scores._repr_html_)
    timed(
        "evaluate 10 sizes",
        lambda: evaluate_circuit_edges(
            model, pairs, metric, scores, log_sizes(graph.n_parts)[-10:], **quiet
        ),
    )
    timed("diagram of 2,000", lambda: best.figure()._repr_html_())


if __name__ == "__main__":
    main()

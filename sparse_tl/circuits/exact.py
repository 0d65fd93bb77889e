"""Exact patching: one circuit edge or head at a time, all else as it comes. The oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sparse_tl.circuits.patches import Patch, Patches
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitGraph, Edge, Node
from sparse_tl.lens import HookedModel, graph_of, logits_patched_alone
from sparse_tl.metrics import Metric, measure
from sparse_tl.progress import tracked

if TYPE_CHECKING:
    import pandas as pd


def patch_exactly(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    parts: Sequence[Edge | Node | str] | None = None,
    *,
    patch: Patch | str = "corrupted",
    batch_size: int = 32,
    rows: int = 256,
    progress: bool = True,
) -> pd.Series:
    """The change of the metric when one part alone is patched: ``m(patched) - m(clean)``.

    Layers before the patched part are never run again, and many parts share a forward pass.

    Args:
        model: dense or sparse; it is not changed.
        pairs: the prompts.
        metric: one value per pair.
        parts: circuit edges and heads, or their names ("a0.h1->m1", "a0.h1"); all edges when left
            out. A head is patched in everything that reads it.
        patch: the corrupted prompt's value, the mean over the clean prompts at that position, or 0.
        batch_size: pairs per pass.
        rows: of a forward pass: pairs times parts.
        progress: whether to show it.

    Returns:
        The change by name, mean over pairs, in units of the metric; negative: the part helps.

    Raises:
        ValueError: a part that the graph does not have, an unknown patch, or a metric that is not
            one finite number per pair.
    """
    import pandas as pd

    graph = graph_of(model)
    asked = [_part(graph, part) for part in (graph.edges if parts is None else parts)]
    layers: dict[int, list[int]] = {}
    for index, part in enumerate(asked):
        layers.setdefault(_layer(graph, part), []).append(index)
    changes = torch.zeros(len(asked), dtype=torch.float64)
    patches = Patches(model, graph, pairs, patch, batch_size)
    total = len(asked) * len(patches.batches)
    with torch.no_grad(), tracked("patching", total, progress) as step:
        for batch, run in patches.masked_runs():
            clean = measure(metric, run.clean_logits, batch)
            at_once = max(1, rows // len(batch))
            for layer, indices in layers.items():
                for start in range(0, len(indices), at_once):
                    some = indices[start : start + at_once]
                    logits = logits_patched_alone(run, [asked[i] for i in some], layer)
                    for index, part_logits in zip(some, logits, strict=True):
                        values = measure(metric, part_logits, batch)
                        changes[index] += (values - clean).sum().cpu().double()
                        step()
    return pd.Series((changes / len(pairs)).tolist(), index=[str(part) for part in asked])


def _part(graph: CircuitGraph, part: Edge | Node | str) -> Edge | Node:
    if isinstance(part, str):
        part = Edge.parse(part) if "->" in part else Node.parse(part)
    if isinstance(part, Edge):
        graph.index(part)
    elif part.kind != "head":
        raise ValueError(f"expected circuit edges or heads to patch; got {part}")
    else:
        graph.source_index(part)
    return part


def _layer(graph: CircuitGraph, part: Edge | Node) -> int:
    """The first layer that a patched part changes; the number of layers for the logits."""
    node = part.destination.node if isinstance(part, Edge) else part
    return graph.n_layers if node.kind == "logits" else node.layer

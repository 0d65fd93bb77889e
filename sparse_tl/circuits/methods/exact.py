"""Exact patching of one circuit edge or head at a time: the ground truth of attribution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode
from sparse_tl.metrics import Metric, check_changed, measure
from sparse_tl.parts.graph import CircuitEdge, Node
from sparse_tl.parts.positioned_graph import PositionedGraph
from sparse_tl.progress import tracked

if TYPE_CHECKING:
    import pandas as pd


@checked
@in_evaluation_mode
def patch_exactly(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    parts: Sequence[CircuitEdge | Node | str] | None = None,
    *,
    patch: Patch = "corrupted",
    positions: Positions | None = None,
    batch_size: AtLeastOne = 32,
    rows: AtLeastOne = 256,
    progress: bool = True,
) -> pd.Series:
    """The change of the metric when one part is patched, ``m(patched) - m(clean)``, for each part.

    A pass starts at the layer of the patched part, and patches many parts side by side.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        metric: metric function with one value per pair.
        parts: circuit edges and heads, or their names ("a0.h1->m1", "a0.h1"); all edges by
            default. A head is patched for all of its readers.
        patch: patch at closed parts, as in `PatchedPairs`.
        positions: patch each edge at one position, as in `attribute_circuit_edges`. Parts are then
            edges at positions ("a0.h1->m1@3", "a0.h1->m1@END"); all of them by default.
        batch_size: prompt pairs per forward pass.
        rows: maximum number of pairs times parts in one forward pass.
        progress: whether to show a progress bar.

    Returns:
        The mean change over pairs by part name, in units of the metric; negative: the part helps.

    Raises:
        ValueError: the model lacks a part, the patch is unknown, the metric is not one finite
            number per pair, or the pairs lack the positions.
        NoEffectError: patching everything changes the metric of no pair.
    """
    import pandas as pd

    graph = adapt(model).graph
    edges = graph
    if positions is not None:
        edges = PositionedGraph(graph, pairs.spans_of(positions).names)
    names = [str(part) for part in (edges.names(edges.places) if parts is None else parts)]
    changes = torch.zeros(len(names), dtype=torch.float64)
    of_edges = [i for i, name in enumerate(names) if "->" in name]
    of_heads = [i for i, name in enumerate(names) if "->" not in name]
    kinds = [(CircuitEdges(), edges, of_edges), (Heads(), graph.heads, of_heads)]
    indices = {i: grid.index(names[i]) for _, grid, numbers in kinds for i in numbers}
    total = len(names) * len(pairs.split(batch_size))
    with autograd(False), tracked("patching", total, progress) as step:
        for site, grid, numbers in kinds:
            if not numbers:
                continue
            # Group parts by layer: a pass starts at the first layer that differs.
            by_layer = sorted(numbers, key=lambda i: grid.layer(indices[i]))
            at = positions if grid is edges else None
            runs, changed = PairRuns(model, site, pairs, patch, batch_size, positions=at), False
            for batch, run in runs:
                clean = measure(metric, run.start_from(None), batch)
                changed = changed or runs.has_effect(metric, batch, run)
                size = max(1, rows // len(batch))
                for _, group in groupby(by_layer, key=lambda i: grid.layer(indices[i])):
                    in_layer = list(group)
                    for start in range(0, len(in_layer), size):
                        patched = in_layer[start : start + size]
                        gates = torch.ones(len(patched), *grid.exists.shape)
                        for gate, i in zip(gates, patched, strict=True):
                            gate[indices[i]] = 0
                        for i, logits in zip(patched, run.logits(gates), strict=True):
                            values = measure(metric, logits, batch)
                            changes[i] += (values - clean).sum().cpu().double()
                            step()
            check_changed(changed)
    return pd.Series((changes / len(pairs)).tolist(), index=names)

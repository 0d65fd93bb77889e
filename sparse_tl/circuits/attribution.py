"""Attribution patching: the first-order effect of patching an edge or head.

For a circuit edge from source u to destination v,

    score(u -> v) = sum_pos (patch_u - clean_u) . d m / d input_v

A negative score means that patching lowers the metric m: the edge helps. Steps:

1. run the corrupted prompts and record what every source writes;
2. run the clean prompts, record the same, and differentiate the metric with respect to every
   destination's input: one backward pass (EAP-IG: at several points between corrupted and clean);
3. contract all sources with all destinations of a layer in one matrix product.

This costs at least two forward passes and one backward pass of the plain model. For heads and
attention edges, the gradient is with respect to the activation at their own hook points.

Reference: EAP, Syed et al., arXiv 2310.10348; EAP-IG, Hanna et al., arXiv 2403.17806, equation 4;
RelP, Rezaei Jafari et al., arXiv 2508.21258.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl import ranks
from sparse_tl.circuits.gradient_passes import Method, Passes
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.read_gradients import ReadGradients
from sparse_tl.circuits.scores import Scores
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import AttentionEdges, CircuitEdges, Heads, HookPoints, Patch, PatchValues
from sparse_tl.graph import Node
from sparse_tl.grids import AttentionGrid
from sparse_tl.lens import EMBEDDED, HookedModel, adapt, source_outputs
from sparse_tl.metrics import Metric
from sparse_tl.progress import tracked

EdgePatch = Literal["zero", "corrupted"]
WRITES_AT_ONCE = 2**25
"""Maximum number of values that all sources write, in d_model dimensions, held at one time."""


def attribute_circuit_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Method | str = "eap-ig",
    steps: int = 5,
    patch: Patch = "corrupted",
    by_pair: bool = False,
    batch_size: int = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of patching each circuit edge, mean over pairs, in units of the metric.

    Several ranks share the pairs, and all return the whole; so do the functions below.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        metric: metric function with one value per pair.
        method: "eap": gradient at the clean prompt; "eap-ig": mean gradient over embeddings
            ``corrupted + k / steps (clean - corrupted)``, k = 1..steps; "eap-ig-activations":
            interpolates one layer's outputs at a time instead; "relp": as "eap", with the rules of
            relevance propagation for norms and MLPs in place of their gradients.
        steps: number of interpolation steps.
        patch: patch of an edge, as in `PairRuns`; also the far end of the interpolation.
        by_pair: keep scores per pair, on a leading axis ``[pair, source, destination]``. Costs no
            extra passes: the gradient of the metric's sum over pairs separates by row.
        batch_size: prompt pairs per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the method or patch is unknown, `steps` is below 1, the metric is not one finite
            number per pair, or parts do not write directly to the residual stream.
    """
    runs = PairRuns(model, CircuitEdges(), pairs, patch, batch_size, shared=True)
    graph = runs.adapter.graph
    shape = (len(graph.sources), len(graph.destinations))
    scores = torch.zeros(len(pairs) if by_pair else 1, *shape, dtype=torch.float64)
    plan = Passes(metric, method, steps, runs)
    with tracked("scoring circuit edges", plan.count, progress) as step:
        for index in runs.own:
            for rows, passes in groupby(plan.passes(index), key=plan.rows_of):
                back, change = ReadGradients(runs.adapter), {}
                for one in passes:
                    change = one.change
                    back.add(one)
                    step()
                places = _moved(change, plan.sources)
                if not by_pair:
                    scores[0] += _contract(back, change, places, rows)
                    continue
                for pair in range(len(places)):
                    own = torch.zeros_like(places)
                    own[pair] = places[pair]
                    scores[index * runs.batch_size + pair] += _contract(back, change, own, rows)
    scores = ranks.summed(scores).where(graph.exists, 0.0)
    return Scores(graph, scores if by_pair else scores[0] / len(pairs), method)


def attribute_heads(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Method | str = "eap-ig",
    steps: int = 5,
    patch: Patch = "corrupted",
    batch_size: int = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of patching each head's output, ``sum (patch_z - z) . d m / d z``.

    Arguments and errors are those of `attribute_circuit_edges`; "eap-ig-activations" interpolates
    the heads of one layer at a time.
    """
    adapter = adapt(model)
    graph, names = adapter.graph, Heads().points(adapter)
    site = HookPoints((EMBEDDED, *names), (), ())
    runs = PairRuns(model, site, pairs, patch, batch_size, shared=True)
    scores = torch.zeros(graph.n_layers, graph.n_heads, dtype=torch.float64)
    plan = Passes(metric, method, steps, runs, heads_only=True)
    with tracked("scoring heads", plan.count, progress) as step:
        for index in runs.own:
            effects = _effects(plan, index, names, step).sum(dim=(1, 2, 4))
            scores += effects.cpu().double()
    return Scores(graph.heads, ranks.summed(scores) / len(pairs), method)


def attribute_attention_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Literal["eap", "eap-ig"] | str = "eap-ig",
    steps: int = 5,
    patch: EdgePatch | str = "zero",
    batch_size: int = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of closing each attention edge of each head, per prompt pair.

        score[layer, head, q, k] = (patch - A[q, k]) . d m / d A[q, k]

    with A the attention pattern that multiplies the values (gated, in a sparse model). Edges at
    padding score 0. Arguments and errors are those of `attribute_circuit_edges`, without
    "eap-ig-activations"; the patch is 0, as at a closed gate, or the corrupted prompt's pattern.
    """
    if method not in ("eap", "eap-ig") or patch not in get_args(EdgePatch):
        raise ValueError(
            f'expected a method of ("eap", "eap-ig") and a patch of {get_args(EdgePatch)}; got '
            f"{method!r} and {patch!r}"
        )
    runs = PairRuns(model, CircuitEdges(), pairs, "corrupted", batch_size, shared=True)
    adapter, length = runs.adapter, pairs.clean.shape[1]
    names = AttentionEdges().points(adapter)
    plan = Passes(metric, method, steps, runs, also=names)
    found = []
    with tracked("scoring attention edges", plan.count, progress) as step:
        for index in runs.own:
            reference = runs.batches[index].corrupted if patch == "corrupted" else None
            shown = PatchValues(adapter, names, patch, reference)
            # The gradient of the sum over pairs separates into each pair's gradient by row.
            effects = _effects(plan, index, names, step, shown)
            found.append(effects.transpose(0, 1).cpu().double())
    site = AttentionGrid(adapter.n_layers, adapter.n_heads, length, adapter.causal)
    return Scores(site, torch.cat(ranks.in_order(found)), method)


def _effects(
    plan: Passes,
    index: int,
    names: Sequence[str],
    step: Callable[[], object],
    shown: PatchValues | None = None,
) -> Float[Tensor, "layer pair ..."]:
    """Change times gradient at some hook points, over a batch's passes."""
    gradients: dict[str, Tensor] = {}
    change: dict[str, Tensor] = {}
    for one in plan.passes(index, shown):
        change = one.change
        counted = [name for name in names if one.counts_for(name)]
        for name, gradient in one.gradients(counted).items():
            gradients[name] = gradients.get(name, 0) + one.share * gradient
        step()
    return torch.stack([change[name] * gradients[name] for name in names])


def _moved(change: Mapping[str, Tensor], sources: Sequence[str]) -> Bool[Tensor, "batch pos"]:
    """Where a source changes: not before the first token that differs, nor at padding."""
    return torch.stack([(change[name] != 0).flatten(2).any(dim=2) for name in sources]).any(dim=0)


def _contract(
    back: ReadGradients,
    change: Mapping[str, Tensor],
    places: Bool[Tensor, "batch pos"],
    rows: slice,
) -> Float[Tensor, "source destination"]:
    """Contract some sources with all destinations; returned on the CPU in float64.

    The sum over places is taken over a few at a time: what every source writes in d_model
    dimensions is the largest tensor of all.

    Args:
        back: gradients with respect to the destinations' inputs.
        change: patch minus clean activation of every source.
        places: prompt positions to sum over.
        rows: sources to score.
    """
    graph = back.adapter.graph
    scores = torch.zeros(len(graph.sources), len(graph.destinations), dtype=torch.float64)
    at_once = max(1, WRITES_AT_ONCE // (len(graph.sources) * back.adapter.d_model))
    moved = places.flatten().nonzero()[:, 0]
    for start in range(0, len(moved), at_once):
        few = torch.zeros_like(places)
        few.view(-1)[moved[start : start + at_once]] = True
        own = {name: change[name][few][None] for name in back.adapter.source_points()}
        _contract_few(scores, back, source_outputs(back.adapter, own)[:, 0], few, rows)
    return scores


def _contract_few(
    scores: Float[Tensor, "source destination"],
    back: ReadGradients,
    difference: Float[Tensor, "source place d_model"],
    places: Bool[Tensor, "batch pos"],
    rows: slice,
) -> None:
    """Add what a few places contribute to the scores, layer by layer."""
    graph, flat = back.adapter.graph, difference.flatten(1)
    first, end, _ = rows.indices(len(graph.sources))
    most = graph.n_heads + 2 * graph.n_kv_heads + graph.has_mlps
    buffer = difference.new_empty(most, *difference.shape[1:])
    start = 0
    for layer in range(graph.n_layers):
        before = slice(first, min(end, graph.n_sources_before(Node("mlp", layer))))
        if before.start >= before.stop:  # sources of later layers
            start += most
            continue
        reading = back.layer(layer, places, buffer).flatten(1)
        scores[before, start : start + len(reading)] += (flat[before] @ reading.T).cpu().double()
        start += len(reading)
    scores[rows, -1] += (flat[rows] @ back.final[places].flatten()).cpu().double()

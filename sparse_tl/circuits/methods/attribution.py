"""Attribution patching: the first-order effect of patching an edge or head.

For a circuit edge from source u to destination v,

    score(u -> v) = sum_pos (patch_u - clean_u) . d m / d input_v

A negative score means that patching lowers the metric m: the edge helps. In phases, batch by batch:

1. run the corrupted prompts and record what every source writes, run the clean prompts and record
   the same, and differentiate the metric with respect to what every destination reads: one backward
   pass. EAP-IG does so at several points between corrupted and clean (`AttributionPasses`);
2. add up the gradients, and pull them back to the residual stream (`ReadGradients`);
3. contract the changes of all sources with the gradients of all destinations (`contract`).

This costs at least two forward passes and one backward pass of the plain model. For heads and
attention edges, change and gradient are multiplied at their own hook points (`_effects`).

Reference: EAP, Syed et al., arXiv 2310.10348; EAP-IG, Hanna et al., arXiv 2403.17806, equation 4;
RelP, Rezaei Jafari et al., arXiv 2508.21258; PEAP, Haklay et al., arXiv 2502.04577.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import (
    EMBEDDED,
    AttentionMask,
    HookedModel,
    adapt,
    attached,
    check_sums_under_hooks,
    frozen,
    in_evaluation_mode,
    mask_hooks,
)
from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.circuits.methods.gradients import (
    AttributionPasses,
    Method,
    ReadGradients,
    contract,
)
from sparse_tl.circuits.pair_runs import PatchedPairs
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import AttentionEdges, Heads, Patch, PatchValues
from sparse_tl.graph import AttentionGrid, PositionedGraph
from sparse_tl.metrics import Metric
from sparse_tl.progress import tracked

MOST_BYTES = 2e9
"""Maximum size of scores by position."""


@checked
@in_evaluation_mode
def attribute_circuit_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Method = "eap-ig",
    steps: AtLeastOne = 5,
    patch: Patch = "corrupted",
    by_pair: bool = False,
    positions: Positions | None = None,
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of patching each circuit edge, mean over pairs, in units of the metric.

    With `positions`, scores are kept per position (PEAP): they are the terms of the sum over
    positions, ``[position, source, destination]``. For what heads move between positions, see
    `attribute_attention_edges`.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        metric: metric function with one value per pair.
        method: "eap": gradient at the clean prompt; "eap-ig": mean gradient over embeddings
            ``corrupted + k / steps (clean - corrupted)``, k = 1..steps; "eap-ig-activations":
            interpolates one layer's outputs at a time instead; "relp": as "eap", with the rules of
            relevance propagation for norms and MLPs in place of their gradients.
        steps: number of interpolation steps of the methods that interpolate.
        patch: what replaces the clean value, and the far end of the interpolation: "corrupted", the
            corrupted prompt's value; "mean", the mean over clean prompts at each position;
            "resample", the value of another clean prompt of the same length, drawn at random with
            a fixed seed; "zero", zeros; or tensors by hook point.
        by_pair: keep scores per pair, on a leading axis ``[pair, source, destination]``. Costs no
            extra passes: the gradient of the metric's sum over pairs separates by row.
        positions: keep scores per position: "tokens", for prompts of one length; or "spans", those
            of `PromptPairs.with_spans`, over whose tokens scores are summed. None: sum over all.
        batch_size: prompt pairs per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the method or patch is unknown, `steps` is below 1, the metric is not one finite
            number per pair, parts do not write directly to the residual stream, the pairs lack the
            positions, or scores by position would take more than 2 GB.
        NoEffectError: patching everything changes the metric of no pair.
    """
    spans = None if positions is None else pairs.spans_of(positions)
    adapter = adapt(model)
    graph = adapter.graph
    patched = PatchedPairs(model, adapter.source_points(), pairs, patch, batch_size)
    check_sums_under_hooks(adapter, patched.batches[0].clean)
    grid = graph if spans is None else PositionedGraph(graph, spans.names)
    n_pairs, n_positions = len(pairs) if by_pair else 1, 1 if spans is None else len(spans.names)
    n_scores = n_pairs * n_positions * graph.exists.numel()
    if spans is not None and 8 * n_scores > MOST_BYTES:
        raise ValueError(
            f"the scores of {n_positions:,} positions of {n_pairs:,} pairs would take "
            f"{8 * n_scores / 1e9:.1f} GB, more than {MOST_BYTES / 1e9:g} GB. Join tokens to fewer "
            'spans (pairs.with_spans, positions="spans"), or average over pairs (by_pair=False)'
        )
    scores = torch.zeros(n_pairs * n_positions, *graph.exists.shape, dtype=torch.float64)
    # The pair and position to which each token contributes.
    groups = torch.zeros_like(pairs.clean) if spans is None else spans.at
    if by_pair:
        groups = groups + n_positions * torch.arange(n_pairs, device=groups.device)[:, None]
    grouped = groups.to(adapter.device).split(patched.batch_size)
    plan = AttributionPasses.of_edges(patched, metric, method, steps)
    tracking = tracked("scoring circuit edges", plan.count, progress)
    with tracking as step, frozen(adapter.core):
        for index in range(len(patched)):
            change, passes = plan.batch(index, step)
            for only, some in groupby(passes, key=lambda one: one.only):
                back = ReadGradients(adapter)
                for one in some:
                    back.add(one)
                contract(scores, back, change, grouped[index], only)
    plan.check_effect()
    shape = [n_pairs] * by_pair + list(grid.exists.shape)
    scores = scores.where(graph.exists, 0.0).view(shape)
    return Scores(grid, scores if by_pair else scores / len(pairs), method, pairs.start)


@checked
@in_evaluation_mode
def attribute_heads(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Method = "eap-ig",
    steps: AtLeastOne = 5,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of patching each head's output, ``sum (patch_z - z) . d m / d z``.

    Arguments and errors are those of `attribute_circuit_edges`; "eap-ig-activations" interpolates
    the heads of one layer at a time.
    """
    adapter = adapt(model)
    graph, names = adapter.graph, Heads().points(adapter)
    points = [EMBEDDED, *names]
    patched = PatchedPairs(model, points, pairs, patch, batch_size, order=Heads.order)
    scores = torch.zeros(graph.n_layers, graph.n_heads, dtype=torch.float64)
    plan = AttributionPasses(patched, metric, method, steps, names, alone=names, first=points)
    with tracked("scoring heads", plan.count, progress) as step, frozen(adapter.core):
        for index in range(len(patched)):
            scores += _effects(plan, index, step).sum(dim=(1, 2, 4)).cpu().double()
    plan.check_effect()
    return Scores(graph.heads, scores / len(pairs), method, pairs.start)


@checked
@in_evaluation_mode
def attribute_attention_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Literal["eap", "eap-ig"] = "eap-ig",
    steps: AtLeastOne = 5,
    patch: Literal["zero", "corrupted"] = "zero",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of closing each attention edge of each head, per prompt pair.

        score[layer, head, q, k] = (patch - A[q, k]) . d m / d A[q, k]

    with A the attention pattern that multiplies the values (gated, in a sparse model). Edges at
    padding score 0. Arguments and errors are those of `attribute_circuit_edges`, without
    "eap-ig-activations"; the patch is 0, as at a closed gate, or the corrupted prompt's pattern.
    """
    adapter, length = adapt(model), pairs.clean.shape[1]
    names = AttentionEdges().points(adapter)
    patched = PatchedPairs(model, adapter.source_points(), pairs, "corrupted", batch_size)
    plan = AttributionPasses(patched, metric, method, steps, names)
    masks: dict[int, AttentionMask] = {}
    found = []
    with (
        tracked("scoring attention edges", plan.count, progress) as step,
        attached(adapter, mask_hooks(adapter, masks)),
        frozen(adapter.core),
    ):
        for index in range(len(patched)):
            reference = patched.batches[index].corrupted if patch == "corrupted" else None
            patches = PatchValues(adapter, names, patch, reference)
            # The gradient of the sum over pairs separates into each pair's gradient by row.
            effects = _effects(plan, index, step, patches)
            allowed = torch.stack([masks[layer].pairs(length) for layer in range(len(masks))])
            found.append((effects.transpose(0, 1).cpu().double(), allowed))
    if patch == "corrupted":
        plan.check_effect()
    values, allowed = zip(*found, strict=True)
    grid = AttentionGrid(adapter.n_layers, adapter.n_heads, length, adapter.causal, allowed[0])
    return Scores(grid, torch.cat(values), method, pairs.start)


def _effects(
    plan: AttributionPasses,
    index: int,
    step: Callable[[], object],
    patches: PatchValues | None = None,
) -> Float[Tensor, "layer pair ..."]:
    """Change times gradient at the plan's hook points, summed over a batch's passes."""
    gradients: dict[str, Tensor] = {}
    change, passes = plan.batch(index, step, patches)
    for one in passes:
        for name, gradient in one.gradients.items():
            gradients[name] = gradients.get(name, 0) + one.over_copies(gradient)
    return torch.stack([change[name] * gradients[name] for name in plan.wanted])

"""Attribution of attention edges: what closing one (query, key) pair of one head would change.

    score[layer, head, q, k] = (patch - A[q, k]) . d m / d A[q, k]

with A the attention pattern that feeds the values (gated, in a sparse model); the patch is 0, as
when a gate closes, or the corrupted prompt's pattern. A negative score means that the edge helps.

Reference: attribution patching, arXiv 2310.10348; the gate of arXiv 2512.05865.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from sparse_tl.circuits.gradient_passes import Passes
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import AttentionEdges, CircuitEdges, PatchValues
from sparse_tl.grids import AttentionGrid
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric
from sparse_tl.progress import tracked

EdgePatch = Literal["zero", "corrupted"]


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
    """The first-order effect of closing every attention edge of every head, for each pair.

    Edges at padding score 0.

    Args:
        model: dense or sparse; it is not changed.
        pairs: the prompts.
        metric: one value per pair.
        method: the gradient at the clean prompt, or its mean over inputs between the corrupted and
            the clean prompt's embeddings.
        steps: of the interpolation.
        patch: what the pattern is patched with: 0, or the corrupted prompt's pattern.
        batch_size: pairs per pass.
        progress: whether to show it.

    Raises:
        ValueError: an unknown method or patch, no steps, or a metric that is not one finite number
            per pair.
    """
    if method not in ("eap", "eap-ig") or patch not in get_args(EdgePatch):
        raise ValueError(
            f'expected a method of ("eap", "eap-ig") and a patch of {get_args(EdgePatch)}; got '
            f"{method!r} and {patch!r}"
        )
    runs = PairRuns(model, CircuitEdges(), pairs, "corrupted", batch_size)
    names = AttentionEdges().points(runs.adapter)
    plan = Passes(metric, method, steps, runs, also=names)
    found = []
    with tracked("scoring attention edges", plan.count, progress) as step:
        for index, batch in enumerate(runs.batches):
            reference = batch.corrupted if patch == "corrupted" else None
            shown = PatchValues(runs.adapter, names, patch, reference)
            change: list[Tensor] = []
            total = 0
            for one in plan.passes(index):
                patterns = [one.kept[name].detach() for name in names]
                if not change:
                    wanted = zip(names, patterns, strict=True)
                    change = [-shown.change(name, pattern) for name, pattern in wanted]
                gradients = one.gradients(names)
                total = total + one.share * torch.stack([gradients[name] for name in names])
                step()
            # The gradient of the sum over pairs is, row by row, that of each pair.
            found.append((torch.stack(change) * total).transpose(0, 1).cpu().double())
    adapter, length = runs.adapter, pairs.clean.shape[1]
    site = AttentionGrid(adapter.n_layers, adapter.n_heads, length, adapter.causal)
    return Scores(site, torch.cat(found), method)

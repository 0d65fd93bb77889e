"""Exact effects of parts on a prediction: one run of the model without each part.

    effect[target, part] = m(without the part) - m(with the part)

for a metric m of the predictions, such as the log-probability of the token that the full model
predicts. Below 0, the part helps.

1. Run the prompt unchanged.
2. Run copies of the prompt as rows of a batch, each with the gate of one part at 0: a head writes 0
   at ``hook_z``, or the pattern of an attention edge is 0. A pass has as many rows as fit, and one
   unmodified row, which shows whether rows run as single prompts do.
3. Read the metric and the probabilities of the answers in each row, minus those of the unmodified
   row, and the tokens that the row predicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import Adapter, HookedModel, adapt
from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.data import PromptPairs
from sparse_tl.gates import AttentionEdges, ClosedAttentionEdges, GatedRun, Heads, Site
from sparse_tl.metrics import Metric, log_probability, measure

Head = tuple[int, int]
"""Layer and head."""
AttentionEdge = tuple[int, int, int, int]
"""Layer, head, query and key."""

MOST_NUMBERS = 2**24
"""Maximum number of activations of a layer in a pass."""
_FIRST_BATCH = 8
"""Edges in the first pass of `EdgeEffects`, if time is limited."""


@dataclass(frozen=True, eq=False)
class RemovalEffects:
    """Changes of predictions when one part is removed.

    Args:
        tokens: answer of each target.
        effects: change of the metric; negative: the part helps.
        probabilities: change of the answer's probability.
        predictions: token that is predicted without the part.
    """

    tokens: Int[Tensor, " target"]
    effects: Float[Tensor, "target part"]
    probabilities: Float[Tensor, "target part"]
    predictions: Int[Tensor, "target part"]


class LeaveOneOut:
    """Runs of a prompt without one part at a time; `pairs` has the prompt once per target.

    The whole model runs once per site, when a part of that site is first removed. Hooks on the
    model stay active; they and weights must not change between the first and the last call.
    """

    def __init__(self, model: HookedModel, pairs: PromptPairs, metric: Metric) -> None:
        self.adapter, self.metric = adapt(model), metric
        self.pairs = pairs.to(self.adapter.device)
        tokens, read_at = self.pairs.clean[0], pairs.positions.tolist()
        read = torch.zeros(1, len(tokens), dtype=torch.bool, device=self.adapter.device)
        read[0, read_at] = True
        # The index of each target among the logits that are read.
        self._columns = [int(read[0, :column].sum()) for column in read_at]
        sites = Heads(), AttentionEdges()
        self._runs = {type(site): GatedRun(model, site, tokens[None], read) for site in sites}
        self._wholes: dict[type, Tensor] = {}
        per_token = self.adapter.activations_per_token + 3 * self.adapter.n_heads * len(tokens)
        self._most_rows = max(1, MOST_NUMBERS // (len(tokens) * per_token))

    @torch.no_grad()
    def effects(
        self, heads: Sequence[Head] = (), groups: Sequence[Sequence[AttentionEdge]] = ()
    ) -> RemovalEffects:
        """The effects of removing each head, then of removing each group of attention edges."""
        n_targets, device = len(self.pairs), self.adapter.device
        changes = [torch.zeros(0, 2, n_targets, dtype=torch.float64, device=device)]
        predictions = [torch.zeros(0, n_targets, dtype=torch.long, device=device)]
        for kind, parts in ((Heads, heads), (AttentionEdges, groups)):
            run = self._runs[kind]
            for start in range(0, len(parts), self._most_rows):
                whole = self._whole(kind)
                some = parts[start : start + self._most_rows]
                gates = _leave_one_out(self.adapter, run.site, some)
                logits = run.logits(gates)[:, self._columns]
                _check_rows(logits[-1].double(), whole)
                scores = torch.stack([self._scores(row.double()) for row in logits])
                changes.append(scores[:-1] - scores[-1])  # same pass: without an effect, exactly 0
                predictions.append(logits[:-1].argmax(dim=-1))
        effects, probabilities = torch.cat(changes).permute(1, 2, 0).cpu()
        predicted = torch.cat(predictions).T.cpu()
        return RemovalEffects(self.pairs.answers[:, 0].cpu(), effects, probabilities, predicted)

    def _scores(self, logits: Float[Tensor, "target vocab"]) -> Float[Tensor, "two target"]:
        """The metric, and the probabilities of the answers."""
        probabilities = log_probability(logits, self.pairs).exp()
        return torch.stack([measure(self.metric, logits, self.pairs), probabilities])

    def _whole(self, kind: type) -> Float[Tensor, "target vocab"]:
        """Logits of the whole model, from which later passes at this site start."""
        if kind not in self._wholes:
            logits = self._runs[kind].start_from(None)
            self._wholes[kind] = logits[self._columns].double()
        return self._wholes[kind]


def _leave_one_out(
    adapter: Adapter, site: Site, parts: Sequence[Sequence[Any]]
) -> Tensor | ClosedAttentionEdges:
    """A stack of gates, of which each entry closes one part, and the last entry none."""
    if isinstance(site, AttentionEdges):
        rows = [row for row, group in enumerate(parts) for _ in group]
        edges = torch.tensor([tuple(edge) for group in parts for edge in group]).view(-1, 4)
        return ClosedAttentionEdges(edges, torch.tensor(rows, dtype=torch.long), len(parts) + 1)
    rows, heads = torch.arange(len(parts)), torch.tensor(parts)
    gates = torch.ones(len(parts) + 1, adapter.n_layers, adapter.n_heads)
    gates[rows, heads[:, 0], heads[:, 1]] = 0
    return gates


def _check_rows(row: Tensor, whole: Tensor) -> None:
    """Check that a row with nothing removed matches the prompt run on its own."""
    difference = float((row - whole).abs().max())
    if difference > 0.02 * (1 + float(whole.abs().max())):
        raise ValueError(
            f"rows of a batch do not run as the prompt does alone: logits differ by "
            f"{difference:.3g}. Remove your own hooks from this model, or make them treat all "
            "rows alike."
        )


class EdgeEffects:
    """Exact effects of a graph's open attention edges, strongest first, within a given time.

    1. Order the edges by their first-order estimates, relative to the largest estimate of each
       target.
    2. Remove one edge at a time, in batches whose size follows from the speed of the last batch.
    3. Set effects that were not computed to NaN.

    The graph needs estimates, unless all effects will be computed.
    """

    def __init__(self, graph: AttentionGraph, leave_one_out: LeaveOneOut) -> None:
        self._graph, self._leave_one_out = graph, leave_one_out
        self._to_do = _strongest_first(graph)
        self._effect = torch.zeros(len(graph.targets), *graph.gates.shape, dtype=torch.float64)
        self._effect[:, graph.gates] = torch.nan  # closed edges have no effect

    @property
    def more(self) -> bool:
        """Whether effects remain to be computed."""
        return bool(self._to_do)

    @property
    def graph(self) -> AttentionGraph:
        """The graph with the effects computed so far."""
        return replace(self._graph, effect=self._effect.clone())

    def advance(self, seconds: float | None) -> None:
        """Compute the effects of as many edges as time allows, but one batch; or all (`None`)."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        size = len(self._to_do) if seconds is None else _FIRST_BATCH
        while self._to_do:
            start = time.monotonic()
            batch, self._to_do = self._to_do[:size], self._to_do[size:]
            removed = self._leave_one_out.effects(groups=[[edge] for edge in batch])
            self._effect[:, *torch.tensor(batch).T] = removed.effects
            now = time.monotonic()
            if now >= end:
                return
            fitting = size * (end - now) / max(now - start, 1e-9)
            size = int(max(1, min(2 * size, fitting)))


def _strongest_first(graph: AttentionGraph) -> list[AttentionEdge]:
    edges = graph.gates.nonzero()
    if graph.attribution is not None:
        sizes = graph.attribution.abs()
        largest = sizes.flatten(start_dim=1).amax(dim=1).clamp(min=1e-30)
        strength = (sizes / largest[:, None, None, None, None]).amax(dim=0)[graph.gates]
        edges = edges[strength.argsort(descending=True, stable=True)]
    return [(layer, head, query, key) for layer, head, query, key in edges.tolist()]

"""Forward selection of small circuits: what a circuit lacks is added to it.

*Forward selection* (`SearchedPairs.larger`) adds to a circuit C those edges outside of it that
would raise its explained effect most, to first order: by ``d effect(C) / d gate`` of the closed
gates, the mean over pairs minus its standard error, since what helps all pairs a little is more
likely to help others. Since each edge changes what others do, the gradient is taken anew when the
largest share of `ADDED` was added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.backend import SLOTS, Order, attached, evaluation_mode, frozen
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.evaluation import evaluated
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.contexts import autograd
from sparse_tl.data import PromptPairs
from sparse_tl.gates import GatedRun
from sparse_tl.gates.sites import GatedPass
from sparse_tl.metrics import Metric, measure

ADDED, ROUNDS = (0.01, 0.02, 0.03, 0.04, 0.08), 3
"""Edges that one gradient adds, as fractions of those there; and the most gradients."""


class SearchedPairs:
    """The metric of circuits of circuit edges on the pairs of a search."""

    def __init__(self, runs: PairRuns, metric: Metric) -> None:
        self.runs, self.metric, self.graph = runs, metric, runs.adapter.graph
        whole = evaluated(runs, metric, [Circuit(self.graph, self.graph.exists)])
        self.clean, self.none = whole.clean, whole.none

    def effects(self, circuits: Sequence[Circuit]) -> list[float]:
        """The explained effect of each circuit."""
        return evaluated(self.runs, self.metric, circuits).effect.tolist()

    def gradient(
        self, mask: Bool[Tensor, "source destination"]
    ) -> tuple[Float[Tensor, "source destination"], Float[Tensor, "source destination"]]:
        """The derivative of the explained effect by every gate, under a circuit, and its standard
        error over pairs."""
        moments = torch.zeros(2, *mask.shape, dtype=torch.float64)
        for batch, run in self.runs:
            moments += gate_gradient(run, mask, self.metric, batch)
        (mean, square), n = moments / len(self.clean), len(self.clean)
        error = ((square - mean.square()).clamp(min=0) / max(1, n - 1)).sqrt()
        whole = (self.clean - self.none).mean()
        return mean / whole, error / whole.abs()

    def larger(
        self,
        circuit: Circuit,
        effect: float,
        most: float,
        late: Callable[[], bool],
    ) -> list[tuple[Circuit, float]]:
        """A circuit with its effect, and larger ones by forward selection up to an effect `most`.

        Once it is late, no gradient is taken.
        """
        found = [(circuit, effect)]
        for _ in range(ROUNDS):
            if found[-1][1] >= most or late():
                break
            mask = found[-1][0].mask
            gain, error = self.gradient(mask)
            gain = (gain - error).masked_fill(mask | ~self.graph.exists, 0)
            order = gain.flatten().argsort(descending=True)[: int((gain > 0).count_nonzero())]
            if not len(order):
                break
            larger = list[Circuit]()
            for share in ADDED:
                end = math.ceil(share * int(mask.count_nonzero()))
                more = mask.flatten().index_fill(0, order[:end], True).view(mask.shape)
                larger.append(Circuit(self.graph, more).connected(patch=self.runs.patch))
            found += zip(larger, self.effects(larger), strict=True)
        return found


def gate_gradient(
    run: GatedRun,
    mask: Bool[Tensor, "source destination"],
    metric: Metric,
    pairs: PromptPairs,
) -> Float[Tensor, "two source destination"]:
    """The derivative of each pair's metric by the gate of every circuit edge, under a circuit: the
    sum over pairs, and that of squares.

    What v reads is ``residual + sum_u (1 - gate[u, v]) change_u``. So the derivative is minus the
    product of the change and the gradient at what v reads, which takes one backward pass of the
    circuit. Gates that require gradients would keep every read of every layer for that pass.
    """
    adapter, graph, site = run.adapter, run.adapter.graph, run.site
    run.start_from(mask)
    changes = run.changes
    assert changes is not None
    entering, probes = dict[int, Tensor](), dict[str, Tensor]()

    def keep(layer: int, residual: Tensor) -> None:
        entering[layer] = residual.detach().clone()

    def probe(name: str, read: Tensor) -> Tensor:
        probes[name] = torch.zeros_like(read, requires_grad=True)
        return read + probes[name]

    with autograd(True):  # separate changes are then kept part by part, none overwritten
        hooks = site.hooks(adapter, mask[None].to(changes), run.patch, GatedPass(1))
    for layer in range(adapter.n_layers):
        hooks.append((f"blocks.{layer}.hook_resid_pre", Order.LAST, partial(keep, layer)))
        reads = [adapter.read_point(layer, slot) for slot in SLOTS]
        reads += [f"blocks.{layer}.mlp_input"] * graph.has_mlps
        hooks += [(name, Order.FIRST, partial(probe, name)) for name in reads]
    last = f"blocks.{adapter.n_layers - 1}.hook_resid_post"
    hooks.append((last, Order.LAST, partial(probe, last)))  # as all, after the hook of the gates
    core = adapter.core
    with autograd(True), frozen(core), attached(adapter, hooks), evaluation_mode(adapter.model):
        final = adapter.final(run.tokens, read=run.read, attention_mask=run.attention_mask)
        total = measure(metric, adapter.logits(final[run.read][:, None])[:, 0], pairs).sum()
        gradients = dict(zip(probes, torch.autograd.grad(total, [*probes.values()]), strict=True))
    found = torch.zeros(2, *mask.shape, dtype=torch.float64)

    def contract(columns: slice, gradient: Float[Tensor, "destination row pos d_model"]) -> None:
        n = graph.n_sources_before(graph.destinations[columns][0].node)
        both = changes[:n], gradient.to(changes.dtype)
        change, slope = (x.flatten(2).transpose(0, 1) for x in both)
        by_row = torch.bmm(change, slope.mT).cpu().double()
        by_pair = by_row.new_zeros(len(pairs), *by_row.shape[1:])
        by_pair.index_add_(0, pairs.forced.pair.cpu(), -by_row)
        found[:, :n, columns] = torch.stack([by_pair.sum(dim=0), by_pair.square().sum(dim=0)])

    # Many terms: half precision would lose them one by one.
    exact = torch.promote_types(changes.dtype, torch.float32)
    everything, n = torch.zeros_like(changes[0], dtype=exact), 0
    for layer in range(adapter.n_layers):
        first, end = (graph.n_reads * some for some in (layer, layer + 1))
        columns = slice(first, end - graph.has_mlps)
        before, n = n, graph.n_sources_before(graph.destinations[columns.start].node)
        everything += changes[before:n].sum(dim=0)
        # Of a small circuit, the few open edges are read from memory, not the many closed ones.
        rows = mask[:n, columns].any(dim=1).nonzero()[:, 0]
        opened = mask[rows, columns].T.to(everything) @ changes[rows].to(exact).flatten(1)
        reads = entering[layer] + everything - opened.unflatten(1, changes.shape[1:])
        reads = reads.to(changes.dtype)
        by_head = list[Tensor]()
        for slot in SLOTS:
            weight, _ = adapter.qkv(layer, slot)
            at = gradients[adapter.read_point(layer, slot)].to(reads.dtype)
            by_head.append(torch.einsum("bphe,hde->hbpd", at, weight.to(at.dtype)))
        with autograd(True):
            reads.requires_grad_()
            normed = adapter.norm(layer, "attn")(reads)
        contract(columns, torch.autograd.grad(normed, reads, torch.cat(by_head))[0])
        if graph.has_mlps:
            contract(slice(end - 1, end), gradients[f"blocks.{layer}.mlp_input"][None])
    contract(slice(len(graph.destinations) - 1, None), gradients[last][None])
    return found

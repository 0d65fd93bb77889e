"""Two greedy searches for small circuits: backward elimination and forward selection.

*Backward elimination* (`Elimination`) starts from a circuit, goes through groups of parts, from
coarse to fine and late ones first, and runs every circuit that it considers. Of a group, or its
weaker half, it drops whichever gains more, if that gains anything and loses at most `STEP` of the
explained effect:

    gain = price * (number of parts dropped) - (increase of the mean deviation)

The mean deviation, ``mean |m(C) - m(clean)| / |mean (m(clean) - m(none))|`` with means over pairs,
also counts what would cancel between pairs in the explained effect. Effects may fall to the level
minus `MARGIN`, since other pairs may need more parts. The price rises from pass to pass, each of
which loses at most half of what may still be lost. ``docs/circuits.md`` says why.

Under a time limit, a pass leaves out finer groups that would take more than a fraction `FINE` of
the time left, unless no coarser group can be dropped at any price.

*Forward selection* (`SearchedPairs.larger`) adds to a circuit C those edges outside of it that
would raise its explained effect most, to first order: by ``d effect(C) / d gate`` of the closed
gates, the mean over pairs minus its standard error, since what helps all pairs a little is more
likely to help others. Since each edge changes what others do, the gradient is taken anew when the
largest share of `ADDED` was added.
"""

from __future__ import annotations

import math
import time
from functools import partial
from itertools import accumulate

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.backend import SLOTS, Hook, Order, attached, evaluation_mode, frozen
from sparse_tl.circuits.circuit import Circuit, Grid, Scores
from sparse_tl.circuits.pair_runs import PairRuns, settings_at_once
from sparse_tl.contexts import autograd
from sparse_tl.data import PromptPairs
from sparse_tl.gates import GatedRun
from sparse_tl.gates.sites import GatedPass
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import Metric, explained_effect, measure
from sparse_tl.progress import tracked

MARGIN = 0.05
"""How far below the level the search goes on, in explained effect."""
STEP = 0.02
"""Largest loss of explained effect in one step; doubled whenever no group loses less."""
FINE = 1 / 4
"""Maximum fraction of the time left that finer groups may take: the price has yet to rise."""
SHARES = (0, 1 / 2)
"""Fractions of a group that are kept."""
ADDED, ROUNDS = (0.01, 0.02, 0.03, 0.04, 0.08), 3
"""Edges that one gradient adds, as fractions of those there; and the most gradients."""


class SearchedPairs:
    """The metric of circuits on the pairs of a search."""

    def __init__(self, runs: PairRuns, metric: Metric, grid: Grid) -> None:
        self.runs, self.metric, self.grid = runs, metric, grid
        clean, none = list[Tensor](), list[Tensor]()
        for batch, run in runs:
            clean.append(measure(metric, run.clean_logits, batch))
            none.append(measure(metric, runs.everything_patched(run), batch))
        self.clean, self.none = (torch.cat(some).cpu().double() for some in (clean, none))

    @torch.no_grad()
    def values(self, masks: Bool[Tensor, "circuit ..."]) -> Float[Tensor, "circuit pair"]:
        """The metric under each circuit."""
        found = list[Float[Tensor, "circuit pair"]]()
        for batch, run in self.runs:
            stacks = masks.split(settings_at_once(len(batch)))
            logits = [row for some in stacks for row in run.logits(some)]
            values = [measure(self.metric, row, batch) for row in logits]
            found.append(torch.stack(values).cpu().double())
        return torch.cat(found, dim=1)

    def effects(self, masks: Bool[Tensor, "circuit ..."]) -> list[float]:
        """The explained effect of each circuit."""
        return explained_effect(self.values(masks), self.clean, self.none).tolist()

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

    def connected(self, mask: Bool[Tensor, "*axes"]) -> Bool[Tensor, "*axes"]:
        """A circuit without parts that have no effect."""
        return Circuit(self.grid, mask).connected(patch=self.runs.patch).mask

    def larger(
        self, mask: Bool[Tensor, "*axes"], most: float = 1.0, deadline: float = math.inf
    ) -> list[tuple[Bool[Tensor, "*axes"], float]]:
        """A circuit and larger ones by forward selection up to an effect `most`; their effects."""
        found = [(mask, self.effects(mask[None])[0])]
        for _ in range(ROUNDS):
            if found[-1][1] >= most or time.monotonic() > deadline:
                break
            mask = found[-1][0]
            gain, error = self.gradient(mask)
            gain = (gain - error).masked_fill(mask | ~self.grid.exists, 0)
            order = gain.flatten().argsort(descending=True)[: int((gain > 0).count_nonzero())]
            ends = [math.ceil(share * int(mask.count_nonzero())) for share in ADDED]
            more = [mask.flatten().index_fill(0, order[:end], True) for end in ends]
            masks = [self.connected(flat.view(mask.shape)) for flat in more]
            found += zip(masks, self.effects(torch.stack(masks)), strict=True)
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

    def probed(name: str, order: Order = Order.FIRST) -> Hook:
        return name, order, partial(probe, name)

    with autograd(True):  # separate changes are then kept part by part, none overwritten
        hooks = site.hooks(adapter, mask[None].to(changes), run.patch, GatedPass(1))
    for layer in range(adapter.n_layers):
        hooks.append((f"blocks.{layer}.hook_resid_pre", Order.LAST, partial(keep, layer)))
        hooks += [probed(adapter.read_point(layer, slot)) for slot in SLOTS]
        if graph.has_mlps:
            hooks.append(probed(f"blocks.{layer}.mlp_input"))
    last = f"blocks.{adapter.n_layers - 1}.hook_resid_post"
    hooks.append(probed(last, Order.LAST))  # as all probes, after the hook of the gates
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
    for group in graph.groups:
        layer, columns = graph.layer((0, group.columns.start)), group.columns
        if not group.n_kv_heads:
            contract(columns, gradients[f"blocks.{layer}.mlp_input"][None])
            continue
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
    contract(slice(len(graph.destinations) - 1, None), gradients[last][None])
    return found


Group = tuple[int | slice, ...]
"""Index of a group of parts."""


class Elimination:
    """A backward elimination of circuits that reach `level`, the weakest parts by `scores` first.

    `mask` has the parts that are left, `dropped` the step at which each part was dropped, or 0,
    `effects` the explained effect after each step on the pairs of the search, at most 1, and
    `deviation` the mean deviation after the last step.
    """

    def __init__(self, pairs: SearchedPairs, scores: Scores, level: float, start: Circuit) -> None:
        self.pairs, self.runs, self.scores, self.grid = pairs, pairs.runs, scores, start.grid
        self._strength = scores.mean().abs()
        sweeps = _sweeps(scores.grid)
        self._groups = [group for sweep in sweeps for group in sweep]
        self._sweeps = [0, *accumulate(map(len, sweeps[:-1]))]
        self.mask = self.pairs.connected(start.mask)
        ((effect, self.deviation),) = self._outcomes(self.mask[None])
        # The start reaches the level on other pairs; on these it may be below.
        self.effects, self._lowest = [effect], min(level, effect) - MARGIN
        self.dropped = (self.grid.exists & ~self.mask).long()
        self.seconds, self._price, self._floor, self._step = 0.0, 0.0, 0.0, STEP
        self._losses: list[tuple[float, int]] = []
        """For each group that this pass could drop: what it would lose, or 0 if it was dropped, and
        its number of parts."""

    def run(self, seconds: float = math.inf, progress: bool = True) -> None:
        """Search until circuits are below the level by `MARGIN`, or the time is over."""
        began = now = time.monotonic()
        end = began + seconds
        total, tried, position, done = len(self._groups), 0, 0, False
        while not done and now < end:
            stop = min(start for start in (*self._sweeps, total) if start > position)
            needed = (stop - position) * (now - began) / max(1, tried)
            if position and self._losses and needed >= FINE * (end - now):
                done, position = self._end_pass(), 0
                continue
            if position == 0:
                self._begin_pass()
            self.mask = self.pairs.connected(self.mask)
            for _, run in self.runs:
                run.start_from(self.mask)
            with tracked("eliminating", total, progress, done=position) as step:
                while position < stop and now < end:
                    self._try(self._groups[position])
                    position, tried, now = position + 1, tried + 1, time.monotonic()
                    self.seconds = now - began
                    size = int(self.mask.count_nonzero())
                    step(f"{size:,} {self.grid.noun}: {self.effects[-1]:.2f}")
            if position == total:
                done, position = self._end_pass(), 0

    def ranking(self) -> Scores:
        """Minus the step at which each part was dropped, as scores of the parts.

        Of parts dropped in one step, those with larger scores count as dropped later.
        """
        last = len(self.effects) + 1
        steps = torch.where(self.dropped == 0, last, self.dropped).double()
        order = self.scores.order()
        steps[tuple(order.T)] += torch.linspace(0.5, 0, len(order), dtype=steps.dtype)
        values = -steps.where(self.grid.exists, 0)
        return Scores(self.grid, values, "elimination", self.scores.prompt_start)

    def sizes(self) -> list[int]:
        """Number of parts after each step: where to cut the ranking."""
        steps = self.dropped[self.grid.exists]
        n_dropped = steps.bincount(minlength=len(self.effects) + 1)[1:].cumsum(0)
        return (self.grid.n_parts - n_dropped).tolist()

    # ---- one step --------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        """Set the price of a part and the explained effect that the pass does not go below."""
        left = max(0.0, self.effects[-1] - self._lowest)
        total, affordable = 0.0, 0.0  # the price at which the groups kept last lose what is left
        for price, lost in sorted((lost / n, lost) for lost, n in self._losses):
            total, affordable = total + lost, price
            if total > left:
                break
        share = left / max(1, int(self.pairs.connected(self.mask).count_nonzero()))
        self._price = max(2 * self._price, affordable, share)
        self._floor = self.effects[-1] - max(left / 2, self._step)
        self._losses = []

    def _end_pass(self) -> bool:
        """Whether this was the last pass; the next has larger steps if this could drop no group."""
        left = self.effects[-1] - self._lowest
        stuck = not self._losses
        done = left < 0 or (stuck and self._step > left)
        if stuck:
            self._step *= 2
        return done

    def _try(self, group: Group) -> None:
        """Drop as much of a group as gains most."""
        live = self.pairs.connected(self.mask)
        inside = torch.zeros_like(live)
        inside[group] = live[group]
        places = inside.nonzero()
        if not len(places):
            return
        order = places[self._strength[tuple(places.T)].argsort(descending=True, stable=True)]
        kept = sorted({int(share * len(order)) for share in SHARES})
        masks = self.mask.repeat(len(kept), *[1] * live.ndim)
        for mask, n in zip(masks, kept, strict=True):
            mask[tuple(order[n:].T)] = False
        outcomes, possible = self._outcomes(masks), list[tuple[float, int, int]]()
        for row, (effect, deviation) in enumerate(outcomes):
            if effect >= max(self._floor, self.effects[-1] - self._step):
                n = int((live & ~self.pairs.connected(masks[row])).count_nonzero())
                possible.append((max(0.0, deviation - self.deviation), n, row))
        if not possible:
            return
        gain, row = max((self._price * n - loss, row) for loss, n, row in possible)
        if gain <= 0:
            self._losses.append(min(possible, key=lambda one: one[0] / one[1])[:2])
            return
        self._losses.append((0.0, 1))
        self.mask = masks[row].clone()
        effect, self.deviation = outcomes[row]
        self.effects.append(effect)
        self.dropped[live & ~self.pairs.connected(self.mask)] = len(self.effects)

    def _outcomes(self, masks: Bool[Tensor, "circuit ..."]) -> list[tuple[float, float]]:
        """Explained effects and mean deviations of circuits on the pairs of the search.

        An effect above 1 counts as equally far below.
        """
        values = self.pairs.values(masks)
        effects = explained_effect(values, self.pairs.clean, self.pairs.none)
        deviations = (values - self.pairs.clean).abs().mean(dim=1)
        deviations /= (self.pairs.clean - self.pairs.none).mean().abs()
        return [*zip((1 - (effects - 1).abs()).tolist(), deviations.tolist(), strict=True)]


def _sweeps(grid: Grid) -> list[list[Group]]:
    """Groups of parts, each sweep from late to early: passes then start at the layer of a group."""
    if not isinstance(grid, CircuitGraph):
        return [[tuple(place) for place in grid.places.flip(0).tolist()]]
    every, last = slice(None), len(grid.destinations) - 1
    heads = [group for group in grid.groups if group.n_kv_heads]
    sweeps: list[list[Group]] = [
        [(slice(0, 1), every), *((group.rows, every) for group in grid.groups)],
        [*((every, group.columns) for group in grid.groups), (every, slice(last, None))],
        [(at, every) for group in heads for at in range(group.rows.start, group.rows.stop)],
        [(every, at) for group in heads for at in range(group.columns.start, group.columns.stop)],
    ]
    return [sweep[::-1] for sweep in sweeps]

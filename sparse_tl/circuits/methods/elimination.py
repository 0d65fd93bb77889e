"""Backward elimination: drop a circuit's parts in groups, and run every circuit that is considered.

1. Start from the n best of all N parts by score, with n from a grid of sizes, such that
   ``left * log(N / n) - (loss of explained effect)`` is largest; ``left`` is what may be lost.
   Parts that score exactly 0, such as those behind closed gates, are left out of the grid.
2. Go through groups of parts, from coarse to fine, late ones first. Of circuit edges: those out of
   the heads or the MLP of a layer, those into them, those out of each head, and those into each of
   its inputs. Of heads: every head.
3. Drop a group, or its weaker half, whichever gains more,

       gain = price * (number of parts dropped) - (increase of the mean deviation)

   if it gains anything and loses at most `STEP` of the explained effect. The mean deviation is
   ``mean |m(C) - m(clean)| / |mean (m(clean) - m(none))|``, with means over pairs: what parts do to
   single pairs may cancel in the explained effect, but hardly on other pairs as well. Parts that
   are left without effect count as dropped. An effect above 1 counts as one equally far below 1.
4. Go through all groups again at a higher price: at least twice the last one, and that at which the
   groups that this pass kept would lose together what may still be lost. The first price is what
   may be lost, divided among the parts of the start. A pass loses at most half of what may still be
   lost, or `STEP` if that is more; `STEP` doubles if every group loses more.

What may be lost is ``1 - level`` plus `MARGIN`, since other pairs may need more parts.

Under a time limit, finer groups that would take more than a share `FINE` of the time left are left
out of a pass, unless none of the coarser groups can be dropped at any price.
"""

from __future__ import annotations

import math
import time
from itertools import accumulate

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.circuits.circuit import Circuit, Grid
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import Metric, explained_effect, measure
from sparse_tl.progress import tracked

MARGIN = 0.05
"""How far below the level the search goes on, in explained effect."""
STEP = 0.02
"""Largest loss of explained effect in one step; doubled whenever no group loses less."""
RATIO = 1.3
"""Ratio between adjacent sizes of the grid that the start is chosen from."""
FINE = 1 / 4
"""Maximum share of the time left that finer groups may take: the price has yet to rise."""
SHARES = (0, 1 / 2)
"""Shares of a group that are kept."""
ROWS = 256
"""Maximum number of circuits times prompts in one forward pass."""

Group = tuple[int | slice, ...]
"""Index of a group of parts."""


class Elimination:
    """A search for small circuits that explain an effect.

    Args:
        runs: kept runs of the pairs of the search, at the site of the scores.
        metric: metric function with one value per pair.
        scores: scores that the search starts from, and that order the parts of a group.
        level: explained effect that circuits should reach.

    Attributes:
        mask: parts that are left, including those that lost their effect in this sweep.
        dropped: the step at which each part was dropped; 0 for parts that are left.
        effects: explained effect after each step, on the pairs of the search; at most 1.
        deviation: mean deviation after the last step, in units of the whole effect.
        seconds: time spent.
    """

    def __init__(self, runs: PairRuns, metric: Metric, scores: Scores, level: float) -> None:
        self.runs, self.metric, self.scores, self.grid = runs, metric, scores, scores.grid
        self._strength = scores.mean().abs()
        self._lowest = level - MARGIN
        sweeps = _sweeps(scores.grid)
        self._groups = [group for sweep in sweeps for group in sweep]
        self._sweeps = [0, *accumulate(map(len, sweeps[:-1]))]
        clean, none = list[Tensor](), list[Tensor]()
        for batch, run in runs:
            clean.append(measure(metric, run.clean_logits, batch))
            none.append(measure(metric, runs.everything_patched(run), batch))
        self._clean, self._none = (torch.cat(some).cpu().double() for some in (clean, none))
        self.mask, effect, self.deviation = self._start()
        self.dropped, self.effects = (self.grid.exists & ~self.mask).long(), [effect]
        self.seconds, self._price, self._floor, self._step = 0.0, 0.0, 0.0, STEP
        self._losses: list[tuple[float, int]] = []
        """For each group that this pass could drop: what it would lose, or 0 if it was dropped, and
        its number of parts."""

    def run(self, seconds: float = math.inf, progress: bool = True) -> None:
        """Search until circuits are below the level by `MARGIN`, or the time is over."""
        began = now = time.monotonic()
        end, total, tried, position, done = began + seconds, len(self._groups), 0, 0, False
        while not done and now < end:
            stop = min(start for start in (*self._sweeps, total) if start > position)
            needed = (stop - position) * (now - began) / max(1, tried)
            if position and self._losses and needed >= FINE * (end - now):
                done, position = self._end_pass(), 0
                continue
            if position == 0:
                self._begin_pass()
            self.mask = self._connected(self.mask)
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

    def _start(self) -> tuple[Bool[Tensor, "*axes"], float, float]:
        """The best parts by score, as many as gain most, their effect, and their deviation."""
        order, left = self.scores.order(), 1 - self._lowest
        start, most = (self._connected(self.grid.exists), 1.0, 0.0), 0.0
        n, found = float(self._strength.count_nonzero()), 1.0
        while n >= 1 and found > 1 - 2 * left:
            mask = torch.zeros_like(start[0])
            mask[tuple(order[: int(n)].T)] = True
            mask = self._connected(mask)
            ((found, deviation),) = self._outcomes(mask[None])
            size = max(1, int(mask.count_nonzero()))
            gain = left * math.log(len(order) / size) - max(0.0, 1 - found)
            if gain > most and found >= 1 - left / 2:
                start, most = (mask, found, deviation), gain
            n /= RATIO
        return start

    def _begin_pass(self) -> None:
        """Set the price of a part and the explained effect that the pass does not go below."""
        left = max(0.0, self.effects[-1] - self._lowest)
        total, affordable = 0.0, 0.0  # the price at which the groups kept last lose what is left
        for price, lost in sorted((lost / n, lost) for lost, n in self._losses):
            total, affordable = total + lost, price
            if total > left:
                break
        share = left / max(1, int(self._connected(self.mask).count_nonzero()))
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
        live = self._connected(self.mask)
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
                n = int((live & ~self._connected(masks[row])).count_nonzero())
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
        self.dropped[live & ~self._connected(self.mask)] = len(self.effects)

    def _outcomes(self, masks: Bool[Tensor, "circuit ..."]) -> list[tuple[float, float]]:
        """Explained effects and mean deviations of circuits on the pairs of the search.

        An effect above 1 counts as equally far below.
        """
        found = list[Float[Tensor, "circuit pair"]]()
        with torch.no_grad():
            for batch, run in self.runs:
                at_once = max(1, ROWS // len(batch))
                logits = [row for some in masks.split(at_once) for row in run.logits(some)]
                values = [measure(self.metric, row, batch) for row in logits]
                found.append(torch.stack(values).cpu().double())
        values = torch.cat(found, dim=1)
        effects = explained_effect(values, self._clean, self._none)
        deviations = (values - self._clean).abs().mean(dim=1)
        deviations /= (self._clean - self._none).mean().abs()
        return [*zip((1 - (effects - 1).abs()).tolist(), deviations.tolist(), strict=True)]

    def _connected(self, mask: Bool[Tensor, "*axes"]) -> Bool[Tensor, "*axes"]:
        if not isinstance(self.grid, CircuitGraph):
            return mask
        return Circuit(self.grid, mask).connected(patch=self.runs.patch).mask


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

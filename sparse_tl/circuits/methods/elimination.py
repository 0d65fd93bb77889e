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
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.circuit import Circuit, Grid
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.circuits.search_identity import search_identity
from sparse_tl.data import PromptPairs
from sparse_tl.metrics import Metric, explained_effect, measure
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.progress import tracked
from sparse_tl.resuming import Resumable, resumed

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
SAVE_EVERY = 30.0
"""Seconds between two checkpoints."""

Group = tuple[int | slice, ...]
"""Index of a group of parts."""


@dataclass
class EliminationState(Resumable):
    """Circuits found so far, each contained in the one before, and where the search is.

    Args:
        dropped: the step at which each part was dropped; 0 for parts that are left.
        effects: explained effect after each step, on the pairs of the search; at most 1.
        deviation: mean deviation after the last step, in units of the whole effect.
        mask: parts that are left, including those that lost their effect in this sweep.
        begun: parts that were left when this sweep over groups began.
        position: index of the next group.
        price: price of a part in this pass, in explained effect.
        floor: explained effect that this pass does not go below.
        losses: for each group that this pass could drop, what it would lose, 0 if it was dropped,
            and its number of parts.
        step: largest loss of explained effect in one step.
        done: whether the search is finished.
        seconds: time spent.
    """

    noun = "search"

    dropped: Int[Tensor, "*axes"]
    effects: list[float]
    deviation: float
    mask: Bool[Tensor, "*axes"]
    begun: Bool[Tensor, "*axes"]
    position: int = 0
    price: float = 0.0
    floor: float = 0.0
    losses: list[tuple[float, int]] = field(default_factory=list)
    step: float = STEP
    done: bool = False
    seconds: float = 0.0


class Elimination:
    """A search for small circuits that explain an effect.

    Args:
        runs: kept runs of the pairs of the search, at the site of the scores.
        metric: metric function with one value per pair.
        scores: scores that the search starts from, and that order the parts of a group.
        level: explained effect that circuits should reach.
    """

    def __init__(self, runs: PairRuns, metric: Metric, scores: Scores, level: float) -> None:
        self.runs, self.metric, self.scores, self.grid = runs, metric, scores, scores.grid
        self._strength = scores.mean().abs()
        self._lowest = level - MARGIN
        sweeps = _sweeps(scores.grid)
        self._groups = [group for sweep in sweeps for group in sweep]
        self._sweeps = [0, *accumulate(map(len, sweeps[:-1]))]
        self._folder: Path | None = None
        clean, none = list[Tensor](), list[Tensor]()
        for batch, run in runs:
            clean.append(measure(metric, run.clean_logits, batch))
            none.append(measure(metric, runs.everything_patched(run), batch))
        self._clean, self._none = (torch.cat(some).cpu().double() for some in (clean, none))
        self.state = self._start()

    def save_to(self, folder: Path, pairs: PromptPairs, settings: str) -> None:
        """Write checkpoints to a folder, and resume from one found there; see `resumed`."""
        state, self._folder = self.state, folder
        state.identity = search_identity(
            self.runs, pairs, self.grid, self.metric, self.grid.exists, settings
        )
        means = self._clean.mean().item(), self._none.mean().item()
        state.measured = (*means, *state.effects, state.deviation)
        self.state = resumed(state, folder)

    def run(self, seconds: float = math.inf, progress: bool = True) -> None:
        """Search until circuits are below the level by `MARGIN`, or the time is over."""
        state, began, spent = self.state, time.monotonic(), self.state.seconds
        end, now, saved, tried = began + seconds - spent, began, began, 0
        total = len(self._groups)
        while not state.done and now < end:
            stop = min(start for start in (*self._sweeps, total) if start > state.position)
            needed = (stop - state.position) * (now - began) / max(1, tried)
            in_time = needed < FINE * (end - now)
            if state.position and state.losses and not in_time:
                self._end_pass()
                continue
            if state.position == 0:
                self._begin_pass()
            if state.position in self._sweeps:
                state.begun = self._connected(state.mask)
                state.mask = state.begun.clone()
            for _, run in self.runs:
                run.start_from(state.begun)
            with tracked("eliminating", total, progress, done=state.position) as step:
                while state.position < stop and now < end:
                    self._try(self._groups[state.position])
                    state.position, tried, now = state.position + 1, tried + 1, time.monotonic()
                    state.seconds = spent + now - began
                    if now > saved + SAVE_EVERY:
                        saved = now
                        self._save()
                    step(f"{self._size(state.mask):,} {self.grid.noun}: {state.effects[-1]:.2f}")
            if state.position == total:
                self._end_pass()
        self._save()

    def ranking(self) -> Scores:
        """Minus the step at which each part was dropped, as scores of the parts.

        Of parts dropped in one step, those with larger scores count as dropped later.
        """
        last = len(self.state.effects) + 1
        steps = torch.where(self.state.dropped == 0, last, self.state.dropped).double()
        order = self.scores.order()
        steps[tuple(order.T)] += torch.linspace(0.5, 0, len(order), dtype=steps.dtype)
        values = -steps.where(self.grid.exists, 0)
        return Scores(self.grid, values, "elimination", self.scores.prompt_start)

    def sizes(self) -> list[int]:
        """Number of parts after each step: where to cut the ranking."""
        steps = self.state.dropped[self.grid.exists]
        n_dropped = steps.bincount(minlength=len(self.state.effects) + 1)[1:].cumsum(0)
        return (self.grid.n_parts - n_dropped).tolist()

    # ---- one step --------------------------------------------------------------------------------

    def _start(self) -> EliminationState:
        """The state after the first step: the best parts by score, as many as gain most."""
        order, left = self.scores.order(), 1 - self._lowest
        start, most = (self._connected(self.grid.exists), 1.0, 0.0), 0.0
        n, found = float(self._strength.count_nonzero()), 1.0
        while n >= 1 and found > 1 - 2 * left:
            mask = torch.zeros_like(start[0])
            mask[tuple(order[: int(n)].T)] = True
            mask = self._connected(mask)
            ((found, deviation),) = self._outcomes(mask[None])
            gain = left * math.log(len(order) / max(1, self._size(mask))) - max(0.0, 1 - found)
            if gain > most and found >= 1 - left / 2:
                start, most = (mask, found, deviation), gain
            n /= RATIO
        best, effect, deviation = start
        dropped = (self.grid.exists & ~best).long()
        return EliminationState(dropped, [effect], deviation, best, best.clone())

    def _begin_pass(self) -> None:
        state = self.state
        left = max(0.0, state.effects[-1] - self._lowest)
        share = left / max(1, self._size(self._connected(state.mask)))
        state.price = max(2 * state.price, self._affordable(left), share)
        state.floor = state.effects[-1] - max(left / 2, state.step)
        state.losses = []

    def _affordable(self, loss: float) -> float:
        """The price at which the groups that the last pass kept lose so much together."""
        total, price = 0.0, 0.0
        for each, lost in sorted((lost / n, lost) for lost, n in self.state.losses):
            total, price = total + lost, each
            if total > loss:
                break
        return price

    def _end_pass(self) -> None:
        """Decide whether to run another pass, with larger steps if this one could drop no group."""
        state = self.state
        left = state.effects[-1] - self._lowest
        stuck = not state.losses
        state.done = left < 0 or (stuck and state.step > left)
        if stuck:
            state.step *= 2
        state.position = 0

    def _try(self, group: Group) -> None:
        """Drop as much of a group as gains most."""
        state, live = self.state, self._connected(self.state.mask)
        inside = torch.zeros_like(live)
        inside[group] = live[group]
        places = inside.nonzero()
        if not len(places):
            return
        order = places[self._strength[tuple(places.T)].argsort(descending=True, stable=True)]
        kept = sorted({int(share * len(order)) for share in SHARES})
        masks = state.mask.repeat(len(kept), *[1] * live.ndim)
        for mask, n in zip(masks, kept, strict=True):
            mask[tuple(order[n:].T)] = False
        size, before, outcomes = self._size(live), state.effects[-1], self._outcomes(masks)
        possible = list[tuple[float, int, int]]()
        for row, (effect, deviation) in enumerate(outcomes):
            if effect >= max(state.floor, before - state.step):
                n = size - self._size(self._connected(masks[row]))
                possible.append((max(0.0, deviation - state.deviation), n, row))
        if not possible:
            return
        gain, row = max((state.price * n - loss, row) for loss, n, row in possible)
        if gain <= 0:
            state.losses.append(min(possible, key=lambda one: one[0] / one[1])[:2])
            return
        state.losses.append((0.0, 1))
        state.mask = masks[row].clone()
        effect, state.deviation = outcomes[row]
        state.effects.append(effect)
        state.dropped[live & ~self._connected(state.mask)] = len(state.effects)

    def _outcomes(self, masks: Bool[Tensor, "circuit ..."]) -> list[tuple[float, float]]:
        """Explained effects and mean deviations of circuits on the pairs of the search.

        An effect above 1 counts as equally far below.
        """
        found = list[Float[Tensor, "circuit pair"]]()
        with autograd(False):
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

    def _size(self, mask: Bool[Tensor, "*axes"]) -> int:
        return int(mask.count_nonzero())

    def _save(self) -> None:
        if self._folder is not None:
            self.state.save(self._folder)


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

"""Circuits, subsets of a grid of parts, and scores of all parts; comparison with known circuits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sparse_tl.arguments import Count, checked
from sparse_tl.gates.patches import Patch, needs_reference
from sparse_tl.graph import AttentionGrid, CircuitEdge, CircuitGraph, HeadGrid, PositionedGraph
from sparse_tl.results import OfPrompts, Result

Grid = CircuitGraph | PositionedGraph | HeadGrid | AttentionGrid
"""The grid of all parts that circuits and scores refer to; a union, so that saved results load."""


@checked
@dataclass(frozen=True, eq=False)
class Circuit(Result):
    """The parts of a model that are kept, out of a grid of circuit edges, heads or attention edges.

    Args:
        grid: grid of all parts, kept or not.
        mask: true for the parts that are kept, which must exist.
    """

    grid: Grid
    mask: Bool[Tensor, "*axes"]

    def __post_init__(self) -> None:
        exists = self.grid.exists
        if self.mask.shape != exists.shape or bool((self.mask.cpu() & ~exists).any()):
            raise ValueError(
                f"the mask, of shape {tuple(self.mask.shape)}, must have the shape "
                f"{tuple(exists.shape)} of {self.grid!r}, without edges that do not exist"
            )

    @classmethod
    def of(cls, grid: Grid, parts: Iterable[Any]) -> Circuit:
        """A circuit from the names or indices of its parts, such as a published circuit.

        Args:
            grid: grid of all parts, such as ``scores.grid``.
            parts: names or indices: ``"a9.h9"`` or ``(9, 9)`` for heads, ``"a0.h1->m3"`` for edges.
        """
        return cls(grid, torch.zeros_like(grid.exists)).having(*parts)

    @property
    def graph(self) -> CircuitGraph:
        """The graph of all circuit edges that a circuit of circuit edges is part of."""
        if not isinstance(self.grid, CircuitGraph):
            raise ValueError(f"this circuit consists of {self.grid.noun}; see also circuit.at()")
        return self.grid

    def at(self, position: str | int) -> Circuit:
        """The circuit edges kept at one position: the column of a token, or the name of a span."""
        grid = positioned(self.grid)
        return Circuit(grid.graph, self.mask[grid.position(position)])

    @property
    def edges(self) -> tuple[CircuitEdge, ...]:
        """The circuit edges that are kept."""
        return self.graph.edges_of(self.mask)

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The heads that are kept, as (layer, head) pairs."""
        if not isinstance(self.grid, HeadGrid):
            raise ValueError(f"this circuit consists of {self.grid.noun}, not of heads")
        return tuple((layer, head) for layer, head in self.mask.nonzero().tolist())

    def __len__(self) -> int:
        return int(self.mask.count_nonzero())

    def having(self, *parts: Any) -> Circuit:
        """The circuit with parts added, given by name (``a0.h1->m3``) or index."""
        mask = self.mask.clone()
        for part in parts:
            mask[self.grid.index(part)] = True
        return Circuit(self.grid, mask)

    def without(self, *parts: Any) -> Circuit:
        """The circuit with parts removed, given by name or index."""
        mask = self.mask.clone()
        for part in parts:
            index = self.grid.index(part)
            if not mask[index]:
                raise ValueError(f"the circuit does not contain {part}")
            mask[index] = False
        return Circuit(self.grid, mask)

    def connected(self, *, patch: Patch = "corrupted") -> Circuit:
        """The circuit without the circuit edges that have no effect under a patch; of heads, all.

        An edge has no effect if no kept path leads from its destination to the logits. With
        "corrupted" and "resample" patches, which come from a single run on another prompt, an edge
        also has no effect if no kept path leads from the input to its source: a node that reads
        only patches then writes its own patch. With "mean", "zero" and tensors, such a node writes
        something else, so its edges are kept.

        Args:
            patch: patch that the circuit is evaluated with.
        """
        grid = self.grid
        if isinstance(grid, HeadGrid):
            return self
        if not isinstance(grid, PositionedGraph):
            grid = PositionedGraph(self.graph, ("0",))
        graph, mask = grid.graph, self.mask.cpu().view(grid.exists.shape).float()
        feeds, follows = graph.feeds.float(), grid.follows.float()

        def written(sources: Tensor) -> Tensor:
            """The sources that read what these write."""
            read = torch.bmm(sources[:, None], mask)[:, 0]
            return torch.where(graph.attended, follows @ read, read) @ feeds

        def read(destinations: Tensor) -> Tensor:
            """The destinations that feed what these read."""
            nodes = torch.bmm(mask, destinations[:, :, None])[:, :, 0] @ feeds.T
            return torch.where(graph.attended, follows.T @ nodes, nodes)

        def on_paths(ends: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
            found, before = ends, torch.zeros_like(ends)
            while not torch.equal(found, before):
                found, before = ((ends + step(found)) > 0).float(), found
            return found > 0

        logits, inputs = torch.zeros_like(mask[:, 0]), torch.zeros_like(mask[:, :, 0])
        logits[:, -1] = inputs[:, 0] = 1
        kept = (mask > 0) & on_paths(logits, read)[:, None]
        if needs_reference(patch) and patch != "mean":
            kept &= on_paths(inputs, written)[:, :, None]
        return Circuit(self.grid, kept.view(self.mask.shape).to(self.mask.device))

    def to_pandas(self) -> pd.DataFrame:
        """One row per kept part: its name and index."""
        return pd.DataFrame(self.grid.columns(self.mask.nonzero()))

    def _repr_html_(self) -> str:
        if not isinstance(self.grid, (CircuitGraph, PositionedGraph)):
            return super()._repr_html_()
        # A larger figure would need scores, to choose the edges that it shows.
        if 0 < len(self) <= 2000:
            return self.figure()._repr_html_()
        return f"<p>{escape(repr(self))}</p>"

    def __repr__(self) -> str:
        return f"Circuit({len(self):,} of {self.grid.n_parts:,} {self.grid.noun} of {self.grid!r})"


@checked
@dataclass(frozen=True, eq=False)
class Scores(OfPrompts):
    """One score per part, in units of the metric; negative: patching the part lowers the metric.

    Scores of attention edges are kept per prompt pair, on a leading axis, because a position has
    the same meaning in two prompts only if they share a template. Scores of circuit edges have this
    axis if computed with ``by_pair=True``. Rankings and tables use the mean over pairs. Scores of
    circuit edges by position have an axis of positions before the axes of the edges; their sum over
    positions is the score of the edge.

    Args:
        grid: grid of the scored parts: circuit edges, heads, or attention edges.
        values: the scores; 0 where there is no part.
        method: name of the attribution method.
    """

    grid: Grid
    values: Float[Tensor, "*axes"]
    method: str

    def __post_init__(self) -> None:
        expected, shape = tuple(self.grid.exists.shape), tuple(self.values.shape)
        if shape[-len(expected) :] != expected or len(shape) > len(expected) + 1:
            raise ValueError(
                f"scores of {self.grid!r} have the shape {expected}, or one more axis for prompt "
                f"pairs; these have {shape}"
            )
        super().__post_init__()

    @classmethod
    def of(cls, grid: Grid, values: Mapping[str, float] | pd.Series, method: str) -> Scores:
        """Scores from values by part name, such as those of `patch_exactly`; other parts score 0.

        Args:
            grid: grid of the scored parts, such as ``adapt(model).graph.heads``.
            values: the scores by part name.
            method: name of the method.
        """
        scores = torch.zeros(grid.exists.shape, dtype=torch.float64)
        for name, value in values.items():
            scores[grid.index(str(name))] = float(value)
        return cls(grid, scores, method)

    def mean(self) -> Float[Tensor, "*axes"]:
        """The scores, averaged over pairs if kept per pair."""
        return self.values.mean(dim=0) if self._by_pair else self.values

    def __getitem__(self, part: Any) -> float:
        return self.mean()[self.grid.index(part)].item()

    def at(self, position: str | int) -> Scores:
        """The scores of circuit edges at one position: column of a token, or name of a span."""
        grid = positioned(self.grid)
        values = self.values[..., grid.position(position), :, :]
        return replace(self, grid=grid.graph, values=values)

    def order(self, *, signed: bool = False) -> Int[Tensor, "part axis"]:
        """The indices of all parts, best first; ties keep the order of the grid.

        Args:
            signed: rank by signed score, the part that helps most (most negative) first, instead of
                by absolute value.
        """
        return self._orders[signed]

    def top(self, size: Count, *, signed: bool = False) -> Circuit:
        """The circuit that keeps the `size` best parts.

        Args:
            size: number of parts to keep.
            signed: ranking, as in `order`.
        """
        check_size(self.grid, size)
        mask = torch.zeros(self.grid.exists.shape, dtype=torch.bool)
        mask[tuple(self.order(signed=signed)[:size].T)] = True
        return Circuit(self.grid, mask)

    def to_pandas(self, top: Count | None = None) -> pd.DataFrame:
        """One row per part, by decreasing absolute score: all parts, or the first `top`."""
        places = self.order()[:top]
        return pd.DataFrame(self.grid.columns(places)).assign(score=self._at(places).tolist())

    @property
    def _by_pair(self) -> bool:
        return self.values.ndim > self.grid.exists.ndim

    def _at(self, places: Int[Tensor, "part axis"]) -> Float[Tensor, " part"]:
        return self.mean()[tuple(places.T)]

    @cached_property
    def _orders(self) -> list[Int[Tensor, "part axis"]]:
        """By absolute value, and by how much parts help: for circuits of many sizes."""
        places = self.grid.places
        values = self._at(places)
        by_rank = (some.argsort(descending=True, stable=True) for some in (values.abs(), -values))
        return [places[ranked.cpu()] for ranked in by_rank]

    def _summary(self) -> pd.DataFrame:
        return self.to_pandas(20)

    def __repr__(self) -> str:
        best = self.order()[:3]
        scored = zip(self.grid.names(best), self._at(best).tolist(), strict=True)
        listed = ", ".join(f"{name} {score:.3g}" for name, score in scored)
        pairs = f" of {len(self.values)} pairs" if self._by_pair else ""
        return (
            f"Scores({self.grid.n_parts:,} {self.grid.noun}{pairs} by {self.method}: {listed}, ...)"
        )


@dataclass(frozen=True, eq=False)
class Roc(Result):
    """How well scores separate the parts of a known circuit from all others, at every threshold.

    Args:
        false_positive_rate: share of the other parts that score at least the threshold.
        true_positive_rate: share of the known parts that score at least the threshold.
        auc: area under the curve: the probability that a known part scores above another part, with
            ties counted as one half. 1: all known parts score above all others; 0.5: chance.
    """

    false_positive_rate: Float[Tensor, " threshold"]
    true_positive_rate: Float[Tensor, " threshold"]
    auc: float

    def __repr__(self) -> str:
        return f"Roc(AUC {self.auc:.4f})"

    def to_pandas(self) -> pd.DataFrame:
        """One row per threshold, in decreasing order."""
        rates = ("false_positive_rate", "true_positive_rate")
        return pd.DataFrame({name: getattr(self, name).tolist() for name in rates})


@dataclass(frozen=True)
class Overlap(Result):
    """Overlap of a circuit with a known one.

    Args:
        iou: shared parts over parts of either circuit.
        precision: shared parts over the circuit's parts.
        recall: shared parts over the known circuit's parts.
    """

    iou: float
    precision: float
    recall: float


@checked
def roc(scores: Scores, known: Circuit) -> Roc:
    """The ROC curve of scores, by absolute value, against a known circuit.

    Raises:
        ValueError: the circuit is of another grid, is empty, or keeps all parts.
    """
    _check_grids(scores, known)
    exists = scores.grid.exists
    values, positive = scores.mean()[exists].abs(), known.mask[exists]
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        raise ValueError(
            f"the known circuit must have some, not all, of the {len(positive):,} "
            f"{known.grid.noun}; it has {n_positive:,}"
        )
    thresholds, group = values.unique(return_inverse=True)  # ascending; ties share a threshold
    tied = torch.zeros(len(thresholds), dtype=torch.float64)
    hits = tied.index_add(0, group, positive.double()).flip(0).cumsum(0) / n_positive
    misses = tied.index_add(0, group, (~positive).double()).flip(0).cumsum(0) / n_negative
    fpr, tpr = pad(misses, (1, 0)), pad(hits, (1, 0))  # from 0
    return Roc(fpr, tpr, torch.trapezoid(tpr, fpr).item())


@checked
def overlap(circuit: Circuit, known: Circuit) -> Overlap:
    """Intersection over union, precision and recall of a circuit's parts.

    Raises:
        ValueError: the circuits are of different grids, or one is empty.
    """
    _check_grids(circuit, known)
    both = int((circuit.mask & known.mask).sum())
    if not len(circuit) or not len(known):
        raise ValueError(f"a circuit is empty: they have {len(circuit)} and {len(known)} parts")
    either = int((circuit.mask | known.mask).sum())
    return Overlap(both / either, both / len(circuit), both / len(known))


def _check_grids(compared: Scores | Circuit, known: Circuit) -> None:
    if compared.grid != known.grid:
        raise ValueError(
            f"these are parts of {compared.grid!r}, the known circuit of {known.grid!r}"
        )


def check_grid(graph: CircuitGraph, grid: Grid, *kinds: type[Grid]) -> None:
    """Raise a ValueError if a grid is not the model's own, or of none of these kinds."""
    whole = grid.graph if isinstance(grid, PositionedGraph) else grid
    if not isinstance(grid, kinds) or whole not in (graph, graph.heads):
        nouns = " or ".join(kind.noun for kind in kinds)
        raise ValueError(f"these are parts of {grid!r}, not {nouns} of the model's own {graph!r}")


def check_size(grid: Grid, size: int) -> None:
    """Raise a ValueError if a circuit of a grid cannot have so many parts."""
    if not 0 <= size <= grid.n_parts:
        raise ValueError(f"the size must be in 0..{grid.n_parts}; it is {size}")


def positioned(grid: Grid) -> PositionedGraph:
    """The grid, after a check that it is one of circuit edges by position."""
    if not isinstance(grid, PositionedGraph):
        raise ValueError(f'{grid.noun} have no positions; score with positions="tokens"')
    return grid

"""The circuit edges of a model at each position of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparse_tl.graph.circuit_graph import CircuitGraph
from sparse_tl.graph.grids import PartGrid


@dataclass(frozen=True)
class PositionedGraph(PartGrid):
    """The circuit edges of a model at each position, named ``a0.h1->m1@3`` or ``a0.h1->m1@END``.

    Arrays are indexed ``[position, source, destination]``. The source and the destination of an
    edge have the same position; only heads carry information to later positions, from their keys
    and values to their query.

    Args:
        graph: circuit edges of the model.
        positions: columns of tokens, starting with "0", or names of spans.
    """

    graph: CircuitGraph
    positions: tuple[str, ...]
    noun = "circuit edges by position"

    @cached_property
    def exists(self) -> Bool[Tensor, "position source destination"]:
        """Which pairs are edges: the same at every position."""
        return self.graph.exists.expand(len(self.positions), -1, -1)

    @property
    def of_tokens(self) -> bool:
        """Whether positions are tokens, not named spans."""
        return self.positions == tuple(map(str, range(len(self.positions))))

    @cached_property
    def follows(self) -> Bool[Tensor, "later earlier"]:
        """Whether a query at one position may read a key at the other; for spans, always true."""
        n = len(self.positions)
        every = torch.ones(n, n, dtype=torch.bool)
        return every.tril() if self.of_tokens else every

    def position(self, name: str | int) -> int:
        """The index of a position."""
        if str(name) not in self.positions:
            raise ValueError(f"there is no position {name!r}, only {self.positions}")
        return self.positions.index(str(name))

    def index(self, part: str | tuple[int, ...]) -> tuple[int, ...]:
        """Position, row and column of an edge."""
        if isinstance(part, tuple):
            return self._checked(part, part)
        edge, at, position = part.partition("@")
        if not at:
            raise ValueError(f"{part!r} names no position: add one, such as @{self.positions[-1]}")
        return self.position(position), *self.graph.index(edge)

    def layer(self, index: Sequence[int]) -> int:
        """The layer in which an edge ends; the number of layers for the logits."""
        return self.graph.layer(index[1:])

    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        """The columns of `CircuitGraph`, and the positions."""
        columns = self.graph.columns(places[:, 1:])
        at = np.array(self.positions, dtype=object)[places[:, 0].numpy()]
        return {**columns, "edge": columns["edge"] + "@" + at, "position": at}

    def __repr__(self) -> str:
        kind = "positions" if self.of_tokens else f"spans {', '.join(self.positions)}"
        many = f"{len(self.positions)} " if self.of_tokens else ""
        return f"PositionedGraph({many}{kind} of {self.graph!r})"

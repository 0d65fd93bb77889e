"""Grids of parts: the arrays over which scores and circuits are defined.

Heads are indexed ``[layer, head]``, attention edges ``[layer, head, query, key]``, and circuit
edges, in `sparse_tl.graph.circuit_graph`, ``[source, destination]``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparse_tl.graph.nodes import Node

_ATTENTION_EDGE = re.compile(r"a(\d+)\.h(\d+):(\d+)->(\d+)")


class PartGrid(ABC):
    """Parts that can be scored and kept individually."""

    noun: ClassVar[str]
    """Name of the parts, in the plural."""

    @cached_property
    @abstractmethod
    def exists(self) -> Bool[Tensor, "*axes"]:
        """Which indices of the array hold a part."""

    @abstractmethod
    def index(self, part: Any) -> tuple[int, ...]:
        """The index of a part, from its name or index.

        Raises:
            ValueError: the part does not exist.
        """

    @abstractmethod
    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        """Table columns of the parts at these indices; the first column holds their names."""

    def names(self, places: Int[Tensor, "part axis"]) -> list[str]:
        return list(next(iter(self.columns(places).values())))

    def layer(self, index: Sequence[int]) -> int:
        """The first layer affected by a part; the number of layers for the logits."""
        return index[0]

    @cached_property
    def n_parts(self) -> int:
        return int(self.exists.sum())

    @cached_property
    def places(self) -> Int[Tensor, "part axis"]:
        """The indices of all parts, in row-major order: the order of ``values[grid.exists]``."""
        return self.exists.nonzero()

    def _checked(self, index: Sequence[int], part: Any) -> tuple[int, ...]:
        shape, index = self.exists.shape, tuple(index)
        fits = len(index) == len(shape) and all(
            0 <= i < n for i, n in zip(index, shape, strict=True)
        )
        if not fits or not self.exists[index]:
            raise ValueError(f"{self!r} has no {part} among its {self.noun}")
        return index


@dataclass(frozen=True)
class HeadGrid(PartGrid):
    """All heads of a model, named ``a3.h2``."""

    n_layers: int
    n_heads: int
    noun = "heads"

    @cached_property
    def exists(self) -> Bool[Tensor, "layer head"]:
        return torch.ones(self.n_layers, self.n_heads, dtype=torch.bool)

    def index(self, part: Node | str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(part, tuple):
            return self._checked(part, part)
        node = Node.parse(part) if isinstance(part, str) else part
        return self._checked((node.layer, node.head) if node.kind == "head" else (), part)

    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        return {"head": [f"a{layer}.h{head}" for layer, head in places.tolist()]}

    def __repr__(self) -> str:
        return f"HeadGrid({self.n_layers} layers x {self.n_heads} heads)"


@dataclass(frozen=True)
class AttentionGrid(PartGrid):
    """All attention edges of prompts of one length, named ``a3.h2:5->8`` (key to query).

    Args:
        n_layers: number of layers.
        n_heads: heads per layer.
        n_positions: prompt length.
        causal: whether attention is causal.
        allowed: pairs that the model's masks allow; None means all causal pairs, or all pairs if
            attention is not causal.
    """

    n_layers: int
    n_heads: int
    n_positions: int
    causal: bool = True
    allowed: Bool[Tensor, "layer query key"] | None = field(default=None, compare=False)
    noun = "attention edges"

    @cached_property
    def exists(self) -> Bool[Tensor, "layer head query key"]:
        """Pairs of a query and a key that it can attend to."""
        if self.allowed is not None:
            return self.allowed[:, None].expand(-1, self.n_heads, -1, -1)
        pairs = torch.ones(self.n_positions, self.n_positions, dtype=torch.bool)
        pairs = pairs.tril() if self.causal else pairs
        return pairs.expand(self.n_layers, self.n_heads, -1, -1)

    def index(self, part: str | tuple[int, ...]) -> tuple[int, ...]:
        """Layer, head, query and key of an attention edge."""
        index = self.parse(part) if isinstance(part, str) else part
        return self._checked(index, part)

    @staticmethod
    def parse(name: str) -> tuple[int, int, int, int]:
        """Layer, head, query and key of an attention edge, from its name."""
        match = _ATTENTION_EDGE.fullmatch(name)
        if match is None:
            raise ValueError(
                f'{name!r} is no attention edge, from key to query, such as "a3.h2:5->8"'
            )
        layer, head, key, query = map(int, match.groups())
        return layer, head, query, key

    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        """The edges' names, and their layer, head, query and key."""
        layer, head, query, key = (column.tolist() for column in places.T)
        named = zip(layer, head, key, query, strict=True)
        names = [f"a{layer}.h{head}:{key}->{query}" for layer, head, key, query in named]
        return {"edge": names, "layer": layer, "head": head, "query": query, "key": key}

    def __repr__(self) -> str:
        return (
            f"AttentionGrid({self.n_layers} layers x {self.n_heads} heads, {self.n_positions} "
            f"positions{'' if self.causal else ', bidirectional'})"
        )

"""Names of a model's parts and of the circuit edges between them, without any indexing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["input", "head", "kv_head", "mlp", "logits"]
Slot = Literal["q", "k", "v"]

_NAME = re.compile(
    r"(?P<plain>input|logits)|m(?P<mlp>\d+)|a(?P<layer>\d+)\.(?P<sort>h|kv)(?P<head>\d+)"
)
_DESTINATION = re.compile(r"(?P<node>[^<]+)(?:<(?P<slot>[qkv])>)?")


class _Named:
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"


@dataclass(frozen=True, repr=False)
class Node(_Named):
    """A part of the model: ``input``, ``a3.h2``, ``m3`` or ``logits``.

    Args:
        kind: kind of node; a "kv_head" only reads, on behalf of the heads of its group.
        layer: layer of a head or MLP.
        head: index of a head within its layer.
    """

    kind: Kind
    layer: int = 0
    head: int = 0

    def __str__(self) -> str:
        if self.kind == "mlp":
            return f"m{self.layer}"
        if self.kind in ("head", "kv_head"):
            return f"a{self.layer}.{'h' if self.kind == 'head' else 'kv'}{self.head}"
        return self.kind

    @staticmethod
    def parse(name: str) -> Node:
        """Parse the name of a node."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f'{name!r} is no node such as "input", "a3.h2", "a3.kv1" or "m3"')
        if match["plain"]:
            return Node(match["plain"])  # type: ignore[arg-type]
        if match["mlp"]:
            return Node("mlp", int(match["mlp"]))
        kind: Kind = "head" if match["sort"] == "h" else "kv_head"
        return Node(kind, int(match["layer"]), int(match["head"]))


@dataclass(frozen=True, repr=False)
class Destination(_Named):
    """An input that reads from the residual stream: ``a3.h2<q>``, ``m3``, ``logits``."""

    node: Node
    slot: Slot | None = None

    def __str__(self) -> str:
        return str(self.node) if self.slot is None else f"{self.node}<{self.slot}>"

    @staticmethod
    def parse(name: str) -> Destination:
        """Parse the name of a destination."""
        match = _DESTINATION.fullmatch(name)
        if match is None:
            raise ValueError(f'{name!r} is no destination such as "a3.h2<q>" or "m3"')
        return Destination(Node.parse(match["node"]), match["slot"])  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class CircuitEdge(_Named):
    """A circuit edge: ``a0.h1->a3.h2<q>``."""

    source: Node
    destination: Destination

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}"

    @staticmethod
    def parse(name: str) -> CircuitEdge:
        """Parse the name of an edge."""
        source, arrow, destination = name.partition("->")
        if not arrow:
            raise ValueError(f'{name!r} is no edge such as "a0.h1->a3.h2<q>"')
        return CircuitEdge(Node.parse(source), Destination.parse(destination))

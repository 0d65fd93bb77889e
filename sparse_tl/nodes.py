"""Names of a model's parts and of the circuit edges between them; nothing is numbered here."""

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
        kind: what it is; a "kv_head" only reads, for the heads of its group.
        layer: of heads and MLPs.
        head: within the layer.
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
        """The node of that name.

        Raises:
            ValueError: no node has such a name.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f'expected a node such as "input", "a3.h2", "a3.kv1" or "m3"; got {name!r}'
            )
        if match["plain"]:
            return Node(match["plain"])  # type: ignore[arg-type]
        if match["mlp"]:
            return Node("mlp", int(match["mlp"]))
        return Node(
            "head" if match["sort"] == "h" else "kv_head", int(match["layer"]), int(match["head"])
        )


@dataclass(frozen=True, repr=False)
class Destination(_Named):
    """An input that reads from the residual stream: ``a3.h2<q>``, ``m3``, ``logits``."""

    node: Node
    slot: Slot | None = None

    def __str__(self) -> str:
        return str(self.node) if self.slot is None else f"{self.node}<{self.slot}>"

    @staticmethod
    def parse(name: str) -> Destination:
        """The destination of that name."""
        match = _DESTINATION.fullmatch(name)
        if match is None:
            raise ValueError(f'expected a destination such as "a3.h2<q>" or "m3"; got {name!r}')
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
        """The edge of that name.

        Raises:
            ValueError: no edge has such a name.
        """
        source, arrow, destination = name.partition("->")
        if not arrow:
            raise ValueError(f'expected an edge such as "a0.h1->a3.h2<q>"; got {name!r}')
        return CircuitEdge(Node.parse(source), Destination.parse(destination))

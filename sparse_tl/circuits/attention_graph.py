"""What attention moves where, for one prompt: the result that circuit diagrams are drawn from.

Nodes form a grid of *levels* and *columns*. Level 0 is the input; level ``l + 1`` is the residual
stream after layer ``l``. A node ``(l + 1, query)`` is fed by ``(l, query)`` through the residual
stream and by ``(l, key)`` through every attention edge of layer ``l`` from ``key`` to ``query``.
This module holds the numbers and the reachability on that grid; it knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EdgeWeight = Literal["attention", "attribution"]


@dataclass(frozen=True, eq=False)
class AttentionGraph:
    """Attention edges of one prompt, with the tokens they join.

    Args:
        attention: gate times attention probability of each edge; 0 at closed gates and at
            acausal pairs.
        gates: 1 where the edge's gate is open; every causal pair of a dense model is open.
        input_tokens: the text under each column, ``?`` where it is not known to the model.
        output_tokens: the text above each column: the model's prediction where it makes one.
        targets: the columns of predicted characters, each with the column at which it is read
            (one to the left for an autoregressive model, the same for a placeholder model).
        attribution: for each target, ``attention * d logit(predicted) / d attention`` in logits;
            ``None`` when it was not asked for.
    """

    attention: Float[Tensor, "layer head query key"]
    gates: Bool[Tensor, "layer head query key"]
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    targets: tuple[tuple[int, int], ...]
    attribution: Float[Tensor, "target layer head query key"] | None = None

    def __post_init__(self) -> None:
        pos = self.attention.shape[-1]
        lengths = {"input_tokens": len(self.input_tokens), "output_tokens": len(self.output_tokens)}
        for name, length in lengths.items():
            if length != pos:
                raise ValueError(
                    f"expected {pos} {name}, one per column of `attention`; got {length}"
                )
        for column, read_at in self.targets:
            if not (0 <= column < pos and 0 <= read_at < pos):
                raise ValueError(
                    f"expected target columns in 0..{pos - 1}; got ({column}, read at {read_at})"
                )

    @property
    def n_layers(self) -> int:
        return self.attention.shape[0]

    @property
    def n_heads(self) -> int:
        return self.attention.shape[1]

    @property
    def n_columns(self) -> int:
        return self.attention.shape[-1]

    def edge_weights(
        self, kind: EdgeWeight = "attention", target: int = -1
    ) -> Float[Tensor, "layer head query key"]:
        """The weight of each edge: gate times attention, or attribution in logits (signed)."""
        if kind == "attention":
            return self.attention
        if self.attribution is None:
            raise ValueError(
                "this flow holds no attribution; trace the model with attribution=True to get it"
            )
        return self.attribution[target]


def ancestors(
    edges: Bool[Tensor, "layer query key"], column: int, level: int | None = None
) -> Bool[Tensor, "level column"]:
    """The nodes from which node ``(level, column)`` can be reached, itself included.

    Args:
        edges: which attention edges exist, after any maximum over heads.
        column: the node's column.
        level: the node's level; the last one when left out.
    """
    n_layers, n_columns, _ = edges.shape
    level = n_layers if level is None else level
    reached = torch.zeros(n_layers + 1, n_columns, dtype=torch.bool)
    reached[level, column] = True
    for layer in reversed(range(level)):
        above = reached[layer + 1]
        reached[layer] = above | edges[layer][above].any(dim=0)
    return reached

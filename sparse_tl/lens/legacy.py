"""Names that are going away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparse_tl.lens.adapter import adapt


@dataclass(frozen=True)
class AttentionShape:
    n_layers: int
    n_heads: int

    def check_head(self, layer: int, head: int) -> None:
        if not (0 <= layer < self.n_layers and 0 <= head < self.n_heads):
            raise ValueError(
                f"expected heads (layer, head) of {self.n_layers} layers of {self.n_heads} heads; "
                f"got ({layer}, {head})"
            )


def attention_shape(model: Any) -> AttentionShape:
    return AttentionShape(model.cfg.n_layers, model.cfg.n_heads)


def embedding_matrix(model: Any) -> Any:
    return adapt(model).weight


def graph_of(model: Any) -> Any:
    return adapt(model).graph


def unembedded(model: Any, final: Any) -> Any:
    return adapt(model).logits(final)


def lean(model: Any, read: Any) -> Any:
    from sparse_tl.lens.shortcuts import only_at

    return only_at(model, read)

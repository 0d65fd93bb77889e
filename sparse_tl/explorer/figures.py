"""Models in, pictures out: a measurement and the plot of its result in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from sparse_tl import plots
from sparse_tl.circuits import trace_attention
from sparse_tl.circuits.attention_graph import EdgeWeight
from sparse_tl.circuits.trace import MAX_EFFECTS
from sparse_tl.lens import HookedModel


def circuit_diagram(
    models: Mapping[str, HookedModel],
    prompt: str | Int[Tensor, " pos"],
    *,
    position: int | None = None,
    positions: Sequence[int] | None = None,
    weight: EdgeWeight = "attention",
    labels: Sequence[str] | None = None,
    **style: Any,
) -> plots.CircuitDiagram:
    """Draw where each model's attention moves information for one prompt, one panel per model.

    Args:
        models: panels from top to bottom, by title.
        prompt: text, or its tokens.
        position: the predicted column that is shown first; the last of `positions` if left out.
        positions: all columns that can be chosen; just `position` if left out.
        weight: "attention" (gate times attention), "effect" (of removing the edge, in logits:
            exact in models with few open edges) or "first-order" (its estimate).
        labels: texts of the columns, where they are not those of the tokenizer.
        **style: passed to `plots.circuit_diagram`: threshold, transition, title.

    Raises:
        ValueError: no model, or a prompt or position that does not fit.
    """
    if not models:
        raise ValueError("expected at least one model by title; got none")
    if positions is None:
        positions = None if position is None else [position]
    elif position is not None and position not in positions:
        raise ValueError(f"expected position to be one of {list(positions)}; got {position}")
    graphs = {
        title: trace_attention(
            model,
            prompt,
            positions=positions,
            attribution=True,
            max_effects=MAX_EFFECTS,
            labels=labels,
        )
        for title, model in models.items()
    }
    target = -1 if positions is None or position is None else list(positions).index(position)
    return plots.circuit_diagram(graphs, target=target, weight=weight, **style)

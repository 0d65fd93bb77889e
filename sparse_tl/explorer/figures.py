"""Models in, pictures out: the attention of a prompt, traced and drawn in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from sparse_tl import plots
from sparse_tl.circuits import trace_attention
from sparse_tl.circuits.attention_graph import EdgeWeight
from sparse_tl.circuits.removal import Head
from sparse_tl.circuits.trace import Prompt
from sparse_tl.explorer.ablated_model import trace_weights
from sparse_tl.lens import HookedModel, adapt
from sparse_tl.nodes import Node


def circuit_diagram(
    models: Mapping[str, HookedModel],
    prompt: Prompt,
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
        title: trace_weights(model, prompt, positions=positions, labels=labels)
        for title, model in models.items()
    }
    target = -1 if positions is None or position is None else list(positions).index(position)
    return plots.circuit_diagram(graphs, target=target, weight=weight, **style)


def attention_view(
    model: HookedModel,
    prompt: Prompt,
    *,
    layer: int | None = None,
    heads: Sequence[Head] | None = None,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> plots.AttentionView:
    """Browse attention patterns with circuitsvis: gate times attention, query by key.

    The figure holds all that it needs, so that it works with the network off; without JavaScript
    it shows every pattern as a small heat map.

    Args:
        model: a dense model or a SparseTransformer.
        prompt: text, or its tokens. Columns are shown up to the last one at which the model is
            read: all of them, or, where the prompt has mask tokens, up to the last of these.
        layer: the layer whose heads are shown; all layers if left out.
        heads: (layer, head) of each head that is shown, in place of a layer.
        labels: texts of the columns, where they are not the tokenizer's.
        title: above the patterns.

    Raises:
        ValueError: a layer or head that the model lacks, a layer and heads at once, a prompt that
            is empty, too long or holds what the tokenizer does not know, or more than 200,000
            attention weights.
    """
    adapter = adapt(model)
    if layer is not None and heads is not None:
        raise ValueError(f"expected a layer or heads; got layer={layer} and heads={list(heads)}")
    if heads is None:
        layers = range(adapter.n_layers) if layer is None else [layer]
        heads = list(product(layers, range(adapter.n_heads)))
    if not heads:
        raise ValueError("expected at least one head (layer, head); got none")
    for head in heads:
        adapter.check_head(*head)
    # A bidirectional model runs the whole prompt, wherever it is read.
    positions = None if adapter.causal else [0]
    graph = trace_attention(model, prompt, positions=positions, labels=labels)
    n_read = graph.n_read
    return plots.attention_view(
        graph.attention[*zip(*heads, strict=True)][:, :n_read, :n_read],
        graph.input_tokens[:n_read],
        [str(Node("head", *head)) for head in heads],
        title=title,
    )

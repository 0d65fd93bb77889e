"""Figures of models: the attention of a prompt, traced and drawn in one call."""

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
from sparse_tl.lens import HookedModel, adapt, check_head
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
        models: models by panel title, from top to bottom.
        prompt: text or tokens.
        position: predicted column shown first; by default the last of `positions`.
        positions: all columns to choose from; by default only `position`.
        weight: "attention" (gate times attention), "effect" (of removing the edge, in logits:
            exact in models with few open edges) or "first-order" (its estimate).
        labels: text of each column, if not the tokenizer's.
        **style: arguments of `plots.circuit_diagram`: threshold, transition, title.

    Raises:
        ValueError: there is no model, or a prompt or position does not fit the model.
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

    The figure is self-contained and works offline; without JavaScript it shows every pattern as a
    small heat map.

    Args:
        model: a dense model or a SparseTransformer.
        prompt: text or tokens. Columns are shown up to the last one where the model is read: all
            of them, or up to the last mask token if the prompt has any.
        layer: layer whose heads are shown; all layers by default.
        heads: (layer, head) pairs to show, instead of a layer.
        labels: text of each column, if not the tokenizer's.
        title: title above the patterns.

    Raises:
        ValueError: the model lacks a layer or head, both a layer and heads are given, the prompt
            is empty, too long or unknown to the tokenizer, or there are more than 200,000
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
        check_head(adapter, *head)
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

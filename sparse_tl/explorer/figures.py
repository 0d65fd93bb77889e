"""Figures of a model's attention on a prompt, traced and drawn in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from sparse_tl import plots
from sparse_tl.arguments import checked
from sparse_tl.backend import HookedModel, adapt, heads_of
from sparse_tl.circuits import trace_attention
from sparse_tl.circuits.prompt.attention import (
    EFFECT_SECONDS,
    MAX_EFFECTS,
    EdgeWeight,
    Head,
    predicted_column,
    predicted_columns,
)
from sparse_tl.circuits.prompt.tokens import Prompt, Token, prompt_tokens
from sparse_tl.graph import Node
from sparse_tl.metrics import Metric, log_probability
from sparse_tl.plots.page.rendering import by_title

MAX_SCORES = 1_000_000
"""Maximum number of effects to compute by default: a few seconds at GPT-2 small's size."""


@checked
def circuit_diagram(
    models: HookedModel | Mapping[str, HookedModel],
    prompt: Prompt,
    *,
    position: int | None = None,
    positions: Sequence[int] | None = None,
    weight: EdgeWeight = "attention",
    metric: Metric = log_probability,
    answer: Token | None = None,
    wrong: Token | None = None,
    labels: Sequence[str] | None = None,
    **style: Any,
) -> plots.CircuitDiagram:
    """Draw where each model's attention moves information for one prompt, one panel per model.

    Args:
        models: a model, or several by panel title, from top to bottom.
        prompt: text or tokens.
        position: predicted column shown first, and in images, counted as in `trace_attention`; by
            default the last of `positions`.
        positions: columns to choose from; by default all that the model predicts: every mask token
            or, without any, the column after each token (each column, if bidirectional).
        weight: what lines show: a kind of weight of `AttentionGraph.edge_weights`.
        metric: metric whose change is the effect of an edge, as in `trace_attention`.
        answer: token to measure, as text or number; by default each model's prediction.
        wrong: the wrong answer, likewise; by default each model's next most likely token.
        labels: text of each column, if not the tokenizer's.
        **style: arguments of `plots.attention_diagram`: threshold, transition, title, size.

    If `positions` is not given and effects at all of them exceed a million numbers (19 tokens in
    GPT-2 small), the figure has no effects or, with effects as the `weight`, only those at
    `position`. Pass the `positions` whose effects you need.

    Effects are exact if at most 500 edges are open. Otherwise, with effects as the `weight`, they
    are computed exactly for 3 seconds per model, starting with the edges that are strongest to
    first order; the others are estimates, drawn as dotted lines.

    Raises:
        ValueError: there is no model, a prompt or position does not fit the model, or an answer is
            not one token.
    """
    options = {"metric": metric, "answer": answer, "wrong": wrong, "labels": labels}
    graphs, target = {}, -1
    for title, model in by_title(models).items():
        columns, target, effects = _plan(model, prompt, position, positions, weight)
        graphs[title] = trace_attention(model, prompt, positions=columns, **effects, **options)
    return plots.attention_diagram(graphs, target=target, weight=weight, **style)


def _plan(
    model: HookedModel,
    prompt: Prompt,
    position: int | None,
    positions: Sequence[int] | None,
    weight: EdgeWeight,
) -> tuple[list[int], int, dict[str, Any]]:
    """The columns to choose from, the index of the one shown first, and effects to compute."""
    column = partial(predicted_column, model, prompt)
    shown = None if position is None else column(position)
    seconds = EFFECT_SECONDS if weight == "effect" else 0
    effects = {"attribution": True, "max_effects": MAX_EFFECTS, "seconds": seconds}
    if positions is not None:
        columns = [*map(column, positions)]
    else:
        columns = predicted_columns(model, prompt)
        first = columns[-1] if shown is None else shown
        columns = sorted({*columns, first})
        adapter = adapt(model)
        n_edges = adapter.n_layers * adapter.n_heads * len(prompt_tokens(model, prompt)) ** 2
        if len(columns) * n_edges > MAX_SCORES and weight in ("attention", "carried"):
            effects = {}
        elif len(columns) * n_edges > MAX_SCORES:
            columns = [first]
    if shown is not None and shown not in columns:
        raise ValueError(f"position is {position}, which is not one of {columns}")
    return columns, -1 if shown is None else columns.index(shown), effects


@checked
def attention_view(
    model: HookedModel,
    prompt: Prompt,
    *,
    layer: int | None = None,
    heads: Sequence[Head] | None = None,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> plots.AttentionView:
    """Draw attention patterns as one map per head: gate times attention, query by key.

    Heads that attend to nothing are listed below the maps, where circuitsvis's view of all heads
    can be opened. The figure is self-contained; without JavaScript it shows only the maps.

    Args:
        model: a dense model or a SparseTransformer.
        prompt: text or tokens. The map ends at the last mask token, if there is one.
        layer: layer whose heads are shown; by default all layers.
        heads: (layer, head) pairs to show instead, whatever the `layer`.
        labels: text of each column, if not the tokenizer's.
        title: title above the patterns.

    Raises:
        ValueError: the model lacks a layer or head, the prompt is empty, too long or unknown to the
            tokenizer, or there are more than 200,000 attention weights.
    """
    adapter = adapt(model)
    if heads is None:
        layers = range(adapter.n_layers) if layer is None else [layer]
        heads = list(product(layers, range(adapter.n_heads)))
    heads = heads_of(adapter, heads)
    if not heads:
        raise ValueError("there is no head: pass (layer, head) pairs")
    # A bidirectional model runs the whole prompt for any position.
    positions = None if adapter.causal else [0]
    graph = trace_attention(model, prompt, positions=positions, labels=labels)
    n_read = graph.n_read
    return plots.attention_maps(
        graph.attention[*zip(*heads, strict=True)][:, :n_read, :n_read],
        graph.input_tokens[:n_read],
        [str(Node("head", *head)) for head in heads],
        title=title,
    )

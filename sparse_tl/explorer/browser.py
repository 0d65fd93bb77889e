"""The attention patterns of a model's heads on one prompt, to browse."""

from __future__ import annotations

from collections.abc import Sequence

from sparse_tl import plots
from sparse_tl.circuits import trace_attention
from sparse_tl.circuits.removal import Head
from sparse_tl.circuits.trace import Prompt
from sparse_tl.lens import HookedModel, adapt
from sparse_tl.nodes import Node


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
    chosen = _chosen(model, layer, heads)
    # A bidirectional model runs the whole prompt, wherever it is read.
    positions = None if adapt(model).causal else [0]
    graph = trace_attention(model, prompt, positions=positions, labels=labels)
    n_read = graph.n_read
    return plots.attention_view(
        graph.attention[*zip(*chosen, strict=True)][:, :n_read, :n_read],
        graph.input_tokens[:n_read],
        [str(Node("head", layer, head)) for layer, head in chosen],
        title=title,
    )


def _chosen(model: HookedModel, layer: int | None, heads: Sequence[Head] | None) -> list[Head]:
    adapter = adapt(model)
    every = [(i, head) for i in range(adapter.n_layers) for head in range(adapter.n_heads)]
    if layer is not None and heads is not None:
        raise ValueError(f"expected a layer or heads; got layer={layer} and heads={list(heads)}")
    if layer is not None and not 0 <= layer < adapter.n_layers:
        raise ValueError(f"expected a layer in 0..{adapter.n_layers - 1}; got {layer}")
    chosen = list(heads) if heads is not None else [h for h in every if layer in (None, h[0])]
    unknown = [head for head in chosen if head not in every]
    if unknown or not chosen:
        raise ValueError(
            f"expected heads (layer, head) of {adapter.n_layers} layers of {adapter.n_heads} "
            f"heads, at least one; got {unknown[0] if unknown else 'none'}"
        )
    return chosen

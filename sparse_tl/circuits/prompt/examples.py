"""Where else the neurons and features of an attribution graph are active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import Adapter, Hook, HookedModel, Order, adapt, attached, in_evaluation_mode
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph
from sparse_tl.circuits.prompt.tokens import prompt_tokens, text_around
from sparse_tl.circuits.prompt.transcoders import Basis, Transcoders, transcoders_of
from sparse_tl.progress import tracked

_BEFORE, _AFTER = 80, 40
"""Number of characters shown around a token."""
Unit = tuple[int, int, float]
"""Layer, index, and sign of the activation in the graph."""
Example = tuple[str, str, str, float]
"""The text before a token, the token, the text after it, and the activation there."""


@checked
@in_evaluation_mode
@torch.no_grad()
def with_examples(
    model: HookedModel,
    graph: AttributionGraph,
    texts: Sequence[str],
    *,
    basis: Basis = "neurons",
    n: AtLeastOne = 5,
    progress: bool = True,
) -> AttributionGraph:
    """The graph, with the tokens of a text at which its neurons or features are most active.

    Of a neuron whose activation on the graph's prompt is negative, these are its lowest ones. The
    column ``examples`` of the nodes lists, strongest first, the text before a token, the token, the
    text after it, and the activation.

    Args:
        model: the model that the graph is of.
        graph: its graph.
        texts: the texts, each run as one prompt; of one longer than the model's context, the
            beginning.
        basis: that of the graph.
        n: number of tokens for each, at most one from each text.
        progress: whether to show a progress bar.
    """
    import pandas as pd

    adapter = adapt(model)
    units = graph.nodes[graph.nodes["kind"].isin(["neuron", "feature"])]
    signs = units["activation"].ge(0).map({True: 1.0, False: -1.0})
    at = [*zip(units["layer"], units["index"], signs, strict=True)]
    chosen: list[Unit] = [*dict.fromkeys(at)]
    transcoders = transcoders_of(basis, adapter)
    found: list[list[tuple[float, int, int]]] = [[] for _ in chosen]
    rows = [prompt_tokens(model, text)[: adapter.n_ctx] for text in texts if text]
    with tracked("Reading texts", len(rows), progress) as done:
        for row, tokens in enumerate(rows):
            strongest = _activations(adapter, tokens, chosen, transcoders).max(dim=0)
            values, positions = strongest.values.tolist(), strongest.indices.tolist()
            for best, value, position in zip(found, values, positions, strict=True):
                best.append((value, row, position))
                best.sort(reverse=True)
                del best[n:]
            done()
    examples = {
        unit: [
            (before[-_BEFORE:], token, after[:_AFTER], unit[2] * value)
            for value, row, position in best
            for before, token, after in [text_around(model, rows[row], position)]
        ]
        for unit, best in zip(chosen, found, strict=True)
    }
    column: list[list[Example]] = [[] for _ in range(len(graph.nodes))]
    for row, unit in zip(units.index, at, strict=True):
        column[row] = examples[unit]
    nodes = graph.nodes.copy()
    nodes["examples"] = pd.Series(column, index=nodes.index)
    return replace(graph, nodes=nodes)


def _activations(
    adapter: Adapter,
    tokens: Int[Tensor, " pos"],
    units: Sequence[Unit],
    transcoders: Transcoders | None,
) -> Float[Tensor, "pos unit"]:
    """The activations of some units on a prompt, each times its sign."""
    columns = torch.zeros(len(tokens), len(units))

    def keep(layer: int, value: Tensor) -> None:
        values = value if transcoders is None else transcoders.layers[layer].activations(value)
        flat = values.reshape(len(tokens), -1)
        for column, (at, index, sign) in enumerate(units):
            if at == layer:
                columns[:, column] = sign * flat[:, index].float().cpu()

    point = "mlp.hook_post" if transcoders is None else transcoders.input_hook
    hooks: list[Hook] = [
        (f"blocks.{layer}.{point}", Order.LAST, partial(keep, layer))
        for layer in sorted({layer for layer, _, _ in units})
    ]
    with attached(adapter, hooks):
        adapter.final(tokens[None].to(adapter.device))
    return columns

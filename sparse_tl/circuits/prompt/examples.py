"""Where else the neurons and features of an attribution graph are active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import Hook, HookedModel, Order, adapt, attached, in_evaluation_mode
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph
from sparse_tl.circuits.prompt.tokens import prompt_tokens, text_around
from sparse_tl.circuits.prompt.transcoders import Basis, transcoders_of
from sparse_tl.progress import tracked

_BEFORE, _AFTER = 80, 40
"""Number of characters shown around a token."""


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
    adapter, transcoders = adapt(model), transcoders_of(basis, adapt(model))
    units = graph.nodes[graph.nodes["kind"].isin(["neuron", "feature"])]
    signs = units["activation"].ge(0).map({True: 1, False: -1})
    named = [*zip(units["layer"], units["index"], signs, strict=True)]
    chosen = sorted(set(named))  # layer, index, and sign of the activation in the graph
    rows = [prompt_tokens(model, text)[: adapter.n_ctx] for text in texts if text]
    seen, strongest = list[Tensor](), list[Tensor]()

    def keep(layer: int, value: Tensor) -> None:
        values = value if transcoders is None else transcoders.layers[layer].activations(value)
        index, sign = torch.tensor([unit[1:] for unit in chosen if unit[0] == layer]).T
        seen.append(sign * values.flatten(0, -2)[:, index].float().cpu())

    point = "mlp.hook_post" if transcoders is None else transcoders.input_hook
    hooks: list[Hook] = [
        (f"blocks.{layer}.{point}", Order.LAST, partial(keep, layer))
        for layer in sorted(set(units["layer"]))
    ]
    with tracked("Reading texts", len(rows), progress) as done, attached(adapter, hooks):
        for tokens in rows:
            adapter.final(tokens[None].to(adapter.device))
            strongest.append(torch.stack([*torch.cat(seen, dim=1).max(dim=0)]))
            seen.clear()
            done()
    values, positions = torch.stack(strongest).unbind(1)
    best = values.argsort(dim=0, descending=True, stable=True)[:n]
    examples = {unit: list[tuple[str, str, str, float]]() for unit in chosen}
    for column, (unit, found) in enumerate(examples.items()):
        for row in best[:, column].tolist():
            at = int(positions[row, column])
            before, token, after = text_around(model, rows[row], at)
            activation = unit[2] * values[row, column].item()
            found.append((before[-_BEFORE:], token, after[:_AFTER], activation))
    nodes = graph.nodes.copy()
    nodes["examples"] = pd.Series([examples[unit] for unit in named], index=units.index)
    nodes["examples"] = [found if isinstance(found, list) else [] for found in nodes["examples"]]
    return replace(graph, nodes=nodes)

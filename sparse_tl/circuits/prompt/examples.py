"""Where in a text the neurons and features of an attribution graph are most active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import Hook, HookedModel, Order, adapt, attached, in_evaluation_mode
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph
from sparse_tl.circuits.prompt.tokens import prompt_tokens, text_around
from sparse_tl.circuits.prompt.transcoders import Basis, transcoders_of
from sparse_tl.progress import tracked
from sparse_tl.results import Result

_BEFORE, _AFTER = 80, 40
"""Number of characters shown around a token."""


@dataclass(frozen=True, eq=False)
class Examples(Result):
    """Where in some texts every neuron, or every feature of transcoders, is most active.

    Args:
        kind: "neuron" or "feature".
        tokens: the texts.
        values: by layer, the largest activations of each unit, then those of the negated unit; the
            largest first, at most one from each text. Texts differ in their numbers of tokens, and
            layers may differ in those of features.
        places: text and position of each.
    """

    kind: str
    tokens: Sequence[Int[Tensor, " _"]]
    values: Sequence[Float[Tensor, "sign _ example"]]
    places: Sequence[Int[Tensor, "sign _ example two"]]

    def __repr__(self) -> str:
        n_units = sum(values.shape[1] for values in self.values)
        return f"Examples({n_units:,} {self.kind}s in {len(self.tokens):,} texts)"


@checked
@in_evaluation_mode
@torch.no_grad()
def find_examples(
    model: HookedModel,
    texts: Sequence[str | Int[Tensor, " _"]],
    *,
    basis: Basis = "neurons",
    n: AtLeastOne = 5,
    progress: bool = True,
) -> Examples:
    """Find where in some texts every neuron or feature of a model is most active.

    Args:
        model: dense or sparse model; left unchanged.
        texts: texts or tokens, each run as one prompt; of one longer than the model's context, the
            beginning.
        basis: neurons, or the features of `load_transcoders`.
        n: number of examples for each, at most one from each text.
        progress: whether to show a progress bar.

    Raises:
        ValueError: there is no text, or the model cannot run one.
    """
    adapter, transcoders = adapt(model), transcoders_of(basis, adapt(model))
    tokens = [prompt_tokens(model, text)[: adapter.n_ctx] for text in texts if len(text)]
    if not tokens:
        raise ValueError("there is no text to read")
    layers, best = range(adapter.n_layers), dict[int, tuple[Tensor, Tensor]]()

    def keep(text: int, layer: int, x: Tensor) -> None:
        x = x if transcoders is None else transcoders.layers[layer].activations(x)
        x = x.flatten(0, -2).float().cpu()
        values, at = torch.stack([x, -x]).max(dim=1)
        places = torch.stack([torch.full_like(at, text), at], dim=-1).int()[..., None, :]
        values = values[..., None]
        if layer in best:
            values = torch.cat([best[layer][0], values], dim=-1)
            places = torch.cat([best[layer][1], places], dim=-2)
        values, order = values.sort(dim=-1, descending=True, stable=True)
        places = places.take_along_dim(order[..., None], dim=-2)
        best[layer] = values[..., :n], places[..., :n, :]

    point = "mlp.hook_post" if transcoders is None else transcoders.input_hook
    with tracked("reading texts", len(tokens), progress) as done:
        for text, row in enumerate(tokens):
            hooks: list[Hook] = [
                (f"blocks.{layer}.{point}", Order.LAST, partial(keep, text, layer))
                for layer in layers
            ]
            with attached(adapter, hooks):
                adapter.final(row[None].to(adapter.device))
            done()
    kind = "neuron" if transcoders is None else "feature"
    return Examples(kind, tokens, *zip(*(best[layer] for layer in layers), strict=True))


@checked
def with_examples(
    model: HookedModel, graph: AttributionGraph, examples: Examples
) -> AttributionGraph:
    """The graph, with the tokens of texts at which its neurons or features are most active.

    Of a neuron whose activation on the graph's prompt is negative, these are its lowest ones. The
    column ``examples`` of the nodes lists, strongest first, the text before a token, the token, the
    text after it, and the activation.

    Args:
        model: the model that the graph is of.
        graph: its graph.
        examples: of `find_examples`, or of `load_examples` in `sparse_tl.zoo`.
    """
    nodes, column = graph.nodes.copy(), list[list[tuple[str, str, str, float]]]()
    for node in nodes.to_dict("records"):
        column.append([])
        if node["kind"] != examples.kind:
            continue
        layer, sign, unit = node["layer"], int(node["activation"] < 0), node["index"]
        values, places = (
            of_layers[layer][sign, unit].tolist()
            for of_layers in (examples.values, examples.places)
        )
        for value, (text, at) in zip(values, places, strict=True):
            before, token, after = text_around(model, examples.tokens[text], at)
            activation = -value if sign else value
            column[-1].append((before[-_BEFORE:], token, after[:_AFTER], activation))
    nodes["examples"] = pd.Series(column, index=nodes.index)
    return replace(graph, nodes=nodes)

"""Where in a text the neurons and features of an attribution graph are most active."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode, record
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
    tokens: Sequence[Int[Tensor, " _"]] = field(repr=False)
    values: Sequence[Float[Tensor, "sign _ example"]] = field(repr=False)
    places: Sequence[Int[Tensor, "sign _ example two"]] = field(repr=False)


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
    tokens = [prompt_tokens(model, text, longest=adapter.n_ctx) for text in texts if len(text)]
    if not tokens:
        raise ValueError("there is no text to read")
    point = "mlp.hook_post" if transcoders is None else transcoders.input_hook
    names = [f"blocks.{layer}.{point}" for layer in range(adapter.n_layers)]
    best: list[list[tuple[Tensor, Tensor]]] = [[] for _ in names]
    with tracked("reading texts", len(tokens), progress) as done:
        for text, row in enumerate(tokens):
            kept, _ = record(adapter, row[None].to(adapter.device), names)
            for layer, name in enumerate(names):
                x = kept.pop(name)
                x = x if transcoders is None else transcoders.layers[layer].activations(x)
                x = x.flatten(0, -2).float().cpu()
                values, at = torch.stack([x, -x]).max(dim=1)
                places = torch.stack([torch.full_like(at, text), at], dim=-1).int()
                best[layer].append((values[..., None], places[..., None, :]))
                values, places = (torch.cat(each, dim=2) for each in zip(*best[layer], strict=True))
                values, order = values.sort(dim=-1, descending=True, stable=True)
                places = places.take_along_dim(order[..., None], dim=-2)
                best[layer] = [(values[..., :n], places[..., :n, :])]
            done()
    kind = "neuron" if transcoders is None else "feature"
    return Examples(kind, tokens, *zip(*(found for (found,) in best), strict=True))


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

    def shown(node: Mapping[Any, Any]) -> list[tuple[str, str, str, float]]:
        if node["kind"] != examples.kind:
            return []
        layer, sign, unit = node["layer"], int(node["activation"] < 0), node["index"]
        values, places = examples.values[layer][sign, unit], examples.places[layer][sign, unit]
        found = list[tuple[str, str, str, float]]()
        for value, (text, at) in zip(values.tolist(), places.tolist(), strict=True):
            before, token, after = text_around(model, examples.tokens[text], at)
            activation = -value if sign else value
            found.append((before[-_BEFORE:], token, after[:_AFTER], activation))
        return found

    column = pd.Series([*map(shown, graph.nodes.to_dict("records"))], index=graph.nodes.index)
    return replace(graph, nodes=graph.nodes.assign(examples=column))

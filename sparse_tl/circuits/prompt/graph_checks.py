"""How true an attribution graph is: its nodes removed, or kept alone, in the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import (
    Hook,
    HookedModel,
    Order,
    adapt,
    attached,
    in_evaluation_mode,
    tolerance,
)
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph
from sparse_tl.circuits.prompt.linearised import target_value
from sparse_tl.circuits.prompt.tokens import Prompt, prompt_tokens
from sparse_tl.circuits.prompt.transcoders import Basis, feature_hooks, transcoders_of
from sparse_tl.results import NONE, Result

_AXES = {
    "attention edge": ("index", "position", "source"),
    "neuron": ("position", "index"),
    "feature": ("position", "index"),
    "error": ("position",),
}
"""The axes of the values of each kind of node that can be removed."""
_MOST_TOKENS = 512
"""Maximum number of tokens in one pass."""


@dataclass(frozen=True, eq=False)
class GraphCheck(Result):
    """What the removal of nodes does in the model, beside what the graph predicts.

    Args:
        nodes: one row per node, strongest first: ``name``, ``predicted``, which is minus its flow,
            and ``exact``, the change of the target when it is removed, in logits.
    """

    nodes: pd.DataFrame

    @property
    def correlation(self) -> float:
        """Pearson's correlation of predicted and exact changes."""
        return float(self.nodes["predicted"].corr(self.nodes["exact"]))

    @property
    def misses(self) -> pd.DataFrame:
        """The nodes whose exact change has the other sign, or less than half the size."""
        predicted, exact = self.nodes["predicted"], self.nodes["exact"]
        return self.nodes[(predicted * exact <= 0) | (exact.abs() < predicted.abs() / 2)]

    def to_pandas(self) -> pd.DataFrame:
        """The table."""
        return self.nodes

    def __repr__(self) -> str:
        return (
            f"GraphCheck({len(self.nodes)} nodes removed one at a time: correlation "
            f"{self.correlation:.2f} of predicted and exact changes, {len(self.misses)} misses)"
        )


@checked
@in_evaluation_mode
@torch.no_grad()
def check_graph(
    model: HookedModel,
    graph: AttributionGraph,
    *,
    basis: Basis = "neurons",
    n: AtLeastOne = 50,
) -> GraphCheck:
    """Remove the strongest nodes of a graph, one at a time, in the model.

    A removed neuron or feature has an activation of 0 at its position; a removed attention edge
    adds nothing to its head there. Everything after it is computed by the model, so that attention
    patterns, norms and activation functions react, as they do not in the graph.

    Args:
        model: the model that the graph is of.
        graph: its graph.
        basis: that of the graph.
        n: number of nodes.

    Raises:
        ValueError: the target is not the graph's in this model, or the basis is another one.
    """
    run, parts = GraphRun(model, graph, basis), graph.to_pandas()
    parts = parts[parts["name"].isin(run.places.keys())][:n]
    removed, exact = [{name: 0.0} for name in parts["name"]], list[float]()
    rows = max(1, _MOST_TOKENS // len(run.tokens))
    for first in range(0, len(removed), rows):
        values, _ = run.values(removed[first : first + rows])
        exact += (values - run.whole[0]).tolist()
    columns = {"name": parts["name"], "predicted": -parts["flow"], "exact": exact}
    return GraphCheck(pd.DataFrame(columns).reset_index(drop=True))


@checked
@in_evaluation_mode
@torch.no_grad()
def graph_effect(
    model: HookedModel,
    graph: AttributionGraph,
    corrupted: Prompt,
    *,
    basis: Basis = "neurons",
    patterns: Literal["run", "prompt"] = "run",
) -> float:
    """The share of an effect that the nodes of a graph carry, when the model is run with them.

    All attention edges, neurons, features and errors outside the graph have their values on a
    corrupted prompt: ``(m(graph) - m(corrupted)) / (m(prompt) - m(corrupted))``, where m is the
    target. Norms and activation functions are those that the model then computes. Other arguments
    and errors are those of `check_graph`.

    Args:
        corrupted: prompt of the same number of tokens.
        patterns: attention patterns of the edges in the graph: those that the model computes in
            this run, or those of the graph's prompt. The difference is what a graph leaves out: why
            heads attend where they do.

    Raises:
        ValueError: the corrupted prompt is shorter, or its target is the same.
    """
    run, other = GraphRun(model, graph, basis), prompt_tokens(model, corrupted)
    if len(other) < len(run.tokens):
        raise ValueError(
            f"the corrupted prompt has {len(other)} tokens, and the graph's {len(run.tokens)}: "
            "give one of the same length"
        )
    low, others = run.values(tokens=other[: len(run.tokens)])
    high, own = run.whole
    if bool(high == low):
        raise ValueError("the target is the same on both prompts, so that there is no effect")
    frozen = {at: own[at] for at in own if at.startswith("attention") and patterns != "run"}
    kept = dict.fromkeys(run.places, 1.0)
    found, _ = run.values([kept], default=0.0, others=others, patterns=frozen)
    return ((found - low) / (high - low)).item()


@checked
@in_evaluation_mode
@torch.no_grad()
def scale_nodes(
    model: HookedModel,
    graph: AttributionGraph,
    factors: Mapping[str, float],
    *,
    basis: Basis = "neurons",
) -> tuple[float, float]:
    """The target in the model, and in the model with some nodes scaled, all at once.

    Everything after them is computed by the model. Other arguments and errors are those of
    `check_graph`.

    Args:
        factors: what attention edges, neurons, features or errors are multiplied by, by name; 0
            removes a node.

    Raises:
        ValueError: the graph has no such node, or it is an embedding or the target.
    """
    run = GraphRun(model, graph, basis)
    if unknown := factors.keys() - run.places.keys():
        raise ValueError(f"the graph has no node {', '.join(sorted(unknown))} to scale")
    after, _ = run.values([factors])
    return run.whole[0].item(), after.item()


class GraphRun:
    """Runs of a model with factors on attention edges, neurons or features, and errors of a graph.

    The graph is one of this model, `basis` that of the graph, and `whole` the `values` without
    factors; `places` says where each node is: in which values, and at which index. Errors are those
    of `check_graph`.
    """

    def __init__(self, model: HookedModel, graph: AttributionGraph, basis: Basis) -> None:
        self.model, self.graph, self.adapter = model, graph, adapt(model)
        self.tokens = torch.tensor(graph.token_ids)
        self.transcoders = transcoders_of(basis, self.adapter)
        other = "feature" if self.transcoders is None else "neuron"
        if (graph.nodes["kind"] == other).any():
            raise ValueError(f"the graph has {other}s: pass the basis= that it was made with")
        nodes: list[Any] = graph.nodes.to_dict("records")
        self.places = {
            node["name"]: (f"{node['kind']}.{node['layer']}", [node[axis] for axis in axes])
            for node in nodes
            if (axes := _AXES.get(node["kind"]))
        }
        self.whole = self.values()
        found, before = self.whole[0].item(), graph.value
        # With a soft cap, the graph's target is before it.
        capped = self.adapter.model.cfg.output_logits_soft_cap > 0
        if not capped and abs(found - before) > tolerance(self.adapter.dtype) * (1 + abs(before)):
            raise ValueError(
                f"the graph's target was {before:.3f} logits, and is {found:.3f} in this model: "
                "pass the model, and the hooks, that the graph was made with"
            )

    def factors(
        self,
        rows: Sequence[Mapping[str, float]],
        default: float,
        place: str,
        value: Float[Tensor, "row ..."],
    ) -> Float[Tensor, "row ..."]:
        """What the values of a place are multiplied by; arguments are those of `values`."""
        found = torch.full_like(value, default)
        for row, given in enumerate(rows):
            for name, factor in given.items():
                at, index = self.places[name]
                if at == place:
                    found[row, *index] = factor
        return found

    def values(
        self,
        rows: Sequence[Mapping[str, float]] = ({},),
        tokens: Int[Tensor, " pos"] | None = None,
        *,
        default: float = 1.0,
        others: Mapping[str, Tensor] = NONE,
        patterns: Mapping[str, Tensor] = NONE,
    ) -> tuple[Float[Tensor, " row"], dict[str, Tensor]]:
        """The target in each row, after a soft cap, and all values that have factors.

        Args:
            rows: the factors of some nodes in each row; others have the `default`. Each value
                becomes ``factor * own + (1 - factor) * other``.
            tokens: prompt of every row; the graph's by default.
            others: the other values, from an earlier run; 0 by default.
            patterns: attention patterns that edges have in place of those of this run.
        """
        tokens, adapter = self.tokens if tokens is None else tokens, self.adapter
        seen = dict[str, Tensor]()

        def factors(place: str, value: Tensor) -> Tensor:
            seen[place] = value
            return self.factors(rows, default, place, value)

        def scaled(kind: str, layer: int, value: Tensor) -> Tensor:
            place, own = f"{kind}.{layer}", value.view(len(rows), len(tokens), -1)
            factor = factors(place, own)
            return (factor * own + (1 - factor) * others.get(place, 0.0)).view(value.shape)

        def moved(pattern: Tensor, v: Tensor) -> Tensor:
            return torch.einsum("bhqk,bkhd->bqhd", pattern, adapter.values_by_head(v))

        def attention(layer: int, z: Tensor) -> Tensor:
            place, v = f"attention edge.{layer}", f"v.{layer}"
            own = seen[place]
            factor = factors(place, own)
            z = z + moved(factor * patterns.get(place, own) - own, seen[v])
            return z + moved((1 - factor) * others[place], others[v]) if others else z

        kinds = {"attn.hook_pattern": "attention edge", "attn.hook_v": "v"}
        hooks: list[Hook] = []
        if self.transcoders is not None:
            both = partial(scaled, "feature"), partial(scaled, "error")
            hooks += feature_hooks(adapter, self.transcoders, *both)
        for layer in range(adapter.n_layers):
            block = f"blocks.{layer}"
            for point, kind in kinds.items():
                keep = partial(seen.__setitem__, f"{kind}.{layer}")
                hooks.append((f"{block}.{point}", Order.LAST, keep))
            hooks.append((f"{block}.attn.hook_z", Order.LAST, partial(attention, layer)))
            if adapter.has_mlps and self.transcoders is None:
                neurons = partial(scaled, "neuron", layer)
                hooks.append((f"{block}.mlp.hook_post", Order.LAST, neurons))
        with attached(adapter, hooks):
            logits = self.model(tokens.expand(len(rows), -1).to(adapter.device))
        return target_value(logits[:, -1].cpu(), self.graph.answers, self.graph.weights), seen

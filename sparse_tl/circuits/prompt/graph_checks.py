"""How true an attribution graph is: its nodes removed, or kept alone, in the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

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
)
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph
from sparse_tl.circuits.prompt.linearised import target_value
from sparse_tl.circuits.prompt.tokens import Prompt, prompt_tokens
from sparse_tl.circuits.prompt.transcoders import Basis, feature_hooks, transcoders_of
from sparse_tl.results import Result

_MOST_GATES = 2**24
"""Maximum number of gates in one pass."""


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
    """
    run, parts = GraphRun(model, graph, basis), _parts(graph.to_pandas())[:n]
    rows = max(1, _MOST_GATES // sum(gates.numel() for gates in run.gates([{}])))
    (clean, _), exact = run.values(run.gates([{}])), list[float]()
    for first in range(0, len(parts), rows):
        removed = [{name: 0.0} for name in parts["name"][first : first + rows]]
        values, _ = run.values(run.gates(removed))
        exact += (values - clean).tolist()
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
    target. Norms and activation functions are those that the model then computes.

    Args:
        model: the model that the graph is of.
        graph: its graph.
        corrupted: prompt of the same number of tokens.
        basis: that of the graph.
        patterns: attention patterns of the edges in the graph: those that the model computes in
            this run, or those of the graph's prompt. A graph does not say why heads attend where
            they do; the difference is what that leaves out.

    Raises:
        ValueError: the corrupted prompt is shorter, or its target is the same.
    """
    run, other = GraphRun(model, graph, basis), prompt_tokens(model, corrupted)
    if len(other) < len(run.tokens):
        raise ValueError(
            f"the corrupted prompt has {len(other)} tokens, and the graph's {len(run.tokens)}: "
            "give one of the same length"
        )
    low, others = run.values(run.gates([{}]), other[: len(run.tokens)])
    high, own = run.values(run.gates([{}]))
    if bool(high == low):
        raise ValueError("the target is the same on both prompts, so that there is no effect")
    frozen = {name: own[name] for name in own if name.endswith("pattern") and patterns != "run"}
    kept = run.gates([dict.fromkeys(_parts(graph.nodes)["name"], 1.0)], default=0.0)
    found, _ = run.values(kept, others=others, patterns=frozen)
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

    As in `check_graph`, everything after them is computed by the model.

    Args:
        model: the model that the graph is of.
        graph: its graph.
        factors: what attention edges, neurons, features or errors are multiplied by, by name; 0
            removes a node.
        basis: that of the graph.

    Raises:
        ValueError: the graph has no such node, or it is an embedding or the target.
    """
    if unknown := factors.keys() - set(_parts(graph.nodes)["name"]):
        raise ValueError(f"the graph has no node {', '.join(sorted(unknown))} to scale")
    run = GraphRun(model, graph, basis)
    before, after = run.values(run.gates([{}, factors]))[0].tolist()
    return before, after


def _parts(nodes: pd.DataFrame) -> pd.DataFrame:
    """The nodes that can be removed."""
    return nodes[~nodes["kind"].isin(["embedding", "target"])]


class Gates(NamedTuple):
    """What attention edges, neurons or features, and errors are multiplied by, in every row."""

    edges: Float[Tensor, "row layer head query key"]
    units: Float[Tensor, "row layer pos unit"]
    errors: Float[Tensor, "row layer pos"]


class GraphRun:
    """Runs of a model with gates on its attention edges, neurons or features, and errors.

    Args:
        model: the model.
        graph: its graph; `basis` is that of the graph.
    """

    def __init__(self, model: HookedModel, graph: AttributionGraph, basis: Basis) -> None:
        self.model, self.graph, self.adapter = model, graph, adapt(model)
        self.tokens = torch.tensor(graph.token_ids)
        self.transcoders = transcoders_of(basis, self.adapter)
        self.n_units = self.adapter.model.cfg.d_mlp or 0
        if self.transcoders is not None:
            self.n_units = max(len(layer.encoder) for layer in self.transcoders.layers)
        other = "feature" if self.transcoders is None else "neuron"
        if (graph.nodes["kind"] == other).any():
            raise ValueError(f"the graph has {other}s: pass the basis= that it was made with")

    def gates(self, rows: Sequence[Mapping[str, float]], default: float = 1.0) -> Gates:
        """In each row, the gates of some nodes by name; all others are `default`."""
        n, layers, adapter = len(self.tokens), self.adapter.n_layers, self.adapter
        edges = torch.full((len(rows), layers, adapter.n_heads, n, n), default)
        units = torch.full((len(rows), layers, n, self.n_units), default)
        errors = torch.full((len(rows), layers, n), default)
        nodes: dict[Any, Any] = self.graph.nodes.set_index("name").to_dict("index")
        for row, given in enumerate(rows):
            for name, gate in given.items():
                node = nodes[name]
                layer, index, position = node["layer"], node["index"], node["position"]
                if node["kind"] == "attention edge":
                    edges[row, layer, index, position, node["source"]] = gate
                elif node["kind"] == "error":
                    errors[row, layer, position] = gate
                else:
                    units[row, layer, position, index] = gate
        return Gates(edges, units, errors)

    def values(
        self,
        gates: Gates,
        tokens: Int[Tensor, " pos"] | None = None,
        *,
        others: Mapping[str, Tensor] | None = None,
        patterns: Mapping[str, Tensor] | None = None,
    ) -> tuple[Float[Tensor, " row"], dict[str, Tensor]]:
        """The target in each row of gates, after a soft cap, and the values that gates multiplied.

        Args:
            gates: each value is ``gate * own + (1 - gate) * other``.
            tokens: prompt of every row; the graph's by default.
            others: the other values, from an earlier run; 0 by default.
            patterns: attention patterns that edges have in place of those of this run.
        """
        tokens = self.tokens if tokens is None else tokens
        self._gates = Gates(*(each.to(self.adapter.device, self.adapter.dtype) for each in gates))
        self._others, self._patterns = others or {}, patterns or {}
        self._seen = dict[str, Tensor]()
        with attached(self.adapter, self._hooks()):
            logits = self.model(tokens.expand(len(gates.edges), -1).to(self.adapter.device))
        values = target_value(logits[:, -1].cpu(), self.graph.answers, self.graph.weights)
        return values, self._seen

    def _hooks(self) -> list[Hook]:
        hooks: list[Hook] = []
        if self.transcoders is not None:
            hooks += feature_hooks(self.adapter, self.transcoders, self._feature, self._error)
        for layer in range(self.adapter.n_layers):
            block = f"blocks.{layer}"
            for name in (f"{block}.attn.hook_pattern", f"{block}.attn.hook_v"):
                hooks.append((name, Order.LAST, partial(self._seen.__setitem__, name)))
            hooks.append((f"{block}.attn.hook_z", Order.LAST, partial(self._attention, layer)))
            if self.adapter.has_mlps and self.transcoders is None:
                hooks.append((f"{block}.mlp.hook_post", Order.LAST, partial(self._neurons, layer)))
        return hooks

    def _gated(self, name: str, value: Tensor, gate: Tensor) -> Tensor:
        self._seen[name] = value
        return gate * value + (1 - gate) * self._others.get(name, 0.0)

    def _attention(self, layer: int, z: Tensor) -> Tensor:
        pattern, v = (f"blocks.{layer}.attn.{name}" for name in ("hook_pattern", "hook_v"))
        gate = self._gates.edges[:, layer]
        own = self._seen[pattern]
        z = z + _moved(gate * self._patterns.get(pattern, own) - own, self._seen[v])
        if not self._others:
            return z
        return z + _moved((1 - gate) * self._others[pattern], self._others[v])

    def _neurons(self, layer: int, post: Tensor) -> Tensor:
        gate = self._gates.units[:, layer]
        flat = post.view(*gate.shape)
        return self._gated(f"blocks.{layer}.mlp.hook_post", flat, gate).view(post.shape)

    def _feature(self, layer: int, found: Tensor) -> Tensor:
        gate = self._gates.units[:, layer, :, : found.shape[-1]]
        return self._gated(f"features.{layer}", found, gate)

    def _error(self, layer: int, error: Tensor) -> Tensor:
        return self._gated(f"errors.{layer}", error, self._gates.errors[:, layer, :, None])


def _moved(
    pattern: Float[Tensor, "row head query key"], v: Float[Tensor, "#row key kv_head d_head"]
) -> Float[Tensor, "row query head d_head"]:
    v = v.repeat_interleave(pattern.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", pattern, v.expand(len(pattern), -1, -1, -1))

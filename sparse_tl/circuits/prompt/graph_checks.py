"""How true an attribution graph is: its nodes removed, or kept alone, in the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
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
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph, target_value
from sparse_tl.circuits.prompt.linearised import feature_hooks
from sparse_tl.circuits.prompt.tokens import Prompt, prompt_tokens
from sparse_tl.circuits.prompt.transcoders import Basis, transcoders_of
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd

Masks = tuple[
    Bool[Tensor, "*row layer head query key"],
    Bool[Tensor, "*row layer pos unit"],
    Bool[Tensor, "*row layer pos"],
]
"""Where attention edges, neurons or features, and errors are kept."""
_ROW_SIZE = 2**26
"""Number of mask entries in one pass."""


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
    import pandas as pd

    run, parts = _Run(model, graph, basis), _parts(graph)
    parts = parts.sort_values("flow", key=abs, ascending=False, kind="stable")[:n]
    rows = max(1, _ROW_SIZE // run.mask_size)
    exact, clean = list[float](), run.clean()
    for first in range(0, len(parts), rows):
        some = [parts.iloc[[row]] for row in range(first, min(first + rows, len(parts)))]
        edges, units, errors = zip(*map(run.masks, some), strict=True)
        keep = ~torch.stack(edges), ~torch.stack(units), ~torch.stack(errors)
        found = run.values(keep, {})
        exact += (found - clean).tolist()
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
    run, other = _Run(model, graph, basis), prompt_tokens(model, corrupted)
    if len(other) < len(run.tokens):
        raise ValueError(
            f"the corrupted prompt has {len(other)} tokens, and the graph's {len(run.tokens)}: "
            "give one of the same length"
        )
    edges, units, errors = run.masks(None)
    everything, other = (~edges[None], ~units[None], ~errors[None]), other[: len(run.tokens)]
    others, own = dict[str, Tensor](), dict[str, Tensor]()
    low = run.values(everything, others, other)
    high = run.values(everything, own)
    if bool(high == low):
        raise ValueError("the target is the same on both prompts, so that there is no effect")
    frozen = {name: own[name] for name in own if name.endswith("pattern") and patterns != "run"}
    edges, units, errors = run.masks(_parts(graph))
    found = run.values((edges[None], units[None], errors[None]), others, frozen=frozen)
    return ((found - low) / (high - low)).item()


def _parts(graph: AttributionGraph) -> pd.DataFrame:
    """The nodes that can be removed."""
    return graph.nodes[~graph.nodes["kind"].isin(["embedding", "target"])]


class _Run:
    """Runs of a model in which only some attention edges, units and errors have their own values.

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
        if (graph.nodes["kind"] == "feature").any() and self.transcoders is None:
            raise ValueError("the graph's nodes are features: pass its transcoders as basis=")

    @property
    def mask_size(self) -> int:
        """The number of entries in the masks of one run."""
        n, adapter = len(self.tokens), self.adapter
        return adapter.n_layers * n * (self.n_units + adapter.n_heads * n)

    def masks(self, nodes: pd.DataFrame | None) -> Masks:
        """Where these nodes are; with None, nowhere."""
        layers, n = self.adapter.n_layers, len(self.tokens)
        edges = torch.zeros(layers, self.adapter.n_heads, n, n, dtype=torch.bool)
        units = torch.zeros(layers, n, self.n_units, dtype=torch.bool)
        errors = torch.zeros(layers, n, dtype=torch.bool)
        if nodes is None:
            return edges, units, errors
        columns = {
            "attention edge": (edges, ["layer", "index", "position", "source"]),
            "neuron": (units, ["layer", "position", "index"]),
            "feature": (units, ["layer", "position", "index"]),
            "error": (errors, ["layer", "position"]),
        }
        for kind, (mask, names) in columns.items():
            found = nodes.loc[nodes["kind"] == kind, names].to_numpy()
            mask[tuple(torch.tensor(found).T)] = True
        return edges, units, errors

    def clean(self) -> Float[Tensor, ""]:
        """The target in a plain run; with a soft cap, unlike the graph's value, after it."""
        logits = self.model(self.tokens[None].to(self.adapter.device))[0, -1].cpu()
        return target_value(logits, self.graph.answers, self.graph.weights)

    def values(
        self,
        keep: Masks,
        others: dict[str, Tensor],
        tokens: Int[Tensor, " pos"] | None = None,
        *,
        frozen: dict[str, Tensor] | None = None,
    ) -> Float[Tensor, " row"]:
        """The target, where only what is kept has its own value.

        Args:
            keep: the edges, units and errors that are kept, as in `masks`, in each run.
            others: what all others have, from an earlier run; 0 where it is empty. What an empty
                one holds afterwards are the values of this run.
            tokens: prompt of every run; the graph's by default.
            frozen: attention patterns that edges have in place of those of this run.
        """
        tokens = self.tokens if tokens is None else tokens
        edges, units, errors = (mask.to(self.adapter.device) for mask in keep)
        now, replacing, fixed = dict[str, Tensor](), bool(others), frozen or {}

        def hold(name: str, value: Tensor) -> Tensor:
            now[name] = value
            return value

        def heads(layer: int, z: Tensor) -> Tensor:
            pattern, v = (f"blocks.{layer}.attn.{name}" for name in ("hook_pattern", "hook_v"))
            out = ~edges[:, layer]
            if pattern in fixed:
                changed = _moved(fixed[pattern] * ~out, now[v])
            else:
                changed = z - _moved(now[pattern] * out, now[v])
            return changed + _moved(others[pattern] * out, others[v]) if replacing else changed

        def kept_units(name: str, layer: int, value: Tensor) -> Tensor:
            now[name] = value
            other = others[name] if replacing else torch.zeros_like(value)
            return torch.where(units[:, layer, :, : value.shape[-1]], value, other)

        def neurons(layer: int, post: Tensor) -> Tensor:
            shape = post.shape
            return kept_units(
                f"blocks.{layer}.mlp.hook_post", layer, post.view(len(units), len(tokens), -1)
            ).view(shape)

        features, changed_features = dict[int, Tensor](), dict[int, Tensor]()

        def encode(layer: int, x: Tensor) -> None:
            assert self.transcoders is not None
            features[layer] = self.transcoders.layers[layer].activations(x)
            changed_features[layer] = kept_units(f"features.{layer}", layer, features[layer])

        def decode(layer: int, output: Tensor) -> Tensor:
            assert self.transcoders is not None
            name = f"errors.{layer}"
            now[name] = error = output - self.transcoders.written(layer, features)
            other = others[name] if replacing else torch.zeros_like(error)
            error = torch.where(errors[:, layer, :, None], error, other)
            return (self.transcoders.written(layer, changed_features) + error).to(output.dtype)

        hooks: list[Hook] = []
        if self.transcoders is not None:
            hooks += feature_hooks(self.adapter, self.transcoders, encode, decode)
        for layer in range(self.adapter.n_layers):
            block = f"blocks.{layer}"
            for name in (f"{block}.attn.hook_pattern", f"{block}.attn.hook_v"):
                hooks.append((name, Order.LAST, partial(hold, name)))
            hooks.append((f"{block}.attn.hook_z", Order.LAST, partial(heads, layer)))
            if self.adapter.has_mlps and self.transcoders is None:
                hooks.append((f"{block}.mlp.hook_post", Order.LAST, partial(neurons, layer)))
        rows = tokens.expand(len(edges), -1).to(self.adapter.device)
        with attached(self.adapter, hooks):
            logits = self.model(rows)[:, -1].cpu()
        if not replacing:
            others.update(now)
        return target_value(logits, self.graph.answers, self.graph.weights)


def _moved(
    pattern: Float[Tensor, "row head query key"], v: Float[Tensor, "#row key kv_head d_head"]
) -> Float[Tensor, "row query head d_head"]:
    v = v.repeat_interleave(pattern.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", pattern, v.expand(len(pattern), -1, -1, -1))

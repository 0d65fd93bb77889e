"""A model linearised at one prompt: its nodes, and the flows between them.

See `sparse_tl.circuits.prompt.attribution_graph` for the equations.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from sparse_tl.backend import (
    EMBEDDED,
    Adapter,
    Hook,
    Order,
    attached,
    check_numbers,
    neuron_coefficients,
    neuron_directions,
    record,
    relevance_rules,
)
from sparse_tl.circuits.prompt.transcoders import Transcoders, feature_hooks


def target_value(
    logits: Float[Tensor, "*row vocab"], answers: Sequence[int], weights: Sequence[float]
) -> Float[Tensor, "*row"]:
    """The weighted sum of answers' logits, less their mean over the vocabulary if it weighs."""
    found = logits[..., list(answers)] @ logits.new_tensor(weights)
    return found - round(sum(weights)) * logits.mean(dim=-1)


_Group = tuple[pd.DataFrame, Float[Tensor, "node d_model"], Float[Tensor, "node d_model"]]
"""Nodes of one kind and layer: their table, the gradients of their flows by what they read, and
what they add to the residual stream, at all layers together."""


def _group(
    kind: str,
    layer: int,
    gradient: Float[Tensor, "node d_model"],
    added: Float[Tensor, "node d_model"],
    *,
    position: Int[Tensor, " node"],
    **columns: Tensor,
) -> _Group:
    """Nodes of one kind and layer; by default they read at their own position."""
    index = torch.zeros_like(position)
    columns = {"index": index, "position": position, "source": position} | columns
    lists = {name: values.tolist() for name, values in columns.items()}
    return pd.DataFrame({"kind": kind, "layer": layer, **lists}), gradient.detach(), added.detach()


class Linearised:
    """A pass over a prompt with patterns, gates, scales of norms and activation ratios held fixed.

    The logits are read at its end. Features of transcoders are nodes in place of neurons.
    """

    def __init__(
        self, adapter: Adapter, tokens: Int[Tensor, " pos"], transcoders: Transcoders | None
    ) -> None:
        self.adapter, self.tokens, self.transcoders = adapter, tokens, transcoders
        _ = adapter.graph  # refuses models that are not the sum of their parts
        neurons = adapter.has_mlps and transcoders is None
        read = ["hook_resid_pre", "attn.hook_pattern", "attn.hook_v", "attn.hook_z"]
        read += ["mlp_input"] * adapter.has_mlps + ["mlp.hook_post"] * neurons
        names = adapter.source_points()
        names += [f"blocks.{layer}.{name}" for layer in range(adapter.n_layers) for name in read]
        patterns = adapter.layer_points("attn.hook_pattern")
        hooks: list[Hook] = [(name, Order.LAST, Tensor.detach) for name in patterns]
        features = dict[int, Float[Tensor, "1 pos feature"]]()
        # What is given at each position: by layer, the errors of its features; at -1, embeddings.
        self._given = dict[int, Float[Tensor, "1 pos d_model"]]()
        if transcoders is not None:
            keep = features.setdefault, lambda n, x: self._given.setdefault(n, x.detach())
            hooks += feature_hooks(adapter, transcoders, *keep)
        batch = tokens[None].to(adapter.device)
        with attached(adapter, hooks), relevance_rules(adapter):
            self._kept, final = record(adapter, batch, names, differentiable=True)
        check_numbers(adapter, final)
        self.final = final[0, -1]
        if transcoders is not None:
            self._take_features(transcoders, features)
        self._given[-1] = self._kept[EMBEDDED].detach()

    def _take_features(self, transcoders: Transcoders, features: dict[int, Tensor]) -> None:
        """Let features take the place of neurons, if they are what MLPs add to the stream."""
        ratios = list[Tensor]()
        for layer, error in self._given.items():
            self._kept[f"blocks.{layer}.mlp.hook_post"] = features[layer]
            output = self._kept[f"blocks.{layer}.hook_mlp_out"]
            if not torch.allclose(transcoders.written(layer, features) + error, output):
                raise ValueError(
                    f"the output hook of the transcoders is not what the MLP of layer {layer} adds "
                    "to the residual stream: a norm or a gate comes after it"
                )
            ratios.append(error.norm(dim=-1) / output.norm(dim=-1))
        if torch.cat(ratios).median() > 1:
            warnings.warn(
                "at most positions, the error of the transcoders is larger than what the MLP of "
                f"{self.adapter.name!r} writes: they seem to be of another model or hook point "
                f"(their files name {transcoders.model_name or 'no model'!r})",
                stacklevel=6,
            )

    def explain(self, answers: Sequence[int], weights: Sequence[float]) -> float:
        """Take a target, compute its gradients, and return its value.

        With a soft cap on logits, it is that of the logits before it.
        """
        direction, constant = (
            target_value(each.detach(), answers, weights) for each in self.adapter.unembedding()
        )
        norm = self.adapter.final_norm
        value = norm.share(self.final, self.final.detach()) @ direction
        self.value = (norm(self.final) @ direction + constant).detach()
        read = {name: x for name, x in self._kept.items() if x.requires_grad}
        read["final"] = self.final
        found = torch.autograd.grad(
            value, [*read.values()], retain_graph=True, allow_unused=True, materialize_grads=True
        )
        self._slope = dict(zip(read, found, strict=True))
        return self.value.item()

    # ---- nodes -----------------------------------------------------------------------------------

    def nodes(self, most: int) -> tuple[pd.DataFrame, pd.DataFrame, Float[Tensor, "node d_model"]]:
        """All embeddings, the `most` other nodes with the largest absolute flow, and the target.

        Returns:
            The nodes in the order of the model, with the columns of `AttributionGraph.nodes` that
            are numbers; their links; and what each node adds to the residual stream, at all layers
            together.
        """
        layers, n = range(self.adapter.n_layers), len(self.tokens)
        kinds: list[Any] = [(self.edge_flows, self._edges)]
        kinds += [(self.unit_flows, self._units)] * self.adapter.has_mlps
        kinds += [(self._given_flows, self._given_nodes)] * (self.transcoders is not None)
        found = [(nodes, layer, flows(layer)) for layer in layers for flows, nodes in kinds]
        sizes = torch.cat([flows.abs().flatten() for *_, flows in found])
        least = sizes.topk(min(most, len(sizes))).values[-1]
        least = least.clamp(min=torch.finfo(sizes.dtype).tiny)
        groups = [self._given_nodes(-1, self._given_flows(-1), torch.arange(n))]
        for nodes, layer, flows in found:
            places = (flows.abs() >= least).nonzero(as_tuple=True)
            groups.append(nodes(layer, flows[places], *places))
        gradient, value, end = self._slope["final"][None], self.value[None], torch.tensor([n - 1])
        target = ("target", len(layers), gradient, torch.zeros_like(gradient))
        groups.append(_group(*target, position=end, activation=value, flow=value))
        tables, gradients, added = zip(*(g for g in groups if len(g[0])), strict=True)
        table = pd.concat(tables, ignore_index=True)
        return table, self._links(table, torch.cat(gradients)), torch.cat(added)

    @torch.no_grad()
    def _links(self, table: pd.DataFrame, gradient: Float[Tensor, "node d_model"]) -> pd.DataFrame:
        """The links; adds columns of ``constant``, ``left_out`` and ``inputs`` to the nodes."""
        kinds = [table["kind"] == kind for kind in ("attention edge", "error")]
        columns = [table[name] for name in ("layer", "index", "position", "source")]
        edge, error, layer, index, position, at = (
            torch.tensor(each.to_numpy()).to(gradient.device) for each in (*kinds, *columns)
        )
        # Embeddings write at depth 0, the attention of layer l at 2 l + 1, its MLP at 2 l + 2.
        writes = 2 * layer + 2 - edge.long()
        reads = (2 * layer + 2 - (edge | self.adapter.parallel).long()).where(~error, 0)
        # Of all that writes there, in `_flows_from`; an error is the last.
        column = index.where(~edge, index * len(self.tokens) + at).where(~error, -1)
        into, inputs, from_nodes = (gradient.new_zeros(len(table)) for _ in range(3))
        links = list[tuple[Tensor, Tensor, Tensor]]()
        for depth in range(2 * self.adapter.n_layers + 1):
            later = (reads > depth).nonzero()[:, 0]
            flows = self._flows_from(depth, gradient[later], at[later], layer[later])
            into[later] += flows.sum(dim=1)
            inputs[later] += flows.abs().sum(dim=1)
            kept = (writes == depth).nonzero()[:, 0]
            start, end = (position[kept, None] == at[later]).nonzero(as_tuple=True)
            links.append((kept[start], later[end], flows[end, column[kept[start]]]))
        source, target, flow = (torch.cat(each) for each in zip(*links, strict=True))
        from_nodes.index_add_(0, target, flow)
        table["constant"] = (table["flow"] - into.tolist()).where((reads > 0).cpu().numpy(), 0.0)
        table["left_out"] = (into - from_nodes).tolist()
        table["inputs"] = inputs.tolist()
        some = flow != 0
        found = {"source": source[some], "target": target[some], "flow": flow[some].double()}
        return pd.DataFrame({name: values.cpu().numpy() for name, values in found.items()})

    def _flows_from(
        self,
        depth: int,
        gradient: Float[Tensor, "node d_model"],
        at: Int[Tensor, " node"],
        layers: Int[Tensor, " node"],
    ) -> Float[Tensor, "node column"]:
        """The flows into nodes from all that writes at a depth, at the positions that they read."""
        layer = (depth - 1) // 2
        if depth % 2:
            pattern, values = self._at(layer, "attn.hook_pattern"), self._values(layer)
            weight = self.adapter.W_O(layer).detach().to(gradient.dtype)
            towards = torch.einsum("hdm,nm->nhd", weight, gradient)
            flows = torch.einsum("khd,nhd->nhk", values, towards) * pattern[:, at].transpose(0, 1)
            return flows.flatten(1) * self.adapter.attention_scale(layer, self._kept)[0, at, None]
        found = [gradient[:, :0]]
        if layer >= 0 and self.adapter.has_mlps:
            coefficients, directions = self._written(layer)
            n_read = (layers - layer).clamp(max=directions.shape[1])
            found.append(coefficients[at])
            for n in n_read.unique().tolist():
                rows = (n_read == n).nonzero()[:, 0]
                found[-1][rows] *= gradient[rows] @ directions[:, :n].sum(dim=1).T
        if layer in self._given:
            found.append((self._given[layer][0, at] * gradient).sum(dim=1, keepdim=True))
        return torch.cat(found, dim=1)

    def _at(self, layer: int, name: str) -> Tensor:
        """A value of the prompt at a hook point of a layer, as a constant."""
        return self._kept[f"blocks.{layer}.{name}"][0].detach()

    def edge_flows(self, layer: int) -> Float[Tensor, "head query key"]:
        """The flow through every attention edge: ``pattern v . d target / d z``."""
        slope = self._slope[f"blocks.{layer}.attn.hook_z"][0]
        towards = torch.einsum("khd,qhd->hqk", self._values(layer), slope)
        return self._at(layer, "attn.hook_pattern") * towards

    def unit_flows(self, layer: int) -> Float[Tensor, "pos unit"]:
        """The flow through every neuron or feature: its activation times the target's slope."""
        values, slope = self._unit_values(layer)
        return values[0].detach() * slope

    def _given_flows(self, layer: int) -> Float[Tensor, " pos"]:
        """The flow of embeddings, at layer -1, or of what a layer's features do not explain."""
        slope = self._slope[EMBEDDED if layer < 0 else f"blocks.{layer}.hook_mlp_out"]
        return (self._given[layer][0] * slope[0]).sum(dim=1)

    def _values(self, layer: int) -> Float[Tensor, "pos head d_head"]:
        """The values that heads move."""
        return self.adapter.values_by_head(self._at(layer, "attn.hook_v"))

    def _unit_values(self, layer: int) -> tuple[Float[Tensor, "1 pos unit"], Tensor]:
        """The activations of a layer's neurons or features, and the slope of the target by them."""
        name, n = f"blocks.{layer}.mlp.hook_post", len(self.tokens)
        return self._kept[name].reshape(1, n, -1), self._slope[name].reshape(n, -1)

    def _written(
        self, layer: int
    ) -> tuple[Float[Tensor, "pos unit"], Float[Tensor, "unit layer d_model"]]:
        """What each unit writes, at its layer and later ones: a multiple of its directions."""
        values, out = self._unit_values(layer)[0].detach(), self._at(layer, "hook_mlp_out")
        if self.transcoders is not None:
            return values[0], self.transcoders.layers[layer].decoder
        coefficients = neuron_coefficients(self.adapter, layer, values, out[None])[0].to(out.dtype)
        directions = neuron_directions(self.adapter, layer).detach().to(out.dtype)
        return coefficients, directions[:, None]

    def _edges(self, layer: int, flow: Tensor, head: Tensor, query: Tensor, key: Tensor) -> _Group:
        weight = self._at(layer, "attn.hook_pattern")[head, query, key]
        scale = self.adapter.attention_scale(layer, self._kept)[0, query]
        moved = (weight * scale)[:, None] * self._values(layer)[key, head]
        out = torch.einsum("nd,ndm->nm", moved, self.adapter.W_O(layer).detach().to(moved)[head])
        # By the value that is moved, and from there by the stream at the key.
        v = self._kept[f"blocks.{layer}.attn.hook_v"]
        shared = self.adapter.n_heads // v.shape[2]
        slope = weight[:, None] * self._slope[f"blocks.{layer}.attn.hook_z"][0][query, head]
        stream = self._kept[f"blocks.{layer}.hook_resid_pre"]
        gradient = _pulled_back(v, stream, key, head // shared, slope)
        group, places = ("attention edge", layer, gradient, out), {"position": query, "source": key}
        return _group(*group, index=head, **places, activation=weight, flow=flow)

    def _units(self, layer: int, flow: Tensor, position: Tensor, unit: Tensor) -> _Group:
        values, slope = self._unit_values(layer)
        stream = self._kept[f"blocks.{layer}.mlp_input"]
        gradient = _pulled_back(values, stream, position, unit, slope[position, unit])
        coefficients, directions = self._written(layer)
        last = min(directions.shape[1], self.adapter.n_layers - layer)
        added = coefficients[position, unit, None] * directions[unit, :last].sum(dim=1)
        kind = "neuron" if self.transcoders is None else "feature"
        group = (kind, layer, gradient, added.to(stream.dtype))
        active = values[0].detach()[position, unit]
        return _group(*group, index=unit, position=position, activation=active, flow=flow)

    def _given_nodes(self, layer: int, flow: Tensor, position: Tensor) -> _Group:
        given = self._given[layer][0, position]
        group = ("embedding" if layer < 0 else "error", layer, torch.zeros_like(given), given)
        return _group(*group, position=position, activation=given.norm(dim=1), flow=flow)


def _pulled_back(
    value: Float[Tensor, "1 pos *part"],
    stream: Float[Tensor, "1 pos d_model"],
    position: Int[Tensor, " node"],
    part: Int[Tensor, " node"],
    slope: Tensor,
) -> Float[Tensor, "node d_model"]:
    """Each node's gradient by the stream at its position, from that by a part of a value there.

    A value at one position does not depend on the stream at others, so that one backward pass
    serves a node of every position.
    """
    seen = one_hot(position, value.shape[1]).cumsum(dim=0)
    turn = seen.gather(1, position[:, None])[:, 0]
    gradient = slope.new_zeros(len(position), stream.shape[-1])
    for now in turn.unique():
        rows = (turn == now).nonzero()[:, 0]
        cotangent = torch.zeros_like(value)
        cotangent[0, position[rows], part[rows]] = slope[rows].to(value.dtype)
        (found,) = torch.autograd.grad(value, stream, cotangent, retain_graph=True)
        gradient[rows] = found[0, position[rows]].to(gradient.dtype)
    return gradient

"""A model linearised at one prompt: its nodes, and the flows between them.

See `sparse_tl.circuits.prompt.attribution_graph` for the equations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import (
    EMBEDDED,
    Adapter,
    Hook,
    Order,
    attached,
    neuron_coefficients,
    neuron_directions,
    record,
    relevance_rules,
)
from sparse_tl.circuits.prompt.transcoders import Transcoders
from sparse_tl.contexts import autograd

KINDS = ("embedding", "attention edge", "neuron", "feature", "error", "target")
EMBEDDING, EDGE, NEURON, FEATURE, ERROR, TARGET = range(len(KINDS))


class Nodes(NamedTuple):
    """Nodes in the order of the model; the last one is the target.

    Args:
        kind: index into `KINDS`.
        layer, index, position, source, activation, flow: as in `AttributionGraph.nodes`.
        reads: depth at which a node reads the residual stream, at its source.
        gradient: that of its flow by the stream that it reads there.
        constant: flow of biases.
    """

    kind: Int[Tensor, " node"]
    layer: Int[Tensor, " node"]
    index: Int[Tensor, " node"]
    position: Int[Tensor, " node"]
    source: Int[Tensor, " node"]
    reads: Int[Tensor, " node"]
    activation: Float[Tensor, " node"]
    flow: Float[Tensor, " node"]
    gradient: Float[Tensor, "node d_model"]
    constant: Float[Tensor, " node"]


class Writes(NamedTuple):
    """What nodes add to the residual stream at their positions.

    Args:
        node: row of the node; one that writes at several layers has several entries.
        depth: depth at which it is added.
        added: the summand.
    """

    node: Int[Tensor, " entry"]
    depth: Int[Tensor, " entry"]
    added: Float[Tensor, "entry d_model"]


class Flows(NamedTuple):
    """Rows of sources and of targets at one position, and the flow from each to each."""

    sources: Int[Tensor, " source"]
    targets: Int[Tensor, " target"]
    flow: Float[Tensor, "source target"]


class _Collected:
    """Nodes and their writes, in the order in which they are added."""

    def __init__(self) -> None:
        self.nodes: list[Nodes] = []
        self.writes: list[Writes] = []

    def add(
        self,
        kind: int,
        layer: int,
        reads: int,
        position: Int[Tensor, " node"],
        writes: Sequence[tuple[int, Float[Tensor, "node d_model"]]],
        *,
        index: Int[Tensor, " node"] | None = None,
        source: Int[Tensor, " node"] | None = None,
        activation: Float[Tensor, " node"],
        flow: Float[Tensor, " node"],
        gradient: Float[Tensor, "node d_model"],
        constant: Float[Tensor, " node"],
    ) -> None:
        """Add nodes of one kind and layer, with a summand of each at every depth they write at."""
        position = position.cpu()
        rows = torch.arange(len(position)) + sum(len(nodes.kind) for nodes in self.nodes)
        whole = torch.tensor([kind, layer, reads]).expand(len(position), -1).unbind(1)
        index = torch.zeros_like(position) if index is None else index.cpu()
        source = position if source is None else source.cpu()
        values = (v.detach().cpu() for v in (activation, flow, gradient, constant))
        self.nodes.append(Nodes(whole[0], whole[1], index, position, source, whole[2], *values))
        for depth, added in writes:
            entry = Writes(rows, torch.full_like(rows, depth), added.detach().cpu())
            self.writes.append(entry)

    def joined(self) -> tuple[Nodes, Writes]:
        nodes = Nodes(*map(torch.cat, zip(*self.nodes, strict=True)))
        return nodes, Writes(*map(torch.cat, zip(*self.writes, strict=True)))


class Linearised:
    """A pass over a prompt with patterns, gates, scales of norms and activation ratios held fixed.

    Args:
        adapter: dense or sparse model.
        tokens: the prompt, up to where the logits are read.
        transcoders: their features are nodes in place of neurons.
    """

    def __init__(
        self,
        adapter: Adapter,
        tokens: Int[Tensor, " pos"],
        transcoders: Transcoders | None,
    ) -> None:
        self.adapter, self.tokens, self.transcoders = adapter, tokens, transcoders
        _ = adapter.graph  # refuses models that are not the sum of their parts
        self.has_units = adapter.has_mlps or transcoders is not None
        read = ["hook_resid_pre", "attn.hook_pattern", "attn.hook_v", "attn.hook_z"]
        read += ["mlp_input", "hook_mlp_out"] * adapter.has_mlps
        read += ["mlp.hook_post"] * (adapter.has_mlps and transcoders is None)
        names = [adapter.heads_point(layer) for layer in range(adapter.n_layers)]
        names += [f"blocks.{layer}.{name}" for layer in range(adapter.n_layers) for name in read]
        hooks: list[Hook] = [
            (name, Order.LAST, lambda pattern: pattern.detach())
            for name in adapter.layer_points("attn.hook_pattern")
        ]
        self.features: dict[int, Float[Tensor, "1 pos feature"]] = {}
        self.outputs: dict[int, Float[Tensor, "1 pos d_model"]] = {}
        self.errors: dict[int, Float[Tensor, "1 pos d_model"]] = {}
        if transcoders is not None:
            hooks += feature_hooks(adapter, transcoders, self._encode, self._replace)
        batch = tokens[None].to(adapter.device)
        with attached(adapter, hooks), relevance_rules(adapter):
            self._kept, final = record(adapter, batch, [*dict.fromkeys(names)], differentiable=True)
        for layer, output in self.outputs.items():
            written = self._kept[f"blocks.{layer}.hook_mlp_out"].detach()
            if not torch.equal(written, output):
                raise ValueError(
                    f"the output hook of the transcoders is not what the MLP of layer {layer} adds "
                    "to the residual stream: a norm or a gate comes after it"
                )
        self.final = final[0, -1]

    def _encode(self, layer: int, x: Tensor) -> None:
        assert self.transcoders is not None
        self.features[layer] = self.transcoders.layers[layer].activations(x)

    def _replace(self, layer: int, output: Tensor) -> Tensor:
        """The same output, as the sum of the features and a constant error."""
        assert self.transcoders is not None
        found = self.transcoders.written(layer, self.features).to(output.dtype)
        self.outputs[layer] = output.detach()
        self.errors[layer] = (output - found).detach()
        return output.detach() + (found - found.detach())

    @autograd(True)
    def explain(self, weights: Float[Tensor, " vocab"]) -> float:
        """Take the target ``weights . logits``, compute its gradients, and return its value.

        With a soft cap on logits, it is that of the logits before it.
        """
        matrix, bias = (each.detach() for each in self.adapter.unembedding())
        weights = weights.to(matrix)
        norm = self.adapter.final_norm
        added = torch.zeros_like(self.final) if norm.bias is None else norm.bias.detach()
        direction, shown = matrix @ weights, norm.share(self.final, self.final.detach())
        value = shown @ direction
        self.constant = bias @ weights + added @ direction
        self.value = value.detach() + self.constant
        points = ["attn.hook_z"] + ["hook_mlp_out"] * self.has_units
        points += ["mlp.hook_post"] * (self.has_units and self.transcoders is None)
        layers = range(self.adapter.n_layers)
        names = [EMBEDDED, *(f"blocks.{layer}.{point}" for layer in layers for point in points)]
        inputs = {"final": self.final} | {name: self._kept[name] for name in names}
        inputs |= {f"features.{layer}": features for layer, features in self.features.items()}
        found = torch.autograd.grad(
            value,
            [*inputs.values()],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        self._slope = dict(zip(inputs, found, strict=True))
        return self.value.item()

    # ---- nodes -----------------------------------------------------------------------------------

    def nodes(self, most: int) -> tuple[Nodes, Writes]:
        """All embeddings, the `most` other nodes with the largest absolute flow, and the target."""
        adapter, layers, n = self.adapter, range(self.adapter.n_layers), len(self.tokens)
        edges = [self._edge_flows(layer) for layer in layers]
        units = [self._unit_flows(layer) for layer in layers if self.has_units]
        errors = [self._error_flows(layer) for layer in self.errors]
        sizes = torch.cat([flow.abs().flatten() for flow in (*edges, *units, *errors)])
        least = sizes.topk(min(most, len(sizes))).values[-1]
        least = least.clamp(min=torch.finfo(sizes.dtype).tiny)
        found, embedded = _Collected(), self._kept[EMBEDDED][0].detach()
        found.add(
            *(EMBEDDING, -1, -1, torch.arange(n), [(0, embedded)]),
            activation=embedded.norm(dim=1),
            flow=(embedded * self._slope[EMBEDDED][0]).sum(dim=1),
            gradient=torch.zeros_like(embedded),
            constant=embedded.new_zeros(n),
        )
        biases = torch.zeros_like(embedded)  # what earlier layers add that is no node
        for layer in layers:
            self._add_edges(found, layer, edges[layer], least, biases)
            attended = biases + adapter.b_O(layer).detach()
            if self.has_units:
                read = biases if adapter.parallel else attended
                attended = attended + self._add_units(found, layer, units[layer], least, read)
            biases = attended
        gradient, value = self._slope["final"][None], self.value[None]
        depth = 2 * adapter.n_layers + 1
        found.add(
            *(TARGET, adapter.n_layers, depth, torch.tensor([n - 1]), []),
            activation=value,
            flow=value,
            gradient=gradient,
            constant=self.constant + gradient @ biases[-1],
        )
        return found.joined()

    def _at(self, layer: int, name: str) -> Tensor:
        """A value of the prompt at a hook point of a layer, as a constant."""
        return self._kept[f"blocks.{layer}.{name}"][0].detach()

    def _edge_flows(self, layer: int) -> Float[Tensor, "head query key"]:
        """The flow through every attention edge: ``pattern v . d target / d z``."""
        slope = self._slope[f"blocks.{layer}.attn.hook_z"][0]
        towards = torch.einsum("khd,qhd->hqk", self._values(layer), slope)
        return self._at(layer, "attn.hook_pattern") * towards

    def _values(self, layer: int) -> Float[Tensor, "pos head d_head"]:
        """The values that heads move; several heads may share one."""
        v = self._at(layer, "attn.hook_v")
        return v.repeat_interleave(self.adapter.n_heads // v.shape[1], dim=1)

    def _add_edges(
        self,
        found: _Collected,
        layer: int,
        flows: Float[Tensor, "head query key"],
        least: Tensor,
        biases: Float[Tensor, "pos d_model"],
    ) -> None:
        head, query, key = (flows.abs() >= least).nonzero(as_tuple=True)
        weight, flow = (x[head, query, key] for x in (self._at(layer, "attn.hook_pattern"), flows))
        z, scale = self._at(layer, "attn.hook_z"), self._attention_scale(layer)
        moved = (weight * scale[query])[:, None] * self._values(layer)[key, head]
        out = torch.einsum("nd,ndm->nm", moved, self.adapter.W_O(layer).detach().to(z.dtype)[head])
        # By the value that is moved, and from there by the stream at the key.
        v = self._kept[f"blocks.{layer}.attn.hook_v"]
        shared = self.adapter.n_heads // v.shape[2]
        slope = weight[:, None] * self._slope[f"blocks.{layer}.attn.hook_z"][0][query, head]
        stream = self._kept[f"blocks.{layer}.hook_resid_pre"]
        gradient = _pulled_back(v, stream, key, head // shared, slope)
        unread = (stream[0].detach() - biases)[key]
        found.add(
            *(EDGE, layer, 2 * layer + 1, query, [(2 * layer + 1, out)]),
            index=head,
            source=key,
            activation=weight,
            flow=flow,
            gradient=gradient,
            constant=flow - (gradient * unread).sum(dim=1),
        )

    def _attention_scale(self, layer: int) -> Float[Tensor, " pos"]:
        """What the heads' output at each query is multiplied by before ``W_O``.

        It is 1 but in models that normalise what attention writes.
        """
        z, written = self._at(layer, "attn.hook_z"), self._kept[self.adapter.heads_point(layer)][0]
        sizes = (each.detach().flatten(1).norm(dim=1) for each in (written, z))
        return torch.div(*sizes).nan_to_num()

    def _neurons(
        self, layer: int, values: Float[Tensor, "1 pos unit"]
    ) -> tuple[Float[Tensor, "pos unit"], Float[Tensor, "unit d_model"]]:
        """What each neuron's direction is multiplied by, and the directions."""
        out = self._at(layer, "hook_mlp_out")
        coefficients = neuron_coefficients(self.adapter, layer, values, out[None])[0].to(out.dtype)
        return coefficients, neuron_directions(self.adapter, layer).detach().to(out.dtype)

    def _unit_values(self, layer: int) -> tuple[Float[Tensor, "1 pos unit"], Tensor]:
        """The activations of a layer's neurons or features, and the slope of the target by them."""
        name = f"blocks.{layer}.mlp.hook_post" if self.transcoders is None else f"features.{layer}"
        values = self._kept[name] if self.transcoders is None else self.features[layer]
        n = len(self.tokens)
        return values.reshape(1, n, -1), self._slope[name].reshape(n, -1)

    def _unit_flows(self, layer: int) -> Float[Tensor, "pos unit"]:
        """The flow through every neuron or feature: its activation times the target's slope."""
        values, slope = self._unit_values(layer)
        return values[0].detach() * slope

    def _add_units(
        self,
        found: _Collected,
        layer: int,
        flows: Float[Tensor, "pos unit"],
        least: Tensor,
        biases: Float[Tensor, "pos d_model"],
    ) -> Float[Tensor, "pos d_model"]:
        """Add the neurons or features with a large flow; return what the MLP adds besides nodes."""
        values, slope = self._unit_values(layer)
        position, unit = (flows.abs() >= least).nonzero(as_tuple=True)
        flow, activation = flows[position, unit], values[0].detach()[position, unit]
        stream = self._kept[f"blocks.{layer}.mlp_input"]
        gradient = _pulled_back(values, stream, position, unit, slope[position, unit])
        unread = (stream[0].detach() - biases)[position]
        out, depth = self._at(layer, "hook_mlp_out"), 2 * layer + 2
        if self.transcoders is None:
            coefficients, directions = self._neurons(layer, values.detach())
            writes = [(depth, coefficients[position, unit, None] * directions[unit])]
            rest = out - coefficients @ directions
        else:
            decoder = self.transcoders.layers[layer].decoder
            last = min(decoder.shape[1], self.adapter.n_layers - layer)
            scaled = activation[:, None, None] * decoder[unit, :last]
            writes = [(depth + 2 * later, scaled[:, later]) for later in range(last)]
            rest = self.transcoders.layers[layer].bias.expand(len(out), -1)
        found.add(
            NEURON if self.transcoders is None else FEATURE,
            *(layer, depth - 1 if self.adapter.parallel else depth, position),
            [(at, added.to(out.dtype)) for at, added in writes],
            index=unit,
            activation=activation,
            flow=flow,
            gradient=gradient,
            constant=flow - (gradient * unread).sum(dim=1),
        )
        if self.transcoders is not None:
            self._add_errors(found, layer, least)
        return rest.to(out.dtype)

    def _error_flows(self, layer: int) -> Float[Tensor, " pos"]:
        """The flow of what a layer's features do not explain."""
        slope = self._slope[f"blocks.{layer}.hook_mlp_out"][0]
        return (self.errors[layer][0] * slope).sum(dim=1)

    def _add_errors(self, found: _Collected, layer: int, least: Tensor) -> None:
        flow = self._error_flows(layer)
        position = (flow.abs() >= least).nonzero()[:, 0]
        error = self.errors[layer][0, position]
        found.add(
            *(ERROR, layer, -1, position, [(2 * layer + 2, error)]),
            activation=error.norm(dim=1),
            flow=flow[position],
            gradient=torch.zeros_like(error),
            constant=error.new_zeros(len(error)),
        )

    def inputs(self, nodes: Nodes) -> Float[Tensor, " node"]:
        """The sum of the absolute flows into each node from all nodes of the model."""
        inputs = torch.zeros_like(nodes.flow)
        reading = (nodes.reads >= 0).nonzero()[:, 0]
        device = self._slope["final"].device
        reads, at = (each[reading].to(device) for each in (nodes.reads, nodes.source))
        gradient = nodes.gradient[reading].to(device)
        embedded = self._kept[EMBEDDED][0].detach()
        found = (embedded[at] * gradient).sum(dim=1).abs()
        for layer in range(self.adapter.n_layers):
            later = (reads > 2 * layer + 1).nonzero()[:, 0]
            found[later] += self._from_edges(layer, gradient[later], at[later])
            later = (reads > 2 * layer + 2).nonzero()[:, 0] if self.has_units else later[:0]
            found[later] += self._from_units(layer, gradient[later], at[later], reads[later])
        inputs[reading] = found.cpu()
        return inputs

    def _from_edges(
        self, layer: int, gradient: Float[Tensor, "node d_model"], at: Int[Tensor, " node"]
    ) -> Float[Tensor, " node"]:
        pattern, values = self._at(layer, "attn.hook_pattern"), self._values(layer)
        weight = self.adapter.W_O(layer).detach().to(gradient.dtype)
        towards = torch.einsum("hdm,nm->nhd", weight, gradient)
        flow = torch.einsum("khd,nhd->nhk", values, towards) * pattern[:, at].transpose(0, 1)
        return flow.abs().sum(dim=(1, 2)) * self._attention_scale(layer)[at]

    def _from_units(
        self,
        layer: int,
        gradient: Float[Tensor, "node d_model"],
        at: Int[Tensor, " node"],
        reads: Int[Tensor, " node"],
    ) -> Float[Tensor, " node"]:
        values, _ = self._unit_values(layer)
        if self.transcoders is None:
            coefficients, directions = self._neurons(layer, values.detach())
            return (coefficients[at] * (gradient @ directions.T)).abs().sum(dim=1)
        decoder, active = self.transcoders.layers[layer].decoder, values[0].detach()
        found = (self.errors[layer][0, at] * gradient).sum(dim=1).abs()
        for depth in reads.unique().tolist():
            rows = (reads == depth).nonzero()[:, 0]
            n_read = min(decoder.shape[1], (depth - 2 * layer - 1) // 2)
            written = gradient[rows] @ decoder[:, :n_read].sum(dim=1).T
            found[rows] += (active[at[rows]] * written).abs().sum(dim=1)
        return found


def feature_hooks(
    adapter: Adapter,
    transcoders: Transcoders,
    encode: Callable[[int, Tensor], None],
    replace: Callable[[int, Tensor], Tensor],
) -> list[Hook]:
    """Hooks that give every layer's transcoder its input, and replace what it writes.

    Raises:
        ValueError: the transcoders do not fit the model.
    """
    if len(transcoders.layers) != adapter.n_layers:
        raise ValueError(
            f"there are transcoders for {len(transcoders.layers)} layers, and {adapter.name!r} has "
            f"{adapter.n_layers}"
        )
    width = transcoders.layers[0].encoder.shape[1]
    if width != adapter.d_model:
        raise ValueError(
            f"the transcoders read {width} dimensions, and {adapter.name!r} has {adapter.d_model}"
        )
    hooks: list[Hook] = []
    for layer in range(adapter.n_layers):
        block = f"blocks.{layer}"
        hooks.append((f"{block}.{transcoders.input_hook}", Order.LAST, partial(encode, layer)))
        hooks.append((f"{block}.{transcoders.output_hook}", Order.FIRST, partial(replace, layer)))
    return hooks


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
    order = position.argsort(stable=True)
    ordered = position[order]
    turn = torch.empty_like(position)
    first = torch.searchsorted(ordered, ordered)
    turn[order] = torch.arange(len(order), device=order.device) - first
    gradient = slope.new_zeros(len(position), stream.shape[-1])
    for now in range(int(turn.max()) + 1 if len(turn) else 0):
        rows = (turn == now).nonzero()[:, 0]
        cotangent = torch.zeros_like(value)
        cotangent[0, position[rows], part[rows]] = slope[rows].to(value.dtype)
        (found,) = torch.autograd.grad(value, stream, cotangent, retain_graph=True)
        gradient[rows] = found[0, position[rows]].to(gradient.dtype)
    return gradient


# ---- flows ---------------------------------------------------------------------------------------


def flows_at(nodes: Nodes, writes: Writes, position: int) -> Flows:
    """The nodes that write and read at a position, and the flows between them."""
    entries = (nodes.position[writes.node] == position).nonzero()[:, 0]
    sources, row = writes.node[entries].unique(return_inverse=True)
    targets = ((nodes.source == position) & (nodes.reads >= 0)).nonzero()[:, 0]
    earlier = writes.depth[entries, None] < nodes.reads[targets]
    each = (writes.added[entries] @ nodes.gradient[targets].T) * earlier
    flow = each.new_zeros(len(sources), len(targets)).index_add_(0, row, each)
    return Flows(sources, targets, flow)

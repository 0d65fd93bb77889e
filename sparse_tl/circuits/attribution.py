"""Attribution patching: what would change, to first order, if an edge or head were patched.

For a circuit edge from source u to destination v,

    score(u -> v) = sum_pos (patch_u - clean_u) . d m / d input_v

and a negative score means that patching lowers the metric m: the edge helps. Phases:

1. run the corrupted prompts and keep what every source writes;
2. run the clean prompts, keep the same, and differentiate the metric by what every destination
   reads: one backward pass (EAP-IG: at several points between corrupted and clean);
3. contract all sources with all destinations of a layer in one matrix product.

The floor is two forward passes and one backward pass of the plain model.

Reference: EAP, Syed et al., arXiv 2310.10348; EAP-IG, Hanna et al., arXiv 2403.17806, equation 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.circuits.patches import Patch, Patches
from sparse_tl.circuits.scores import Scores
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitGraph, Node
from sparse_tl.lens import (
    EMBEDDED,
    HookedModel,
    PulledGradients,
    Streams,
    Tape,
    graph_of,
)
from sparse_tl.metrics import Metric, measure
from sparse_tl.progress import tracked

Method = Literal["eap", "eap-ig", "eap-ig-activations"]


def attribute_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Method | str = "eap-ig",
    steps: int = 5,
    patch: Patch | str = "corrupted",
    batch_size: int = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of patching each circuit edge, mean over pairs, in units of the metric.

    Args:
        model: dense or sparse; it is not changed.
        pairs: the prompts.
        metric: one value per pair.
        method: "eap" takes the gradient at the clean prompt; "eap-ig" its mean over inputs
            ``corrupted + k / steps (clean - corrupted)``, k = 1..steps, of the embeddings;
            "eap-ig-activations" moves one layer's outputs at a time instead.
        steps: of the interpolation.
        patch: what an edge is patched with: the corrupted prompt's value, the mean over the clean
            prompts at that position, or 0. The interpolation ends there too.
        batch_size: pairs per pass.
        progress: whether to show it.

    Raises:
        ValueError: an unknown method or patch, no steps, a metric that is not one finite number
            per pair, or a model whose parts do not write to the residual stream as they are.
    """
    graph = graph_of(model)
    scores = torch.zeros(len(graph.sources), len(graph.destinations), dtype=torch.float64)
    plan = Passes(metric, method, steps, Patches(model, graph, pairs, patch, batch_size))
    with tracked("scoring edges", plan.count, progress) as step:
        for batch in plan.patches.batches:
            difference = None
            for rows, passes in groupby(plan.passes(batch), key=lambda one: one.rows):
                pulled = PulledGradients(model, graph.n_layers)
                for one in passes:
                    if difference is None:
                        difference = one.difference.outputs(model, graph)
                    one.pull(pulled)
                    step()
                assert difference is not None
                scores += _contract(graph, pulled, difference, rows)
    return Scores(graph, scores.where(graph.exists, 0.0) / len(pairs), method)


def attribute_heads(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Method | str = "eap-ig",
    steps: int = 5,
    patch: Patch | str = "corrupted",
    batch_size: int = 32,
    progress: bool = True,
) -> Scores:
    """The first-order effect of patching each head's output, ``sum (patch_z - z) . d m / d z``.

    Arguments and errors as of `attribute_edges`; "eap-ig-activations" moves the heads of one layer
    at a time.
    """
    graph = graph_of(model)
    scores = torch.zeros(graph.n_layers, graph.n_heads, dtype=torch.float64)
    patches = Patches(model, graph, pairs, patch, batch_size)
    plan = Passes(metric, method, steps, patches, heads_only=True)
    with tracked("scoring heads", plan.count, progress) as step:
        for batch in plan.patches.batches:
            for one in plan.passes(batch):
                layers = [i for i in range(graph.n_layers) if one.covers(graph, Node("head", i))]
                names = [f"blocks.{layer}.attn.hook_z" for layer in layers]
                gradients = one.gradients([one.tape.kept(name) for name in names])
                for layer, gradient in zip(layers, gradients, strict=True):
                    effect = (one.difference.z[layer] * gradient).sum(dim=(0, 1, 3))
                    scores[layer] += one.share * effect.cpu().double()
                step()
    return Scores(graph.heads, scores / len(pairs), method)


@dataclass
class Pass:
    """One differentiable forward pass, and which sources its gradients count for."""

    tape: Tape
    value: Float[Tensor, ""]
    difference: Streams
    share: float
    rows: slice

    def covers(self, graph: CircuitGraph, source: Node) -> bool:
        return graph.source_index(source) in range(*self.rows.indices(len(graph.sources)))

    def pull(self, pulled: PulledGradients) -> None:
        """Add the gradients of this pass."""
        layers = self.tape.layers
        wanted = [tensor for reads in layers for tensor in reads.tensors]
        *gradients, final = self.gradients([*wanted, self.tape.final])
        pulled.add(layers, gradients, final, self.share)

    def gradients(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of the metric's sum; 0 at tensors that it does not depend on."""
        if not tensors:
            return ()
        return torch.autograd.grad(self.value, tensors, materialize_grads=True)


def _lent(one: Pass) -> Iterator[Pass]:
    """A pass until the next one is asked for: two would double the memory."""
    yield one
    del one.tape, one.value


class Passes:
    """The passes that a method asks for; made once, run for every batch.

    With `heads_only` what says nothing about heads is not run.

    Raises:
        ValueError: an unknown method, or no steps.
    """

    def __init__(
        self,
        metric: Metric,
        method: Method | str,
        steps: int,
        patches: Patches,
        also: Sequence[str] = (),
        heads_only: bool = False,
    ) -> None:
        if method not in get_args(Method) or steps < 1:
            raise ValueError(
                f"expected a method of {get_args(Method)} and at least 1 step; got {method!r} and "
                f"{steps}"
            )
        self.metric, self.method, self.steps, self.patches = metric, method, steps, patches
        self.model, self.graph = patches.model, patches.graph
        self.also, self.heads_only = tuple(also), heads_only

    @property
    def count(self) -> int:
        """How many passes there are in all."""
        if self.method == "eap":
            return len(self.patches.batches)
        layers = self.graph.n_layers * (1 + (self.graph.has_mlps and not self.heads_only))
        moved = 1 if self.method == "eap-ig" else layers + (not self.heads_only)
        return len(self.patches.batches) * self.steps * moved

    def passes(self, batch: PromptPairs) -> Iterator[Pass]:
        """The clean prompts first: that pass also says what every source writes."""
        patched = self.patches.written(batch)
        tape, value = self._differentiable(batch, {})
        clean = tape.streams
        change = clean.change_to(patched)
        if self.method != "eap-ig-activations":
            share = 1.0 if self.method == "eap" else 1 / self.steps
            yield from _lent(Pass(tape, value, change, share, slice(None)))
        del tape, value  # frees the autograd graph before the next pass
        for rows, name, whole, way in self._moved(clean, change):
            for k in range(self.steps, 0, -1):
                if name == EMBEDDED and self.method == "eap-ig" and k == self.steps:
                    continue  # the clean pass
                moved = whole + (1 - k / self.steps) * way
                found = self._differentiable(batch, {name: moved})
                yield from _lent(Pass(*found, change, 1 / self.steps, rows))
                del found

    def _moved(
        self, clean: Streams, change: Streams
    ) -> Iterator[tuple[slice, str, Tensor, Tensor]]:
        """What is interpolated: score rows, hook point, clean value, and the way to the patch."""
        if self.method == "eap":
            return
        if self.method == "eap-ig":
            yield slice(None), EMBEDDED, clean.embedded, change.embedded
            return
        if not self.heads_only:
            yield slice(0, 1), EMBEDDED, clean.embedded, change.embedded
        for layer in range(self.graph.n_layers):
            first = self.graph.source_index(Node("head", layer))
            heads = slice(first, first + self.graph.n_heads)
            yield heads, f"blocks.{layer}.attn.hook_z", clean.z[layer], change.z[layer]
            if self.graph.has_mlps and not self.heads_only:
                row = slice(heads.stop, heads.stop + 1)
                name = f"blocks.{layer}.hook_mlp_out"
                yield row, name, clean.mlp[layer], change.mlp[layer]

    def _differentiable(
        self, batch: PromptPairs, replaced: dict[str, Tensor]
    ) -> tuple[Tape, Float[Tensor, ""]]:
        tape = Tape(self.model, self.graph, replaced=replaced, differentiable=True, also=self.also)
        logits = tape.run(batch.clean, batch.positions)
        with torch.enable_grad():
            value = measure(self.metric, logits, batch).sum()
        if not value.requires_grad:
            raise ValueError(
                "expected a metric with a gradient, such as a difference of logits; what it "
                "returned does not depend on the logits differentiably"
            )
        return tape, value


def _contract(
    graph: CircuitGraph,
    pulled: PulledGradients,
    difference: Float[Tensor, "source batch pos d_model"],
    rows: slice,
) -> Float[Tensor, "source destination"]:
    """Some sources with all destinations, layer by layer, on the CPU in float64."""
    scores = torch.zeros(len(graph.sources), len(graph.destinations), dtype=torch.float64)
    flat = difference.flatten(1)
    first, end, _ = rows.indices(len(graph.sources))
    most = graph.n_heads + 2 * graph.n_kv_heads + graph.has_mlps
    buffer = difference.new_empty(most, *difference.shape[1:])
    start = 0
    for layer in range(graph.n_layers):
        before = slice(first, min(end, graph.n_sources_before(Node("mlp", layer))))
        if before.start >= before.stop:  # these sources come later
            start += most
            continue
        reading = pulled.layer(layer, buffer).flatten(1)
        found = (flat[before] @ reading.T).cpu().double()
        scores[before, start : start + len(reading)] = found
        start += len(reading)
    assert pulled.final is not None
    scores[rows, -1] = (flat[rows] @ pulled.final.flatten()).cpu().double()
    return scores

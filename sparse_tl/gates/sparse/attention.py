"""A gate on every attention edge, computed from the edge's own attention.

With the pattern ``p = softmax(s)``,

    A_ij ~ Bernoulli(sigmoid(e_ij + r_i)),    z = (A * p) V        (no renormalisation)

in training; ``A_ij = [e_ij + r_i > 0]`` otherwise. The two kinds of gate differ in the logit's
terms ``e`` (edge) and ``r`` (query): see `ScoreGates` and `ShareGates`. Masked pairs (future
tokens, padding) have an attention of 0 whatever their gate, and are not counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sparse_tl.gates.distributions import BernoulliGate, GateDistribution, GateMode, gate_values
from sparse_tl.gates.passes import ComputedGates, Counted, GateSettings, layer_hooks
from sparse_tl.gates.patches import gate
from sparse_tl.gates.sparse.blockwise import GatedAttention, GatedPattern
from sparse_tl.gates.sparse.layer_counts import attention_edges_of_layer
from sparse_tl.gates.sparse.straight_through import edge_term, gated_pattern
from sparse_tl.lens import (
    EVERYTHING,
    Adapter,
    AttentionMask,
    Block,
    Deferred,
    Hook,
    check_gates,
    explicit,
    mask_hooks,
)

GateKind = Literal["score", "share"]
"""What a gate reads: its edge's score, or its edge's share of the query's attention."""


class AttentionGates(ComputedGates, ABC):
    """Learnable gates on all attention edges of a model.

    Args:
        bias: learnable term of each head in the logits of its gates; a larger bias opens more.
        distribution: how gates are sampled and evaluated.
    """

    kind: GateKind

    def __init__(
        self, bias: Float[Tensor, "layer head"], distribution: GateDistribution | None
    ) -> None:
        super().__init__(distribution or BernoulliGate())
        self.bias = nn.Parameter(bias)

    @staticmethod
    def _initial(adapter: Adapter, value: float) -> Float[Tensor, "layer head"]:
        shape = adapter.n_layers, adapter.n_heads
        return torch.full(shape, value, device=adapter.device, dtype=adapter.gate_dtype)

    @abstractmethod
    def read_points(self, adapter: Adapter) -> list[str]:
        """The hook points, one per layer, that the gates read besides the pattern."""

    @abstractmethod
    def _terms(
        self, layer: int, read: Tensor
    ) -> tuple[
        Float[Tensor, "prompt head query key"] | None, Float[Tensor, "#prompt head #query 1"]
    ]:
        """The edges' term of the logits (scores, or None for log p), and each query's term."""

    def hooks(self, adapter: Adapter) -> list[Hook]:
        """Hooks that attach these gates: they read inputs last, and set patterns first."""
        patterns = adapter.layer_points("attn.hook_pattern")
        masks: dict[int, AttentionMask] = {}
        gated = layer_hooks(self.read_points(adapter), patterns, partial(self._gate_pattern, masks))
        return mask_hooks(adapter, masks) + gated

    def check(self, adapter: Adapter) -> None:
        """Check that these gates fit a model.

        Raises:
            ValueError: the shapes do not match, or gates would have no effect on the model.
        """
        check_gates(adapter)
        if tuple(self.bias.shape) != (adapter.n_layers, adapter.n_heads):
            raise ValueError(
                f"expected gates for {adapter.n_layers} layers of {adapter.n_heads} heads; got "
                f"biases of shape {tuple(self.bias.shape)}"
            )

    def extra_repr(self) -> str:
        """Size, kind, distribution and biases."""
        n_layers, n_heads = self.bias.shape
        return (
            f"{n_layers} layers x {n_heads} heads, by {self.kind}, {self.distribution}, "
            f"bias {self.bias.min().item():.2f} to {self.bias.max().item():.2f}"
        )

    def _gate_pattern(
        self,
        masks: dict[int, AttentionMask],
        layer: int,
        read: Tensor,
        pattern: Float[Tensor, "prompt head query key"],
    ) -> Float[Tensor, "prompt head query key"] | None:
        mask, now = masks.pop(layer), self._settings_of(layer, read)
        if now.idle or (now.does_nothing and not isinstance(pattern, Deferred)):
            return None
        scores, row = self._terms(layer, read)
        cost, real = self._cost(layer, now, pattern), _real_queries(now, pattern)
        size, device = pattern.shape[2:], pattern.device
        counting = now.counts is not None

        def valid(block: Block) -> Tensor | None:
            if not counting:
                return None
            allowed = mask.allowed(block, size, device)
            return allowed if real is None else allowed & block.of(real)

        whole = not isinstance(pattern, Deferred) or not isinstance(scores, Deferred | None)
        if now.keep_gates or whole:
            scores, pattern = explicit(scores), explicit(pattern)
            gated, counted = self._gate(now, scores, pattern, row, cost, valid(EVERYTHING))
            if now.counts is not None:
                now.counts.append(counted)
            return gated

        # Drop the counts: they hold the graph whose backward pass holds this function, and Python's
        # garbage collector does not see cycles that go through an autograd graph.
        without = replace(now, counts=None)

        def gate_block(block: Block, s: Tensor | None, p: Tensor, row: Tensor, g: Any) -> Any:
            costs = None if cost is None else block.of(cost)
            here = replace(without, generator=g)
            gated, counted = self._gate(here, s, p, row, costs, valid(block))
            return p if gated is None else gated, counted

        seed = _drawn(now.generator) if now.mode is GateMode.SAMPLED and now.noise else None
        scored = scores.expression if isinstance(scores, Deferred) else None
        attention = GatedAttention(pattern.expression, scored, mask, row, gate_block, seed)
        return GatedPattern.under(attention, pattern, now.counts)

    def _gate(
        self,
        now: GateSettings,
        scores: Float[Tensor, "prompt head query key"] | None,
        pattern: Float[Tensor, "prompt head query key"],
        row: Float[Tensor, "#prompt head #query 1"],
        cost: Float[Tensor, "#head #query #key"] | None,
        valid: Bool[Tensor, "#prompt #head query key"] | None,
    ) -> tuple[Float[Tensor, "prompt head query key"] | None, Counted]:
        """The pattern of some heads under gates, None if it is unchanged, and counts if `valid`."""
        if now.mode is GateMode.OPEN and valid is None:
            return None, {}
        rule = self.distribution
        if now.mode is GateMode.SAMPLED and type(rule) is BernoulliGate and not now.keep_gates:
            return gated_pattern(scores, pattern, row, rule.temperature, now, cost, valid)
        logits = edge_term(scores, pattern, row.dtype) + row
        counted: Counted = {}
        if valid is not None:
            is_open, probability = self._opened(now, logits, valid)
            counted = attention_edges_of_layer(valid, is_open, probability, cost, now.keep_gates)
        if now.mode is GateMode.OPEN:
            return None, counted
        gates = gate_values(rule, logits, now.mode, now.generator, now.noise)
        return gate(gates.to(pattern.dtype), pattern, None), counted

    def _cost(
        self, layer: int, now: GateSettings, like: Float[Tensor, "prompt head query key"]
    ) -> Float[Tensor, "#head #query #key"] | None:
        """The costs of a layer's edges; None if all cost 1."""
        if now.edge_cost is None:
            return None
        check_edge_cost(now.edge_cost, (len(self.bias), *like.shape[1:]))
        cost = now.edge_cost.reshape((1,) * (4 - now.edge_cost.ndim) + tuple(now.edge_cost.shape))
        return cost[layer if len(cost) > 1 else 0].to(like.device, self.bias.dtype)


def _drawn(generator: torch.Generator | None) -> int:
    """A seed drawn from a generator."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def _real_queries(
    now: GateSettings, pattern: Float[Tensor, "prompt head query key"]
) -> Bool[Tensor, "prompt 1 query 1"] | None:
    """Queries that are not padding, which models mask as a key but not as a query."""
    if now.real is None:
        return None
    return now.real.to(pattern.device).bool()[:, None, -pattern.shape[2] :, None]


def check_edge_cost(cost: Float[Tensor, "*#edge"], edges: Sequence[int | None]) -> None:
    """Check that edge costs broadcast to ``[layer, head, query, key]``.

    Args:
        cost: cost per attention edge.
        edges: number of layers, heads, queries and keys; None where the prompts determine it.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    given = (1,) * (4 - cost.ndim) + tuple(cost.shape)
    if len(given) > 4 or any(
        there is not None and size not in (1, there)
        for size, there in zip(given, edges, strict=True)
    ):
        names = zip(("layer", "head", "query", "key"), edges, strict=True)
        here = ", ".join(name if there is None else str(there) for name, there in names)
        raise ValueError(
            "expected edge_cost to be broadcastable to [layer, head, query, key], here "
            f"[{here}]; got the shape {list(cost.shape)}"
        )


def costs_of_first(
    cost: Float[Tensor, "*edge"] | None, width: int
) -> Float[Tensor, "*first"] | None:
    """Costs of the attention edges within the first columns of a prompt.

    Args:
        cost: cost per attention edge, broadcastable to ``[layer, head, query, key]``.
        width: number of columns.
    """
    if cost is None or cost.ndim == 0:
        return cost
    return cost[..., :width] if cost.ndim == 1 else cost[..., :width, :width]

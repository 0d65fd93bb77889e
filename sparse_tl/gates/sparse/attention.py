"""A gate on every attention edge, computed from the edge's own attention.

With the pattern ``p = softmax(s)``,

    A_ij ~ Bernoulli(sigmoid(e_ij + r_i)),    z = (A * p) V        (no renormalisation)

in training; ``A_ij = [e_ij + r_i > 0]`` otherwise. The two kinds of gate differ in the logit's
terms ``e`` (edge) and ``r`` (query): see `ScoreGates` and `ShareGates`. Masked pairs (future
tokens, padding) have an attention of 0 whatever their gate, and are not counted.

`AttentionGates._gate` gates a part of a pattern. A pattern with values is one part; a deferred one,
of a long prompt, is gated by blocks, which `blockwise` computes, uses and discards.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sparse_tl.backend import (
    EVERYTHING,
    Adapter,
    AttentionMask,
    Block,
    Deferred,
    Hook,
    HookedModel,
    Order,
    adapt,
    attached,
    check_gates,
    check_scores,
    defer_scores,
    explicit,
    mask_hooks,
    without_user_hooks,
)
from sparse_tl.gates.distributions import BernoulliGate, GateDistribution, GateMode, gate_values
from sparse_tl.gates.patches import gate
from sparse_tl.gates.sparse.blockwise import GatedAttention, GatedPattern
from sparse_tl.gates.sparse.computed_gates import ComputedGates, GateSettings, layer_hooks, using
from sparse_tl.gates.sparse.counting import Counted, attention_edges_of_layer
from sparse_tl.gates.sparse.straight_through import edge_term, gated_pattern

GateKind = Literal["score", "share"]
"""What a gate reads: its edge's score, or its edge's share of the query's attention."""


class AttentionGates(ComputedGates, ABC):
    """Learnable gates on all attention edges of a model.

    Args:
        bias: learnable term of each head in the logits of its gates; a larger bias opens more.
        distribution: how gates are sampled and evaluated.
    """

    kind: GateKind
    reads: str
    """The hook point, in every layer, that the gates read besides the pattern."""

    def __init__(
        self, bias: Float[Tensor, "layer head"], distribution: GateDistribution | None
    ) -> None:
        super().__init__(distribution or BernoulliGate())
        self.bias = nn.Parameter(bias)

    @abstractmethod
    def _terms(
        self, layer: int, read: Tensor
    ) -> tuple[
        Float[Tensor, "prompt head query key"] | None, Float[Tensor, "#prompt head #query 1"]
    ]:
        """The edges' term of the logits (scores, or None for log p), and each query's term."""

    def hooks(self, adapter: Adapter) -> list[Hook]:
        """Hooks that attach these gates: they read inputs last, and set patterns first."""
        reads, patterns = map(adapter.layer_points, (self.reads, "attn.hook_pattern"))
        masks: dict[int, AttentionMask] = {}
        gated = layer_hooks(reads, patterns, partial(self._gate_pattern, masks))
        return mask_hooks(adapter, masks) + gated

    def check(self, adapter: Adapter) -> None:
        """Check that these gates fit a model; raises a ValueError if the shapes do not match."""
        if tuple(self.bias.shape) != (adapter.n_layers, adapter.n_heads):
            raise ValueError(
                f"these gates have biases of shape {tuple(self.bias.shape)}; the model has "
                f"{adapter.n_layers} layers of {adapter.n_heads} heads"
            )

    def extra_repr(self) -> str:
        """Size, kind, distribution and biases."""
        n_layers, n_heads = self.bias.shape
        return f"{n_layers} layers x {n_heads} heads, by {self.kind}, {super().extra_repr()}"

    def _gate_pattern(
        self,
        masks: dict[int, AttentionMask],
        layer: int,
        read: Tensor,
        pattern: Float[Tensor, "prompt head query key"],
    ) -> Float[Tensor, "prompt head query key"] | None:
        mask, now = masks.pop(layer), self._now()
        deferred = isinstance(pattern, Deferred)
        if now.does_nothing and not (now.by_blocks and deferred):
            return None
        scores, row = self._terms(layer, read)
        size, device = pattern.shape[2:], pattern.device
        cost = self._cost(layer, now, (*pattern.shape[1:],))
        real, counting = now.real, now.counts is not None
        if real is not None:  # models mask padding as a key, but not as a query
            real = real.to(device).bool()[:, None, -size[0] :, None]

        def part(
            now: GateSettings, block: Block, s: Tensor | None, p: Tensor, row: Tensor
        ) -> tuple[Tensor | None, Counted]:
            valid = None
            if counting:
                valid = mask.allowed(block, size, device)
                valid = valid if real is None else valid & block.of(real)
            return self._gate(now, s, p, row, None if cost is None else block.of(cost), valid)

        if now.keep_gates or not deferred or not isinstance(scores, Deferred | None):
            gated, counted = part(now, EVERYTHING, explicit(scores), explicit(pattern), row)
            if now.counts is not None:
                now.counts.append(counted)
            return gated

        # Drop the counts: they hold the graph whose backward pass holds this function, and Python's
        # garbage collector does not see cycles that go through an autograd graph.
        without = replace(now, counts=None)

        def gate_block(block: Block, s: Tensor | None, p: Tensor, row: Tensor, g: Any) -> Any:
            gated, counted = part(replace(without, generator=g), block, s, p, row)
            return p if gated is None else gated, counted

        seed = None
        if now.mode is GateMode.SAMPLED and now.noise:
            on = None if now.generator is None else now.generator.device
            seed = int(torch.randint(2**62, (), generator=now.generator, device=on))
        scored = scores.expression if isinstance(scores, Deferred) else None
        attention = GatedAttention(pattern.expression, scored, mask, row, gate_block, seed)
        return GatedPattern.under(attention, now.counts)

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
        self, layer: int, now: GateSettings, edges: tuple[int, ...]
    ) -> Float[Tensor, "#head #query #key"] | None:
        """The costs of a layer's edges; None if all cost 1."""
        if now.edge_cost is None:
            return None
        check_edge_cost(now.edge_cost, (len(self.bias), *edges))
        cost = now.edge_cost[(None,) * (4 - now.edge_cost.ndim)]
        return cost[layer if len(cost) > 1 else 0].to(self.bias)


class ScoreGates(AttentionGates):
    """Learnable gates on all attention edges that read the edge's score, as in the paper.

    With scores ``s`` at ``hook_attn_scores`` and a learnable bias ``b`` per head,
    ``[layer, head]``,

        P(A_ij = 1) = sigmoid(s_ij + b)

    A constant that is added to all scores of a query changes these gates, although softmax ignores
    it.

    Reference: arXiv 2512.05865, section 3.
    """

    kind: Literal["score"] = "score"
    reads = "attn.hook_attn_scores"

    @classmethod
    def of(
        cls,
        adapter: Adapter,
        *,
        initial_bias: float = 4.0,
        distribution: GateDistribution | None = None,
    ) -> ScoreGates:
        """New gates for a model; see `SparseTransformer`."""
        return cls(_initial(adapter, initial_bias), distribution)

    def check(self, adapter: Adapter) -> None:
        """As `AttentionGates.check`; also that scores do not depend on tokens that follow."""
        check_scores(adapter)
        super().check(adapter)

    def _terms(
        self, layer: int, read: Float[Tensor, "prompt head query key"]
    ) -> tuple[Float[Tensor, "prompt head query key"], Float[Tensor, "1 head 1 1"]]:
        return read, self.bias[layer][None, :, None, None]


class ShareGates(AttentionGates):
    """Learnable gates on all attention edges that read the edge's share of its query's attention.

    With the pattern ``p = softmax(s)``, the query vector ``q`` at ``hook_q`` (before rotary
    embeddings), and learnable ``c`` and ``w`` per head, the parameters `bias`, ``[layer, head]``,
    and `weight`, ``[layer, head, d_head]``,

        P(A_ij = 1) = p_ij / (p_ij + t_i),    log t_i = -(c + w . q_i)

    so the logit is ``log p_ij + c + w . q_i``. Without sampling, an edge is open if its share
    exceeds its head's threshold t at that query. Nothing is renormalised, so closing edges removes
    no more attention than they had. Adding a constant to all scores of a query changes neither p
    nor these gates. If the threshold exceeds 1 at a query, the head closes there altogether, its
    attention sink included.

    Training starts at ``w = 0``, where all queries of a head share a threshold. `ScoreGates` are
    the special case ``log t_i = -(b + log sum_j exp(s_ij))``.
    """

    kind: Literal["share"] = "share"
    reads = "attn.hook_q"

    def __init__(
        self,
        bias: Float[Tensor, "layer head"],
        weight: Float[Tensor, "layer head d_head"],
        distribution: GateDistribution | None,
    ) -> None:
        super().__init__(bias, distribution)
        self.weight = nn.Parameter(weight)

    @classmethod
    def of(
        cls,
        adapter: Adapter,
        *,
        initial_threshold: float = 0.005,
        distribution: GateDistribution | None = None,
    ) -> ShareGates:
        """New gates for a model; see `SparseTransformer`."""
        if not 0 < initial_threshold < 1:
            raise ValueError(f"initial_threshold must lie between 0 and 1, not {initial_threshold}")
        bias = _initial(adapter, -math.log(initial_threshold))
        return cls(bias, bias.new_zeros(*bias.shape, _query_size(adapter)), distribution)

    def check(self, adapter: Adapter) -> None:
        """See `AttentionGates.check`."""
        super().check(adapter)
        shape, found = (*self.bias.shape, _query_size(adapter)), tuple(self.weight.shape)
        if found != shape:
            raise ValueError(f"these gates have weights of shape {found}; the model needs {shape}")

    def _terms(
        self, layer: int, read: Float[Tensor, "prompt query head d_head"]
    ) -> tuple[None, Float[Tensor, "prompt head query 1"]]:
        # No matrix product: autocast would round it, unlike in evaluation, and gates would differ.
        along = (read.to(self.weight.dtype) * self.weight[layer]).sum(dim=-1) + self.bias[layer]
        return None, along.transpose(1, 2)[..., None]


def attention_gates(
    adapter: Adapter,
    gates: GateKind | AttentionGates | None,
    starts: Mapping[str, float | None],
    distribution: GateDistribution | None,
) -> AttentionGates:
    """Gates that fit a model: new ones of a kind, or the given ones; see `SparseTransformer`."""
    given = {name: value for name, value in starts.items() if value is not None}
    check_gates(adapter)
    if not isinstance(gates, AttentionGates):
        kind = gates or ("score" if given.keys() == {"initial_bias"} else "share")
        if unknown := given.keys() - {"initial_bias" if kind == "score" else "initial_threshold"}:
            raise ValueError(f"{kind} gates take no {', '.join(unknown)}")
        gates = KINDS[kind].of(adapter, distribution=distribution, **given)
    elif given:
        raise ValueError(f"existing gates take no {', '.join(given)}, which are for new ones")
    gates.check(adapter)
    return gates


KINDS: dict[str, type[ScoreGates | ShareGates]] = {"score": ScoreGates, "share": ShareGates}
"""The kinds of gate on attention edges, by name."""


def _initial(adapter: Adapter, value: float) -> Float[Tensor, "layer head"]:
    shape = adapter.n_layers, adapter.n_heads
    return torch.full(shape, value, device=adapter.device, dtype=adapter.gate_dtype)


@torch.no_grad()
def _query_size(adapter: Adapter) -> int:
    """The size of a head's query vector, which differs from `cfg.d_head` in latent attention."""
    sizes: list[int] = []

    def note(query: Float[Tensor, "batch pos head d_head"]) -> None:
        sizes.append(query.shape[-1])

    # Run the whole model: passes of a sharded model cannot stop after one layer.
    hook = "blocks.0.attn.hook_q", Order.LAST, note
    with without_user_hooks(adapter.model), attached(adapter, [hook]):
        adapter.model(torch.zeros(1, 1, dtype=torch.long, device=adapter.device))
    return sizes[0]


@contextmanager
def attention_by_blocks(model: HookedModel) -> Iterator[None]:
    """Inside the scope, a model without gates computes attention of long prompts by blocks."""
    adapter = adapt(model)
    gates = ScoreGates(_initial(adapter, 0.0), None).requires_grad_(False)
    with (
        using([gates], mode=GateMode.OPEN, by_blocks=True),
        attached(adapter, gates.hooks(adapter)) as own,
        defer_scores(adapter, own),
    ):
        yield


def check_edge_cost(cost: Float[Tensor, "*#edge"], edges: Sequence[int | None]) -> None:
    """Check that edge costs broadcast to ``[layer, head, query, key]``.

    `edges` has the numbers of these, None where the prompts determine it.
    """
    given = (1,) * (4 - cost.ndim) + tuple(cost.shape)
    if len(given) > 4 or any(
        there is not None and size not in (1, there)
        for size, there in zip(given, edges, strict=True)
    ):
        names = zip(("layer", "head", "query", "key"), edges, strict=True)
        here = ", ".join(name if there is None else str(there) for name, there in names)
        raise ValueError(
            f"edge_cost has the shape {list(cost.shape)}, which does not broadcast to "
            f"[layer, head, query, key], here [{here}]"
        )


def costs_of_first(
    cost: Float[Tensor, "*edge"] | None, width: int
) -> Float[Tensor, "*first"] | None:
    """Costs, broadcastable to ``[layer, head, query, key]``, of the edges in the first columns."""
    if cost is None or cost.ndim == 0:
        return cost
    return cost[..., :width] if cost.ndim == 1 else cost[..., :width, :width]

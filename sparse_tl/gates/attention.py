"""A gate on every attention edge, computed from the edge's own attention score.

With scores ``s`` at ``hook_attn_scores`` and a learnable bias ``b`` per head,

    A_ij ~ Bernoulli(sigmoid(s_ij + b)),    z = (A * softmax(s)) V        (no renormalisation)

in training; ``A_ij = [s_ij + b > 0]`` otherwise. Masked pairs (future tokens, padding) have an
attention of 0, whatever their gate; which pairs are counted follows from the model's masks and not
from scores, since softmax ignores a constant that is added to a row of them.

Reference: arXiv 2512.05865, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sparse_tl.gates.blockwise import GatedAttention, GatedPattern
from sparse_tl.gates.distributions import BernoulliGate, GateDistribution, GateMode, gate_values
from sparse_tl.gates.layer_counts import attention_edges_of_layer
from sparse_tl.gates.passes import Counted, GateSettings, PassGates, layer_hooks
from sparse_tl.gates.patches import gate
from sparse_tl.gates.straight_through import gated_pattern
from sparse_tl.lens import (
    EVERYTHING,
    Adapter,
    AttentionMask,
    Block,
    Deferred,
    Hook,
    HookedModel,
    adapt,
    attached,
    check_scores,
    defer_scores,
    explicit,
    mask_hooks,
)
from sparse_tl.scopes import scope


class AttentionGates(PassGates):
    """Learnable gates on all attention edges of a model.

    Args:
        n_layers: number of layers.
        n_heads: query heads per layer.
        initial_bias: initial value of b; a larger bias opens more gates.
        distribution: how gates are sampled and evaluated.
        device: device of the biases.
        dtype: precision of the biases and of the gate arithmetic: float32 or float64.
    """

    def __init__(
        self,
        n_layers: int,
        n_heads: int,
        *,
        initial_bias: float = 4.0,
        distribution: GateDistribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(distribution or BernoulliGate())
        self.bias = nn.Parameter(
            torch.full((n_layers, n_heads), initial_bias, device=device, dtype=dtype)
        )

    @classmethod
    def of(
        cls, adapter: Adapter, initial_bias: float, distribution: GateDistribution | None
    ) -> AttentionGates:
        """New gates for a model, on its device and in the precision that it needs."""
        return cls(
            adapter.n_layers,
            adapter.n_heads,
            initial_bias=initial_bias,
            distribution=distribution,
            device=adapter.device,
            dtype=adapter.gate_dtype,
        )

    def hooks(self, adapter: Adapter) -> list[Hook]:
        """The hooks that attach these gates: scores are read last, patterns are set first."""
        scores = adapter.layer_points("attn.hook_attn_scores")
        patterns = adapter.layer_points("attn.hook_pattern")
        masks: dict[int, AttentionMask] = {}
        gated = layer_hooks(scores, patterns, partial(self._gate_pattern, masks))
        return mask_hooks(adapter, masks) + gated

    def check(self, adapter: Adapter) -> None:
        """Check that these gates fit a model.

        Raises:
            ValueError: the shapes do not match, or the model's scores change with the prompt's
                length.
        """
        check_scores(adapter)
        if tuple(self.bias.shape) != (adapter.n_layers, adapter.n_heads):
            raise ValueError(
                f"expected gates for {adapter.n_layers} layers of {adapter.n_heads} heads; got "
                f"biases of shape {tuple(self.bias.shape)}"
            )

    def extra_repr(self) -> str:
        """Size, distribution and biases."""
        n_layers, n_heads = self.bias.shape
        return (
            f"{n_layers} layers x {n_heads} heads, {self.distribution}, "
            f"bias {self.bias.min().item():.2f} to {self.bias.max().item():.2f}"
        )

    def _gate_pattern(
        self,
        masks: dict[int, AttentionMask],
        layer: int,
        scores: Float[Tensor, "prompt head query key"],
        pattern: Float[Tensor, "prompt head query key"],
    ) -> Float[Tensor, "prompt head query key"] | None:
        mask, now = masks.pop(layer), self._settings_of(layer, _last_query(scores))
        if now.idle:
            return None
        cost, real = self._cost(layer, now, scores), _real_queries(now, scores)
        size, device = scores.shape[2:], scores.device

        def valid(block: Block) -> Tensor | None:
            if now.counts is None:
                return None
            allowed = mask.allowed(block, size, device)
            return allowed if real is None else allowed & block.of(real)

        if now.keep_gates or not isinstance(scores, Deferred) or not isinstance(pattern, Deferred):
            scores, pattern = explicit(scores), explicit(pattern)
            bias = self.bias[layer]
            gated, counted = self._gate(now, scores, pattern, bias, cost, valid(EVERYTHING))
            if now.counts is not None:
                now.counts.append(counted)
            return gated

        def gate_block(block: Block, s: Tensor, p: Tensor, bias: Tensor, g: Any) -> Any:
            costs = None if cost is None else block.of(cost)
            here = replace(now, generator=g)
            gated, counted = self._gate(here, s, p, bias, costs, valid(block))
            return p if gated is None else gated, counted

        seed = _drawn(now.generator) if now.mode is GateMode.SAMPLED and now.noise else None
        attention = GatedAttention(
            scores.expression, pattern.expression, mask, self.bias[layer], gate_block, seed
        )
        return GatedPattern.under(attention, pattern, now.counts)

    def _gate(
        self,
        now: GateSettings,
        scores: Float[Tensor, "prompt head query key"],
        pattern: Float[Tensor, "prompt head query key"],
        bias: Float[Tensor, " head"],
        cost: Float[Tensor, "#head #query #key"] | None,
        valid: Bool[Tensor, "#prompt #head query key"] | None,
    ) -> tuple[Float[Tensor, "prompt head query key"] | None, Counted]:
        """The pattern of some heads under gates, None if it is unchanged, and counts if `valid`."""
        if now.mode is GateMode.OPEN and valid is None:
            return None, {}
        rule = self.distribution
        if now.mode is GateMode.SAMPLED and type(rule) is BernoulliGate and not now.keep_gates:
            return gated_pattern(scores, pattern, bias, rule.temperature, now, cost, valid)
        logits = scores.to(bias.dtype) + bias[:, None, None]
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
        """The costs of a layer's edges, if they differ."""
        if now.edge_cost is None:
            return None
        check_edge_cost(now.edge_cost, (len(self.bias), *like.shape[1:]))
        cost = now.edge_cost.reshape((1,) * (4 - now.edge_cost.ndim) + tuple(now.edge_cost.shape))
        return cost[layer if len(cost) > 1 else 0].to(like.device, self.bias.dtype)


@scope
def attention_by_blocks(model: HookedModel) -> Iterator[None]:
    """Inside the block, a model without gates computes attention of long prompts by blocks too."""
    adapter = adapt(model)
    gates = AttentionGates.of(adapter, 0.0, None).requires_grad_(False)
    with (
        gates.using(mode=GateMode.OPEN, by_blocks=True),
        attached(adapter, gates.hooks(adapter)) as own,
        defer_scores(adapter, own),
    ):
        yield


def _last_query(
    scores: Float[Tensor, "prompt head query key"],
) -> Float[Tensor, "1 1 1 key"]:
    """The scores of the first head's last query in the first prompt."""
    if isinstance(scores, Deferred) and scores.computed is None:
        last = slice(scores.shape[2] - 1, None)
        return scores.expression.on(Block(slice(0, 1), slice(0, 1), last, slice(None)))
    return scores[:1, :1, -1:]


def _drawn(generator: torch.Generator | None) -> int:
    """A seed drawn from a generator."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def _real_queries(
    now: GateSettings, scores: Float[Tensor, "prompt head query key"]
) -> Bool[Tensor, "prompt 1 query 1"] | None:
    """Queries that are no padding: models mask it as a key, but not as a query."""
    if now.real is None:
        return None
    return now.real.to(scores.device).bool()[:, None, -scores.shape[2] :, None]


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

"""Gates that every forward pass computes from the model's own activations.

On attention edges, with the pattern ``p = softmax(s)``,

    A_ij ~ Bernoulli(sigmoid(e_ij + r_i)),    z = (A * p) V        (no renormalisation)

in training; ``A_ij = [e_ij + r_i > 0]`` otherwise. The two kinds of gate differ in the logit's
terms ``e`` (edge) and ``r`` (query). Masked pairs (future tokens, padding) have an attention of 0
whatever their gate, and are not counted.

`AttentionGates._gate` gates a part of a pattern. A pattern with values is one part; a deferred one,
of a long prompt, is gated by blocks, which `blockwise` computes, uses and discards.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    Order,
    check_gates,
    check_mlps,
    check_score_gates,
    explicit,
    mask_hooks,
)
from sparse_tl.gates.distributions import (
    BernoulliGate,
    GateDistribution,
    GateSettings,
    with_pressure,
)
from sparse_tl.gates.patches import gate
from sparse_tl.gates.sparse.blockwise import GatedAttention, GatedPattern
from sparse_tl.gates.sparse.counting import (
    Counted,
    EdgeCost,
    Pairs,
    Pattern,
    QueryTerm,
    counted_edges,
)
from sparse_tl.gates.sparse.straight_through import edge_term, gated_pattern

GateKind = Literal["score", "share"]
"""What a gate reads: its edge's score, or its edge's share of the query's attention."""
Rule = GateDistribution | None
"""How gates are sampled and evaluated; None for `BernoulliGate`."""


class ComputedGates(nn.Module, ABC):
    """Learnable gates of all layers, which every pass computes from the model's activations.

    Args:
        bias: learnable term of each layer, or head, in the logits of its gates; larger opens more.
        distribution: how gates are sampled and evaluated; `BernoulliGate` by default.
        weight: learnable direction in what the gates read; None for kinds without one.
    """

    label: str
    """What has gates, for `extra_repr`."""

    def __init__(
        self,
        bias: Float[Tensor, "layer ..."],
        distribution: GateDistribution | None = None,
        weight: Float[Tensor, "layer ... size"] | None = None,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias)
        if weight is not None:
            self.weight = nn.Parameter(weight)
        self.distribution = distribution or BernoulliGate()
        self.settings = GateSettings()

    @classmethod
    @abstractmethod
    def of(cls, adapter: Adapter, rule: Rule = None, start: float = 0.0) -> ComputedGates:
        """New gates for a model, on its device and in the precision that it needs.

        `start` is the initial bias, or threshold; see `SparseTransformer` and `MLPGates`.
        """

    @abstractmethod
    def hooks(self, adapter: Adapter) -> list[Hook]:
        """Hooks that attach these gates: they read inputs last, and set values first."""

    def check(self, adapter: Adapter) -> None:
        """Raise a ValueError if these gates do not fit a model."""
        new = self.of(adapter)
        found, needed = ([tuple(p.shape) for p in some.parameters()] for some in (self, new))
        if found != needed:
            raise ValueError(
                f"these gates have parameters of the shapes {found}; the model needs {needed}"
            )

    def extra_repr(self) -> str:
        """Size, kind, distribution and biases."""
        size = " x ".join(map(str, self.bias.shape))
        least, most = self.bias.aminmax()
        return f"{size} {self.label}, {self.distribution}, bias {least:.2f} to {most:.2f}"

    def _now(self) -> GateSettings:
        """The settings of this pass; in a backward pass, others would give other noise."""
        if torch._C._current_graph_task_id() != -1 and not self.settings.again:
            raise RuntimeError(
                "a backward pass runs a layer again without knowing its gates: checkpoint "
                "activations with sparse_tl.backend.checkpointed_activations"
            )
        return self.settings

    def _gates(self, now: GateSettings, logits: Float[Tensor, "*gate"]) -> Float[Tensor, "*gate"]:
        if now.mode == "sampled":
            return self.distribution.sample(logits, now.generator, now.noise)
        return self.distribution.mode(logits)

    def _opened(
        self, now: GateSettings, logits: Float[Tensor, "*gate"], possible: Bool[Tensor, "*#gate"]
    ) -> tuple[Bool[Tensor, "*gate"], Float[Tensor, "*gate"]]:
        """Which possible gates are open if deterministic, and their probabilities of being open."""
        if now.mode == "open":
            possible = possible.expand_as(logits)
            return possible, possible.to(logits.dtype)
        probability = self.distribution.open_probability(logits)
        if now.pressure > 0:
            probability = with_pressure(probability, logits, now.pressure)
        return self.distribution.is_open(logits) & possible, probability * possible


@contextmanager
def using(gates: Sequence[ComputedGates], **settings: Any) -> Iterator[None]:
    """Inside the block, override fields of the `GateSettings` of these gates."""
    before = [some.settings for some in gates]
    try:
        for some in gates:
            some.settings = replace(some.settings, **settings)
        yield
    finally:
        for some, own in zip(gates, before, strict=True):
            some.settings = own


def as_now(gates: Sequence[ComputedGates]) -> AbstractContextManager[None]:
    """A block, to be entered once, in which a model's gates are set as they are now.

    A layer is repeated in it by the backward pass, with the same noise. What it counts is dropped.
    """
    now = gates[0].settings  # all gates have the same
    generator = now.generator
    if generator is not None:
        generator = torch.Generator(generator.device).set_state(generator.get_state())
    counts = None if now.counts is None else list[Counted]()
    return using(gates, **vars(now) | {"generator": generator, "counts": counts, "again": True})


def _layer_hooks(
    read: Sequence[str],
    gated: Sequence[str],
    act: Callable[[int, Tensor, Tensor], Tensor | None],
) -> list[Hook]:
    """Hooks that gate every layer: they read after all other hooks, and set values before them.

    `act` takes layer, input and value, and returns the gated value, or None to keep it.
    """
    inputs: dict[int, Tensor] = {}

    def set_gated(layer: int, value: Tensor) -> Tensor | None:
        return act(layer, inputs.pop(layer), value)

    hooks: list[Hook] = []
    for layer, (before, after) in enumerate(zip(read, gated, strict=True)):
        hooks.append((before, Order.LAST, partial(inputs.__setitem__, layer)))
        hooks.append((after, Order.FIRST, partial(set_gated, layer)))
    return hooks


class AttentionGates(ComputedGates):
    """Learnable gates on all attention edges of a model; arguments as in `ComputedGates`."""

    kind: GateKind
    reads: str
    """The hook point, in every layer, that the gates read besides the pattern."""

    @abstractmethod
    def _terms(self, layer: int, read: Tensor) -> tuple[Pattern | None, QueryTerm]:
        """The edges' term of the logits (scores, or None for log p), and each query's term."""

    def hooks(self, adapter: Adapter) -> list[Hook]:
        reads, patterns = map(adapter.layer_points, (self.reads, "attn.hook_pattern"))
        masks: dict[int, AttentionMask] = {}
        gated = _layer_hooks(reads, patterns, partial(self._gate_pattern, masks))
        return mask_hooks(adapter, masks) + gated

    def _gate_pattern(
        self, masks: dict[int, AttentionMask], layer: int, read: Tensor, pattern: Pattern
    ) -> Pattern | None:
        mask, now = masks.pop(layer), self._now()
        deferred = isinstance(pattern, Deferred)
        if now.does_nothing and not (now.by_blocks and deferred):
            return None
        scores, row = self._terms(layer, read)
        size, device = pattern.shape[2:], pattern.device
        real, counting, cost = now.real, now.counts is not None, None
        if real is not None:  # models mask padding as a key, but not as a query
            real = real.to(device).bool()[:, None, -size[0] :, None]
        if now.edge_cost is not None:  # by layer, which may be the same for all
            check_edge_cost(now.edge_cost, (len(self.bias), *pattern.shape[1:]))
            costs = now.edge_cost[(None,) * (4 - now.edge_cost.ndim)]
            cost = costs[layer if len(costs) > 1 else 0].to(self.bias)

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

        generator = None
        if now.mode == "sampled" and now.noise:
            generator = now.generator
            if generator is None or generator.device != device:
                on = None if generator is None else generator.device
                seed = torch.randint(2**62, (), generator=generator, device=on)
                generator = torch.Generator(device).manual_seed(int(seed))
        scored = scores.expression if isinstance(scores, Deferred) else None
        attention = GatedAttention(pattern.expression, scored, mask, row, gate_block, generator)
        return GatedPattern.under(attention, now.counts)

    def _gate(
        self,
        now: GateSettings,
        scores: Pattern | None,
        pattern: Pattern,
        row: QueryTerm,
        cost: EdgeCost | None,
        valid: Pairs | None,
    ) -> tuple[Pattern | None, Counted]:
        """The pattern of some heads under gates, None if it is unchanged, and counts if `valid`."""
        if now.mode == "open" and valid is None:
            return None, {}
        rule = self.distribution
        if now.mode == "sampled" and type(rule) is BernoulliGate and not now.keep_gates:
            return gated_pattern(scores, pattern, row, rule.temperature, now, cost, valid)
        logits = edge_term(scores, pattern, row.dtype) + row
        counted: Counted = {}
        if valid is not None:
            is_open, probability = self._opened(now, logits, valid)
            counted = counted_edges(valid, is_open, probability, cost)
            counted |= {"gates": is_open} if now.keep_gates else {}
        if now.mode == "open":
            return None, counted
        return gate(self._gates(now, logits).to(pattern.dtype), pattern, None), counted


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
    label = "heads, by score"
    reads = "attn.hook_attn_scores"

    @classmethod
    def of(cls, adapter: Adapter, rule: Rule = None, start: float = 4.0) -> ScoreGates:
        return cls(_initial(adapter, start), rule)

    def check(self, adapter: Adapter) -> None:
        """Raise a ValueError if these gates do not fit a model, or scores see later tokens."""
        check_score_gates(adapter)
        super().check(adapter)

    def _terms(self, layer: int, read: Pattern) -> tuple[Pattern, Float[Tensor, "1 head 1 1"]]:
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
    label = "heads, by share"
    reads = "attn.hook_q"

    @classmethod
    def of(cls, adapter: Adapter, rule: Rule = None, start: float = 0.005) -> ShareGates:
        bias = _initial(adapter, -math.log(start))
        return cls(bias, rule, bias.new_zeros(*bias.shape, adapter.d_query))

    def _terms(
        self, layer: int, read: Float[Tensor, "prompt query head d_head"]
    ) -> tuple[None, Float[Tensor, "prompt head query 1"]]:
        return None, _along(read, self.weight[layer], self.bias[layer]).transpose(1, 2)[..., None]


KINDS: dict[str, type[ScoreGates | ShareGates]] = {"score": ScoreGates, "share": ShareGates}
"""The kinds of gate on attention edges, by name."""


def attention_gates(
    adapter: Adapter,
    gates: GateKind | AttentionGates | None,
    starts: Mapping[str, float | None],
    distribution: Rule,
) -> AttentionGates:
    """Gates that fit a model: new ones of a kind, or the given ones; see `SparseTransformer`."""
    check_gates(adapter)
    given = {name: value for name, value in starts.items() if value is not None}
    kind = gates or ("score" if given.keys() == {"initial_bias"} else "share")
    if isinstance(kind, AttentionGates):
        if given:
            raise ValueError(f"{' and '.join(given)}: these are for new gates")
        made = kind
    else:
        start = given.pop("initial_bias" if kind == "score" else "initial_threshold", None)
        if given:
            raise ValueError(f"{kind} gates take no {', '.join(given)}")
        made = KINDS[kind].of(adapter, distribution, *([] if start is None else [start]))
    made.check(adapter)
    return made


def _initial(adapter: Adapter, value: float) -> Float[Tensor, "layer head"]:
    shape = adapter.n_layers, adapter.n_heads
    return torch.full(shape, value, device=adapter.device, dtype=adapter.gate_dtype)


def _along(read: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``w . x + b``."""
    # No matrix product: autocast would round it, unlike in evaluation, and gates would differ.
    return (read.to(weight.dtype) * weight).sum(dim=-1) + bias


def check_edge_cost(cost: Float[Tensor, "*#edge"], edges: Sequence[int | None]) -> None:
    """Check that edge costs broadcast to ``[layer, head, query, key]``.

    `edges` has the numbers of these, None where the prompts determine it.
    """
    given = (1,) * (4 - cost.ndim) + tuple(cost.shape)
    if len(given) > 4 or any(
        there is not None and size not in (1, there)
        for size, there in zip(given, edges, strict=True)
    ):
        raise ValueError(
            f"edge_cost has the shape {list(cost.shape)}, which does not broadcast to "
            f"[layer, head, query, key], here {['any' if n is None else n for n in edges]}"
        )


def costs_of_first(
    cost: Float[Tensor, "*edge"] | None, width: int
) -> Float[Tensor, "*first"] | None:
    """Costs, broadcastable to ``[layer, head, query, key]``, of the edges in the first columns."""
    if cost is None or cost.ndim == 0:
        return cost
    return cost[..., :width] if cost.ndim == 1 else cost[..., :width, :width]


class MLPGates(ComputedGates):
    """A learnable gate on every MLP output, per layer and position.

    With the input u of a layer's MLP at a position, after normalisation if the model normalises it,
    and a learnable direction w and bias b per layer,

        A ~ Bernoulli(sigmoid(w . u + b)),    residual + A * mlp(u)

    in training; ``A = [w . u + b > 0]`` otherwise. The gate multiplies what reaches the residual
    stream: the output after its own normalisation, where the model has one. Training starts at
    ``w = 0``, where all positions of a layer share a logit; gradients reach w, b and, once w is not
    0, u. New gates have a bias of 2.0: an MLP output is open with a probability of 88 percent.
    MLP gates are an addition of this package; arXiv 2512.05865 gates attention edges only.
    """

    label = "MLPs"

    @classmethod
    def of(cls, adapter: Adapter, rule: Rule = None, start: float = 2.0) -> MLPGates:
        bias = _initial(adapter, start)[:, 0].clone()
        return cls(bias, rule, bias.new_zeros(adapter.n_layers, adapter.d_model))

    def hooks(self, adapter: Adapter) -> list[Hook]:
        reads = [f"blocks.{layer}.mlp_read" for layer in range(adapter.n_layers)]
        return _layer_hooks(reads, adapter.layer_points("hook_mlp_out"), self._gate_output)

    def check(self, adapter: Adapter) -> None:
        """Raise a ValueError if these gates do not fit a model, or it has no MLPs to gate."""
        check_mlps(adapter)
        super().check(adapter)

    def logits(
        self, layer: int, read: Float[Tensor, "prompt pos d_model"]
    ) -> Float[Tensor, "prompt pos"]:
        """``w . u + b`` for the input u of a layer's MLP; differentiable in all three."""
        return _along(read, self.weight[layer], self.bias[layer])

    def _gate_output(
        self,
        layer: int,
        read: Float[Tensor, "prompt pos d_model"],
        output: Float[Tensor, "prompt pos d_model"],
    ) -> Float[Tensor, "prompt pos d_model"] | None:
        now = self._now()
        if now.does_nothing:
            return None
        logits = self.logits(layer, read)
        if now.counts is not None:
            possible = torch.ones_like(logits, dtype=torch.bool)  # `of_pass` drops padding
            is_open, probability = self._opened(now, logits, possible)
            counted = {"active_mlps": is_open, "expected_mlps": probability}
            counted["possible_mlps"] = possible
            now.counts.append(counted | {"mlp_gates": is_open} if now.keep_gates else counted)
        if now.mode == "open":
            return None
        return gate(self._gates(now, logits)[..., None].to(output.dtype), output, None)

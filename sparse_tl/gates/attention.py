"""A gate on every attention edge, decided by the same scores that weight it.

With scores ``s`` as at ``hook_attn_scores`` and a learnable bias ``b`` per head,

    A_ij ~ Bernoulli(sigmoid(s_ij + b)),    z = (A * softmax(s)) V        (no renormalisation)

in training; ``A_ij = [s_ij + b > 0]`` otherwise. Pairs that the model masks (the future, padding)
carry the lowest score there is, so that their gates are 0 by the same formula. The
gate of an edge that is *closed* by choice is 0 whatever its score: the edge keeps its share of
attention, and counts as possible.

Reference: arXiv 2512.05865, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sparse_tl.gates.counting import EdgeCounts
from sparse_tl.gates.distributions import (
    BernoulliGate,
    GateDistribution,
    GateMode,
    gate_values,
    press,
)
from sparse_tl.lens import AttentionShape, Order, layer_points
from sparse_tl.lens.attaching import HookFunction
from sparse_tl.lens.points import Model


@dataclass
class EdgeRecord:
    """What the gates did during one forward pass; filled while `AttentionGates.recorded` is on.

    Args:
        keep_gates: keep every gate, not only their counts.
        pressure: gradient that the expected count puts on confidently open gates; see `press`.
    """

    keep_gates: bool = False
    pressure: float = 0.0
    _active: list[Int[Tensor, "prompt head"]] = field(default_factory=list)
    _expected: list[Float[Tensor, "prompt head"]] = field(default_factory=list)
    _expected_self: list[Float[Tensor, "prompt head"]] = field(default_factory=list)
    _possible: list[Int[Tensor, "prompt head"]] = field(default_factory=list)
    _tokens: Int[Tensor, " prompt"] | None = None
    _gates: list[Bool[Tensor, "prompt head query key"]] = field(default_factory=list)

    def counts(self) -> EdgeCounts:
        """Active, expected and possible edges, ``[layer, prompt, head]``.

        Raises:
            RuntimeError: no forward pass ran under the record, or only a part of the layers did.
        """
        if self._tokens is None:
            raise RuntimeError("no forward pass was recorded; run the model inside the block")
        return EdgeCounts(
            active=torch.stack(self._active),
            expected=torch.stack(self._expected),
            expected_self=torch.stack(self._expected_self),
            possible=torch.stack(self._possible),
            tokens=self._tokens,
        )

    def gates(self) -> Bool[Tensor, "layer prompt head query key"]:
        """The deterministic gates of every layer; needs ``keep_gates=True``."""
        if not self._gates:
            raise RuntimeError("no gates were kept; record with keep_gates=True")
        return torch.stack(self._gates)

    def add(
        self,
        valid: Bool[Tensor, "prompt head query key"],
        is_open: Bool[Tensor, "prompt head query key"],
        probability: Float[Tensor, "prompt head query key"],
    ) -> None:
        """Note one layer."""
        self._active.append(is_open.sum(dim=(-2, -1)))
        self._expected.append(probability.sum(dim=(-2, -1)))
        # With a key-value cache the queries are the last of the keys.
        own = probability.diagonal(probability.shape[-1] - probability.shape[-2], -2, -1)
        self._expected_self.append(own.sum(dim=-1))
        self._possible.append(valid.sum(dim=(-2, -1)))
        if self._tokens is None:
            # A real token attends at least to itself; a padding token has no valid pair.
            self._tokens = valid[:, 0].any(dim=-1).sum(dim=-1)
        if self.keep_gates:
            self._gates.append(is_open)


class AttentionGates(nn.Module):
    """Learnable gates on all attention edges of a model.

    Args:
        shape: layers and heads of the model.
        initial_bias: b at the start; larger biases open more gates.
        distribution: how gates are sampled and evaluated.
        closed: edges that are never open but in `GateMode.OPEN`, by columns of the prompt; as many
            columns as the longest prompt may have. None when left out.
        device: where the biases live.
        dtype: of the biases and of the gates' arithmetic: float32, or float64.

    Raises:
        ValueError: `closed` is not one truth value for each edge.
    """

    closed: Bool[Tensor, "layer head longest longest"] | None

    def __init__(
        self,
        shape: AttentionShape,
        *,
        initial_bias: float = 4.0,
        distribution: GateDistribution | None = None,
        closed: Bool[Tensor, "layer head query key"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(
            torch.full((shape.n_layers, shape.n_heads), initial_bias, device=device, dtype=dtype)
        )
        self.distribution = distribution or BernoulliGate()
        _check_closed(closed, shape)
        if closed is not None:
            # What lies above the diagonal is no edge.
            closed = closed.tril().to(self.bias.device)
        self.register_buffer("closed", closed)
        self.mode = GateMode.DETERMINISTIC
        self.generator: torch.Generator | None = None
        self.noise = 1.0
        self.closed_share = 1.0
        self._record: EdgeRecord | None = None
        self._scores: dict[int, Tensor] = {}

    def hooks(self, model: Model) -> Sequence[tuple[str, Order, HookFunction]]:
        """The hooks that put these gates on a model: scores are read last, patterns set first."""
        hooks: list[tuple[str, Order, HookFunction]] = []
        for layer, name in enumerate(layer_points(model, "attn.hook_attn_scores")):
            hooks.append((name, Order.LAST, partial(self._keep_scores, layer)))
        for layer, name in enumerate(layer_points(model, "attn.hook_pattern")):
            hooks.append((name, Order.FIRST, partial(self._gate_pattern, layer)))
        return hooks

    @contextmanager
    def using(
        self,
        mode: GateMode,
        generator: torch.Generator | None = None,
        noise: float = 1.0,
        closed_share: float = 1.0,
    ) -> Iterator[None]:
        """Another mode for the length of a block."""
        before = self.mode, self.generator, self.noise, self.closed_share
        self.mode, self.generator, self.noise = mode, generator, noise
        self.closed_share = closed_share
        try:
            yield
        finally:
            self.mode, self.generator, self.noise, self.closed_share = before

    @contextmanager
    def recorded(self, *, keep_gates: bool = False, pressure: float = 0.0) -> Iterator[EdgeRecord]:
        """Record the edges of the forward pass inside the block."""
        before, self._record = self._record, EdgeRecord(keep_gates, pressure)
        try:
            yield self._record
        finally:
            self._record = before

    def _keep_scores(self, layer: int, scores: Float[Tensor, "prompt head query key"]) -> None:
        self._scores[layer] = scores

    def _gate_pattern(
        self, layer: int, pattern: Float[Tensor, "prompt head query key"]
    ) -> Float[Tensor, "prompt head query key"] | None:
        scores = self._scores.pop(layer)
        if self.mode is GateMode.OPEN and self._record is None:
            return None
        logits = scores.to(self.bias.dtype) + self.bias[layer, :, None, None]
        drawn = logits
        if self.closed is not None and self.mode is not GateMode.OPEN:
            free = logits
            logits = free.masked_fill(_within(self.closed[layer], scores), -torch.inf)
            drawn = self._closing(free, logits)
        if self._record is not None:
            self._note(scores, logits)
        if self.mode is GateMode.OPEN:
            return None
        gates = gate_values(self.distribution, drawn, self.mode, self.generator, self.noise)
        return pattern * gates.to(pattern.dtype)

    def _closing(
        self,
        free: Float[Tensor, "prompt head query key"],
        shut: Float[Tensor, "prompt head query key"],
    ) -> Float[Tensor, "prompt head query key"]:
        """The logits with closed edges shut: for part of the queries in a draw, for all otherwise.

        All closed edges of a query at once: what it must learn is to do without them all.
        """
        if self.mode is not GateMode.SAMPLED or self.closed_share >= 1:
            return shut
        size = (len(free), 1, free.shape[-2], 1)
        uniform = torch.rand(size, generator=self.generator, device=free.device)
        return torch.where(uniform < self.closed_share, shut, free)

    def _note(self, scores: Tensor, logits: Tensor) -> None:
        assert self._record is not None
        # Not those above it: a score that is no number must reach the loss, not vanish here.
        valid = ~_masked(scores)
        if self.mode is GateMode.OPEN:
            self._record.add(valid, valid, valid.to(logits.dtype))
        else:
            probability = self.distribution.open_probability(logits)
            if self._record.pressure > 0:
                probability = press(probability, logits, self._record.pressure)
            self._record.add(valid, self.distribution.is_open(logits) & valid, probability)


def _within(
    closed: Bool[Tensor, "head longest longest"], scores: Float[Tensor, "prompt head query key"]
) -> Bool[Tensor, "1 head query key"]:
    """The closed edges of prompts of this length."""
    n_queries, n_keys = scores.shape[-2:]
    if n_keys > closed.shape[-1]:
        raise ValueError(
            f"expected prompts of at most {closed.shape[-1]} tokens, for which `closed` says what "
            f"is closed; got {n_keys}"
        )
    if n_queries == n_keys and bool(_masked(scores[:, 0, 0, 0]).any()):
        raise ValueError(
            "expected prompts without padding on the left, since edges are closed by the columns "
            "of the prompt; pad on the right, or run prompts of one length at a time"
        )
    # With a key-value cache the queries are the last of the keys.
    return closed[None, :, n_keys - n_queries : n_keys, :n_keys]


def _masked(scores: Float[Tensor, "*pair"]) -> Bool[Tensor, "*pair"]:
    """Pairs that the model masks: -inf on a HookedTransformer, the dtype's minimum on a bridge."""
    return scores <= torch.finfo(scores.dtype).min / 2


def _check_closed(closed: Tensor | None, shape: AttentionShape) -> None:
    if closed is None:
        return
    layers, heads = shape.n_layers, shape.n_heads
    whole = closed.ndim == 4 and tuple(closed.shape[:2]) == (layers, heads)
    if not whole or closed.shape[2] != closed.shape[3] or closed.dtype != torch.bool:
        raise ValueError(
            f"expected `closed` to be booleans of shape [{layers} layers, {heads} heads, query, "
            f"key], with as many queries as keys; got {closed.dtype} of shape {list(closed.shape)}"
        )

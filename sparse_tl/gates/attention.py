"""A gate on every attention edge, decided by the same scores that weight it.

With scores ``s`` as at ``hook_attn_scores`` and a learnable bias ``b`` per head,

    A_ij ~ Bernoulli(sigmoid(s_ij + b)),    z = (A * softmax(s)) V        (no renormalisation)

in training; ``A_ij = [s_ij + b > 0]`` otherwise. Pairs that the model masks (the future, padding)
carry the lowest score there is, so that their gates are 0 by the same formula.

Reference: arXiv 2512.05865, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.gates.counting import AttentionEdgeCounts, possible_attention_edges
from sparse_tl.gates.distributions import (
    BernoulliGate,
    GateDistribution,
    GateMode,
    gate_values,
    press,
)
from sparse_tl.gates.patches import gate
from sparse_tl.lens import Adapter, HookFunction, Order


@dataclass
class GateSettings:
    """How the gates of one forward pass are set, and what is counted.

    Args:
        mode: sampled, deterministic or open.
        generator: of the draws.
        noise: scales that of sampled gates.
        counts: where the pass writes down its edges; None to count nothing.
        keep_gates: whether that has every gate, not only their counts.
        pressure: gradient that the expected count puts on confidently open gates; see `press`.
        edge_cost: what an edge counts in `AttentionEdgeCounts.cost`; 1 when left out.
        real: 0 at padding, which counts for nothing.
    """

    mode: GateMode = GateMode.DETERMINISTIC
    generator: torch.Generator | None = None
    noise: float = 1.0
    counts: list[AttentionEdgeCounts] | None = None
    keep_gates: bool = False
    pressure: float = 0.0
    edge_cost: Tensor | None = None
    real: Tensor | None = None


@dataclass(frozen=True)
class _LayerPass:
    """What a layer's gates need to be computed again in a backward pass, with the same draws."""

    settings: GateSettings
    drawn_from: Tensor | None
    fingerprint: Tensor


class AttentionGates(nn.Module):
    """Learnable gates on all attention edges of a model.

    Args:
        n_layers: of the model.
        n_heads: query heads of each layer.
        initial_bias: b at the start; larger biases open more gates.
        distribution: how gates are sampled and evaluated.
        device: where the biases live.
        dtype: of the biases and of the gates' arithmetic: float32, or float64.
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
        super().__init__()
        self.bias = nn.Parameter(
            torch.full((n_layers, n_heads), initial_bias, device=device, dtype=dtype)
        )
        self.distribution = distribution or BernoulliGate()
        self.settings = GateSettings()
        self._scores: dict[int, Tensor] = {}
        self._last: dict[int, _LayerPass] = {}

    def hooks(self, adapter: Adapter) -> list[tuple[str, Order, HookFunction]]:
        """The hooks that put these gates on a model: scores are read last, patterns set first."""
        hooks: list[tuple[str, Order, HookFunction]] = []
        scores = adapter.layer_points("attn.hook_attn_scores")
        patterns = adapter.layer_points("attn.hook_pattern")
        for layer, (score, pattern) in enumerate(zip(scores, patterns, strict=True)):
            hooks.append((score, Order.LAST, partial(self._scores.__setitem__, layer)))
            hooks.append((pattern, Order.FIRST, partial(self._gate_pattern, layer)))
        return hooks

    @contextmanager
    def using(self, **settings: Any) -> Iterator[None]:
        """Other `GateSettings` for the length of a block."""
        before = self.settings
        self.settings = replace(before, **settings)
        try:
            yield
        finally:
            self.settings = before

    def extra_repr(self) -> str:
        """Size, distribution and biases."""
        n_layers, n_heads = self.bias.shape
        return (
            f"{n_layers} layers x {n_heads} heads, {self.distribution}, "
            f"bias {self.bias.min().item():.2f} to {self.bias.max().item():.2f}"
        )

    def forget(self) -> None:
        """Drop what is kept of the last pass."""
        self._last.clear()

    def _gate_pattern(
        self, layer: int, pattern: Float[Tensor, "prompt head query key"]
    ) -> Float[Tensor, "prompt head query key"] | None:
        scores = self._scores.pop(layer)
        now, again = self._settings_of(layer, scores)
        if now.mode is GateMode.OPEN and now.counts is None:
            return None
        logits = scores.to(self.bias.dtype) + self.bias[layer, :, None, None]
        if now.counts is not None:
            counted = self._count(layer, now, scores, pattern, logits)
            if not again:
                now.counts.append(counted)
        if now.mode is GateMode.OPEN:
            return None
        gates = gate_values(self.distribution, logits, now.mode, now.generator, now.noise)
        return gate(gates.to(pattern.dtype), pattern, None)

    def _settings_of(self, layer: int, scores: Tensor) -> tuple[GateSettings, bool]:
        """Those of this pass, and whether it is a repetition of the last one.

        Activation checkpointing runs a layer again in the backward pass, when the block that said
        how gates are set may be left: then they are set, and drawn, as they were.
        """
        if torch._C._current_graph_task_id() == -1:
            now = self.settings
            if torch.is_grad_enabled():
                drawn_from = None if now.generator is None else now.generator.get_state()
                # What is counted belongs to the pass, not to its repetition.
                kept = replace(now, counts=None if now.counts is None else [])
                self._last[layer] = _LayerPass(kept, drawn_from, _fingerprint(scores))
            return now, False
        last = self._last.get(layer)
        found = _fingerprint(scores)
        if last is None or not (
            found.shape == last.fingerprint.shape
            and torch.allclose(last.fingerprint, found, equal_nan=True)
        ):
            raise RuntimeError(
                "expected one backward pass after each forward pass of a model with checkpointed "
                "activations; the gates of an earlier pass are not known any more"
            )
        if last.drawn_from is None:
            return last.settings, True
        generator = torch.Generator(scores.device)
        generator.set_state(last.drawn_from)
        return replace(last.settings, generator=generator), True

    def _count(
        self, layer: int, now: GateSettings, scores: Tensor, pattern: Tensor, logits: Tensor
    ) -> AttentionEdgeCounts:
        """The edges of one layer."""
        valid = possible_attention_edges(scores, pattern)
        if now.real is not None:
            # Models mask what is read at padding, not what padding reads.
            valid = valid & now.real.to(valid.device).bool()[:, None, -scores.shape[2] :, None]
        cost = None
        if now.edge_cost is not None:
            cost = _cost_of(layer, len(self.bias), now.edge_cost, logits)
        if now.mode is GateMode.OPEN:
            every = valid.to(logits.dtype)
            return AttentionEdgeCounts.of_layer(valid, valid, every, cost, now.keep_gates)
        probability = self.distribution.open_probability(logits)
        if now.pressure > 0:
            probability = press(probability, logits, now.pressure)
        if now.real is not None:
            probability = probability * valid
        is_open = self.distribution.is_open(logits) & valid
        return AttentionEdgeCounts.of_layer(valid, is_open, probability, cost, now.keep_gates)


def check_edge_cost(cost: Float[Tensor, "*#edge"], edges: Sequence[int | None]) -> None:
    """Raise unless costs are broadcastable to ``[layer, head, query, key]``.

    Args:
        cost: of an attention edge.
        edges: layers, heads, queries and keys; None for as many as a prompt will have.

    Raises:
        ValueError: they are not.
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


def _cost_of(
    layer: int,
    n_layers: int,
    cost: Float[Tensor, "*#edge"],
    logits: Float[Tensor, "prompt head query key"],
) -> Float[Tensor, "#head #query #key"]:
    """The costs of a layer's edges."""
    check_edge_cost(cost, (n_layers, *logits.shape[1:]))
    cost = cost.reshape((1,) * (4 - cost.ndim) + tuple(cost.shape)).to(logits)
    return cost[layer if len(cost) > 1 else 0]


def _fingerprint(scores: Float[Tensor, "prompt head query key"]) -> Tensor:
    return scores.detach()[:1, :1, -1:].clone()

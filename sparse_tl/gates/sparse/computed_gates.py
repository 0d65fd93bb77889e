"""Gates that every forward pass computes from the model's own activations, and those on MLPs.

How a pass sets and counts its gates, and how a layer recomputed by activation checkpointing gets
the same gates again, is the same for gates on attention edges and on MLPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sparse_tl.backend import Adapter, Hook, Order, check_mlps
from sparse_tl.gates.distributions import (
    BernoulliGate,
    GateDistribution,
    GateMode,
    gate_values,
    with_pressure,
)
from sparse_tl.gates.patches import gate
from sparse_tl.gates.sparse.counting import Counted


@dataclass
class GateSettings:
    """Settings of a forward pass: how gates are set, and what is counted.

    Args:
        mode: sampled, deterministic or open.
        generator: random generator of sampled gates.
        noise: scale of the noise of sampled gates.
        counts: list to which the pass appends its counts; None to count nothing.
        keep_gates: whether to keep every gate in `counts`, not only the totals.
        pressure: extra gradient of the expected count for confidently open gates, by
            `with_pressure`.
        edge_cost: cost per attention edge for `AttentionEdgeCounts.cost`; 1 by default.
        real: attention mask, 0 at padding; padding is not counted.
        by_blocks: whether long patterns are computed by blocks even if no gate has an effect; this
            changes results by rounding.
        again: whether a layer runs again in the backward pass, under the settings it had.
    """

    mode: GateMode = GateMode.DETERMINISTIC
    generator: torch.Generator | None = None
    noise: float = 1.0
    counts: list[Counted] | None = None
    keep_gates: bool = False
    pressure: float = 0.0
    edge_cost: Tensor | None = None
    real: Tensor | None = None
    by_blocks: bool = False
    again: bool = False

    @property
    def does_nothing(self) -> bool:
        """Whether a pass neither closes nor counts any gate."""
        return self.mode is GateMode.OPEN and self.counts is None


class ComputedGates(nn.Module):
    """Learnable gates of all layers, which every pass computes from the model's activations."""

    def __init__(self, distribution: GateDistribution) -> None:
        super().__init__()
        self.distribution = distribution
        self.settings = GateSettings()

    def extra_repr(self) -> str:
        """Distribution and biases."""
        bias: Any = self.bias
        return f"{self.distribution}, bias {bias.min().item():.2f} to {bias.max().item():.2f}"

    def _now(self) -> GateSettings:
        """The settings of this pass.

        Raises:
            RuntimeError: a backward pass repeats the layer, with other settings and other noise.
        """
        if torch._C._current_graph_task_id() != -1 and not self.settings.again:
            raise RuntimeError(
                "a backward pass runs a layer again without knowing its gates: checkpoint "
                "activations with sparse_tl.backend.checkpointed_activations"
            )
        return self.settings

    def _opened(
        self, now: GateSettings, logits: Float[Tensor, "*gate"], possible: Bool[Tensor, "*#gate"]
    ) -> tuple[Bool[Tensor, "*gate"], Float[Tensor, "*gate"]]:
        """Which possible gates are open if deterministic, and their probabilities of being open."""
        if now.mode is GateMode.OPEN:
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


def as_now(gates: Sequence[ComputedGates]) -> Callable[[], AbstractContextManager[None]]:
    """Keep the settings of these gates for the repetition of a layer in the backward pass.

    Returns:
        Opens a block in which gates are set as they are now, with the same noise. Nothing is
        counted: what counts already holds the graph, which holds this function.
    """
    kept = [(some, replace(some.settings, counts=None, again=True)) for some in gates]
    counting, generator = gates[0].settings.counts is not None, gates[0].settings.generator
    state = None if generator is None else generator.get_state()

    @contextmanager
    def opened() -> Iterator[None]:
        again = None
        if generator is not None and state is not None:
            again = torch.Generator(generator.device).set_state(state)
        with ExitStack() as blocks:
            for some, settings in kept:
                fields = vars(settings) | {"generator": again, "counts": [] if counting else None}
                blocks.enter_context(using([some], **fields))
            yield

    return opened


def layer_hooks(
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


class MLPGates(ComputedGates):
    """A learnable gate on every MLP output, per layer and position.

    With the input u of a layer's MLP at a position, after normalisation if the model normalises it,
    and a learnable direction w and bias b per layer,

        A ~ Bernoulli(sigmoid(w . u + b)),    residual + A * mlp(u)

    in training; ``A = [w . u + b > 0]`` otherwise. The gate multiplies what reaches the residual
    stream: the output after its own normalisation, where the model has one. Training starts at
    ``w = 0``, where all positions of a layer share a logit; gradients reach w, b and, once w is not
    0, u. MLP gates are an addition of this package; arXiv 2512.05865 gates attention edges only.

    Args:
        n_layers: number of layers.
        d_model: size of an MLP's input.
        initial_bias: initial value of b; a larger bias opens more gates. At 2.0, an MLP output is
            open with a probability of 88 percent.
        distribution: how gates are sampled and evaluated.
        device: device of w and b.
        dtype: precision of w, b and the gate arithmetic: float32 or float64.
    """

    def __init__(
        self,
        n_layers: int,
        d_model: int,
        *,
        initial_bias: float = 2.0,
        distribution: GateDistribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(distribution or BernoulliGate())
        kind = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.zeros(n_layers, d_model, **kind))
        self.bias = nn.Parameter(torch.full((n_layers,), initial_bias, **kind))

    @classmethod
    def of(cls, adapter: Adapter, distribution: GateDistribution) -> MLPGates:
        """New gates for a model, on its device and in the precision that it needs."""
        return cls(
            adapter.n_layers,
            adapter.d_model,
            distribution=distribution,
            device=adapter.device,
            dtype=adapter.gate_dtype,
        )

    def hooks(self, adapter: Adapter) -> list[Hook]:
        """Hooks that attach these gates: they read inputs last, and set outputs first."""
        reads = [f"blocks.{layer}.mlp_read" for layer in range(adapter.n_layers)]
        return layer_hooks(reads, adapter.layer_points("hook_mlp_out"), self._gate_output)

    def check(self, adapter: Adapter, distribution: GateDistribution) -> None:
        """Check that these gates fit a model, alongside gates on its attention edges.

        Raises:
            ValueError: the shapes do not match, the distribution is not that of the attention
                gates, the model has no MLPs, or gates would have no effect on them.
        """
        check_mlps(adapter)
        shape, found = (adapter.n_layers, adapter.d_model), tuple(self.weight.shape)
        if found != shape or tuple(self.bias.shape) != shape[:1]:
            raise ValueError(
                f"these MLP gates have weights of shape {found} and biases of shape "
                f"{tuple(self.bias.shape)}; the model needs {shape} and {shape[:1]}"
            )
        if self.distribution != distribution:
            raise ValueError(
                f"gates on MLPs need the distribution of those on attention edges, {distribution}, "
                f"not {self.distribution}"
            )

    def extra_repr(self) -> str:
        """Size, distribution and biases."""
        return f"{len(self.bias)} layers, {super().extra_repr()}"

    def logits(
        self, layer: int, read: Float[Tensor, "prompt pos d_model"]
    ) -> Float[Tensor, "prompt pos"]:
        """``w . u + b`` for the input u of a layer's MLP; differentiable in all three."""
        # No matrix product: autocast would round it, and gates would differ from those in
        # evaluation.
        return (read.to(self.weight.dtype) * self.weight[layer]).sum(dim=-1) + self.bias[layer]

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
        if now.mode is GateMode.OPEN:
            return None
        gates = gate_values(self.distribution, logits, now.mode, now.generator, now.noise)
        return gate(gates[..., None].to(output.dtype), output, None)

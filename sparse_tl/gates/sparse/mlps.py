"""A gate on every MLP output, per layer and position, computed from the MLP's input.

With the input u of a layer's MLP at a position, after normalisation if the model normalises it, and
a learnable direction w and bias b per layer,

    A ~ Bernoulli(sigmoid(w . u + b)),    residual + A * mlp(u)

in training; ``A = [w . u + b > 0]`` otherwise. The gate multiplies what reaches the residual
stream: the output after its own normalisation, where the model has one. Training starts at
``w = 0``, where all positions of a layer share a logit; gradients reach w, b and, once w is not 0,
u. Attention edges are gated by ``query . key + b``: see `sparse_tl.gates.sparse.attention`. MLP
gates are an addition of this package; arXiv 2512.05865 gates attention edges only.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.gates.distributions import BernoulliGate, GateDistribution, GateMode, gate_values
from sparse_tl.gates.passes import ComputedGates, layer_hooks
from sparse_tl.gates.patches import gate
from sparse_tl.gates.sparse.layer_counts import mlps_of_layer
from sparse_tl.lens import Adapter, Hook, check_mlps

INITIAL_BIAS = 2.0
"""Initial b: an MLP output is open with a probability of 88 percent."""


class MLPGates(ComputedGates):
    """Learnable gates on all MLP outputs of a model.

    Args:
        n_layers: number of layers.
        d_model: size of an MLP's input.
        initial_bias: initial value of b; a larger bias opens more gates.
        distribution: how gates are sampled and evaluated.
        device: device of w and b.
        dtype: precision of w, b and the gate arithmetic: float32 or float64.
    """

    def __init__(
        self,
        n_layers: int,
        d_model: int,
        *,
        initial_bias: float = INITIAL_BIAS,
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
        outputs = adapter.layer_points("hook_mlp_out")
        reads = [f"blocks.{layer}.mlp_read" for layer in range(adapter.n_layers)]
        return layer_hooks(reads, outputs, self._gate_output)

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
                f"expected gates for the MLPs of {shape[0]} layers that read {shape[1]} numbers; "
                f"got weights of shape {found} and biases of shape {tuple(self.bias.shape)}"
            )
        if self.distribution != distribution:
            raise ValueError(
                "expected gates on MLPs with the same distribution as those on attention edges, "
                f"{distribution}; got {self.distribution}"
            )

    def extra_repr(self) -> str:
        """Size, distribution and biases."""
        return (
            f"{len(self.bias)} layers, {self.distribution}, "
            f"bias {self.bias.min().item():.2f} to {self.bias.max().item():.2f}"
        )

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
        now = self._settings_of(layer, read)
        if now.idle:
            return None
        logits = self.logits(layer, read)
        if now.counts is not None:
            everywhere = torch.ones_like(logits, dtype=torch.bool)
            is_open, probability = self._opened(now, logits, everywhere)
            now.counts.append(mlps_of_layer(is_open, probability, now.keep_gates))
        if now.mode is GateMode.OPEN:
            return None
        gates = gate_values(self.distribution, logits, now.mode, now.generator, now.noise)
        return gate(gates[..., None].to(output.dtype), output, None)

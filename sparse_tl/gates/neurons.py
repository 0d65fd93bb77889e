"""Patch single neurons of one MLP for some of its readers: circuit edges, neuron by neuron."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.gates.circuit_edges import CircuitEdges
from sparse_tl.gates.patches import PatchValues
from sparse_tl.lens import Adapter


@dataclass(frozen=True)
class EdgesOfNeurons(CircuitEdges):
    """Circuit edges from one MLP, whose patch differs in every setting of a stack.

    Args:
        layer: layer of the MLP, in which passes start.
    """

    layer: int = 0

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        return self.layer


class NeuronPatch(PatchValues):
    """The clean output of an MLP, with the parts of some neurons patched, one in each setting.

    Args:
        adapter: adapter of the model.
        layer: layer of the MLP.
        moved: patched minus clean coefficient of each neuron's direction.
        directions: the direction that each neuron writes.

    Attributes:
        neurons: the neurons that are patched, one for each setting of the stack.
    """

    def __init__(
        self,
        adapter: Adapter,
        layer: int,
        moved: Float[Tensor, "batch pos neuron"],
        directions: Float[Tensor, "neuron d_model"],
    ) -> None:
        super().__init__(adapter, (), "zero")
        self._name = f"blocks.{layer}.hook_mlp_out"
        self._moved, self._directions = moved, directions
        self.neurons: Int[Tensor, " setting"] = torch.zeros(0, dtype=torch.long)

    def change(self, name: str, value: Tensor, n_stack: int = 1, start: int = 0) -> Tensor:
        """See `PatchValues`; where no neuron is patched, the patch is the activation itself."""
        if name != self._name or not len(self.neurons):
            return torch.zeros_like(value)
        # A pass may include the setting that it starts from, which closes no edge.
        neurons = self.neurons[torch.arange(n_stack) % len(self.neurons)]
        moved = self._moved[..., neurons].movedim(-1, 0)[..., None]
        change = moved * self._directions[neurons][:, None, None]
        return change.flatten(0, 1).to(value)

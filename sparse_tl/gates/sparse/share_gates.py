"""Gates on attention edges that read the edge's share of its query's attention.

With the pattern ``p = softmax(s)``, the query vector ``q`` at ``hook_q`` (before rotary
embeddings), and a learnable ``c`` and ``w`` per head,

    P(A_ij = 1) = p_ij / (p_ij + t_i),    log t_i = -(c + w . q_i)

so the logit is ``log p_ij + c + w . q_i``. Without sampling, an edge is open if its share exceeds
its head's threshold t at that query. Nothing is renormalised, so closing edges removes no more
attention than they had. Adding a constant to all scores of a query changes neither p nor these
gates. If the threshold exceeds 1 at a query, the head closes there altogether, its attention sink
included.

Training starts at ``w = 0``, where all queries of a head share a threshold. `ScoreGates` are the
special case ``log t_i = -(b + log sum_j exp(s_ij))``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.calls.scopes import autograd
from sparse_tl.gates.distributions import GateDistribution
from sparse_tl.gates.sparse.attention import AttentionGates
from sparse_tl.lens import Adapter, Order, attached

INITIAL_THRESHOLD = 0.005
"""Share of attention below which edges start closed."""


class ShareGates(AttentionGates):
    """Learnable gates on all attention edges: ``p_ij / (p_ij + t_i)``.

    The parameters `bias` and `weight` hold c, ``[layer, head]``, and w, ``[layer, head, d_head]``.
    """

    kind: Literal["share"] = "share"

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
        initial_threshold: float = INITIAL_THRESHOLD,
        distribution: GateDistribution | None = None,
    ) -> ShareGates:
        """New gates for a model, on its device and in the precision that it needs.

        Args:
            adapter: adapter of the model.
            initial_threshold: share of attention, in (0, 1), that opens an edge at first.
            distribution: how gates are sampled and evaluated.

        Raises:
            ValueError: the threshold is not in (0, 1).
        """
        if not 0 < initial_threshold < 1:
            raise ValueError(
                "expected an initial threshold between 0 and 1, a share of attention; got "
                f"{initial_threshold}"
            )
        bias = cls._initial(adapter, -math.log(initial_threshold))
        return cls(bias, bias.new_zeros(*bias.shape, _query_size(adapter)), distribution)

    def check(self, adapter: Adapter) -> None:
        """See `AttentionGates.check`."""
        super().check(adapter)
        shape = *self.bias.shape, _query_size(adapter)
        if tuple(self.weight.shape) != shape:
            raise ValueError(
                f"expected gates for query vectors of {shape[-1]} numbers; got weights of shape "
                f"{tuple(self.weight.shape)}"
            )

    def read_points(self, adapter: Adapter) -> list[str]:
        """The query vectors of every layer."""
        return adapter.layer_points("attn.hook_q")

    def _terms(
        self, layer: int, read: Float[Tensor, "prompt query head d_head"]
    ) -> tuple[None, Float[Tensor, "prompt head query 1"]]:
        # No matrix product: autocast would round it, unlike in evaluation, and gates would differ.
        along = (read.to(self.weight.dtype) * self.weight[layer]).sum(dim=-1) + self.bias[layer]
        return None, along.transpose(1, 2)[..., None]

    def _excerpt(
        self, read: Float[Tensor, "prompt query head d_head"]
    ) -> Float[Tensor, "1 1 head d_head"]:
        """See `ComputedGates._excerpt`: here, the first prompt's last query."""
        return read.detach()[:1, -1:].clone()


@autograd(False)
def _query_size(adapter: Adapter) -> int:
    """The size of a head's query vector, which differs from `cfg.d_head` in latent attention."""
    sizes: list[int] = []

    def note(query: Float[Tensor, "batch pos head d_head"]) -> None:
        sizes.append(query.shape[-1])

    # Run the whole model: passes of a sharded model cannot stop after one layer.
    with attached(adapter, [("blocks.0.attn.hook_q", Order.LAST, note)]):
        adapter.model(torch.zeros(1, 1, dtype=torch.long, device=adapter.device))
    return sizes[0]

"""Gates on attention edges that read the edge's score, as in the sparse post-training paper.

With scores ``s`` at ``hook_attn_scores`` and a learnable bias ``b`` per head,

    P(A_ij = 1) = sigmoid(s_ij + b)

A constant that is added to all scores of a query changes these gates, although softmax ignores it.

Reference: arXiv 2512.05865, section 3.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from sparse_tl.gates.distributions import GateDistribution
from sparse_tl.gates.sparse.attention import AttentionGates
from sparse_tl.lens import Adapter, Block, Deferred, check_scores


class ScoreGates(AttentionGates):
    """Learnable gates on all attention edges: ``sigmoid(s_ij + b_h)``.

    The parameter `bias` holds b, ``[layer, head]``.
    """

    kind: Literal["score"] = "score"

    @classmethod
    def of(
        cls,
        adapter: Adapter,
        *,
        initial_bias: float = 4.0,
        distribution: GateDistribution | None = None,
    ) -> ScoreGates:
        """New gates for a model, on its device and in the precision that it needs.

        Args:
            adapter: adapter of the model.
            initial_bias: initial value of b, in logits; a larger bias opens more gates.
            distribution: how gates are sampled and evaluated.
        """
        return cls(cls._initial(adapter, initial_bias), distribution)

    def check(self, adapter: Adapter) -> None:
        """Check that these gates fit a model, and do not depend on tokens that follow.

        Raises:
            ValueError: the model's scores change when tokens follow, or as in `AttentionGates`.
        """
        check_scores(adapter)
        super().check(adapter)

    def read_points(self, adapter: Adapter) -> list[str]:
        """The attention scores of every layer."""
        return adapter.layer_points("attn.hook_attn_scores")

    def _terms(
        self, layer: int, read: Float[Tensor, "prompt head query key"]
    ) -> tuple[Float[Tensor, "prompt head query key"], Float[Tensor, "1 head 1 1"]]:
        return read, self.bias[layer][None, :, None, None]

    def _excerpt(self, read: Float[Tensor, "prompt head query key"]) -> Float[Tensor, "1 1 1 key"]:
        """See `ComputedGates._excerpt`: here, the scores of the first head's last query."""
        if isinstance(read, Deferred) and read.computed is None:
            last = slice(read.shape[2] - 1, None)
            block = Block(slice(0, 1), slice(0, 1), last, slice(None))
            return read.expression.on(block).detach().clone()
        return read.detach()[:1, :1, -1:].clone()

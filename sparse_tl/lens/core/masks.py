"""The pairs of a query and a key that a layer's attention allows, whatever their scores are.

Softmax ignores a constant that is added to a row of scores, so the size of a score says nothing
about a mask. What is masked follows from the structure of attention (causal order, window) and from
the mask that the layer is called with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.lens.core.expressions import EVERYTHING, Block

MASKED = -1e8
"""An additive mask hides pairs at or below this value; positional biases are far above it."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys each query of a layer can attend to in one forward pass.

    Queries are the last columns: with a key-value cache, there are more keys than queries.

    Args:
        causal: whether keys after the query are masked.
        window: how many of the latest keys, the query's own included, are not masked; None for all.
        given: a further mask that broadcasts to ``[prompt, head, query, key]``: booleans or
            integers that are 0 where a pair is masked, or floats that are added to the scores.
    """

    causal: bool
    window: int | None = None
    given: Tensor | None = None

    def allowed(
        self, block: Block, size: Sequence[int], device: torch.device
    ) -> Bool[Tensor, "#prompt #head query key"]:
        """The pairs of a block that are not masked.

        Args:
            block: prompts, heads, queries and keys.
            size: number of queries and keys in the whole pattern.
            device: device of the result.
        """
        n_queries, n_keys = size
        columns = torch.arange(n_keys, device=device)
        keys, queries = columns[block.keys], columns[n_keys - n_queries :][block.queries, None]
        allowed = keys <= queries if self.causal else (keys >= 0).expand(len(queries), -1)
        if self.window is not None:
            allowed = allowed & (keys > queries - self.window)
        if self.given is None:
            return allowed[None, None]
        given = block.of(self.given[..., -n_queries:, :n_keys].to(device))
        if given.is_floating_point():
            given = given > max(MASKED, torch.finfo(given.dtype).min)
        return allowed & given.bool()

    def keys_allowed(self, queries: slice, size: Sequence[int], device: torch.device) -> slice:
        """The range of keys that are allowed to any of these queries; all keys if none is."""
        block = Block(slice(None), slice(None), queries, slice(None))
        some = self.allowed(block, size, device).flatten(0, -2).any(dim=0).nonzero()
        return slice(int(some[0]), int(some[-1]) + 1) if len(some) else slice(0, size[1])

    def pairs(self, length: int) -> Bool[Tensor, "query key"]:
        """The pairs that are allowed in some prompt of this length, on the CPU."""
        device = torch.device("cpu") if self.given is None else self.given.device
        allowed = self.allowed(EVERYTHING, (length, length), device)
        return allowed.flatten(0, 1).any(dim=0).cpu()

    def check(self, pattern: Float[Tensor, "prompt head query key"], name: str) -> None:
        """Check that a pattern is 0 at all masked pairs.

        Args:
            pattern: attention pattern of a pass under this mask.
            name: what the message calls the pattern.

        Raises:
            ValueError: the pattern is not 0 at a masked pair: the layer does not apply this mask.
        """
        allowed = self.allowed(EVERYTHING, pattern.shape[2:], pattern.device)
        if bool((pattern * ~allowed).any()):
            raise ValueError(
                f"expected attention of 0 at all pairs that the layer masks; got more in {name}: "
                "its mask is of an unknown kind, so possible edges cannot be counted"
            )

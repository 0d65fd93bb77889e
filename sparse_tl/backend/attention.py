"""Blocks of attention patterns: what a model computes them from, and the pairs that are allowed.

`Expression` records what a model makes of the product of queries and keys, and evaluates it on
blocks. `AttentionMask` says which pairs of a query and a key a layer allows, whatever their scores
are: softmax ignores a constant that is added to a row of scores, so the size of a score says
nothing about a mask. What is masked follows from the structure of attention (causal order, window)
and from the mask that the layer is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Some prompts, heads, queries and keys of an attention pattern."""

    prompts: slice
    heads: slice
    queries: slice
    keys: slice

    def of(self, values: Tensor) -> Tensor:
        """The block of a tensor that broadcasts to ``[prompt, head, query, key]``."""
        places = (self.prompts, self.heads, self.queries, self.keys)[4 - values.ndim :]
        each = zip(places, values.shape, strict=True)
        return values[tuple(place if size > 1 else slice(None) for place, size in each)]


ENTRY = Block(slice(0, 1), slice(0, 1), slice(0, 1), slice(0, 1))
"""The first entry of a pattern."""
EVERYTHING = Block(slice(None), slice(None), slice(None), slice(None))
"""The whole pattern."""


@dataclass(frozen=True, eq=False)
class Expression:
    """A tensor ``[prompt, head, query, key]``, computed from others entry by entry or row by row.

    The function takes expressions, tensors that broadcast to its shape, and settings; the innermost
    function takes the queries and the transposed keys.
    """

    function: Callable[..., Tensor]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property  # not cached: an expression that refers to itself outlives its pass
    def product(self) -> Expression:
        """The product of queries and keys that this is computed from."""
        inner = (v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Expression))
        return next((value.product for value in inner), self)

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The tensors that this is computed from, except queries and keys, each once."""
        if self is self.product:
            return []
        found: dict[int, Tensor] = {}
        for value in (*self.args, *self.kwargs.values()):
            inner = value.leaves if isinstance(value, Expression) else [value]
            found |= {id(leaf): leaf for leaf in inner if isinstance(leaf, Tensor)}
        return list(found.values())

    def value(self, leaves: Mapping[int, Tensor], known: dict[int, Tensor]) -> Tensor:
        """The value on a block, from the block of every leaf, by its id.

        `known` holds values of other expressions on this block, by id, including the product's;
        computed values are added.
        """
        if id(self) not in known:

            def of(value: Any) -> Any:
                if isinstance(value, Expression):
                    return value.value(leaves, known)
                return leaves[id(value)] if isinstance(value, Tensor) else value

            kwargs = {name: of(value) for name, value in self.kwargs.items()}
            known[id(self)] = self.function(*map(of, self.args), **kwargs)
        return known[id(self)]

    def on(self, block: Block) -> Tensor:
        """The value on a block, computed from the full tensors."""
        q, k = self.product.args
        product = (
            q[block.prompts, block.heads, block.queries]
            @ (k[block.prompts, block.heads, :, block.keys])
        )
        leaves = {id(leaf): block.of(leaf) for leaf in self.leaves}
        return self.value(leaves, {id(self.product): product})


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
        """The pairs of a block that are not masked, in a pattern of `size` queries and keys."""
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

    def keys_allowed(self, queries: Sequence[slice], size: Sequence[int]) -> list[slice]:
        """The range of keys that are allowed to any query of each slice; all keys if none is."""
        device = torch.device("cpu") if self.given is None else self.given.device
        blocks = [Block(slice(None), slice(None), part, slice(None)) for part in queries]
        some = [self.allowed(block, size, device).flatten(0, -2).any(dim=0) for block in blocks]
        seen = torch.stack(some).int()
        starts, after = seen.argmax(dim=1), seen.flip(1).argmax(dim=1)  # 0 where no key is seen
        ends = torch.stack([starts, size[1] - after], dim=1).tolist()  # waits for a GPU: once
        return [slice(*both) for both in ends]

    def pairs(self, length: int) -> Bool[Tensor, "query key"]:
        """The pairs that are allowed in some prompt of this length, on the CPU."""
        device = torch.device("cpu") if self.given is None else self.given.device
        allowed = self.allowed(EVERYTHING, (length, length), device)
        return allowed.flatten(0, 1).any(dim=0).cpu()

    def check(self, pattern: Float[Tensor, "prompt head query key"], name: str) -> None:
        """Raise a ValueError if a pattern is not 0 at a masked pair."""
        allowed = self.allowed(EVERYTHING, pattern.shape[2:], pattern.device)
        if bool((pattern * ~allowed).any()):
            raise ValueError(
                f"{name} is not 0 at all pairs that the layer masks: its mask is of an unknown "
                "kind, so possible edges cannot be counted"
            )

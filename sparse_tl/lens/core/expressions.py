"""Record what a model computes from the product of queries and keys, and evaluate it on blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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

    Args:
        function: function that computes it.
        args: arguments: expressions, tensors that broadcast to its shape, and settings. The
            innermost function takes the queries and the transposed keys.
        kwargs: keyword arguments, likewise.
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
        """The value on a block.

        Args:
            leaves: the block of every leaf, by its id.
            known: values of other expressions on this block, by id, including the product's;
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

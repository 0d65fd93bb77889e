"""Forward passes that skip unused positions without changing any value that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from sparse_tl.backend.core.places import hooked

MOSTLY = 0.7
"""Share of read positions above which selecting them costs more than it saves."""


@contextmanager
def mlp_only_at(
    mlp: nn.Module, behind: Sequence[nn.Module], own: Set[int], read: Bool[Tensor, "batch pos"]
) -> Iterator[None]:
    """Inside the block, the last MLP runs on some positions only, and writes zeros elsewhere.

    If a module inside it or `behind` it has hooks, besides `own`, all positions are computed, since
    the hook would see zeros.
    """
    if any(hooked(module, own) for module in behind) or read.float().mean() > MOSTLY:
        yield
        return

    selected = False

    def select(_module: nn.Module, args: Any) -> tuple[Any, ...] | None:
        nonlocal selected
        selected = args[0].shape[:2] == read.shape
        if not selected:  # a pass over other prompts
            return None
        # Bloom's MLPs also take the residual stream, to add to it.
        return tuple(arg[read][None] if isinstance(arg, Tensor) else arg for arg in args)

    def scatter(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not selected:
            return None
        # Experts may also return their router's scores, which nothing reads.
        written, *rest = output if isinstance(output, tuple) else (output,)
        everywhere = written.new_zeros(*read.shape, written.shape[-1])
        everywhere[read] = written.view(-1, written.shape[-1])
        return (everywhere, *rest) if isinstance(output, tuple) else everywhere

    with mlp.register_forward_pre_hook(select), mlp.register_forward_hook(scatter):
        yield


@contextmanager
def logits_only_at(
    unembed: nn.Module, read: Bool[Tensor, "batch pos"]
) -> Iterator[Callable[[Tensor], Float[Tensor, "label vocab"]]]:
    """Inside the block, logits are computed at some positions only, if no hook needs others.

    Yields a function from the model's output to the logits at these positions, in row-major order.
    """
    if any(map(hooked, unembed.modules())):
        yield lambda logits: logits[read]
        return

    selected = False

    def select(_module: nn.Module, args: Any) -> tuple[Tensor, ...] | None:
        nonlocal selected
        selected = args[0].shape[:2] == read.shape
        return (args[0][read][None], *args[1:]) if selected else None

    with unembed.register_forward_pre_hook(select):
        yield lambda logits: logits[0] if selected else logits[read]


@contextmanager
def sees_first(attention: nn.Module, n_rows: int) -> Iterator[None]:
    """Inside the block, an attention layer sees only the first rows of its inputs."""

    def shorten(_module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        all_rows = len(next(value for value in (*args, *kwargs.values()) if _by_row(value)))

        def first(value: Any) -> Any:
            if isinstance(value, tuple):  # rotary tables
                return tuple(map(first, value))
            return value[:n_rows] if _by_row(value) and len(value) == all_rows else value

        return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}

    with attention.register_forward_pre_hook(shorten, with_kwargs=True):
        yield


def repeated(rows: Tensor, copies: int) -> Tensor:
    """`copies` copies of the rows, one after the other."""
    return rows if copies == 1 else rows.repeat(copies, *[1] * (rows.ndim - 1))


def _by_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1

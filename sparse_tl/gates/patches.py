"""Patch values at closed gates: zeros, means, other prompts' activations, or given tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import (
    Activations,
    Adapter,
    Order,
    check_padding,
    check_reference,
    check_tokens,
    evaluation_mode,
    record,
    repeated,
)
from sparse_tl.data import PromptPairs

PatchName = Literal["zero", "mean", "corrupted", "resample"]
Patch = PatchName | Activations
"""A `PatchName`, or tensors keyed by hook point (as from `run_with_cache`)."""
ReferencePrompts = Int[Tensor, "prompt pos"] | PromptPairs
"""Prompts without padding, or pairs, whose positions tell where each prompt ends."""


def gate(
    gates: Float[Tensor, "*#shape"], clean: Float[Tensor, "*#shape"], patch: Tensor | None
) -> Float[Tensor, "*#shape"]:
    """``gates * clean + (1 - gates) * patch``: 1 keeps, 0 patches. A patch of None is zeros."""
    kept = gates * clean
    return kept if patch is None else kept + (1 - gates) * patch


class PatchValues:
    """The values of a patch at some hook points; arguments as in `gated`.

    `order` is when the gates act relative to other hooks; values are recorded there.
    """

    final: Float[Tensor, "prompt pos d_model"] | None = None
    """Final residual stream of the reference prompts; None without them, and for means."""

    def __init__(
        self,
        adapter: Adapter,
        names: Sequence[str],
        patch: Patch,
        reference: ReferencePrompts | None = None,
        seed: int = 0,
        *,
        order: Order = Order.LAST,
    ) -> None:
        self.patch, self.values = patch, {}
        self._generator = torch.Generator().manual_seed(seed)
        self.rows: Tensor | None = None
        """For "resample", the reference prompt of each row; drawn when it is first needed."""
        prompts = reference_prompts(adapter, patch, reference)
        if not isinstance(patch, str):
            missing = [name for name in names if name not in patch]
            if missing:
                raise ValueError(f"the patch has no tensor for the hook points {missing}")
            self.values = {name: patch[name] for name in names}
        elif prompts is not None and len(names):
            if patch == "mean":
                self.values = mean_activations(adapter, [prompts], names, order)
            else:
                with torch.no_grad():
                    self.values, self.final = _recorded(adapter, prompts, names, order)

    def at(
        self, name: str, like: Float[Tensor, "rows ..."], n_stack: int = 1, start: int = 0
    ) -> Tensor | None:
        """The values at a hook point, one row per row of an activation; None for zeros.

        The activation `like` has `n_stack` copies of the prompts, one after the other; its first
        column is at position `start`, above 0 with a key-value cache.
        """
        if name not in self.values:
            return None
        value = self.values[name]
        n_prompts = len(like) // n_stack
        if self.patch == "resample":
            if self.rows is None or len(self.rows) != n_prompts:
                self.rows = torch.randint(len(value), (n_prompts,), generator=self._generator)
            value = value[self.rows.to(value.device)]
        if isinstance(self.patch, str):
            value = _columns(name, value, like, start)
        if value.ndim == like.ndim and len(value) not in (1, len(like)):
            if len(value) != n_prompts:
                raise ValueError(
                    f"the patch at {name} has {len(value)} rows for {n_prompts} prompts"
                )
            value = repeated(value, n_stack)
        return value.to(like)

    def change(
        self, name: str, value: Float[Tensor, "rows ..."], n_stack: int = 1, start: int = 0
    ) -> Tensor:
        """The patch of a hook point minus its activation; arguments as in `at`."""
        shown = self.at(name, value, n_stack, start)
        return -value if shown is None else shown - value


def needs_reference(patch: Patch) -> bool:
    return isinstance(patch, str) and patch != "zero"


def reference_prompts(
    adapter: Adapter, patch: Patch, reference: ReferencePrompts | None
) -> Int[Tensor, "prompt pos"] | None:
    """The prompts whose activations a patch needs; None if it needs none.

    "mean" and "resample" combine columns of different prompts. Prompts of several lengths are
    refused there, since some columns would hold padding.
    """
    if needs_reference(patch) != (reference is not None):
        said = repr(patch) if isinstance(patch, str) else "of tensors"
        raise ValueError(
            f"the patch {said} needs reference prompts: reference=..."
            if reference is None
            else f"the patch {said} takes no reference prompts"
        )
    if reference is None:
        return None
    if not isinstance(reference, PromptPairs):
        prompts = reference
    elif patch == "corrupted":
        prompts = reference.corrupted
        check_padding(adapter, reference.attention_mask)
    else:
        prompts = reference.of_one_length().clean
    check_tokens(adapter, prompts)
    if patch != "corrupted":
        check_reference(adapter, prompts)
    return prompts


@torch.no_grad()
def mean_activations(
    adapter: Adapter,
    batches: Iterable[Int[Tensor, "_ pos"]],
    names: Sequence[str],
    order: Order = Order.LAST,
) -> dict[str, Float[Tensor, "1 ..."]]:
    """The mean over all prompts at some hook points, per position."""
    total: dict[str, Tensor] = {}
    n_prompts = 0
    for tokens in batches:
        kept, _ = _recorded(adapter, tokens, names, order)
        for name in names:
            total[name] = total.get(name, 0) + kept[name].sum(dim=0, keepdim=True)
        n_prompts += len(tokens)
    return {name: value / n_prompts for name, value in total.items()}


def _recorded(
    adapter: Adapter, tokens: Tensor, names: Sequence[str], order: Order
) -> tuple[dict[str, Tensor], Tensor]:
    first = names if order is Order.FIRST else ()
    with evaluation_mode(adapter.model):
        return record(adapter, tokens, names, first=first)


def _columns(name: str, value: Tensor, like: Tensor, start: int) -> Tensor:
    """The columns of a reference's values that match the positions of an activation."""
    pattern = name.endswith("hook_pattern")  # [batch, head, query, key]; else [batch, pos, ...]
    axis = 2 if pattern else 1
    end = start + like.shape[axis]
    if value.shape[axis] < end:
        raise ValueError(f"reference prompts must be at least as long as the {end} tokens that run")
    return value[:, :, start:end, end - like.shape[3] : end] if pattern else value[:, start:end]

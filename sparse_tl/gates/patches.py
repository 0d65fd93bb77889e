"""What stands where a gate is closed: nothing, a mean, another prompt's value, or given tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.lens import Activations, Adapter, record

PatchName = Literal["zero", "mean", "corrupted", "resample"]
Patch = PatchName | str | Activations
"""A name of `PatchName`, or tensors by the name of their hook point (as from `run_with_cache`)."""


def gate(
    gates: Float[Tensor, "*#shape"], clean: Float[Tensor, "*#shape"], patch: Tensor | None
) -> Float[Tensor, "*#shape"]:
    """``gates * clean + (1 - gates) * patch``: 1 keeps, 0 patches. A patch of None is 0."""
    kept = gates * clean
    return kept if patch is None else kept + (1 - gates) * patch


class PatchValues:
    """The values of a patch, as of `gated`, at the hook points of some names.

    Raises:
        ValueError: an unknown patch, a hook point without a tensor, or a reference that is missing
            or not asked for.
    """

    def __init__(
        self,
        adapter: Adapter,
        names: Sequence[str],
        patch: Patch,
        reference: Int[Tensor, "prompt pos"] | None = None,
        seed: int = 0,
    ) -> None:
        self.patch, self.values = patch, {}
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: Tensor | None = None
        if needs_reference(patch) != (reference is not None):
            raise ValueError(
                "expected reference prompts for the patches 'mean', 'corrupted' and 'resample', "
                f"and for these alone; got patch={patch if isinstance(patch, str) else 'tensors'!r}"
                f" {'without' if reference is None else 'with'} them"
            )
        if not isinstance(patch, str):
            missing = [name for name in names if name not in patch]
            if missing:
                raise ValueError(f"expected a patch for every hook point; none for {missing}")
            self.values = {name: patch[name] for name in names}
        elif reference is not None and len(names):
            if not len(reference):
                raise ValueError("expected at least one reference prompt; got none")
            if patch == "mean":
                self.values = mean_activations(adapter, [reference], names)
            else:
                with torch.no_grad():
                    self.values, _ = record(adapter, reference, names)

    def draw(self, n_prompts: int) -> None:
        """Choose reference prompts anew, for a pass over so many prompts."""
        if self.patch == "resample" and self.values:
            n = len(next(iter(self.values.values())))
            self._rows = torch.randint(n, (n_prompts,), generator=self._generator)

    def at(
        self, name: str, like: Float[Tensor, "rows ..."], n_stack: int = 1, start: int = 0
    ) -> Tensor | None:
        """The values at a hook point, one row for each row of an activation; None for zeros.

        Args:
            name: of the hook point.
            like: the activation: `n_stack` copies of the prompts, one after the other.
            n_stack: how many.
            start: the prompts' position at which the activation starts (with a key-value cache).

        Raises:
            ValueError: a reference that is shorter than the prompts, or has other rows.
        """
        if name not in self.values:
            return None
        value = self.values[name]
        n_prompts = len(like) // n_stack
        if self.patch == "resample":
            if self._rows is None or len(like) % len(self._rows):
                self.draw(n_prompts)
            assert self._rows is not None
            # Where other gates stack the prompts, their copies show the same.
            value = value[self._rows.repeat(len(like) // len(self._rows)).to(value.device)]
        if isinstance(self.patch, str):
            value = _columns(name, value, like, start)
        if value.ndim == like.ndim and len(value) not in (1, len(like)):
            if len(value) != n_prompts:
                raise ValueError(
                    f"expected a patch of one row, or of one for each of {n_prompts} prompts; got "
                    f"{len(value)} at {name}"
                )
            value = value.repeat(n_stack, *[1] * (value.ndim - 1))
        return value.to(like)

    def change(self, name: str, value: Float[Tensor, "rows ..."], n_stack: int = 1) -> Tensor:
        """What stands at a hook point, minus the patch."""
        shown = self.at(name, value, n_stack)
        return value if shown is None else value - shown


def needs_reference(patch: Patch) -> bool:
    """Whether a patch is taken from reference prompts.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(patch, str) and patch not in get_args(PatchName):
        raise ValueError(
            f"expected a patch of {get_args(PatchName)}, or tensors by hook point; got {patch!r}"
        )
    return isinstance(patch, str) and patch != "zero"


def drawn(
    prompts: Int[Tensor, "prompt pos"], n_prompts: int, seed: int
) -> Int[Tensor, "drawn pos"]:
    """So many of some prompts, at random."""
    generator = torch.Generator().manual_seed(seed)
    return prompts[torch.randint(len(prompts), (n_prompts,), generator=generator)]


@torch.no_grad()
def mean_activations(
    adapter: Adapter, batches: Iterable[Int[Tensor, "_ pos"]], names: Sequence[str]
) -> dict[str, Float[Tensor, "1 ..."]]:
    """The mean over all prompts at some hook points, position by position."""
    total: dict[str, Tensor] = {}
    n_prompts = 0
    for tokens in batches:
        kept, _ = record(adapter, tokens, names)
        for name in names:
            total[name] = total.get(name, 0) + kept[name].sum(dim=0, keepdim=True)
        n_prompts += len(tokens)
    return {name: value / n_prompts for name, value in total.items()}


def _columns(name: str, value: Tensor, like: Tensor, start: int) -> Tensor:
    """The part of a reference's values that belongs to the positions of an activation."""
    pattern = name.endswith("hook_pattern")  # [batch, head, query, key]; else [batch, pos, ...]
    end = start + like.shape[2 if pattern else 1]
    if value.shape[2 if pattern else 1] < end:
        raise ValueError(
            f"expected reference prompts at least as long as the {end} tokens that are run; they "
            f"have {value.shape[2 if pattern else 1]}"
        )
    return value[:, :, start:end, end - like.shape[3] : end] if pattern else value[:, start:end]

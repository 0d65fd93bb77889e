"""Interventions on activations: another prompt's values, vectors, subspaces, factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.backend import (
    EMBEDDED,
    Activations,
    Adapter,
    Hook,
    HookedModel,
    Order,
    adapt,
    check_tokens,
    evaluation_mode,
    record,
)
from sparse_tl.contexts import scope
from sparse_tl.gates.run import all_firing
from sparse_tl.gates.sites import Columns, meant

Selected = Float[Tensor, "prompt column *size"]
"""Activations in the columns on which an intervention acts."""
Source = (
    str
    | Int[Tensor, "prompt pos"]
    | Activations
    | Float[Tensor, "*size"]
    | Callable[[Selected], Selected]
)


@checked
@dataclass(frozen=True, eq=False)
class Intervention:
    """What becomes of the activations a at a hook point: ``a + P (keep * a + scale * s - a)``.

    s is the source, and P projects onto a subspace; by default it is the identity. So ``keep=0``
    swaps (interchange intervention), or projects a subspace out if there is no source; ``keep=1``
    adds the source; another number scales what is there.

    Args:
        name: hook point, such as "blocks.3.hook_resid_pre".
        source: a prompt, as text or tokens, or one prompt for each that is run; activations by hook
            point, as from `run_with_cache`; a vector of the size of one position's activation
            (``[d_model]`` in the residual stream, ``[head, d_head]`` at ``attn.hook_z``); or a
            function of a, such as a feature's part of it. None for zeros. Gradients reach all but
            prompts.
        keep: factor of the activations.
        scale: factor of the source.
        positions: columns in which it acts: one, a list, a slice, or a function that says whether a
            column is selected. Negative columns count from the end of the tokens that are run. By
            default all, including those of generated tokens.
        source_positions: columns of the source: one for all, or one for each of `positions`; by
            default the same columns.
        subspace: vectors that span it, ``[direction, *size]``; or indices along the first axis of
            one position's activation: neurons at ``mlp.hook_post``, heads at ``attn.hook_z``.

    Raises:
        ValueError: the hook point has no position of its own, a vector is not finite, vectors that
            span a subspace are linearly dependent, or `source_positions` do not match `positions`.

    Reference: Geiger et al., arXiv 2106.02997 (interchange interventions); arXiv 2303.02536 (in
    subspaces).
    """

    name: str
    source: Source | None = None
    keep: float = 0.0
    scale: float = 1.0
    positions: Columns | None = None
    source_positions: int | Sequence[int] | None = None
    subspace: Float[Tensor, "direction ..."] | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.name.endswith(("hook_attn_scores", "hook_pattern")):
            raise ValueError(
                f"{self.name} has a number for each query and key, not a vector for each position: "
                "hook it by hand, or cut edges with ablate_attention_edges"
            )
        if isinstance(self.source, Tensor) and not self.source.isfinite().all():
            raise ValueError("the vector holds NaN or infinity")
        if isinstance(self.subspace, Tensor):
            vectors = self.subspace.detach().flatten(1).float()
            if torch.linalg.matrix_rank(vectors) < len(vectors):
                raise ValueError("the vectors that span the subspace are linearly dependent")
        if isinstance(self.source_positions, Sequence):
            listed = self.positions if isinstance(self.positions, Sequence) else ()
            if len(listed) != len(self.source_positions):
                raise ValueError("give a list of positions, and one of source_positions for each")


def _changed(
    one: Intervention, here: Selected, columns: Sequence[int], end: int, recorded: Tensor | None
) -> Selected:
    """What the activations in some columns of a pass, which ends before `end`, become."""
    size, changed = here.shape[2:], one.keep * here

    def check(what: str, shape: torch.Size) -> None:
        if shape != size:
            at = f"a position at {one.name} has {tuple(size)}"
            raise ValueError(f"{what} has shape {tuple(shape)}; {at}")

    if recorded is not None:
        changed = changed + one.scale * _from_source(one, here, columns, end, recorded)
    elif isinstance(one.source, Tensor):
        check("the vector", one.source.shape)
        changed = changed + one.scale * one.source.to(here)
    elif callable(one.source):
        changed = changed + one.scale * one.source(here)
    if one.subspace is None:
        return changed
    if not isinstance(one.subspace, Tensor):
        units = torch.tensor(one.subspace, device=here.device)
        return here.index_copy(2, units, changed.index_select(2, units))
    check("each vector of the subspace", one.subspace.shape[1:])
    # Half precision has no QR decomposition.
    vectors = one.subspace.flatten(1).T.to(torch.promote_types(here.dtype, torch.float32))
    q = torch.linalg.qr(vectors)[0].to(here)
    return here + ((changed - here).flatten(2) @ q @ q.T).view_as(here)


def _from_source(
    one: Intervention, here: Selected, columns: Sequence[int], end: int, recorded: Tensor
) -> Float[Tensor, "#prompt column *size"]:
    """The source's activations for some columns of each prompt."""
    if len(recorded) not in (1, len(here)):
        raise ValueError(f"the source has {len(recorded)} prompts for {len(here)} that are run")
    width, places = recorded.shape[1], one.source_positions
    if places is None:
        places = columns
    elif isinstance(places, int):
        places = [places] * len(columns)
    else:
        assert isinstance(one.positions, Sequence)
        of = {column % end: place for column, place in zip(one.positions, places, strict=True)}
        places = [of[column] for column in columns]
    if outside := [place for place in places if not -width <= place < width]:
        raise ValueError(
            f"position {outside[0]} lies outside the source of {width} tokens: choose positions "
            "that it has, such as slice(0, 5), or source_positions"
        )
    return recorded[:, places].to(here)


class _Columns:
    """The columns of the current pass."""

    def __init__(self) -> None:
        self.start = self.end = 0
        self.hooks: list[Hook] = [
            ("cached_columns", Order.FIRST, self._begin),
            (EMBEDDED, Order.FIRST, self._note),
        ]

    def _begin(self, cached: int) -> None:
        self.start, self.end = cached, 0

    def _note(self, residual: Float[Tensor, "batch pos d_model"]) -> None:
        # HookedTransformer's `hook_rot_k` has the keys of all columns, so a width is not enough.
        self.end = self.start + residual.shape[1]

    def act(
        self, one: Intervention, recorded: Tensor | None, value: Float[Tensor, "batch pos *size"]
    ) -> Tensor:
        end = self.end or self.start + value.shape[1]
        first = end - value.shape[1]
        positions = slice(None) if one.positions is None else one.positions
        places = meant(positions, first, self.start, end).nonzero()[:, 0]
        at = places.to(value.device)
        here = value.index_select(1, at)
        changed = _changed(one, here, (places + first).tolist(), end, recorded)
        return value.index_copy(1, at, changed)


@checked
@scope
def intervene(
    model: HookedModel, interventions: Intervention | Sequence[Intervention]
) -> Iterator[None]:
    """Inside the block, the model runs under interventions; they act in order at one hook point.

    They act in every pass, also where `generate` adds tokens, with or without a key-value cache;
    ``positions=slice(0, 15)`` is the 15 tokens of a prompt alone. A prompt that is a source is run
    when the block is entered, under what acts on the model then. The model is in evaluation mode.

    Args:
        model: dense or sparse model.
        interventions: one, or several. They hold no state, and can be used again.

    Raises:
        ValueError: the model lacks a hook point; when the model is run, a source or subspace has
            another size than the activations, a listed position lies outside the prompts or the
            source, or one counts from the end in a run with a key-value cache; when the block ends,
            the model was run and never called a hook point.
    """
    adapter, columns = adapt(model), _Columns()
    given = [interventions] if isinstance(interventions, Intervention) else interventions
    with evaluation_mode(model):
        hooks: list[Hook] = [
            (one.name, Order.FIRST, partial(columns.act, one, _recorded(adapter, one)))
            for one in given
        ]
        with all_firing(adapter, [*hooks, *columns.hooks]):
            yield


@torch.no_grad()
def _recorded(adapter: Adapter, one: Intervention) -> Float[Tensor, "prompt pos *size"] | None:
    """The activations of a source that is a prompt, or that has them by hook point."""
    source = one.source
    if isinstance(source, str):
        source = adapter.model.to_tokens(source)
    if isinstance(source, Tensor) and not source.is_floating_point():
        check_tokens(adapter, source)
        return record(adapter, source, [one.name], first=[one.name])[0][one.name]
    return source[one.name] if isinstance(source, Activations) else None


@checked
def steer(
    model: HookedModel,
    name: str,
    vector: Float[Tensor, "*size"],
    *,
    scale: float = 1.0,
    positions: Columns | None = None,
) -> AbstractContextManager[None]:
    """Inside the block, add ``scale * vector`` to the activations at a hook point.

    This is `intervene` with ``Intervention(name, vector, keep=1.0, scale=scale, ...)``; see there.

    Reference: Turner et al., arXiv 2308.10248 (activation addition).
    """
    return intervene(model, Intervention(name, vector, keep=1.0, scale=scale, positions=positions))

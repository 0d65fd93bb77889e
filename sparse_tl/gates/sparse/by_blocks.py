"""Attention computed by blocks for long prompts, in a model without gates."""

from __future__ import annotations

from collections.abc import Iterator

from sparse_tl.calls.scopes import scope
from sparse_tl.gates.distributions import GateMode
from sparse_tl.gates.passes import using
from sparse_tl.gates.sparse.score_gates import ScoreGates
from sparse_tl.lens import HookedModel, adapt, attached, defer_scores


@scope
def attention_by_blocks(model: HookedModel) -> Iterator[None]:
    """Inside the scope, a model without gates computes attention of long prompts by blocks."""
    adapter = adapt(model)
    gates = ScoreGates.of(adapter).requires_grad_(False)
    with (
        using([gates], mode=GateMode.OPEN, by_blocks=True),
        attached(adapter, gates.hooks(adapter)) as own,
        defer_scores(adapter, own),
    ):
        yield

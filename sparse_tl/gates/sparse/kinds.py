"""The kinds of gate on attention edges, by name."""

from __future__ import annotations

from collections.abc import Mapping

from sparse_tl.gates.distributions import GateDistribution
from sparse_tl.gates.sparse.attention import AttentionGates, GateKind
from sparse_tl.gates.sparse.score_gates import ScoreGates
from sparse_tl.gates.sparse.share_gates import ShareGates
from sparse_tl.lens import Adapter, check_gates

KINDS: dict[str, type[ScoreGates | ShareGates]] = {
    kind.kind: kind for kind in (ScoreGates, ShareGates)
}
_STARTS = {"score": "initial_bias", "share": "initial_threshold"}
"""The argument that says where the gates of each kind start."""


def attention_gates(
    adapter: Adapter,
    gates: GateKind | AttentionGates | None,
    starts: Mapping[str, float | None],
    distribution: GateDistribution | None,
) -> AttentionGates:
    """Gates that fit a model: new ones of a kind, or the given ones.

    Args:
        adapter: adapter of the model.
        gates: a name in `KINDS`, or existing gates; by default share gates, or score gates if their
            start is given.
        starts: where new gates start, by argument; None for the default.
        distribution: how new gates are sampled and evaluated.

    Raises:
        ValueError: an argument belongs to the other kind, or to new gates where existing ones are
            given; or the gates do not fit the model.
    """
    given = {name: value for name, value in starts.items() if value is not None}
    if gates is None:
        gates = "score" if given.keys() == {_STARTS["score"]} else "share"
    own = {_STARTS[gates]} if isinstance(gates, str) else set()
    if not given.keys() <= own:
        said = f"gates={gates!r}" if isinstance(gates, str) else "existing gates"
        raise ValueError(
            f"expected {' or '.join(own) or 'no argument of new gates'} with {said}; got "
            f"{', '.join(sorted(given.keys() - own))}"
        )
    if isinstance(gates, str):
        check_gates(adapter)
        gates = KINDS[gates].of(adapter, distribution=distribution, **given)
    gates.check(adapter)
    return gates

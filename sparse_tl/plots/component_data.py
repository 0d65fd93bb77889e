"""The data of a component diagram's script, and the state that its page saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.circuits.wiring import Wiring, in_order
from sparse_tl.files import read_json
from sparse_tl.plots.token_text import visible_text

STATE_FORMAT = "sparse_tl component diagram 1"

LinkColour = Literal["slot", "sign"]
Ranking = Literal["influence", "score"]


@checked
@dataclass(frozen=True)
class View:
    """The reader's choices of what to show.

    Args:
        edges: number of circuit edges; the path of the last one is completed.
        by: ranking of edges.
        slots: whether q, k and v of a head are drawn separately.
        off_path: whether edges on no path from input to logits are drawn.
        colour: what the colour of a link encodes.
        difference: whether two circuits are drawn as one, coloured by which has a link.
        groups: members of every supernode, by name.
        pins: nodes that are always shown, with the most influential path through them.
        labels: texts that replace names of nodes.
        notes: notes on nodes.
    """

    edges: AtLeastOne = 100
    by: Ranking = "influence"
    slots: bool = False
    off_path: bool = False
    colour: LinkColour = "slot"
    difference: bool = False
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pins: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def read_view(state: str | Path | Mapping[str, Any] | None, view: View) -> View:
    """The view in a state saved by a page.

    Args:
        state: path of the file, its content, or None.
        view: view with the defaults of fields that the state lacks.

    Raises:
        ValueError: it is no such state, or a field has the wrong type.
    """
    if state is None:
        return view
    content = state if isinstance(state, Mapping) else read_json(Path(state))
    if not isinstance(content, Mapping) or content.get("format") != STATE_FORMAT:
        raise ValueError(
            f"expected a state saved by a component diagram, with format {STATE_FORMAT!r}; "
            f"got {str(content)[:80]}"
        )
    given = {key: value for key, value in content.items() if key != "format"}
    try:
        return replace(view, **given)
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(View))
        raise ValueError(
            f"expected fields {names} in the state of a diagram; {str(error)[:200]}"
        ) from error


def wired(wirings: Mapping[str, Wiring]) -> tuple[list[Any], list[dict[str, Any]]]:
    """The nodes of all circuits and, by index of these, the lines of each."""
    spots = in_order({spot for wiring in wirings.values() for spot in wiring.spots})
    index = {spot: i for i, spot in enumerate(spots)}
    nodes = [
        [
            visible_text(str(spot)),
            spot.kind,
            spot.step,
            spot.position,
            None if spot.kind in ("input", "logits") else spot.node.layer,
        ]
        for spot in spots
    ]
    panels = []
    for name, wiring in wirings.items():
        at = [index[spot] for spot in wiring.spots]
        into, out = wiring.best
        weights = [line.weight for line in wiring.lines]
        panels.append(
            {
                "name": visible_text(name[:200]),
                "names": wiring.names,
                "scores": wiring.scores and [float(f"{score:.6g}") for score in wiring.scores],
                "lines": [
                    [at[line.source], at[line.reader], line.slot or "", line.edge]
                    + ([] if line.edge >= 0 else [float(f"{line.weight:.6g}")])
                    for line in wiring.lines
                ],
                "influence": [float(f"{value:.4g}") for value in wiring.influence],
                "order": {
                    "influence": wiring.order(wiring.influence),
                    "score": wiring.order(weights),
                },
                "into": {at[spot]: line for spot, line in into.items()},
                "out": {at[spot]: line for spot, line in out.items()},
            }
        )
    return nodes, panels

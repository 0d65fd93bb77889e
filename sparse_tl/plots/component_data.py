"""What a component diagram's script reads, and the state that its page saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

from sparse_tl.circuits.wiring import Wiring
from sparse_tl.files import read_json
from sparse_tl.plots import component_style, palette
from sparse_tl.plots.drawn_circuit import LinkColour, Ranking, View, all_spots, plain_nodes
from sparse_tl.plots.figure_frame import Surround
from sparse_tl.plots.token_text import visible_text

STATE_FORMAT = "sparse_tl component diagram 1"
_KINDS = ("head", "mlp", "keys", "group", "input", "logits")


def read_view(state: str | Path | Mapping[str, Any] | None, view: View) -> View:
    """The view that a page has saved.

    Args:
        state: path of the file, its content, or nothing.
        view: the view where the state says nothing.

    Raises:
        ValueError: the state is not one, or has a field of another type.
    """
    if state is None:
        return view
    content = state if isinstance(state, Mapping) else read_json(Path(state))
    if not isinstance(content, Mapping) or content.get("format") != STATE_FORMAT:
        raise ValueError(
            f"expected a state that a component diagram has saved, with format {STATE_FORMAT!r}; "
            f"got {str(content)[:80]}"
        )
    given = {key: value for key, value in content.items() if key != "format"}
    for key, value in given.items():
        if not _fits(key, value):
            raise ValueError(
                f"expected fields {', '.join(field.name for field in fields(View))} in the state "
                f"of a diagram; got {str(key)[:60]}={str(value)[:60]!r}"
            )
    return replace(view, **given)


def _fits(key: str, value: Any) -> bool:
    """Whether a field of a state exists and has a value that it can have."""
    texts = isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())
    names = isinstance(value, list) and all(isinstance(v, str) for v in value)
    if key == "edges":
        return type(value) is int and value >= 1
    if key in ("by", "colour"):
        return value in get_args(Ranking if key == "by" else LinkColour)
    if key == "groups":
        return isinstance(value, Mapping) and all(
            isinstance(some, list) and all(isinstance(v, str) for v in some)
            for some in value.values()
        )
    if key in ("labels", "notes"):
        return texts
    if key == "pins":
        return names
    return key in ("slots", "off_path", "difference") and isinstance(value, bool)


def script_data(
    wirings: Mapping[str, Wiring],
    n_kept: Sequence[int],
    n_existing: Sequence[int],
    view: View,
    style: component_style.Style,
    surround: Surround,
) -> dict[str, Any]:
    """The wiring of all panels, the first view, and the style."""
    spots = all_spots([*wirings.values()])
    index = {spot: i for i, spot in enumerate(spots)}
    nodes = [[n.name, n.kind, n.step, n.position, n.layer] for n in plain_nodes(spots)]
    panels = []
    for i, (name, wiring) in enumerate(wirings.items()):
        at = [index[spot] for spot in wiring.spots]
        into, out = wiring.best
        weights = [line.weight for line in wiring.lines]
        panels.append(
            {
                "name": visible_text(name[:200]),
                "kept": n_kept[i],
                "existing": n_existing[i],
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
                "into": [[at[spot], line] for spot, line in into.items()],
                "out": [[at[spot], line] for spot, line in out.items()],
                "roles": style.roles[i] if style.roles else {},
            }
        )
    return {
        "format": STATE_FORMAT,
        "nodes": nodes,
        "panels": panels,
        "view": asdict(view) | {"pins": list(view.pins)},
        "unit": style.unit,
        "columns": [visible_text(text[:200]) for text in style.columns],
        "marked": {
            colour: [str(node) for node in heads]
            for heads, colour in zip(style.marked.values(), palette.MARKS, strict=False)
        },
        "markNames": [visible_text(name[:60]) for name in style.marked],
        "title": visible_text(surround.title[:200]) if surround.title else "",
        "transition": visible_text(surround.transition[:200]) if surround.transition else "",
        "colours": {
            "slots": {slot or "": colour for slot, colour in component_style.SLOT_COLOURS.items()},
            "words": {slot or "": words for slot, words in component_style.SLOT_WORDS.items()},
            "shared": palette.TRUNK,
            "only": component_style.ONLY,
            "plain": palette.RESIDUAL_READER,
            "hurts": palette.HURTS,
            "helps": palette.HELPS,
            "open": palette.OPEN_EDGE,
            "band": palette.BAND,
            "ink": palette.INK,
            "muted": palette.MUTED,
            "grid": palette.GRID,
            "roles": {
                role: component_style.node_paint("head", "path", role, None)
                for role in palette.ROLES
            },
            "sides": [component_style.node_paint("head", "path", None, side) for side in (0, 1)],
            "nodes": {
                kind: {
                    state: component_style.node_paint(kind, state, None, None)
                    for state in ("path", "open", "absent")
                }
                for kind in _KINDS
            },
        },
    }

"""Component diagrams: a circuit as nodes by layer with the edges between them, per model.

1. Check the panels, and select the strongest edges of each (`drawn_circuit`).
2. Lay out all panels together (`component_layout`).
3. Draw the static SVG (`component_svg`).
4. Combine the SVG, its data and a small script in one HTML fragment; the script reduces the number
   of edges, or highlights what is before and after a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.nodes import Node
from sparse_tl.plots import palette
from sparse_tl.plots.component_layout import ComponentLayout, lay_out
from sparse_tl.plots.component_svg import (
    SLOT_COLOURS,
    LineColour,
    draw_svg,
    line_stroke,
    node_paint,
    score_text,
)
from sparse_tl.plots.drawn_circuit import DrawnCircuit, LineState, draw_strongest
from sparse_tl.plots.figure_frame import Surround
from sparse_tl.plots.head_map import marked_heads
from sparse_tl.plots.interactive_html import PanelFigure, checked_panels
from sparse_tl.plots.token_text import visible_text


class ComponentDiagram(PanelFigure):
    """A component diagram that displays in notebooks and can be saved to files."""

    script = "component_diagram"


def component_diagram(
    panels: Mapping[str, Circuit],
    *,
    scores: Mapping[str, Scores] | None = None,
    max_circuit_edges: int = 100,
    colour: LineColour = "slot",
    unit: str = "",
    marked: Mapping[str, Sequence[Any]] | None = None,
    transition: str | None = "Sparsity-Regularised Finetuning",
    title: str | None = None,
) -> ComponentDiagram:
    """Draw which components a circuit connects, and through which slot.

    Rows are layers, upwards, from the input to the logits. A line is thicker and darker with
    ``|score|``, relative to the largest of its panel. Edges on no path from the input to the
    logits are light. A node has the same position in every panel; it is faint in panels that
    draw none of its edges.

    Args:
        panels: circuits of circuit edges by panel name, from top to bottom.
        scores: scores of the circuits' edges, by panel name; negative: patching the edge lowers
            the metric, so it helps. Without scores, all lines look the same.
        max_circuit_edges: maximum number of edges drawn in a panel, by absolute score.
        colour: ``"slot"`` colours lines by their reader: the query, key or value input of a head,
            or an MLP or the logits; ``"sign"`` by whether the edge helps (negative score) or
            hurts.
        unit: unit of the scores, such as "logits" or "nats".
        marked: heads to frame wherever they are drawn, as in `head_map`.
        transition: text along the arrow from each panel to the next; ``None`` for no arrow.
        title: title above the panels.

    Returns:
        The figure: static SVG that a dependency-free script makes interactive.

    Raises:
        ValueError: there is no panel, `max_circuit_edges` is below 1, signs are requested without
            scores, the first panel's model lacks a marked head, or there are too many mark names.
        TypeError: a panel is not a `Circuit`.
    """
    way = "attribute_circuit_edges(...).top(100) makes one"
    panels = checked_panels(panels, Circuit, way)
    scores = scores or {}
    _check_options(panels, scores, max_circuit_edges, colour)
    drawn = [
        draw_strongest(name, circuit, scores.get(name), max_circuit_edges)
        for name, circuit in panels.items()
    ]
    surround = Surround(tuple(panels), title, transition)
    framed = _marked_nodes(panels, marked or {})
    layout = lay_out(drawn, surround, marks=bool(framed))
    unit = visible_text(unit.strip())
    svg = draw_svg(drawn, layout, surround, colour=colour, unit=unit, marked=framed)
    return ComponentDiagram(svg, _script_data(drawn, layout, colour, unit), surround)


def _check_options(
    panels: Mapping[str, Circuit],
    scores: Mapping[str, Scores],
    max_circuit_edges: int,
    colour: str,
) -> None:
    for name, some in scores.items():
        if name not in panels or some.site != panels[name].graph:
            raise ValueError(
                f"expected scores of the circuit edges of a panel, one of {list(panels)}; got "
                f"scores of {some.site!r} for {name!r}"
            )
    if max_circuit_edges < 1:
        raise ValueError(
            f"expected max_circuit_edges of at least 1; got {max_circuit_edges}; about 100 are "
            "legible"
        )
    if colour not in get_args(LineColour):
        raise ValueError(f"expected colour 'slot' or 'sign'; got {colour!r}")
    if colour == "sign" and not scores:
        raise ValueError(
            "expected scores in some panel, to colour by their sign; got none; pass "
            "scores={name: attribute_circuit_edges(...)}, or colour='slot'"
        )


def _marked_nodes(
    panels: Mapping[str, Circuit], marked: Mapping[str, Sequence[Any]]
) -> dict[str, list[Node]]:
    """The marked heads of the first panel's model, by legend entry."""
    heads = next(iter(panels.values())).graph.heads
    return {
        visible_text(name): [Node("head", *place) for place in places]
        for name, places in marked_heads(heads, marked).items()
    }


def _script_data(
    panels: Sequence[DrawnCircuit], layout: ComponentLayout, colour: LineColour, unit: str
) -> dict[str, Any]:
    """The data that the script cannot read from the static figure."""
    return {
        "colour": colour,
        "openStroke": palette.OPEN_EDGE,
        "openPort": palette.OPEN_PORT,
        "pointed": palette.INK,
        "ground": palette.GROUND,
        "slots": {slot: full for slot, full in SLOT_COLOURS.items() if slot},
        "paint": {
            kind: {state: node_paint(kind, state) for state in get_args(LineState)}
            for kind in sorted({node.kind for node in layout.boxes})
        },
        "panels": [
            {
                "nKept": panel.n_kept,
                "nExisting": panel.n_existing,
                "scored": panel.has_scores,
                "edges": [
                    {
                        "name": str(edge.edge),
                        "score": None if edge.score is None else score_text(edge.score, unit),
                        "sign": 0 if edge.score is None else (edge.score > 0) - (edge.score < 0),
                        "strokes": {c: line_stroke(edge, c) for c in get_args(LineColour)},
                    }
                    for edge in panel.edges
                ],
            }
            for panel in panels
        ],
    }

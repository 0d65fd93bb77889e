"""Component diagrams: circuits as nodes by layer with the edges between them.

1. Check the panels, and find the paths of each circuit (`circuits.paths`).
2. Draw the first view with the page's own script (`javascript`): it selects what the view shows
   (``component_view.js``), lays out all panels together (``component_layout.js``,
   ``component_routes.js``), and writes SVG (``component_draw.js``).
3. Combine this static SVG, the paths and the script in one HTML fragment. There it draws every
   other view: fewer or more edges, supernodes, q, k and v apart, one node's paths.

The static SVG has neither script nor style sheet. It is 720 pixels wide, or wider for many
positions: printed at 5.5 inches, its smallest text has 6 points. Above about 60 links, print only
shows where a circuit is dense; to follow single links, use the interactive page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.circuits import Circuit, HeadBehaviour, Scores
from sparse_tl.circuits.paths import path_graph
from sparse_tl.head_roles import HeadRoles
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.parts.grids import HeadGrid
from sparse_tl.parts.nodes import Node
from sparse_tl.parts.positioned_graph import PositionedGraph
from sparse_tl.plots.diagrams.component_data import (
    STATE_FORMAT,
    LinkColour,
    View,
    nodes_and_links,
    read_view,
)
from sparse_tl.plots.diagrams.component_style import COLOURS
from sparse_tl.plots.diagrams.neuron_lists import Neurons, neuron_lists
from sparse_tl.plots.page.figure_frame import Surround, svg_start
from sparse_tl.plots.page.interactive_html import COMPONENT_DRAWING, STYLE, PanelFigure, script_json
from sparse_tl.plots.page.javascript import first_view
from sparse_tl.plots.page.palette import MARKS
from sparse_tl.plots.page.token_text import visible_text
from sparse_tl.plots.panels.head_map import marked_heads

MOST_EDGES = 2000
"""Maximum number of circuit edges per panel on a page."""
WIDTH = 720
"""Width of static figures in pixels."""

Roles = HeadRoles | HeadBehaviour


class ComponentDiagram(PanelFigure):
    """A component diagram that displays in notebooks and can be saved to files."""

    scripts = (
        *COMPONENT_DRAWING,
        "component_card.js",
        "component_controls.js",
        "component_diagram.js",
    )
    styles = (STYLE, "component_diagram.css")


@checked
def component_diagram(
    panels: Mapping[str, Circuit] | Circuit,
    *,
    scores: Mapping[str, Scores] | Scores | None = None,
    max_circuit_edges: AtLeastOne = 100,
    colour: LinkColour = "slot",
    slots: bool = False,
    off_path: bool = False,
    difference: bool = False,
    roles: Mapping[str, Roles] | Roles | None = None,
    neurons: Mapping[str, Neurons] | Neurons | None = None,
    tokens: Sequence[str] | None = None,
    state: str | Path | Mapping[str, Any] | None = None,
    unit: str = "",
    marked: Mapping[str, Sequence[Any]] | None = None,
    transition: str | None = "Sparsity-Regularised Finetuning",
    title: str | None = None,
) -> ComponentDiagram:
    """Draw which components circuits connect, and through which slot.

    Rows are layers, upwards, from the input to the logits; with positions, columns are positions.
    A circuit over positions does not record which query attends to which key: a dashed line leads
    from the keys and values that a head reads at one position to the same head at every position at
    or after it where the circuit keeps the head (in spans, at every position).

    Edges are chosen by their influence on the answer: the share of the logits' paths that run
    through an edge, where a node's paths divide over its inputs by ``|score|``. Each edge is drawn
    with its whole path from the input to the logits. A node has the same position in every panel.
    The page draws panels side by side if that is legible, otherwise one above the other, as static
    files do; a selection in one is marked in all, and "Difference" draws two circuits as one. The
    page holds up to 2,000 edges of each circuit, the strongest ones; its caption gives the number.

    Args:
        panels: circuits of circuit edges by panel name, in order, or one circuit.
        scores: scores of the circuits' edges, by panel name or for all panels; negative: patching
            the edge lowers the metric, so it helps. Without scores, all edges count the same.
        max_circuit_edges: number of edges shown initially, and in static files.
        colour: ``"slot"`` colours links by their reader: the query, key or value input of a head,
            or an MLP or the logits; ``"sign"`` by whether the edge helps (negative score) or
            hurts.
        slots: whether to draw q, k and v of a head separately.
        off_path: whether to draw edges on no path from the input to the logits, in grey.
        difference: whether to draw two circuits as one, coloured by which has a link.
        roles: head roles, or head behaviour from `head_behaviour`, to colour heads by; by panel
            name, or for all panels. Behaviour for all panels also adds a short label to each name.
        neurons: neurons of one MLP or several, from `neuron_effects`, listed on the page when the
            MLP is selected; by panel name, or for all panels.
        tokens: texts of the columns, for circuits over token positions.
        state: state saved by the page, as a path or its content; its fields override the arguments
            above.
        unit: unit of the scores, such as "logits" or "nats".
        marked: heads to frame, as in `head_map`.
        transition: text along the arrow from each panel to the next; ``None`` for no arrow.
        title: title above the panels.

    Returns:
        The figure: static SVG that a dependency-free script makes interactive.

    Raises:
        ValueError: there is no panel, `max_circuit_edges` is below 1, signs are requested without
            scores, a difference is requested of other than two circuits, panels differ in their
            positions, a circuit of more than 2,000 edges has no scores, the first panel's model
            lacks a marked head, roles are of another model, an MLP with neurons is not in any
            panel, there are too many mark names, or the state cannot be read.
        TypeError: a panel is not a `Circuit`.
    """
    if isinstance(panels, Circuit):
        panels = {"Circuit": panels}
    if not panels:
        raise ValueError('expected at least one panel, such as {"Base Model": circuit}; got none')
    if isinstance(scores, Scores):
        scores = dict.fromkeys(panels, scores)
    scores = scores or {}
    columns = _check_options(panels, scores, colour, tokens)
    view = View(max_circuit_edges, "influence", slots, off_path, colour, difference)
    view = read_view(state, view)
    if view.difference and len(panels) != 2:
        raise ValueError(f"expected two circuits to draw their difference; got {len(panels)}")
    graphs = {
        name: path_graph(_strongest(name, circuit, scores.get(name)), scores.get(name))
        for name, circuit in panels.items()
    }
    framed = _marked_nodes(panels, marked or {})
    nodes, panel_data = nodes_and_links(graphs)
    if isinstance(roles, HeadBehaviour):
        view = replace(view, labels=_labels(nodes, roles) | dict(view.labels))
    for panel, circuit, own in zip(panel_data, panels.values(), _roles(panels, roles), strict=True):
        panel |= {"kept": len(circuit), "existing": circuit.grid.n_parts, "roles": own}
    data = {
        "format": STATE_FORMAT,
        "nodes": nodes,
        "panels": panel_data,
        "view": asdict(view),
        "unit": visible_text(unit.strip()[:40]),
        "columns": [visible_text(text[:200]) for text in columns],
        "marked": dict(zip(MARKS, framed.values(), strict=False)),
        "markNames": [name[:60] for name in framed],
        "title": visible_text((title or "")[:200]),
        "transition": visible_text((transition or "")[:200]),
        "colours": COLOURS,
        "neurons": neuron_lists(neurons, graphs),
    }
    json = script_json(data)
    width, height, content = first_view(COMPONENT_DRAWING, json, WIDTH)
    surround = Surround(tuple(panels), title, transition)
    svg = "\n".join([svg_start(width, height, surround.names, title), content, "</svg>"])
    return ComponentDiagram(svg, json, surround)


def _strongest(name: str, circuit: Circuit, scores: Scores | None) -> Circuit:
    """The circuit, or its edges with the largest ``|score|``."""
    if len(circuit) <= MOST_EDGES:
        return circuit
    if scores is None:
        raise ValueError(
            f"expected scores, to choose the {MOST_EDGES:,} strongest of the {len(circuit):,} "
            f"edges of {name!r}; got none; pass scores={{name: attribute_circuit_edges(...)}}"
        )
    indices = circuit.mask.cpu().nonzero()
    values = scores.mean().detach().cpu()[tuple(indices.T)].abs()
    best = indices[values.argsort(descending=True, stable=True)[:MOST_EDGES]]
    mask = torch.zeros_like(circuit.mask, device="cpu")
    mask[tuple(best.T)] = True
    return Circuit(circuit.grid, mask)


def _check_options(
    panels: Mapping[str, Circuit],
    scores: Mapping[str, Scores],
    colour: LinkColour,
    tokens: Sequence[str] | None,
) -> list[str]:
    """The texts of the columns: none without positions."""
    positions = set[tuple[str, ...]]()
    for circuit in panels.values():
        grid = circuit.grid
        if not isinstance(grid, (CircuitGraph, PositionedGraph)):
            raise ValueError(f"expected circuits of circuit edges; got one of {grid.noun}")
        positions.add(grid.positions if isinstance(grid, PositionedGraph) else ())
    if len(positions) > 1:
        raise ValueError(
            f"expected panels with the same positions; got {sorted(map(list, positions))}; "
            "circuit.at(position) is the circuit at one position"
        )
    columns = list(positions.pop())
    for name, of_panel in scores.items():
        if name not in panels or of_panel.grid != panels[name].grid:
            raise ValueError(
                f"expected scores of the circuit edges of a panel, one of {list(panels)}; got "
                f"scores of {of_panel.grid!r} for {name!r}"
            )
    if colour == "sign" and not scores:
        raise ValueError(
            "expected scores of at least one panel, to colour by sign; got none; pass "
            "scores={name: attribute_circuit_edges(...)}, or colour='slot'"
        )
    if tokens is not None:
        if len(tokens) != len(columns):
            raise ValueError(
                f"expected one text for each of {len(columns)} positions; got {len(tokens)}"
            )
        columns = [str(token) for token in tokens]
    return columns


def _marked_nodes(
    panels: Mapping[str, Circuit], marked: Mapping[str, Sequence[Any]]
) -> dict[str, list[str]]:
    """The names of the marked heads of the first panel's model, by legend entry."""
    grid = _heads_of(next(iter(panels.values())))
    return {
        visible_text(name): [str(Node("head", *head)) for head in heads]
        for name, heads in marked_heads(grid, marked).items()
    }


def _heads_of(circuit: Circuit) -> HeadGrid:
    """All heads of a circuit's model."""
    grid = circuit.grid
    graph = grid.graph if isinstance(grid, PositionedGraph) else grid
    assert isinstance(graph, CircuitGraph)
    return graph.heads


def _roles(
    panels: Mapping[str, Circuit], roles: Mapping[str, Roles] | Roles | None
) -> list[dict[str, str]]:
    """The role of each head that has one, by panel.

    Raises:
        ValueError: the roles are of another model.
    """
    by_panel = roles if isinstance(roles, Mapping) else dict.fromkeys(panels, roles)
    of_heads = list[dict[str, str]]()
    for name, circuit in panels.items():
        given, grid = by_panel.get(name), _heads_of(circuit)
        if given is not None and given.grid != grid:
            raise ValueError(f"expected roles for {name!r} of {grid!r}; got {given.grid!r}")
        of_heads.append({} if given is None else given.main)
    return of_heads


def _labels(nodes: Sequence[Sequence[Any]], behaviour: HeadBehaviour) -> dict[str, str]:
    """The texts of heads that have a kind, such as "a5.h1 ind+", by the name of their node."""
    heads = [(name, name.split("@")[0]) for name, *_ in nodes]
    labels = behaviour.labels
    return {name: f"{head} {labels[head]}" for name, head in heads if head in labels}

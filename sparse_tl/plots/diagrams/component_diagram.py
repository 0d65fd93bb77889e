"""Component diagrams: circuits as nodes by layer with the edges between them.

1. Check the panels, and find the paths of each circuit (`circuits.paths`).
2. Draw the first view with the page's own script: it selects what the view shows
   (``component_view.js``), lays out all panels together (``component_layout.js``,
   ``component_routes.js``), and writes SVG (``component_draw.js``).
3. Combine this static SVG, the paths and the script in one HTML fragment. There it draws every
   other view: fewer or more edges, supernodes, q, k and v apart, one node's paths.

The static SVG has neither script nor style sheet. It is 720 pixels wide, or wider for many
positions: printed at 5.5 inches, its smallest text has 6 points. Above about 60 links, print only
shows where a circuit is dense; to follow single links, use the interactive page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.circuits import Circuit, DrivingToken, HeadBehaviour, NeuronEffects, Scores
from sparse_tl.circuits.paths import CROSSING, PathGraph, PositionedNode, in_order, path_graph
from sparse_tl.graph import CircuitGraph, HeadGrid, Node, PositionedGraph
from sparse_tl.head_roles import HeadRoles
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import BACKGROUND, INK, MARKS, Colour
from sparse_tl.plots.page.rendering import PanelFigure, by_title
from sparse_tl.plots.page.token_text import running_text, visible_text
from sparse_tl.plots.panels.maps import marked_heads
from sparse_tl.storage.files import read_json

STATE_FORMAT = "sparse_tl component diagram 1"
MOST_EDGES = 2000
"""Maximum number of circuit edges per panel on a page."""
WIDTH = 720
"""Width of static figures in pixels."""
_BEFORE, _TOKEN, _AFTER = 80, 40, 40
"""Maximum number of characters shown before, in and after a token that drives a neuron."""

Roles = HeadRoles | HeadBehaviour
Neurons = NeuronEffects | Sequence[NeuronEffects]
LinkColour = Literal["slot", "sign"]
Ranking = Literal["influence", "score"]


class ComponentDiagram(PanelFigure):
    """A component diagram that displays in notebooks and can be saved to files."""

    drawing = (
        "reach.js",
        "panel_figure.js",
        "layered_layout.js",
        "component_layout.js",
        "component_routes.js",
        "component_view.js",
        "component_panels.js",
        "component_draw.js",
    )
    scripts = ("component_card.js", "component_diagram.js")


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
    remarks: Mapping[str, str] | None = None,
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
        remarks: text to add to a panel's caption, such as what its circuit explains.
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
    panels = by_title(panels, "Circuit")
    scores = _by_panel(scores, panels)
    columns = _columns(panels, tokens)
    for name, of_panel in scores.items():
        if name not in panels or of_panel.grid != panels[name].grid:
            raise ValueError(
                f"scores of {of_panel.grid!r} for {name!r} are not scores of the circuit edges of "
                f"a panel, one of {list(panels)}"
            )
    if colour == "sign" and not scores:
        raise ValueError("colour='sign' needs scores={name: attribute_circuit_edges(...)}")
    view = View(max_circuit_edges, "influence", slots, off_path, colour, difference)
    if state is not None:
        view = read_view(state, view)
    if view.difference and len(panels) != 2:
        raise ValueError(f"a difference is of two circuits; got {len(panels)}")
    graphs = {
        name: path_graph(_strongest(name, circuit, scores.get(name)), scores.get(name))
        for name, circuit in panels.items()
    }
    framed = marked_heads(_heads_of(next(iter(panels.values()))), marked or {})
    nodes = in_order({node for graph in graphs.values() for node in graph.nodes})
    rows, index = [*map(row_of, nodes)], {node: row for row, node in enumerate(nodes)}
    panel_data = [
        panel_of(name, graph, [index[node] for node in graph.nodes])
        for name, graph in graphs.items()
    ]
    if isinstance(roles, HeadBehaviour):  # "a5.h1 ind+"
        short, heads = roles.labels, {name: name.split("@")[0] for name, *_ in rows}
        labels = {name: f"{head} {short[head]}" for name, head in heads.items() if head in short}
        view = replace(view, labels=labels | dict(view.labels))
    for panel, (name, circuit) in zip(panel_data, panels.items(), strict=True):
        panel |= {"kept": len(circuit), "existing": circuit.grid.n_parts, "sign": -1}
        given = _by_panel(roles, panels).get(name)
        if given is not None and given.grid != _heads_of(circuit):
            raise ValueError(f"roles are not of {_heads_of(circuit)!r}; got {given.grid!r}")
        panel["roles"] = {} if given is None else given.main
        panel["remark"] = (remarks or {}).get(name)
    data = {
        "nodes": rows,
        "panels": panel_data,
        "unit": visible_text(unit.strip()[:40]),
        "marked": [
            (colour, visible_text(name)[:60], [str(Node("head", *head)) for head in heads])
            for colour, (name, heads) in zip(MARKS, framed.items(), strict=False)
        ],
        "words": _WORDS,
        "slots": True,
        "neurons": _neurons(_by_panel(neurons, panels), graphs),
    }
    return diagram_of(data, view, columns, panels, title, transition)


def diagram_of(
    data: Mapping[str, Any],
    view: View,
    columns: Sequence[str],
    names: Iterable[str],
    title: str | None,
    transition: str | None,
) -> ComponentDiagram:
    """The figure of nodes and panels, with the first view drawn by the page's own script."""
    shared = {
        "format": STATE_FORMAT,
        "view": asdict(view),
        "columns": [visible_text(text[:200]) for text in columns],
        "colours": _COLOURS,
        "width": WIDTH,
    }
    return ComponentDiagram({**data, **shared}, names, title, transition)


def shown_first(circuit: Circuit, scores: Scores | None = None, size: AtLeastOne = 100) -> Circuit:
    """The edges of a circuit that `component_diagram` shows first, with the same `scores`.

    Args:
        size: its `max_circuit_edges`; the last path is whole, so a few more may be shown.
    """
    graph = path_graph(_strongest("the circuit", circuit, scores), scores)
    order, sizes = graph.order(graph.influence)
    n = next((n for n in sizes if n >= size), len(order))
    return Circuit.of(circuit.grid, [graph.names[i] for i in order[:n]])


def _columns(panels: Mapping[str, Circuit], tokens: Sequence[str] | None) -> list[str]:
    """The texts of the columns: none without positions."""
    positions = set[tuple[str, ...]]()
    for circuit in panels.values():
        grid = circuit.grid
        if not isinstance(grid, (CircuitGraph, PositionedGraph)):
            raise ValueError(f"only circuits of circuit edges can be drawn, not of {grid.noun}")
        positions.add(grid.positions if isinstance(grid, PositionedGraph) else ())
    if len(positions) > 1:
        raise ValueError(
            f"panels do not have the same positions: {sorted(map(list, positions))}; "
            "circuit.at(position) is the circuit at one position"
        )
    columns = list(positions.pop())
    if tokens is not None and len(tokens) != len(columns):
        raise ValueError(
            f"`tokens` is one text for each of {len(columns)} positions; got {len(tokens)}"
        )
    return columns if tokens is None else list(tokens)


def _strongest(name: str, circuit: Circuit, scores: Scores | None) -> Circuit:
    """The circuit, or its edges with the largest ``|score|``."""
    if len(circuit) <= MOST_EDGES:
        return circuit
    if scores is None:
        raise ValueError(
            f"pass scores={{name: attribute_circuit_edges(...)}}, to choose the {MOST_EDGES:,} "
            f"strongest of the {len(circuit):,} edges of {name!r}"
        )
    best = scores.order()
    best = best[circuit.mask.cpu()[tuple(best.T)]][:MOST_EDGES]
    mask = torch.zeros_like(circuit.mask, device="cpu")
    mask[tuple(best.T)] = True
    return Circuit(circuit.grid, mask)


def _heads_of(circuit: Circuit) -> HeadGrid:
    """All heads of a circuit's model."""
    grid = circuit.grid
    graph = grid.graph if isinstance(grid, PositionedGraph) else grid
    assert isinstance(graph, CircuitGraph)
    return graph.heads


def _by_panel(given: Mapping[str, Any] | Any, panels: Iterable[str]) -> Mapping[str, Any]:
    """What is given by panel, or once for all panels."""
    if given is None or isinstance(given, Mapping):
        return given or {}
    return dict.fromkeys(panels, given)


# ---- what the reader chooses -------------------------------------------------------------------


@checked
@dataclass(frozen=True)
class View:
    """The reader's choices of what to show: arguments of `component_diagram`, and what only a page
    offers: the ranking of edges, supernodes, nodes that are always shown (with the most influential
    path through them), and names and notes of nodes.
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


def read_view(state: str | Path | Mapping[str, Any], view: View) -> View:
    """The view in a state saved by a page, with the fields of `view` that it lacks."""
    content = state if isinstance(state, Mapping) else read_json(Path(state))
    if not isinstance(content, Mapping) or content.get("format") != STATE_FORMAT:
        raise ValueError(
            f"this is no state saved by a component diagram, with format {STATE_FORMAT!r}: "
            f"{str(content)[:80]}"
        )
    return replace(view, **{key: value for key, value in content.items() if key != "format"})


# ---- the script's data -------------------------------------------------------------------------


def row_of(node: PositionedNode) -> list[Any]:
    """The name, kind, step, position and layer of a node."""
    layer = None if node.kind in ("input", "logits") else node.component.layer
    return [visible_text(str(node)), node.kind, node.step, node.position, layer]


def panel_of(name: str, graph: PathGraph, at: Sequence[int]) -> dict[str, Any]:
    """The links of one panel, between nodes of the figure: `at` has the row of each node."""
    into, out = graph.best
    weights = [link.weight for link in graph.links]
    return {
        "name": visible_text(name[:200]),
        "names": graph.names,
        "scores": graph.scores and [float(f"{score:.6g}") for score in graph.scores],
        "lines": [
            [at[link.source], at[link.reader], link.slot or "", link.edge]
            + ([] if link.edge >= 0 else [float(f"{link.weight:.6g}")])
            for link in graph.links
        ],
        "influence": [float(f"{value:.4g}") for value in graph.influence],
        "order": {
            "influence": graph.order(graph.influence),
            "score": graph.order(weights),
        },
        "into": {at[node]: link for node, link in into.items()},
        "out": {at[node]: link for node, link in out.items()},
    }


def _neurons(
    by_panel: Mapping[str, Neurons], panels: Mapping[str, PathGraph]
) -> list[dict[str, Any]]:
    """The neurons that the card of an MLP lists, by panel and the name of the MLP."""
    drawn = {str(node.component) for graph in panels.values() for node in graph.nodes}
    found = {name: dict[str, Any]() for name in panels}
    for name, given in by_panel.items():
        for result in [given] if isinstance(given, NeuronEffects) else given:
            if name not in found or result.mlp not in drawn:
                raise ValueError(
                    f"there are neurons of {result.mlp} for {name!r}: it has no edges, or is none "
                    f"of the panels {list(panels)}"
                )
            found[name][result.mlp] = _listed(result)
    return [*found.values()]


def _listed(result: NeuronEffects) -> dict[str, Any]:
    rows: list[Any] = result.to_pandas().head(len(result.tokens)).to_dict("records")
    return {
        "count": len(result.score),
        "readers": [visible_text(name[:_TOKEN]) for name in result.readers],
        "rows": [
            {
                "name": row["neuron"],
                "effect": row["effect"],
                "means": [row["clean"], row["corrupted"]],
                "tokens": [_shown(token) for token in result.tokens[row["neuron"]]],
                "promotes": shown_texts(result.promotes[row["neuron"]]),
                "suppresses": shown_texts(result.suppresses[row["neuron"]]),
            }
            for row in rows
        ],
    }


def _shown(token: DrivingToken) -> dict[str, Any]:
    parts = token.before[-_BEFORE:], token.token[:_TOKEN], token.after[:_AFTER]
    return {"text": [*map(running_text, parts)], "values": [token.clean, token.corrupted]}


def shown_texts(tokens: Sequence[str]) -> list[str]:
    """Tokens as the card of a node lists them."""
    return [visible_text(token[:_TOKEN]) for token in tokens]


ONLY: tuple[Colour, Colour] = palette.MODEL_PAIRS[0]
"""Links that only the first or only the second of two circuits has."""


def _node(line: Colour, share: float) -> tuple[Colour, Colour, Colour]:
    """Fill, line and text colour of a node: a share of the line's colour fills it."""
    return palette.blend(BACKGROUND, line, share), line, INK


_WORDS = {
    "edges": "circuit edges",
    "value": "score",
    "helps": "helps (score < 0)",
    "hurts": "hurts (score > 0)",
}

_COLOURS: dict[str, Any] = {
    # By the input that a link enters: q, k, v or several of a head; an MLP or the logits.
    "slots": {
        "q": palette.QUERY,
        "k": palette.KEY,
        "v": palette.VALUE,
        "several": palette.SEVERAL,
        CROSSING: palette.CROSSES,
        "": palette.RESIDUAL_READER,
    },
    "words": {
        "q": "q: query",
        "k": "k: key",
        "v": "v: value",
        "several": "several of q, k, v",
        CROSSING: "attention: keys and values to query",
        "": "into MLP or logits",
    },
    "shared": palette.TRUNK,
    "only": ONLY,
    "plain": palette.RESIDUAL_READER,
    "hurts": palette.HURTS,
    "helps": palette.HELPS,
    "open": palette.OPEN_EDGE,
    "band": palette.BAND,
    "ink": INK,
    "muted": palette.MUTED,
    "grid": palette.GRID,
    # Fill, line and text colour of nodes.
    "nodes": {
        "head": (*palette.HEAD_NODE, INK),
        "mlp": (*palette.MLP_NODE, INK),
        "keys": (BACKGROUND, palette.CROSSES, INK),
        "group": (palette.SUPERNODE, palette.SEVERAL, INK),
        "input": (*palette.END_NODE, INK),
        "logits": (*palette.END_NODE, INK),
    },
    "openNode": (*palette.OPEN_NODE, palette.OPEN_NODE_INK),
    "absentNode": (*palette.ABSENT_NODE, palette.ABSENT_NODE_INK),
    "roles": {
        role: _node(line, 0.25) for role, line in (palette.ROLES | palette.KINDS_OF_HEADS).items()
    },
    "sides": [_node(line, 0.15) for line in ONLY],
}
"""Colours and texts for the script."""

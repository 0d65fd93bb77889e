"""Contents of a component diagram: which nodes and links a view of some circuits shows.

1. Edges enter path by path (`circuits.wiring`), as many as the view asks for, and the path through
   every pinned node. Lines on no path among these are left out, unless the view shows them.
2. Nodes become the supernode that they belong to; lines inside one are not drawn.
3. Lines with the same ends are merged into a *link*, unless the view tells q, k and v apart. Its
   strength is the sum of ``|score|`` over that of the strongest link of its panel.

`component_view.js` does the same in the browser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sparse_tl.circuits.wiring import CROSSING, Spot, Wiring, connected

LinkColour = Literal["slot", "sign"]
Ranking = Literal["influence", "score"]

MERGED = "several"
"""The slot of a link that merges lines into several inputs of a head."""
EITHER = "difference"
"""The name of the panel that shows two circuits in one."""


@dataclass(frozen=True)
class View:
    """What is shown of the circuits.

    Args:
        edges: number of circuit edges; the path that the last one belongs to is completed.
        by: what edges are ranked by.
        slots: whether q, k and v of a head are drawn apart.
        off_path: whether edges on no path from input to logits are drawn.
        colour: what the colour of a link encodes.
        difference: whether two circuits are drawn as one, by which of them has a link.
        groups: members of every supernode, by name.
        pins: nodes that are shown in any case, with the most influential path through them.
        labels: texts in place of the names of nodes.
        notes: remarks on nodes.
    """

    edges: int = 100
    by: Ranking = "influence"
    slots: bool = False
    off_path: bool = False
    colour: LinkColour = "slot"
    difference: bool = False
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pins: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DrawnNode:
    """A node, or a supernode.

    Args:
        name: its name.
        kind: kind of node; "keys" for what a head reads at an earlier position, "group" for a
            supernode.
        step: when it computes, as `Spot.step`; between two steps for a supernode.
        position: index of its position.
        layer: its layer; ``None`` for input, logits and supernodes.
        size: number of nodes in it.
    """

    name: str
    kind: str
    step: float
    position: int | None
    layer: int | None
    size: int = 1


@dataclass(frozen=True)
class Link:
    """Lines with the same ends.

    Args:
        source, reader: indices of the nodes.
        slot: input of a head, `CROSSING`, or `MERGED`.
        lines: indices of the lines in the panel's wiring.
        strength: 0 to 1.
        sign: whether patching the edges raises the metric (1) or lowers it (-1), together.
        on_path: whether a line is on a path from the input to the logits.
        only: the one circuit of two that has the link; ``None`` for both.
    """

    source: int
    reader: int
    slot: str | None
    lines: tuple[int, ...]
    strength: float
    sign: int
    on_path: bool
    only: int | None = None


@dataclass(frozen=True)
class DrawnCircuit:
    """One panel.

    Args:
        name: its name.
        n_edges: number of circuit edges that are shown.
        n_kept: number of edges in the circuit.
        n_existing: number of edges in the model.
        links: links by (source, reader, slot).
    """

    name: str
    n_edges: int
    n_kept: int
    n_existing: int
    links: tuple[Link, ...]


def all_spots(wirings: Sequence[Wiring]) -> list[Spot]:
    """The spots of all circuits, in the order in which they compute."""
    every = {spot for wiring in wirings for spot in wiring.spots}
    return sorted(every, key=lambda s: (s.step, s.position or 0, s.node.head))


def draw(
    wirings: Mapping[str, Wiring], n_existing: Sequence[int], view: View
) -> tuple[list[DrawnNode], list[DrawnCircuit]]:
    """The nodes of all panels, and the panels."""
    spots = all_spots([*wirings.values()])
    nodes, place = _nodes(spots, view)
    panels = [
        _panel(name, wiring, n, nodes, place, view)
        for (name, wiring), n in zip(wirings.items(), n_existing, strict=True)
    ]
    if view.difference:
        panels = [difference(panels, view.slots)]
    return nodes, panels


def plain_nodes(spots: Sequence[Spot]) -> list[DrawnNode]:
    """Each spot as a node of its own."""
    return [
        DrawnNode(
            str(spot),
            spot.kind,
            spot.step,
            spot.position,
            None if spot.kind in ("input", "logits") else spot.node.layer,
        )
        for spot in spots
    ]


def _nodes(spots: Sequence[Spot], view: View) -> tuple[list[DrawnNode], dict[str, int]]:
    """All nodes and supernodes, and the index of the one that each spot belongs to."""
    nodes = plain_nodes(spots)
    place = {node.name: index for index, node in enumerate(nodes)}
    for number, (name, members) in enumerate(view.groups.items(), start=1):
        inside = [nodes[place[member]] for member in members if member in place]
        if not inside:
            continue
        inside.sort(key=lambda node: place[node.name])
        middle = inside[(len(inside) - 1) // 2]
        step = middle.step + number / (len(view.groups) + 1)
        nodes.append(DrawnNode(name, "group", step, middle.position, None, len(inside)))
        place |= {node.name: len(nodes) - 1 for node in inside}
    return nodes, place


def shown_lines(wiring: Wiring, view: View) -> tuple[list[int], frozenset[int]]:
    """The lines that a view shows, and which of them are on a path."""
    weights = [line.weight for line in wiring.lines]
    order, sizes = wiring.order(wiring.influence if view.by == "influence" else weights)
    n = next((size for size in sizes if size >= view.edges), len(order))
    edges = set(order[:n])
    into, out = wiring.best
    names = {str(spot): index for index, spot in enumerate(wiring.spots)}
    for pin in view.pins:
        for lines in (into, out):
            if names.get(pin) in lines:
                edges |= {wiring.lines[i].edge for i in wiring.path(lines[names[pin]])}
    chosen = [i for i, line in enumerate(wiring.lines) if line.edge in edges or line.edge < 0]
    on_path = connected(wiring.lines, chosen, wiring.ends)
    if not view.off_path:
        return sorted(on_path), on_path
    read = {wiring.lines[i].reader for i in chosen if wiring.lines[i].edge >= 0}
    written = {wiring.lines[i].source for i in chosen if wiring.lines[i].edge >= 0}
    return [
        i
        for i in chosen
        if wiring.lines[i].edge >= 0
        or (wiring.lines[i].source in read and wiring.lines[i].reader in written)
    ], on_path


def _panel(
    name: str,
    wiring: Wiring,
    n_existing: int,
    nodes: Sequence[DrawnNode],
    place: Mapping[str, int],
    view: View,
) -> DrawnCircuit:
    shown, on_path = shown_lines(wiring, view)
    at = [place[str(spot)] for spot in wiring.spots]
    merged: dict[tuple[int, int, str], list[int]] = {}
    for i in shown:
        line = wiring.lines[i]
        source, reader = at[line.source], at[line.reader]
        apart = view.slots and nodes[reader].kind != "group"
        if source != reader:
            merged.setdefault((source, reader, (line.slot or "") if apart else ""), []).append(i)
    size = {key: sum(wiring.lines[i].weight for i in lines) for key, lines in merged.items()}
    edges = [k for k, lines in merged.items() if any(wiring.lines[i].edge >= 0 for i in lines)]
    largest = max((size[key] for key in edges), default=0.0)
    links = []
    for key, lines in sorted(merged.items()):
        slots = sorted({wiring.lines[i].slot or "" for i in lines})
        total = 0.0
        if wiring.scores is not None:
            total = sum(wiring.scores[wiring.lines[i].edge] for i in lines if _is_edge(wiring, i))
        links.append(
            Link(
                key[0],
                key[1],
                (slots[0] or None) if len(slots) == 1 else MERGED,
                tuple(lines),
                min(1.0, size[key] / largest) if largest else 0.0,
                (total > 0) - (total < 0),
                not on_path.isdisjoint(lines),
            )
        )
    n_edges = len({wiring.lines[i].edge for i in shown if _is_edge(wiring, i)})
    return DrawnCircuit(name, n_edges, len(wiring.names), n_existing, tuple(links))


def _is_edge(wiring: Wiring, line: int) -> bool:
    """Whether a line is a circuit edge, not a crossing."""
    return wiring.lines[line].slot != CROSSING


def difference(panels: Sequence[DrawnCircuit], slots: bool) -> DrawnCircuit:
    """Two circuits as one: links of the first alone, of the second alone, and of both."""
    first, second = (
        {(k.source, k.reader, (k.slot or "") if slots else ""): k for k in panel.links}
        for panel in panels
    )
    links = []
    for key in sorted(first | second):
        one, two = first.get(key), second.get(key)
        stronger = two if one is None or (two and two.strength > one.strength) else one
        assert stronger is not None
        on_path = bool((one and one.on_path) or (two and two.on_path))
        only = None if one and two else int(one is None)
        links.append(replace(stronger, on_path=on_path, only=only))
    return DrawnCircuit(EITHER, len(links), 0, 0, tuple(links))

"""The static component diagram: an SVG without script, style sheet or network access.

It is 720 pixels wide: printed at 5.5 inches, its smallest text has 6 points. Above about 60 links
a printed picture shows where a circuit is busy; to follow single links, use the interactive page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sparse_tl.circuits.wiring import CROSSING
from sparse_tl.nodes import Node
from sparse_tl.plots import palette
from sparse_tl.plots.component_layout import (
    LAYER_TEXT_SIZE,
    NODE_HEIGHT,
    NODE_TEXT_SIZE,
    ComponentLayout,
    Ends,
    lay_out,
    node_text,
)
from sparse_tl.plots.component_routes import Routes, Shape, all_ends, ends_of
from sparse_tl.plots.component_style import (
    Style,
    legend,
    legend_lines,
    line_width,
    link_stroke,
    node_paint,
)
from sparse_tl.plots.drawn_circuit import DrawnCircuit, DrawnNode, Link, View
from sparse_tl.plots.figure_frame import MARGIN, PANEL_GAP, Frame, Surround, xml_text
from sparse_tl.plots.palette import FRAME_TITLE_SIZE, LABEL_SIZE, MUTED
from sparse_tl.plots.token_text import clip_text, text_width, visible_text, wrap_text

WIDTH = 720
HEADING, LINE, COLUMN_HEADING = 54, 16, 22


def draw_svg(
    nodes: Sequence[DrawnNode],
    panels: Sequence[DrawnCircuit],
    view: View,
    style: Style,
    surround: Surround,
) -> str:
    """The figure as an SVG element."""
    ends = [ends_of(panel.links, view.slots) for panel in panels]
    every = all_ends(dict(enumerate(ends)))
    left = surround.left
    label = max(
        (text_width(f"Layer {n.layer}", LAYER_TEXT_SIZE) for n in nodes if n.layer is not None),
        default=0.0,
    )
    bounds = (left + 14 + label, WIDTH - MARGIN - 8.0)
    layout = lay_out(nodes, every, view.labels, bounds, len(style.columns) or 1)
    routes = Routes(layout, every)
    # Many positions need a wider figure.
    width = round(layout.columns[-1][1] + MARGIN + 8)
    room = width - MARGIN - left - 28
    captions = [wrap_text(text, LABEL_SIZE, room) for text in style.captions]
    lines = max(map(len, captions))
    above = HEADING + LINE * (lines - 1) + (COLUMN_HEADING if style.columns else 0)
    height = round(above + layout.height)
    frames = [Frame(surround.top + i * (height + PANEL_GAP), height) for i in range(len(panels))]
    content = [
        part
        for i, panel in enumerate(panels)
        for part in _panel(
            i,
            panel,
            captions[i],
            ends[i],
            nodes,
            layout,
            routes,
            view,
            style,
            frames[i],
            left,
            width - MARGIN,
            above,
        )
    ]
    bottom = frames[-1].top + height + 10
    entries = legend(panels, view, style)
    lines = list(legend_lines(entries, left + 6, bottom, width - MARGIN))
    content += lines
    total = bottom + 19 * len({line.split(' y="')[1].split('"')[0] for line in lines}) + MARGIN
    return surround.svg(width, round(total), frames, content)


def _panel(
    index: int,
    panel: DrawnCircuit,
    caption: Sequence[str],
    ends: Sequence[Ends],
    nodes: Sequence[DrawnNode],
    layout: ComponentLayout,
    routes: Routes,
    view: View,
    style: Style,
    frame: Frame,
    left: int,
    right: int,
    above: int,
) -> Iterator[str]:
    room = right - left - 28
    name = clip_text(visible_text(panel.name[:200]), FRAME_TITLE_SIZE, room)
    yield f'<g data-panel="{index}" data-edges-shown="{panel.n_edges}">'
    yield (
        f'<rect x="{left}" y="{frame.top}" width="{right - left}" height="{frame.height}" rx="7" '
        f'fill="{palette.GROUND}" stroke="{palette.INK}" stroke-width="{palette.FRAME_WEIGHT}"/>'
        f'<text x="{left + 14}" y="{frame.top + 24}" font-size="{FRAME_TITLE_SIZE:g}" '
        f'font-weight="bold">{xml_text(name)}</text>'
    )
    for place, line in enumerate(caption):
        yield (
            f'<text x="{left + 14}" y="{frame.top + 43 + LINE * place}" fill="{MUTED}" '
            f'font-size="{LABEL_SIZE:g}" data-role="caption">{xml_text(line)}</text>'
        )
    yield f'<g transform="translate(0 {frame.top + above})">'
    yield from _grounds(layout, style.columns, left, right)
    yield '<g data-role="links" fill="none" stroke-linecap="round">'
    for shape in routes.shapes(
        panel.links, ends, lambda link: link_stroke(link, view), palette.TRUNK
    ):
        yield _curve(shape, panel.links, nodes)
    yield f'</g><g font-size="{NODE_TEXT_SIZE:g}" text-anchor="middle">'
    roles = style.roles[0 if view.difference else index] if style.roles else {}
    for i, box in layout.boxes.items():
        near = [link for link in panel.links if i in (link.source, link.reader)]
        state = "path" if any(k.on_path for k in near) else "open" if near else "absent"
        sides = {link.only for link in near}
        only = sides.pop() if view.difference and len(sides) == 1 else None
        role = roles.get(nodes[i].name.split("@")[0])
        fill, line, ink = node_paint(nodes[i].kind, state, role, only)
        top, start = box.y - NODE_HEIGHT / 2, box.x - box.width / 2
        yield (
            f'<g data-node="{xml_text(visible_text(nodes[i].name[:200]))}" data-state="{state}">'
            f'<rect x="{start:.1f}" y="{top:g}" width="{box.width:g}" height="{NODE_HEIGHT}" '
            f'rx="{3 if nodes[i].kind == "mlp" else 9}" fill="{fill}" stroke="{line}" '
            f'stroke-width="{palette.FRAME_WEIGHT}"/><text x="{box.x:.1f}" y="{box.y + 4:g}" '
            f'fill="{ink}">{xml_text(node_text(nodes[i], view.labels))}</text></g>'
        )
    yield "</g>"
    yield from _marks(nodes, layout, style.marked)
    yield "</g></g>"


def _grounds(
    layout: ComponentLayout, columns: Sequence[str], left: int, right: int
) -> Iterator[str]:
    """The backgrounds of layers, and the columns of positions."""
    for label, top, bottom in layout.bands:
        yield (
            f'<rect x="{left + 6}" y="{top:g}" rx="4" fill="{palette.BAND}" '
            f'width="{right - left - 12}" height="{bottom - top:g}"/>'
            f'<text x="{left + 12}" y="{(top + bottom) / 2 + 4.5:g}" '
            f'font-size="{LAYER_TEXT_SIZE:g}" fill="{MUTED}">{label}</text>'
        )
    for text, (start, end) in zip(columns, layout.columns, strict=False):
        said = clip_text(visible_text(text[:200]), LABEL_SIZE, end - start - 4)
        yield (
            f'<path d="M{end:.1f} -12V{layout.height - 6:g}" stroke="{palette.GRID}"/>'
            f'<text x="{(start + end) / 2:.1f}" y="-4" text-anchor="middle" '
            f'font-size="{LABEL_SIZE:g}" font-weight="bold">{xml_text(said)}</text>'
        )


def _curve(shape: Shape, links: Sequence[Link], nodes: Sequence[DrawnNode]) -> str:
    first = links[shape.links[0]]
    crosses = all(links[k].slot == CROSSING for k in shape.links)
    dashed = ' stroke-dasharray="5 3"' if crosses else ""
    named = ""
    if len(shape.links) == 1:
        ends = f"{nodes[first.source].name}->{nodes[first.reader].name}"
        named = f' data-link="{xml_text(visible_text(ends[:200]))}"'
    return (
        f'<path{named} d="{shape.path}" stroke="{shape.stroke}" '
        f'stroke-width="{line_width(shape.strength):g}"{dashed}/>'
    )


def _marks(
    nodes: Sequence[DrawnNode], layout: ComponentLayout, marked: Mapping[str, Sequence[Node]]
) -> Iterator[str]:
    """A frame around every marked node; for nodes with several marks, the last mark is on top."""
    named = {nodes[i].name.split("@")[0]: box for i, box in layout.boxes.items()}
    for heads, colour in zip(marked.values(), palette.MARKS, strict=False):
        for head in heads:
            if box := named.get(str(head)):
                yield (
                    f'<rect data-mark="{head}" x="{box.x - box.width / 2 - 2:.1f}" '
                    f'y="{box.y - NODE_HEIGHT / 2 - 2:g}" width="{box.width + 4:g}" '
                    f'height="{NODE_HEIGHT + 4}" rx="11" stroke="{colour}" fill="none" '
                    f'stroke-width="{palette.MARK_WEIGHT:g}"/>'
                )

"""A plotly figure of lines or heatmaps as static SVG: no browser, no script, no network.

Draws what the figures of this package make use of: line traces with or without a closed fill,
heatmaps of two colours, linear and logarithmic axes with explicit ranges and ticks, axis titles,
legends at the lower right of their place, and annotations. Anything else is refused rather than
left out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

import plotly.graph_objects as go

from sparse_tl.plots.token_text import text_width

# A line of a legend, and the sample of the line in front of its text, in pixels.
_ROW, _SAMPLE, _SAMPLE_GAP, _LEGEND_FOOT = 16, 18, 5, 5
# Between lines of a text, over the size of its font; as plotly has it.
_LINE_HEIGHT = 1.3
_LINE = {"type": "scatter", "mode": "lines"}


@dataclass(frozen=True)
class Frame:
    """The plot area of one panel in pixels, and the axes that fill it."""

    x_axis: Any
    y_axis: Any
    left: float
    right: float
    top: float
    bottom: float

    def x(self, position: float) -> float:
        """Pixels from the left; the position is a logarithm on a logarithmic axis."""
        start, stop = self.x_axis.range
        return self.left + (position - start) / (stop - start) * (self.right - self.left)

    def y(self, position: float) -> float:
        """Pixels from the top."""
        start, stop = self.y_axis.range
        return self.bottom - (position - start) / (stop - start) * (self.bottom - self.top)

    def x_of(self, value: float) -> float:
        """Pixels from the left of a value in the data."""
        return self.x(math.log10(value) if self.x_axis.type == "log" else value)


def draw_svg(figure: go.Figure) -> str:
    """The figure as an SVG document.

    Args:
        figure: of lines, with a width, a height, and explicit ranges and ticks on every axis.

    Raises:
        ValueError: if the figure has something that this drawing lacks.
    """
    _check(figure)
    layout = layout_of(figure)
    frames = _frames(figure)
    # Several figures may share a page, where the same name would be one and the same clip path.
    clip = "clip-" + hashlib.sha256(str(figure.to_json()).encode()).hexdigest()[:12]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width:g} '
        f'{layout.height:g}" width="{layout.width:g}" height="{layout.height:g}" role="img" '
        f'aria-label="{_xml(figure_label(figure))}" font-family="{_xml(layout.font.family)}" '
        f'fill="{_xml(layout.font.color)}">',
        f'<rect width="{layout.width:g}" height="{layout.height:g}" '
        f'fill="{_xml(layout.paper_bgcolor)}"/>',
    ]
    for index, (name, frame) in enumerate(frames.items()):
        parts.append(f'<g data-panel="{index}">')
        parts.extend(_axes(frame))
        parts.extend(_traces(figure, name, frame, f"{clip}-{index}"))
        parts.append("</g>")
    parts.extend(_legends(figure))
    for annotation in layout.annotations:
        parts.append(_annotation(annotation, frames))
    parts.append("</svg>")
    return "\n".join(parts)


def _check(figure: go.Figure) -> None:
    known = ({**_LINE, "fill": None}, {**_LINE, "fill": "toself"}, {"type": "heatmap"})
    for trace in _drawn(figure):
        kind = {name: trace[name] for name in ("type", "mode", "fill") if name in trace}
        if kind not in known or (trace.type == "heatmap" and len(trace.colorscale) != 2):
            raise ValueError(
                "expected only lines, closed areas and heatmaps of two colours in a static figure; "
                f"got a trace of {kind}; save the figure as .html"
            )
    layout = layout_of(figure)
    if layout.width is None or layout.height is None or layout.shapes or layout.images:
        raise ValueError(
            "expected a width, a height, no shapes and no images in a static figure; got "
            f"{layout.width} x {layout.height}, {len(layout.shapes)} shapes and "
            f"{len(layout.images)} images; save the figure as .html"
        )
    for name, axis in ((f"{k}axis{n}", layout[f"{k}axis{n}"]) for k, n in _axis_keys(figure)):
        if axis.range is None or axis.tickvals is None or axis.domain is None:
            raise ValueError(
                f"expected a domain, a range and ticks on {name} of a static figure; got "
                f"{axis.domain}, {axis.range} and {axis.tickvals}; set them, or save as .html"
            )


def layout_of(figure: go.Figure) -> Any:
    """The layout, of which type checkers know nothing: plotly makes its classes as it goes."""
    return figure.layout


def _drawn(figure: go.Figure) -> list[Any]:
    data: Any = figure.data
    return list(data)


def _axis_keys(figure: go.Figure) -> list[tuple[str, str]]:
    """("x", "2") for the axis that is called x2, in order of appearance."""
    names = [name for t in _drawn(figure) for name in (t.xaxis or "x", t.yaxis or "y")]
    return [(name[0], name[1:]) for name in dict.fromkeys(names)]


def _frames(figure: go.Figure) -> dict[tuple[str, str], Frame]:
    layout, margin = layout_of(figure), layout_of(figure).margin
    width = layout.width - margin.l - margin.r
    height = layout.height - margin.t - margin.b
    frames = {}
    for trace in _drawn(figure):
        name = trace.xaxis or "x", trace.yaxis or "y"
        x_axis, y_axis = (layout[f"{axis[0]}axis{axis[1:]}"] for axis in name)
        left, right = (margin.l + share * width for share in x_axis.domain)
        bottom, top = (margin.t + (1 - share) * height for share in y_axis.domain)
        frames[name] = Frame(x_axis, y_axis, left, right, top, bottom)
    return frames


def _axes(frame: Frame) -> Iterator[str]:
    x_axis, y_axis, bottom = frame.x_axis, frame.y_axis, frame.bottom
    font = y_axis.tickfont
    for value, text in zip(y_axis.tickvals, y_axis.ticktext, strict=True):
        y = frame.y(value)
        yield (
            f'<path d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}" '
            f'stroke="{_xml(y_axis.gridcolor)}"/>'
        )
        yield _text(text, frame.left - 6, y + 0.35 * font.size, font, "end")
    yield (
        f'<path d="M{frame.left:.1f} {bottom:.1f}H{frame.right:.1f}" '
        f'stroke="{_xml(x_axis.linecolor)}"/>'
    )
    font = x_axis.tickfont
    for value, text in zip(x_axis.tickvals, x_axis.ticktext, strict=True):
        x = frame.x_of(value)
        yield (
            f'<path d="M{x:.1f} {bottom:.1f}v{x_axis.ticklen:g}" '
            f'stroke="{_xml(x_axis.tickcolor)}"/>'
        )
        yield _text(text, x, bottom + x_axis.ticklen + 4 + 0.8 * font.size, font, "middle")
    middle = (frame.left + frame.right) / 2
    yield _text(x_axis.title.text or "", middle, bottom + 38, x_axis.title.font, "middle")
    middle = (frame.top + bottom) / 2
    turned = f'<g transform="translate({frame.left - 34:.1f} {middle:.1f}) rotate(-90)">'
    yield turned + _text(y_axis.title.text or "", 0, 0, y_axis.title.font, "middle") + "</g>"


def _traces(figure: go.Figure, name: tuple[str, str], frame: Frame, clip: str) -> Iterator[str]:
    yield (
        f'<clipPath id="{clip}"><rect x="{frame.left:.1f}" y="{frame.top:.1f}" '
        f'width="{frame.right - frame.left:.1f}" height="{frame.bottom - frame.top:.1f}"/>'
        "</clipPath>"
    )
    yield f'<g clip-path="url(#{clip})" fill="none" stroke-linejoin="round">'
    mine = [t for t in _drawn(figure) if (t.xaxis or "x", t.yaxis or "y") == name]
    # Plotly too draws all areas of a panel before its lines.
    for trace in sorted(mine, key=lambda trace: trace.type == "scatter" and trace.fill is None):
        if trace.type == "heatmap":
            yield from _cells(trace, frame)
            continue
        if not trace.x:
            continue
        points = (
            f"{frame.x_of(x):.2f} {frame.y(y):.2f}" for x, y in zip(trace.x, trace.y, strict=True)
        )
        path = "M" + "L".join(points)
        if trace.fill:
            yield f'<path d="{path}Z" {_paint("fill", trace.fillcolor)}/>'
        if trace.line.width:
            yield (
                f'<path d="{path}" {_paint("stroke", trace.line.color)} '
                f'stroke-width="{trace.line.width:g}"{_dashed(trace)}/>'
            )
    yield "</g>"


def _cells(trace: Any, frame: Frame) -> Iterator[str]:
    """The cells of a heatmap, around whole numbers."""
    (_, pale), (_, full) = trace.colorscale
    ends = [[int(c[start : start + 2], 16) for start in (1, 3, 5)] for c in (pale, full)]
    for y, row in enumerate(trace.z):
        for x, value in enumerate(row):
            share = min(max((value - trace.zmin) / (trace.zmax - trace.zmin), 0), 1)
            mixed = (round(a + share * (b - a)) for a, b in zip(*ends, strict=True))
            left, top = frame.x(x - 0.5) + 0.5, frame.y(y + 0.5) + 0.5
            yield (
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{frame.x(x + 0.5) - left - 0.5:.1f}" '
                f'height="{frame.y(y - 0.5) - top - 0.5:.1f}" '
                f'fill="#{"".join(f"{part:02x}" for part in mixed)}"/>'
            )


def _legends(figure: go.Figure) -> Iterator[str]:
    layout, margin = layout_of(figure), layout_of(figure).margin
    rows: dict[str, list[Any]] = {}
    for trace in _drawn(figure):
        if trace.type == "scatter" and trace.showlegend is not False:
            rows.setdefault(trace.legend or "legend", []).append(trace)
    for name, traces in rows.items():
        legend = layout[name]
        widest = max(text_width(unescape(trace.name), legend.font.size) for trace in traces)
        width = _SAMPLE + _SAMPLE_GAP + widest + 4
        left = margin.l + legend.x * (layout.width - margin.l - margin.r) - width
        height = layout.height - margin.t - margin.b
        top = margin.t + (1 - legend.y) * height - _ROW * len(traces) - _LEGEND_FOOT
        yield (
            f'<rect x="{left - 4:.1f}" y="{top:.1f}" width="{width + 4:.1f}" '
            f'height="{_ROW * len(traces)}" {_paint("fill", legend.bgcolor)}/>'
        )
        for row, trace in enumerate(traces):
            y = top + _ROW * (row + 0.5)
            yield (
                f'<path d="M{left:.1f} {y:.1f}h{_SAMPLE}" {_paint("stroke", trace.line.color)} '
                f'stroke-width="{trace.line.width:g}"{_dashed(trace)}/>'
            )
            x = left + _SAMPLE + _SAMPLE_GAP
            yield _text(trace.name, x, y + 0.36 * legend.font.size, legend.font, "start")


def _dashed(trace: Any) -> str:
    dash = trace.line.dash
    return f' stroke-dasharray="{dash.replace("px", "")}"' if dash else ""


def _annotation(annotation: Any, frames: dict[tuple[str, str], Frame]) -> str:
    references = annotation.xref, annotation.yref
    name = references[0].removesuffix(" domain"), references[1].removesuffix(" domain")
    frame = frames[name]
    if references[0].endswith("domain"):
        x = frame.left + annotation.x * (frame.right - frame.left)
    else:
        x = frame.x(annotation.x)
    if references[1].endswith("domain"):
        y = frame.bottom - annotation.y * (frame.bottom - frame.top)
    else:
        y = frame.y(annotation.y)
    x, y = x + (annotation.xshift or 0), y - (annotation.yshift or 0)
    anchor = {"left": "start", "center": "middle", "right": "end"}[annotation.xanchor]
    size = annotation.font.size
    if annotation.textangle:
        turned = f'<g transform="translate({x:.1f} {y:.1f}) rotate({annotation.textangle:g})">'
        lines = annotation.text.split("<br>")
        first = 0.35 * size - _LINE_HEIGHT * size * (len(lines) - 1) / 2
        drawn = (
            _text(line, 0, first + _LINE_HEIGHT * size * place, annotation.font, anchor)
            for place, line in enumerate(lines)
        )
        return turned + "".join(drawn) + "</g>"
    return _text(annotation.text, x, y - 0.22 * size, annotation.font, anchor)


def _text(text: str, x: float, y: float, font: Any, anchor: str) -> str:
    """Text in plotly's markup, of which raised text and escaped characters are drawn."""
    pieces = re.split(r"<sup>(.*?)</sup>", text)
    inner = ""
    for index, piece in enumerate(pieces):
        plain = _xml(unescape(piece))
        if index % 2:
            inner += f'<tspan dy="-{0.4 * font.size:.1f}" font-size="{0.75 * font.size:g}">'
            inner += f"{plain}</tspan>"
        else:
            inner += plain
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{font.size:g}" fill="{_xml(font.color)}" '
        f'text-anchor="{anchor}">{inner}</text>'
    )


def _paint(what: str, colour: str) -> str:
    """A colour as SVG 1.1 has it: without rgba()."""
    match = re.fullmatch(r"rgba\((\d+), ?(\d+), ?(\d+), ?([\d.]+)\)", colour)
    if not match:
        return f'{what}="{_xml(colour)}"'
    red, green, blue, alpha = match.groups()
    solid = f"#{int(red):02x}{int(green):02x}{int(blue):02x}"
    return f'{what}="{solid}" {what}-opacity="{alpha}"'


def figure_label(figure: go.Figure) -> str:
    """What a figure shows, in words: its vertical axis, and the titles of its panels."""
    titles = [a.text for a in layout_of(figure).annotations if str(a.xref).endswith("domain")]
    what = next((a.title.text for a in _axes_of(figure, "y") if a.title.text), "Figure")
    return " in ".join([what, ", ".join(map(unescape, titles))] if titles else [what])


def _axes_of(figure: go.Figure, letter: str) -> list[Any]:
    return [layout_of(figure)[f"{k}axis{n}"] for k, n in _axis_keys(figure) if k == letter]


def _xml(text: str) -> str:
    return escape(str(text), quote=True)

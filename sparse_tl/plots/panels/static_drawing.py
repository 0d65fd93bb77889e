"""A plotly figure of panels as static SVG, drawn by matplotlib without browser or script, and with
text as outlines, so that it looks the same on every machine.

Supports what `panels` makes: lines, points, areas and heat maps with colour bars, axes with given
ranges and ticks, annotations and legends.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import defaultdict
from html import escape, unescape
from typing import TYPE_CHECKING, Any

from sparse_tl.plots.page.palette import (
    AXIS,
    BACKGROUND,
    DASHES,
    GRID,
    INK,
    LABEL_SIZE,
    LEGEND_SIZE,
    MUTED,
    TICK_SIZE,
)
from sparse_tl.plots.panels.panels import entries_per_row, inner_size

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib's SVG has 72 dots per inch, so that points are pixels.
_DOTS = 72
# Distance between a plot and the middle of its vertical axis title.
_TITLE_ASIDE = 44
# Depth of descenders as a share of the font size.
_DESCENT = 0.22
_BAR_STEPS = 64


def draw_svg(figure: Any, title: str) -> str:
    """A plotly figure as an SVG element with a text description; deterministic."""
    import matplotlib
    from matplotlib.figure import Figure

    traces, layout = figure.data, figure.layout
    # The user's matplotlib style stays unchanged, and does not affect this figure.
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "sparse_tl", "lines.scale_dashes": False})
        # Characters that DejaVu Sans lacks are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        size = (layout.width / _DOTS, layout.height / _DOTS)
        page = Figure(size, dpi=_DOTS, facecolor=BACKGROUND)
        panels: dict[str, Axes] = {}
        listed: dict[str, dict[str, Artist]] = defaultdict(dict)
        for trace in traces:
            if trace.xaxis not in panels:
                panels[trace.xaxis] = _add_axes(page, layout, trace.xaxis, trace.yaxis)
            drawn = _draw_trace(panels[trace.xaxis], trace)
            if trace.type == "heatmap" and trace.showscale is not False:
                _add_colour_bar(page, layout, trace, drawn)
            if trace.showlegend:
                listed[trace.legend or "legend"][trace.name] = drawn
        for text in layout.annotations:
            axes = panels.get(text.xref.removesuffix(" domain"), next(iter(panels.values())))
            _write(axes, layout, text)
        for name, samples in listed.items():
            _draw_legend(page, layout, layout[name], samples)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        page.savefig(file, format="svg", metadata=nothing)
    return _as_element(file.getvalue(), title)


def _on_page(layout: Any, x: float, y: float) -> tuple[float, float]:
    """A position inside plotly's margins, in page units."""
    width, height = inner_size(layout)
    return (
        (layout.margin.l + x * width) / layout.width,
        (layout.margin.b + y * height) / layout.height,
    )


def _add_axes(page: Figure, layout: Any, x: str, y: str) -> Axes:
    across, upwards = layout[x.replace("x", "xaxis")], layout[y.replace("y", "yaxis")]
    left, bottom = _on_page(layout, across.domain[0], upwards.domain[0])
    right, top = _on_page(layout, across.domain[1], upwards.domain[1])
    axes = page.add_axes((left, bottom, right - left, top - bottom), facecolor="none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set(color=AXIS, linewidth=1)
    axes.set_axisbelow(True)
    if upwards.showgrid is not False:
        axes.grid(axis="y", color=GRID, linewidth=1)
    for name, axis, drawn in (("x", across, axes.xaxis), ("y", upwards, axes.yaxis)):
        hidden, is_log = axis.showticklabels is False, axis.type == "log"
        axes.set(**{f"{name}scale": axis.type or "linear"})
        drawn.set_ticks([], minor=True)
        drawn.set_ticks(axis.tickvals, [""] * len(axis.tickvals) if hidden else axis.ticktext)
        axes.set(**{f"{name}lim": [10**end if is_log else end for end in axis.range]})
        drawn.set_tick_params(color=AXIS, labelcolor=MUTED, labelsize=TICK_SIZE)
        drawn.set_label_text(axis.title.text or "", size=LABEL_SIZE, color=INK)
        drawn.labelpad = 6
    # The title has the same position in all rows, whatever the ticks.
    axes.yaxis.set_label_coords(-_TITLE_ASIDE / axes.bbox.width, 0.5)
    axes.tick_params("y", length=0)
    axes.tick_params("x", length=4)
    return axes


def _add_colour_bar(page: Figure, layout: Any, trace: Any, drawn: Any) -> None:
    bar = trace.colorbar
    left, top = _on_page(layout, bar.x, bar.y)
    height = bar.thickness / layout.height
    axes = page.add_axes((left, top - height, bar.len / layout.width, height))
    axes.spines[:].set_visible(False)
    step = (trace.zmax - trace.zmin) / _BAR_STEPS
    ends = [trace.zmin + i * step for i in range(_BAR_STEPS + 1)]
    style = {"cmap": drawn.cmap, "norm": drawn.norm, "edgecolors": "face", "linewidth": 0.4}
    # Drawn as shapes, which a dark figure can invert; matplotlib's own colour bar is an image.
    axes.pcolormesh(ends, (0, 1), [[end + step / 2 for end in ends[:-1]]], **style)
    axes.set(xlim=(trace.zmin, trace.zmax), yticks=[])
    axes.xaxis.set_ticks([], minor=True)
    axes.xaxis.set_ticks(bar.tickvals, bar.ticktext)
    axes.tick_params("x", length=0, labelcolor=MUTED, labelsize=TICK_SIZE)


def _draw_trace(axes: Axes, trace: Any) -> Artist:
    if trace.type == "heatmap":
        from matplotlib.colors import LinearSegmentedColormap

        colours = LinearSegmentedColormap.from_list("", [colour for _, colour in trace.colorscale])
        edges = ([i - 0.5 for i in range(n + 1)] for n in (len(trace.z[0]), len(trace.z)))
        ends = {"vmin": trace.zmin, "vmax": trace.zmax}
        return axes.pcolormesh(
            *edges, trace.z, cmap=colours, **ends, edgecolors=BACKGROUND, linewidth=trace.xgap
        )
    if trace.fill:
        return axes.fill(trace.x, trace.y, color=trace.fillcolor, alpha=trace.opacity, lw=0)[0]
    if trace.mode == "markers":
        style = {"color": trace.marker.color, "ms": trace.marker.size, "alpha": trace.opacity}
        return axes.plot(trace.x, trace.y, "o", markeredgewidth=0, **style)[0]
    line, dashes = trace.line, (0, DASHES) if trace.line.dash else "solid"
    style = {"color": line.color, "alpha": trace.opacity, "lw": line.width, "ls": dashes}
    return axes.plot(trace.x, trace.y, **style)[0]


def _write(axes: Axes, layout: Any, text: Any) -> None:
    """Draw an annotation, without parsing its text as a formula."""
    at, unit = (text.x, text.y), "axes fraction"
    if text.xref == "paper":
        at, unit = _on_page(layout, text.x, text.y), "figure fraction"
    elif not text.xref.endswith("domain"):
        # Positions on plotly's logarithmic axes are exponents of ten.
        at, unit = (10**text.x if axes.get_xscale() == "log" else text.x, text.y), "data"
    above = text.yanchor == "bottom"
    axes.annotate(
        unescape(text.text.replace("<br>", "\n")),
        at,
        xycoords=unit,
        xytext=(text.xshift or 0, (text.yshift or 0) + above * _DESCENT * text.font.size),
        textcoords="offset points",
        rotation=-(text.textangle or 0),
        ha=text.xanchor,
        va={"bottom": "baseline", "top": "top"}.get(text.yanchor, "center"),
        size=text.font.size,
        color=text.font.color or INK,
        multialignment="center",
        linespacing=1.3,
        parse_math=False,
    )


def _draw_legend(page: Figure, layout: Any, legend: Any, samples: dict[str, Artist]) -> None:
    n_columns, names = entries_per_row(layout, legend), list(samples)
    # In rows, while matplotlib fills columns.
    names = [name for column in range(n_columns) for name in names[column::n_columns]]
    drawn = page.legend(
        [samples[name] for name in names],
        [""] * len(names),
        ncols=n_columns,
        columnspacing=1.4,
        loc="upper left" if legend.yanchor == "top" else "lower right",
        bbox_to_anchor=_on_page(layout, legend.x, legend.y),
        frameon=False,
        fontsize=LEGEND_SIZE,
        labelcolor=INK,
        borderaxespad=0.2,
        handlelength=1.6,
        handletextpad=0.5,
        labelspacing=0.3,
    )
    # Set afterwards, since matplotlib drops labels with a leading underscore and parses $ as math.
    for written, name in zip(drawn.get_texts(), names, strict=True):
        written.set(text=unescape(name), parse_math=False)


def _as_element(document: str, title: str) -> str:
    """The SVG element alone: in pixels, labelled, and without styles that affect the page."""
    svg = document[document.index("<svg ") :].strip()
    svg = re.sub(r"\s*<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    # Hundredths of a pixel are enough, and half as long.
    svg = re.sub(r' d="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', head)
    joins = 'stroke-linejoin="round" stroke-linecap="butt"'
    return f'{head} role="img" aria-label="{escape(title)}" {joins}>{rest}'

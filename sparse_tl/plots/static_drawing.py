"""A grid of panels as static SVG, by matplotlib: no browser, no script, and text as outlines, so
that it looks the same on every machine.
"""

from __future__ import annotations

import io
import re
import warnings
from html import escape
from typing import TYPE_CHECKING, Any

from sparse_tl.plots.grid import LEGEND_ROW, LEGEND_SAMPLE, ROW_TITLE_WIDTH, Box, Grid, Panel
from sparse_tl.plots.palette import (
    AXIS,
    DASHES,
    EMPTY_CELL,
    GRID,
    GROUND,
    INK,
    INTERVAL_ALPHA,
    LABEL_SIZE,
    LEGEND_SIZE,
    MUTED,
    PANEL_TITLE_SIZE,
    TICK_SIZE,
)
from sparse_tl.plots.token_text import fit_text, visible_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib's SVG has 72 dots per inch: its points are our pixels.
_DOTS = 72
# Between a plot and the middle of its vertical axis's title.
_TITLE_ASIDE = 44


def draw_svg(grid: Grid) -> str:
    """The grid as an SVG document; always the same for the same grid."""
    import matplotlib
    from matplotlib.figure import Figure

    width, height = grid.size
    # Whatever style the user has set for figures of their own stays as it is, and out of ours.
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "sparse_tl", "lines.scale_dashes": False})
        # Of letters that DejaVu Sans lacks, boxes are drawn.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure((width / _DOTS, height / _DOTS), dpi=_DOTS, facecolor=GROUND)
        for box, panel in grid.panels():
            _draw_panel(figure, box, panel)
        for row, title in enumerate(grid.row_titles):
            box = grid.box(row, len(grid.rows[row]) - 1)
            middle = (box.right + 0.6 * ROW_TITLE_WIDTH, (box.top + box.bottom) / 2)
            _write(figure, title, *middle, box.height, rotation=-90, ha="center", va="center")
        _draw_legends(figure, grid)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    return _as_element(file.getvalue(), grid.said)


def _draw_panel(figure: Figure, box: Box, panel: Panel) -> None:
    width, height = figure.bbox.size
    place = (box.left / width, 1 - box.bottom / height, box.width / width, box.height / height)
    axes = figure.add_axes(place, facecolor="none")
    _prepare_axes(axes, panel, box.width)
    if panel.cells is not None:
        _draw_cells(axes, panel)
    for line in panel.lines:
        if len(line.low):
            alpha = INTERVAL_ALPHA
            axes.fill_between(line.x, line.low, line.high, color=line.colour, alpha=alpha, lw=0)
    for line in panel.lines:
        dashes = (0, DASHES) if line.dashed else "solid"
        axes.plot(line.x, line.y, color=line.colour, alpha=line.alpha, lw=line.width, ls=dashes)
    if panel.note is not None:
        at = [
            10**value if axis.log else value
            for value, axis in ((panel.note.x, panel.x), (panel.note.y, panel.y))
        ]
        size = PANEL_TITLE_SIZE - 1
        axes.text(at[0], at[1], panel.note.text, ha="center", va="bottom", size=size, color=INK)
    _write(figure, panel.title, box.left, box.top - 8, box.width + 12, ha="left", va="baseline")


def _prepare_axes(axes: Axes, panel: Panel, width: float) -> None:
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=AXIS, linewidth=1)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=1)
    for axis, drawn, scale, limit in (
        (panel.x, axes.xaxis, axes.set_xscale, axes.set_xlim),
        (panel.y, axes.yaxis, axes.set_yscale, axes.set_ylim),
    ):
        if axis.log:
            scale("log")
        texts = list(axis.ticks.values()) if axis.labelled else [""] * len(axis.ticks)
        drawn.set_ticks([], minor=True)
        drawn.set_ticks(list(axis.ticks), texts)
        limit(*(10**end if axis.log else end for end in axis.span))
        drawn.set_tick_params(color=AXIS, labelcolor=MUTED, labelsize=TICK_SIZE)
        if axis.labelled:
            drawn.set_label_text(axis.title, size=LABEL_SIZE, color=INK)
            drawn.labelpad = 6
    # At one place in all rows, whatever their ticks are.
    axes.yaxis.set_label_coords(-_TITLE_ASIDE / width, 0.5)
    axes.tick_params("y", length=0)
    axes.tick_params("x", length=4)


def _draw_cells(axes: Axes, panel: Panel) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    assert panel.cells is not None
    values = [list(row) for row in panel.cells.values]
    colours = LinearSegmentedColormap.from_list("", [EMPTY_CELL, panel.cells.colour])
    edges = ([place - 0.5 for place in range(n + 1)] for n in (len(values[0]), len(values)))
    axes.pcolormesh(*edges, values, cmap=colours, vmin=0, vmax=1, edgecolors=GROUND, linewidth=1)


def _write(figure: Figure, text: str, x: float, y: float, room: float, **options: Any) -> None:
    """A title at a place in pixels, as large as it fits; whatever it holds is no formula."""
    width, height = figure.bbox.size
    shown, size = fit_text(visible_text(text), PANEL_TITLE_SIZE, room)
    at = x / width, 1 - y / height
    figure.text(*at, shown, size=size, color=INK, parse_math=False, **options)


def _draw_legends(figure: Figure, grid: Grid) -> None:
    from matplotlib.lines import Line2D

    width, height = figure.bbox.size
    for legend in grid.legends():
        samples = [
            Line2D([], [], color=line.colour, lw=line.width, ls=(0, DASHES) if line.dashed else "-")
            for line in legend.lines
        ]
        drawn = figure.legend(
            samples,
            [""] * len(samples),
            loc="lower right",
            bbox_to_anchor=(legend.right / width, 1 - legend.bottom / height),
            frameon=False,
            fontsize=LEGEND_SIZE,
            labelcolor=INK,
            borderaxespad=0,
            handlelength=0.45 * LEGEND_SAMPLE / LEGEND_SIZE,
            handletextpad=0.5,
            labelspacing=(LEGEND_ROW - LEGEND_SIZE) / LEGEND_SIZE - 0.2,
        )
        # Set later: a label that begins with an underscore is left out, one with $ is a formula.
        for written, line in zip(drawn.get_texts(), legend.lines, strict=True):
            written.set(text=grid.legend_text(line), parse_math=False)


def _as_element(document: str, said: str) -> str:
    """The SVG element alone, in pixels, with a name, and without a style for others on its page."""
    svg = document[document.index("<svg ") :].strip()
    svg = re.sub(r"\s*<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', head)
    label = escape(visible_text(said), quote=True)
    joins = 'stroke-linejoin="round" stroke-linecap="butt"'
    return f'{head} role="img" aria-label="{label}" {joins}>{rest}'

"""A grid of panels with lines or cells, as data: plotly and matplotlib both draw it from here.

Lengths are pixels, and every range, tick and place is explicit, so that the two drawings agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sparse_tl.plots.palette import CURVE_WEIGHT, LEGEND_SIZE, Colour
from sparse_tl.plots.token_text import clip_text, text_width, visible_text

TOP, BOTTOM, LEFT, RIGHT = 34, 52, 62, 12
ROW_GAP, ROW_TITLE_WIDTH = 20, 26
LEGEND_ROW, LEGEND_SAMPLE = 17, 40


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Args:
        title: beside it.
        span: its lower and upper end; powers of ten on a logarithmic axis.
        ticks: texts by the value at which they stand.
        log: whether it is logarithmic.
        labelled: whether title and texts are written; the panels of a row or column may share them.
    """

    title: str
    span: tuple[float, float]
    ticks: Mapping[float, str]
    log: bool = False
    labelled: bool = True


@dataclass(frozen=True)
class Line:
    """A line with, perhaps, intervals around it.

    Args:
        name: of what it shows; lines of one name are switched on and off together.
        x, y: its points.
        colour: of the line and, paler, of its intervals.
        low, high: the ends of the interval of each point; none if empty.
        hover: for each point the words of its tooltip, the first of them bold.
        width: in pixels.
        alpha: below 1 for a pale line.
        dashed: whether it is broken.
        listed: whether the legend lists it.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: Colour
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    hover: Sequence[Sequence[str]] = ()
    width: float = CURVE_WEIGHT
    alpha: float = 1.0
    dashed: bool = False
    listed: bool = False


@dataclass(frozen=True)
class Cells:
    """A heat map of values in 0..1, whose cells lie around whole numbers.

    Args:
        values: rows from the bottom to the top.
        colour: of 1.
        hover: for each cell the words of its tooltip, the first of them bold.
    """

    values: Sequence[Sequence[float]]
    colour: Colour
    hover: Sequence[Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Note:
    """A text above a point, which is given in the units of the axes' spans."""

    text: str
    x: float
    y: float


@dataclass(frozen=True)
class Panel:
    """One plot with its axes."""

    x: Axis
    y: Axis
    title: str = ""
    lines: tuple[Line, ...] = ()
    cells: Cells | None = None
    note: Note | None = None


@dataclass(frozen=True)
class Box:
    """Where a plot lies, from the upper left corner of the figure."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass(frozen=True)
class Legend:
    """The lines that it lists, and where its lower right corner lies."""

    lines: tuple[Line, ...]
    right: float
    bottom: float


@dataclass(frozen=True)
class Grid:
    """The whole figure.

    Args:
        rows: of panels, all of the same length.
        said: what the figure shows, in words.
        row_titles: at the right of the rows; empty ones take no room.
        width, height: of one plot.
        gap: between two plots of a row.
        side_legend: whether one legend stands at the right, or each panel has its own at its lower
            right.
    """

    rows: Sequence[Sequence[Panel]]
    said: str
    row_titles: Sequence[str] = ()
    width: float = 200
    height: float = 140
    gap: float = 18
    side_legend: bool = True

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the figure."""
        last = self.box(len(self.rows) - 1, len(self.rows[0]) - 1)
        right = last.right + (ROW_TITLE_WIDTH if any(self.row_titles) else 0)
        if self.side_legend:
            right += self._legend_width
        return round(right + RIGHT), round(last.bottom + BOTTOM)

    def box(self, row: int, column: int) -> Box:
        """Where the plot of a panel lies."""
        left, top = LEFT + column * (self.width + self.gap), TOP + row * (self.height + ROW_GAP)
        return Box(left, top, self.width, self.height)

    def panels(self) -> Iterator[tuple[Box, Panel]]:
        """The panels row by row, each with its place."""
        for row, panels in enumerate(self.rows):
            for column, panel in enumerate(panels):
                yield self.box(row, column), panel

    def legends(self) -> list[Legend]:
        """One at the right, or one in each panel whose lines are listed."""
        listed = [
            (box, tuple(ln for ln in panel.lines if ln.listed)) for box, panel in self.panels()
        ]
        if self.side_legend:
            lines = tuple(line for _, some in listed for line in some)
            bottom = TOP + LEGEND_ROW * len(lines) + 6
            listed = [(Box(0, 0, self.size[0] - RIGHT, bottom), lines)]
        return [Legend(lines, box.right, box.bottom - 2) for box, lines in listed if lines]

    def legend_text(self, line: Line) -> str:
        """The name of a line, or as much of it as a legend can hold."""
        room = math.inf if self.side_legend else self.width - LEGEND_SAMPLE
        return clip_text(visible_text(line.name), LEGEND_SIZE, room)

    @property
    def _legend_width(self) -> float:
        lines = (line for _, panel in self.panels() for line in panel.lines if line.listed)
        widths = [text_width(self.legend_text(line), LEGEND_SIZE) for line in lines]
        return max(widths) + LEGEND_SAMPLE + 12 if widths else 0


def round_ticks(low: float, high: float, most: int = 4) -> dict[float, str]:
    """Ticks at round numbers within a range: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step) + 1)
    values = [place * step for place in places]
    return {value: f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}") for value in values}

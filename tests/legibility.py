"""What a reader of a page in a browser cannot see or read, narrow and light, and wide and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from sparse_tl.plots.page.palette import channels, dark_colour

WIDTHS = (1000, 1600)
SMALLEST_TEXT = 10.0
"""In pixels, on screen."""
CONTRAST = 4.5
"""WCAG 2.2, level AA."""
LOOK = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
SETTLED = """() => new Promise((done) => {
  requestAnimationFrame(() => requestAnimationFrame(done));
  setTimeout(done, 2000);  // a busy browser has been seen to draw no more frames
})"""


def problems_of(page: Any) -> str:
    """A line for everything that is cut off, overlaps, is too small or has too little contrast.

    A theme changes no place, and a width no colour.
    """
    problems: list[str] = []
    for width, scheme in zip(WIDTHS, ("light", "dark"), strict=True):
        page.set_viewport_size({"width": width, "height": 3000})
        page.emulate_media(color_scheme=scheme)
        page.evaluate(SETTLED)  # figures fit themselves to their page
        seen = page.evaluate(LOOK)
        assert len(seen["texts"]) > 5
        found = [*seen["problems"], *_unreadable(seen["texts"], scheme)]
        problems += [f"{width} px, {scheme}: {problem}" for problem in found]
    return "\n".join(problems)


def _unreadable(texts: Sequence[Mapping[str, Any]], scheme: str) -> list[str]:
    problems = []
    for text in texts:
        said = f"{text['text']!r}"
        if text["size"] < SMALLEST_TEXT - 0.05:
            problems.append(f"{said} is {text['size']:.1f} px high")
        assert text["turned"] == (scheme == "dark")
        ink, ground = (_hexadecimal(text[key]) for key in ("ink", "ground"))
        if text["turned"]:
            ink, ground = dark_colour(ink), dark_colour(ground)
        if _contrast(ink, ground) < CONTRAST:
            problems.append(f"{said} has a contrast of {_contrast(ink, ground):.2f}")
    boxes = [(place, box) for place, text in enumerate(texts) for box in text["boxes"]]
    owners, drawn = zip(*boxes, strict=True)
    pairs = {(owners[i], owners[j]) for i, j in _overlapping(np.array(drawn))}
    return problems + [
        f"{texts[first]['text']!r} overlaps {texts[second]['text']!r}"
        for first, second in sorted(pairs)
        if first != second
    ]


def _overlapping(boxes: Float[np.ndarray, "box 4"]) -> list[list[int]]:
    """Pairs of boxes (left, top, right, bottom) that overlap by 3 px both ways."""
    starts, ends = boxes[:, :2], boxes[:, 2:]
    shared = np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts)
    return np.argwhere(np.triu((shared > 3).all(axis=2), k=1)).tolist()


def _hexadecimal(parts: Sequence[float]) -> str:
    return "#" + "".join(f"{round(part):02x}" for part in parts)


@cache
def _contrast(first: str, second: str) -> float:
    low, high = sorted(_luminance(colour) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = np.array(channels(colour)) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])

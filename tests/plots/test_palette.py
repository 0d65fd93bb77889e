"""Colours that mean different things are apart for everyone, on a light and on a dark ground."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparse_tl.plots import circuit_diagram
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import dark_colour

THEMES: dict[str, Callable[[str], str]] = {"light": str, "dark": dark_colour}

# Machado, Oliveira and Fernandes 2009 (doi:10.1109/TVCG.2009.113), severity 1, on
# linear RGB.
SIGHT = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}

TOLD_APART = {
    "pairs of models": [colour for pair in palette.MODEL_PAIRS for colour in pair],
    "roles": list(palette.ROLES.values()),
    "slots": [palette.QUERY, palette.KEY, palette.VALUE, palette.RESIDUAL_READER],
    "signs": [palette.HELPS, palette.HURTS, palette.RESIDUAL_READER],
    "framed heads": list(palette.MARKS),
    "weak attention edges": [palette.MAIN[0], palette.MAIN_NEGATIVE[0]],
    "strong attention edges": [palette.MAIN[1], palette.MAIN_NEGATIVE[1]],
}
"""Colours that a reader must tell apart within one figure."""

"""Lines that carry what a figure says. Rules and what is off the path are light on purpose."""


def linear(colour: str) -> np.ndarray:
    channels = np.array(palette.channels(colour)) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def cielab(colour: str, sight: str) -> np.ndarray:
    seen = np.clip(np.asarray(SIGHT[sight]) @ linear(colour), 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", THEMES)
class TestReadable:
    @pytest.mark.parametrize("sight", SIGHT)
    @pytest.mark.parametrize("what", TOLD_APART)
    def test_colours_are_apart_for_everyone(self, what: str, sight: str, theme: str) -> None:
        shown = [THEMES[theme](colour) for colour in TOLD_APART[what]]
        for first, second in combinations(shown, 2):
            distance = np.linalg.norm(cielab(first, sight) - cielab(second, sight))
            # About 2 can just be seen side by side. One person in ten thousand is tritanopic.
            assert distance > (9 if sight == "tritanopia" else 18), (first, second)


class TestDiagrams:
    """Figures that are one piece of HTML are turned whole; the text in them stays."""

    def test_a_token_that_is_a_colour_stays(self, make_flow: Any, tmp_path: Path) -> None:
        tokens = (palette.ACCENT, 'fill="#ffffff"', *"+28=?????")[:11]
        flow = make_flow({(0, 0, 10, 0): 0.9}, input_tokens=tokens, output_tokens=tokens)
        figure = circuit_diagram({"#ffffff": flow})
        svg = figure.save(tmp_path / "dark.svg", theme="dark").read_text(encoding="utf-8")
        texts = ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter() if t.text]
        assert any(palette.ACCENT in text for text in texts)
        assert not re.search(r'(fill|stroke)="#ffffff"', svg)
        assert figure.dark().svg in svg and figure.svg != figure.dark().svg

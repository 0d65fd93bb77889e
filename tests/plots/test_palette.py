"""All figures share one palette, which everybody can read, on a light and on a dark ground."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparse_tl.plots
from sparse_tl.plots import circuit_diagram
from sparse_tl.plots.diagrams.circuit_svg import line_styles
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import dark_colour, dark_svg
from sparse_tl.plots.page.rendering import html_page

FOLDER = Path(sparse_tl.plots.__file__).parent
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

# (text, ground)
TEXTS = [
    *((ink, ground) for ink in (palette.INK, palette.MUTED) for ground in ("BACKGROUND", "BAND")),
    (palette.CONTROL_INK, "BACKGROUND"),
    (palette.ACCENT, "BACKGROUND"),
    (palette.OPEN_NODE_INK, "BACKGROUND"),
    (palette.ABSENT_NODE_INK, "BACKGROUND"),
]
LINES = [
    palette.INK,
    palette.AXIS,
    palette.POINTED,
    palette.RESIDUAL_ON_PATH,
    *dict.fromkeys(colour for colours in TOLD_APART.values() for colour in colours),
    palette.NODE_REACHED[1],
    palette.HEAD_NODE[1],
    palette.MLP_NODE[1],
]
"""Lines that carry what a figure says. Rules and what is off the path are light on purpose."""


def linear(colour: str) -> np.ndarray:
    channels = np.array(palette.channels(colour)) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """WCAG 2.2: 1 to 21."""
    weights = [0.2126, 0.7152, 0.0722]
    low, high = sorted(float(linear(colour) @ weights) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


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

    @pytest.mark.parametrize("sight", SIGHT)
    @pytest.mark.parametrize("pair", palette.MODEL_PAIRS)
    def test_dense_and_sparse_are_far_apart_for_everyone(
        self, pair: tuple[str, str], sight: str, theme: str
    ) -> None:
        dense, sparse = (cielab(THEMES[theme](colour), sight) for colour in pair)
        assert np.linalg.norm(dense - sparse) > 15

    @pytest.mark.parametrize("pair", palette.MODEL_PAIRS)
    def test_dense_and_sparse_are_apart_in_grey_print(
        self, pair: tuple[str, str], theme: str
    ) -> None:
        dense, sparse = (cielab(THEMES[theme](colour), "full")[0] for colour in pair)
        assert abs(dense - sparse) > 8

    @pytest.mark.parametrize(("ink", "ground"), TEXTS)
    def test_text_has_contrast(self, ink: str, ground: str, theme: str) -> None:
        turned = THEMES[theme]
        assert contrast(turned(ink), turned(getattr(palette, ground))) >= 4.5

    def test_text_on_nodes_has_contrast(self, theme: str) -> None:
        turned = THEMES[theme]
        for fill, _ in (palette.HEAD_NODE, palette.MLP_NODE, palette.END_NODE):
            assert contrast(turned(palette.INK), turned(fill)) >= 4.5

    @pytest.mark.parametrize("line", LINES)
    def test_lines_have_contrast(self, line: str, theme: str) -> None:
        turned = THEMES[theme]
        assert contrast(turned(line), turned(palette.BACKGROUND)) >= 3

    def test_main_edges_have_contrast_at_every_weight(self, theme: str) -> None:
        turned = THEMES[theme]
        for kind, stroke, *_ in line_styles():
            if kind == "main":
                assert contrast(turned(stroke), turned(palette.BACKGROUND)) >= 3


class TestOneLanguage:
    def test_colours_are_written_in_the_palette_alone(self) -> None:
        for path in FOLDER.rglob("*.py"):
            # Examples in error messages are quoted otherwise.
            found = re.findall(r'"(?:#[0-9a-fA-F]{3,8}|rgba?\(\d.*?)"', path.read_text())
            assert path.name == "palette.py" or not found, f"{path.name}: {found}"

    def test_scripts_and_styles_hold_colours_of_the_palette(self) -> None:
        known = set(re.findall(r"#[0-9a-f]{6}", (FOLDER / "page/palette.py").read_text()))
        assert len(known) > 30
        for path in (*FOLDER.glob("js/*.js"), *FOLDER.glob("js/*.css")):
            used = set(re.findall(r"#[0-9a-fA-F]{3,8}\b", path.read_text()))
            assert used <= known, f"{path.name}: {used - known}"


class TestDark:
    def test_light_and_dark_change_places(self) -> None:
        assert dark_colour("#ffffff") == "#141414"
        assert dark_colour("#000000") == "#ebebeb"

    def test_a_hue_stays(self) -> None:
        for colour, largest in {"#c02020": 0, "#206020": 1, "#2020c0": 2}.items():
            assert np.argmax(palette.channels(dark_colour(colour))) == largest

    def test_refuses_what_is_no_colour(self) -> None:
        with pytest.raises(ValueError, match=r"expected a colour like .*; got 'red'"):
            dark_colour("red")

    def test_only_paint_is_turned(self) -> None:
        svg = '<text fill="#ffffff">#ffffff fill=&quot;#ffffff&quot;</text>'
        assert dark_svg(svg) == svg.replace('fill="#ffffff"', 'fill="#141414"')

    def test_browsers_turn_pages_alike(self, page: Any, tmp_path: Path) -> None:
        colours = [palette.BACKGROUND, palette.INK, palette.DENSE, palette.SPARSE, palette.KEY]
        colours += palette.ROLES.values()
        stripes = "".join(f'<div style="background:{c};height:20px"></div>' for c in colours)
        file = tmp_path / "page.html"
        file.write_text(html_page("Colours", stripes, margin=10), encoding="utf-8")
        page.set_viewport_size({"width": 100, "height": 20 * len(colours) + 20})
        for scheme, turn in THEMES.items():
            page.emulate_media(color_scheme=scheme)
            page.goto(file.as_uri())
            rows = [5, *(20 + 20 * place for place in range(len(colours)))]
            shown = pixels(page, 50, rows)
            expected = [palette.channels(turn(colour)) for colour in [palette.BACKGROUND, *colours]]
            assert np.abs(np.subtract(shown, expected)).max() <= 2


def pixels(page: Any, x: int, rows: list[int]) -> list[tuple[int, int, int]]:
    """Red, green and blue as the page shows them."""
    script = """async ([png, x, rows]) => {
        const image = await createImageBitmap(new Blob([new Uint8Array(png)]));
        const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
        context.drawImage(image, 0, 0);
        return rows.map((y) => [...context.getImageData(x, y, 1, 1).data].slice(0, 3));
    }"""
    return page.evaluate(script, [list(page.screenshot()), x, rows])


def inside_a_panel(page: Any) -> tuple[int, int]:
    """A place just within the frame, where nothing else is drawn."""
    box = page.locator("g[data-panel] rect").first.bounding_box()
    return round(box["x"] + 5), round(box["y"] + 60)


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

    def test_pages_of_readers_with_a_dark_system(
        self, page: Any, sparse_flow: Any, tmp_path: Path
    ) -> None:
        figure, file = circuit_diagram({"model": sparse_flow}), tmp_path / "figure.html"
        page.set_viewport_size({"width": 800, "height": 300})
        page.emulate_media(color_scheme="dark")
        for theme, expected in {"auto": "dark", "light": "light", "dark": "dark"}.items():
            figure.save(file, theme=theme)
            page.goto(file.as_uri())
            ground = palette.channels(THEMES[expected](palette.BACKGROUND))
            # In the margin of the page, and within a panel.
            for x, y in ((5, 5), inside_a_panel(page)):
                assert np.abs(np.subtract(pixels(page, x, [y]), ground)).max() <= 2, theme
        turned = figure.dark().save(file).read_text(encoding="utf-8")
        assert turned == figure.save(file, theme="dark").read_text(encoding="utf-8")

    def test_a_dark_figure_is_turned_once(self, two_panels: Any, tmp_path: Path) -> None:
        figure = circuit_diagram(two_panels)
        expected = figure.save(tmp_path / "a.svg", theme="dark").read_text()
        for theme in ("auto", "dark"):
            assert figure.dark().save(tmp_path / "b.svg", theme=theme).read_text() == expected
        light = figure.save(tmp_path / "a.svg").read_text()
        assert figure.dark().save(tmp_path / "b.svg", theme="light").read_text() == light
        assert str(figure.dark().dark()) == str(figure.dark())

    def test_dark_in_a_light_notebook(self, page: Any, sparse_flow: Any, tmp_path: Path) -> None:
        html = circuit_diagram({"model": sparse_flow}).dark()._repr_html_()
        file = tmp_path / "cell.html"
        file.write_text(f"<!DOCTYPE html><meta charset=utf-8>{html}", encoding="utf-8")
        page.set_viewport_size({"width": 800, "height": 300})
        page.goto(file.as_uri())
        ground = palette.channels(dark_colour(palette.BACKGROUND))
        x, y = inside_a_panel(page)
        assert np.abs(np.subtract(pixels(page, x, [y]), [ground])).max() <= 2

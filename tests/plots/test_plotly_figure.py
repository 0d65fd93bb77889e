"""Plotly's figures in notebooks, in nbconvert's HTML, and on a dark ground."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparse_tl.plots import (
    AblationLine,
    EffectCurve,
    PlotlyFigure,
    ablation_grid,
    effect_figure,
    gate_trajectories,
    head_roles_figure,
)
from sparse_tl.plots.palette import DENSE, GROUND, ROLES, dark_colour
from sparse_tl.plots.plotly_figure import PLOTLY_DATA

NASTY = "</script><img src=x onerror=alert(1)>"


def effects(name: str = "Dense") -> PlotlyFigure:
    curve = EffectCurve(name, [0, 10, 100], [0, 0.5, 1], [0, 0.4, 1], [0, 0.6, 1])
    return effect_figure({"IOI": [curve]}, parts="edges")


def grid(task: str = "Syntax") -> PlotlyFigure:
    lines = [AblationLine(order, [0, -1.0], [0, -1.1], [0, -0.9]) for order in ROLES]
    return ablation_grid({task: {"Dense": lines}})


FIGURES = {
    "effects": effects,
    "grid": grid,
    "heat": lambda: head_roles_figure({"facilitation": [[0.0, 0.5], [1.0, 0.2]]}),
    "gates": lambda: gate_trajectories({(0, 0): ("facilitation", [[0.5, 0.9]] * 3)}, [0, 10]),
}


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values of nested data by their place in it."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            yield from leaves(part, f"{place}/{name}")
    else:
        yield place, value


def converted(*figures: PlotlyFigure) -> str:
    """The HTML that nbconvert makes of a notebook whose cells end in these figures."""
    v4 = pytest.importorskip("nbformat").v4
    nbconvert = pytest.importorskip("nbconvert")
    cells = [
        v4.new_code_cell(
            "figure", outputs=[v4.new_output("execute_result", figure._repr_mimebundle_())]
        )
        for figure in figures
    ]
    notebook = v4.new_notebook(cells=cells)
    pytest.importorskip("nbformat").validate(notebook)
    # The template loads scripts of its own; ours are none of them.
    return nbconvert.HTMLExporter(template_name="basic").from_notebook_node(notebook)[0]


class TestNotebook:
    @pytest.mark.parametrize("name", FIGURES)
    def test_every_figure_is_data_for_jupyterlab_and_a_drawing_for_the_rest(
        self, name: str
    ) -> None:
        bundle = FIGURES[name]()._repr_mimebundle_()
        assert list(bundle) == [PLOTLY_DATA, "text/html", "text/plain"]
        assert len(json.dumps(bundle[PLOTLY_DATA])) < 60_000
        assert len(bundle["text/html"]) < 30_000
        assert "<script" not in bundle["text/html"]
        drawing = ElementTree.fromstring(bundle["text/html"])
        assert drawing[0].tag == "{http://www.w3.org/2000/svg}svg"
        assert bundle["text/plain"].startswith("PlotlyFigure('")

    def test_converted_notebooks_show_all_figures_offline(self, page: Any, tmp_path: Path) -> None:
        html = converted(*(make() for make in FIGURES.values()))
        assert len(html) < 150_000
        file = tmp_path / "notebook.html"
        file.write_text(html, encoding="utf-8")
        page.goto(file.as_uri())
        drawings = page.locator("svg[role=img]")
        assert drawings.count() == len(FIGURES)
        for index in range(len(FIGURES)):
            box = drawings.nth(index).bounding_box()
            assert box["width"] > 100 and box["height"] > 100
        # Every line is seen: each drawing has clip paths of its own.
        names = page.eval_on_selector_all("svg clipPath", "found => found.map((one) => one.id)")
        assert len(set(names)) == len(names) > len(FIGURES)

    def test_names_stay_text_in_converted_notebooks(self, page: Any, tmp_path: Path) -> None:
        file = tmp_path / "notebook.html"
        file.write_text(converted(effects(NASTY), grid(NASTY)), encoding="utf-8")
        page.goto(file.as_uri())  # the `page` fixture fails on a dialog
        assert page.locator("img").count() == 0

    def test_ipython_asks_for_the_bundle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
        monkeypatch.setattr("plotly.io.renderers.default", "plotly_mimetype")
        data, _ = formatter.format(effects())
        assert list(data) == [PLOTLY_DATA, "text/html", "text/plain"]

    def test_show_is_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[Any] = []
        monkeypatch.setattr("IPython.display.display", shown.append)
        monkeypatch.setattr("plotly.io.renderers.default", "plotly_mimetype")
        figure = effects()
        figure.show()
        assert shown == [figure]

    def test_a_renderer_that_the_user_chose_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[Any] = []
        monkeypatch.setattr("plotly.io.show", lambda figure, *a, **k: shown.append(k))
        figure = effects()
        monkeypatch.setattr("plotly.io.renderers.default", "plotly_mimetype")
        figure.show(renderer="svg")
        monkeypatch.setattr("plotly.io.renderers.default", "browser")
        figure.show()
        figure._ipython_display_()
        assert shown == [{"renderer": "svg"}, {}, {}]

    def test_what_the_drawing_lacks_is_left_to_plotly(self) -> None:
        figure = effects().add_bar(x=[1], y=[1])
        assert isinstance(figure, PlotlyFigure)
        html = figure._repr_mimebundle_()["text/html"]
        assert "Plotly.newPlot" in html and len(html) > 1_000_000


class TestDark:
    @pytest.mark.parametrize("name", FIGURES)
    def test_every_colour_is_turned_and_nothing_else(self, name: str) -> None:
        light = FIGURES[name]()
        dark = light.dark()
        assert dark.layout.paper_bgcolor == dark_colour(GROUND)
        before, after = (dict(leaves(json.loads(str(f.to_json())))) for f in (light, dark))
        assert before.keys() == after.keys()
        changed = {place for place in before if before[place] != after[place]}
        painted = {place for place in before if re.search(r"color(scale|/|$)", place)}
        assert changed == {p for p in painted if isinstance(before[p], str)}
        for place in changed:
            assert after[place] == dark_colour(before[place])
        assert light.layout.paper_bgcolor == GROUND

    def test_a_name_that_is_a_colour_stays(self) -> None:
        dark = effects("#0072b2").dark()
        assert dark.data[1].name == "#0072b2"
        assert dark.data[1].line.color == dark_colour(DENSE)

    def test_saved_dark(self, tmp_path: Path) -> None:
        svg = effects().save(tmp_path / "a.svg", theme="dark").read_text()
        assert dark_colour(DENSE) in svg and DENSE not in svg
        assert f'fill="{dark_colour(GROUND)}"' in svg and GROUND not in svg
        light, dark = (
            effects().save(tmp_path / f"{theme}.png", theme=theme).read_bytes()
            for theme in ("light", "dark")
        )
        assert light != dark
        turned = effects().dark().save(tmp_path / "b.svg", theme="dark").read_text()
        assert turned == svg
        page = effects().dark().save(tmp_path / "b.html").read_text()
        assert "prefers-color-scheme" not in page.partition("</head>")[0]

    def test_a_page_follows_the_reader(self, tmp_path: Path) -> None:
        pages = {
            theme: effects().save(tmp_path / f"{theme}.html", theme=theme).read_text()
            for theme in ("auto", "light", "dark")
        }
        rule = "prefers-color-scheme: dark"
        assert [rule in page for page in pages.values()] == [True, False, False]
        assert f"background: {dark_colour(GROUND)}" in pages["dark"]

    def test_refuses_other_themes(self, tmp_path: Path, unchecked_types: None) -> None:
        with pytest.raises(ValueError, match=r"expected a theme of .*; got 'blue'"):
            effects().save(tmp_path / "a.svg", theme="blue")  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())

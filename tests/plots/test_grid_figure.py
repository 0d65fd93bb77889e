"""Grids of panels in notebooks, pages and images."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from importlib import import_module
from pathlib import Path
from typing import Any

import IPython.display
import plotly.io as pio
import pytest
import torch
from component_examples import ATTACK, ablation_of, head_roles_of
from PIL import Image

from sparse_tl.circuits import EffectCurve
from sparse_tl.jobs.folder import save_figures
from sparse_tl.plots import (
    GridFigure,
    ablation_grid,
    effect_figure,
    gate_trajectories,
    head_roles_figure,
)
from sparse_tl.plots.page.palette import BACKGROUND, channels, dark_colour
from sparse_tl.plots.page.rendering import AUTO
from sparse_tl.plots.panels import grid as grid_module
from sparse_tl.plots.panels.grid import has_browser


def effects(name: str = "Dense") -> GridFigure:
    curve = EffectCurve(name, [0, 10, 100], [0, 0.5, 1], [0, 0.4, 1], [0, 0.6, 1])
    return effect_figure({"IOI": [curve]}, parts="circuit_edges")


def grid(task: str = "Syntax") -> GridFigure:
    curve = ablation_of("facilitation", -torch.rand(2, 5), 2)
    return ablation_grid({task: {"Dense": [curve]}})


ROLES = head_roles_of(torch.rand(3, 2, 4, 2, 3, generator=torch.Generator().manual_seed(0)))
FIGURES = {
    "effects": effects,
    "grid": grid,
    "heat": lambda: head_roles_figure(ROLES),
    "gates": lambda: gate_trajectories(ROLES),
}


@pytest.fixture
def chromium() -> None:
    if not has_browser():
        pytest.skip("no Chromium found; put it on PATH or set BROWSER_PATH to its path")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_small_data_in_a_notebook(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")
    shown = list[Any]()
    monkeypatch.setattr(IPython.display, "display", lambda one, **_: shown.append(one))
    FIGURES[name]()._ipython_display_()
    style, figure = shown
    assert AUTO in style.data
    data = figure["application/vnd.plotly.v1+json"]
    assert data["data"][-1]["uid"] == AUTO and data["config"]["displayModeBar"] is False
    assert len(json.dumps(data)) < 60_000


@pytest.mark.long
def test_a_page_shows_text_as_text_and_tooltips_offline(page: Any, tmp_path: Path) -> None:
    figure = effects(ATTACK)
    page.goto(figure.save(tmp_path / "figure.html").as_uri())  # fails on errors and dialogs
    page.wait_for_selector(".main-svg")
    assert page.locator("img").count() == 0
    box, layout = page.locator(".plot-container").bounding_box(), figure.plotly.layout
    # The last point: 2 % of the axis from the right end of the plot.
    high, top = layout.yaxis.range[1], layout.margin.t
    tall = layout.height - top - layout.margin.b
    low = layout.yaxis.range[0]
    x = layout.margin.l + (layout.width - layout.margin.l - layout.margin.r) * (1 - 0.02 / 1.04)
    page.mouse.move(box["x"] + x - 4, box["y"] + top + tall * (high - 1) / (high - low) + 2)
    page.mouse.move(box["x"] + x - 2, box["y"] + top + tall * (high - 1) / (high - low) + 1)
    page.wait_for_selector(".hovertext")
    said = page.locator(".hovertext").text_content()
    assert ATTACK in said and "100 circuit edges kept" in said


@pytest.mark.long
def test_images_are_drawn_in_both_themes(
    chromium: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In browsers of their own, as everywhere but in the other tests."""
    monkeypatch.setattr("kaleido.Kaleido", import_module("kaleido.kaleido").Kaleido)
    figure = head_roles_figure(ROLES)
    svg = figure.save(tmp_path / "dark.svg", theme="dark").read_text(encoding="utf-8")
    width, height = figure.plotly.layout.width, figure.plotly.layout.height
    root = ElementTree.fromstring(svg)
    assert (root.get("width"), root.get("height")) == (str(width), str(height))
    drawn = Image.open(figure.save(tmp_path / "light.png"))
    assert drawn.size == (2 * width, 2 * height)
    light, dark = drawn.convert("RGB").getpixel((1, 1)), channels(dark_colour(BACKGROUND))
    assert light == (255, 255, 255) and f"rgb{dark}" in svg


def test_without_a_browser_a_page_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(grid_module, "has_browser", lambda: False)
    save_figures({"figure": effects()}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["figure.html"]

"""Grids of panels in notebooks, in nbconvert's HTML, and on a dark ground."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_tl.circuits import EffectCurve
from sparse_tl.head_roles import AblationCurve, HeadRoles
from sparse_tl.plots import (
    GridFigure,
    ablation_grid,
    effect_figure,
    gate_trajectories,
    head_roles_figure,
)
from sparse_tl.plots.panels.grid_figure import PLOTLY_DATA

NASTY = "</script><img src=x onerror=alert(1)>"


def effects(name: str = "Dense") -> GridFigure:
    curve = EffectCurve(name, [0, 10, 100], [0, 0.5, 1], [0, 0.4, 1], [0, 0.6, 1])
    return effect_figure({"IOI": [curve]}, parts="circuit_edges")


def grid(task: str = "Syntax") -> GridFigure:
    curve = AblationCurve(
        *("facilitation", (0, 1, 2, 3, 4), -torch.rand(2, 5), (2, 2)), control=-torch.rand(2, 5)
    )
    return ablation_grid({task: {"Dense": [curve]}})


def roles() -> HeadRoles:
    return HeadRoles(
        seeds=(0, 1),
        lambda_=0.1,
        trajectories=torch.rand(3, 2, 4, 2, 3, generator=torch.Generator().manual_seed(0)),
        recorded_at=(0, 10, 20, 30),
        losses=torch.zeros(3, 2),
        dense_loss=0.0,
        fitted=torch.tensor([True, True]),
        removed=torch.zeros(2, 3),
        removed_together=torch.zeros(2, 3, 2),
    )


FIGURES = {
    "effects": effects,
    "grid": grid,
    "heat": lambda: head_roles_figure(roles()),
    "gates": lambda: gate_trajectories(roles()),
}


def converted(*figures: GridFigure) -> str:
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
        assert len(bundle["text/html"]) < 200_000
        (data,) = re.findall(r'src="data:image/svg\+xml;base64,(.*?)"', bundle["text/html"])
        assert ElementTree.fromstring(base64.b64decode(data)).get("role") == "img"
        assert bundle["text/plain"].startswith("GridFigure('")

    def test_converted_notebooks_show_all_figures_offline(self, page: Any, tmp_path: Path) -> None:
        html = converted(*(make() for make in FIGURES.values()), effects(NASTY), grid(NASTY))
        assert len(html) < 500_000
        file = tmp_path / "notebook.html"
        file.write_text(html, encoding="utf-8")
        page.goto(file.as_uri())  # the `page` fixture fails on a dialog
        pictures = page.locator("img[alt]")
        assert pictures.count() == page.locator("img").count() == len(FIGURES) + 2
        for picture in pictures.all():
            assert picture.evaluate("image => image.complete && image.naturalWidth") > 100

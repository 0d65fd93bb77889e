"""The explorer in JupyterLab itself: server, kernel and a browser, as a reader has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from lab import Lab, command, open_notebook, running_lab, wait_for_kernel

SETUP = """
import warnings; warnings.simplefilter("ignore")
from sparse_tl import SparseTransformer
from sparse_tl.zoo import build_addition_model
from sparse_tl.explorer import explore
dense, other = build_addition_model(0, "cpu"), build_addition_model(1, "cpu")
models = {"Dense": dense, "Sparse": SparseTransformer(other, initial_bias=0.0)}
"""
SHOW = "explore(models, '36+28=?????', threshold=0.1)"
FIGURES = """
import torch
from IPython.display import display
from sparse_tl import Scores, circuit_diagram
from sparse_tl.graph import HeadGrid
from sparse_tl.plots import head_map
display(circuit_diagram({"Dense": dense}, "36+28=?????"))
drawn = head_map({"Dense": Scores(HeadGrid(2, 2), torch.eye(2), "eap")})
display(drawn, drawn.light(), drawn.dark())
"""
# A large figure and a script that stops the page for a second, and below the explorer a cell that
# computes while the page asks.
BUSY_PAGE = """
import numpy as np, plotly.express as px
from IPython.display import Javascript
display(Javascript("const end = Date.now() + 1000; while (Date.now() < end);"))
px.imshow(np.random.rand(6, 64, 64), facet_col=0, facet_col_wrap=3)
"""
BUSY_KERNEL = """
import time
time.sleep(2)
"""
TURNED = """(place) => [...document.querySelectorAll(place)].map((figure) =>
  getComputedStyle(figure).filter !== "none")"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed (pip install jupyterlab)")
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def lab_page(browser: Any) -> Iterator[Any]:
    """A page that may talk to the server on this machine and to nothing else."""
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    context.set_default_timeout(120_000)
    page = context.new_page()
    problems: list[str] = []
    # Seen once in many sessions; which script of the page raises it is not known.
    known = "The node to be removed is not a child of this node"
    page.on("pageerror", lambda e: None if known in str(e) else problems.append(str(e)))

    def on_request(request: Any) -> None:
        if request.url.startswith("http") and "//127.0.0.1:" not in request.url:
            problems.append(request.url)

    page.on("request", on_request)
    yield page
    context.close()
    assert not problems


@pytest.fixture
def offline_page(browser: Any) -> Iterator[Any]:
    """Exported notebooks ask for MathJax and more; without a network none of it comes."""
    context = browser.new_context(offline=True)
    yield context.new_page()
    context.close()


def explorer(page: Any) -> Any:
    return page.locator(".sparse-tl-explorer[data-live]")


def answered(page: Any) -> None:
    page.wait_for_selector(".sparse-tl-explorer:not([data-busy])")


def outcome(page: Any, panel: str) -> str:
    return explorer(page).locator(f"[data-outcome='{panel}']").inner_text()


def lines(page: Any, panel: int) -> int:
    group = explorer(page).locator(f"g[data-panel='{panel}']")
    return int(group.get_attribute("data-edges-shown"))


@pytest.mark.long
def test_a_session_in_jupyterlab(lab, lab_page, offline_page):
    """One long session, since starting a kernel is what takes time."""
    nbformat = pytest.importorskip("nbformat", reason="pip install nbformat")
    nbconvert = pytest.importorskip("nbconvert", reason="pip install nbconvert")
    tab = lab_page
    path = lab.write("session.ipynb", SETUP, FIGURES, BUSY_PAGE, SHOW, BUSY_KERNEL)
    open_notebook(tab, lab, "session.ipynb")
    command(tab, "notebook:run-all-cells")
    explorer(tab).wait_for(timeout=300_000)
    explorer(tab).locator(".card[data-panel='1'] tbody tr").first.wait_for()
    wait_for_kernel(tab)
    # The figure that is saved stands in the page, and is not seen beside the live one.
    assert tab.locator("[data-saved-explorer]").count() == 1
    assert not tab.locator("[data-saved-explorer]").is_visible()

    # Figures and the explorer follow the theme; light and dark figures do not.
    tab.locator(".js-plotly-plot").nth(2).wait_for(state="attached")
    for theme, turned in (("JupyterLab Dark", True), ("JupyterLab Light", False)):
        command(tab, "apputils:change-theme", theme=theme)
        tab.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=theme)
        assert tab.evaluate(TURNED, ".sparse-tl-auto:not([data-saved-explorer] *)") == [turned] * 2
        assert tab.evaluate(TURNED, ".js-plotly-plot")[:3] == [turned, False, False]

    # The slider.
    before = lines(tab, 0)
    explorer(tab).locator("input[name=threshold]").fill("0.3")
    assert 0 < lines(tab, 0) < before
    explorer(tab).locator("input[name=threshold]").fill("0.1")
    assert lines(tab, 0) == before

    # A node, its attention, and an edge taken out of it.
    explorer(tab).locator("g[data-panel='0'] circle[data-level='2'][data-column='10']").click()
    cell = explorer(tab).locator(".heat .cell[data-edge='1,2,10,2']")
    cell.wait_for()
    assert explorer(tab).locator(".lens tbody tr").count() == 6
    whole = outcome(tab, "Dense")
    assert re.search(r"log P\(“.”\) −?\d+\.\d\d$", whole)
    cell.click()
    explorer(tab).locator("[data-chip='a1.h2 2→10']").wait_for()
    answered(tab)
    assert cell.get_attribute("aria-pressed") == "true"
    less = explorer(tab).locator(".card[data-panel='0'] tbody td:nth-child(4)").all_inner_texts()
    assert any(text != "0.00" for text in less)

    # A head.
    explorer(tab).locator(".card[data-panel='0'] [data-head='3,1']").click()
    explorer(tab).locator("[data-chip='a3.h1']").wait_for()
    answered(tab)
    without = outcome(tab, "Dense")
    assert without != whole and "(" in without
    assert outcome(tab, "Sparse") == outcome(tab, "Sparse").split(" (")[0]  # left alone

    # A line of the diagram, and everything put back.
    explorer(tab).locator("g[data-panel='0'] circle[data-level='2'][data-column='10']").click()
    click_line(tab, 0, layer=0, query=8, key=2)
    answered(tab)
    explorer(tab).locator("g[data-panel='0'] [data-role='removed']").wait_for(state="attached")
    explorer(tab).locator(".restore").click()
    explorer(tab).locator(".chip").first.wait_for(state="detached")
    answered(tab)
    assert outcome(tab, "Dense") == whole and lines(tab, 0) == before

    # Prompts: a bad one is a message, and everything stays; a good one is run.
    say(tab, "36x28=")
    message = explorer(tab).locator(".message.error")
    message.wait_for()
    assert "no token for 'x'" in message.inner_text()
    assert lines(tab, 0) == before and outcome(tab, "Dense") == whole
    say(tab, "99+99=?????")
    message.wait_for(state="hidden")
    answered(tab)
    row = explorer(tab).locator("g[data-panel='0'] [data-role='input'] text")
    assert [text[0] for text in row.all_text_contents()] == list("99+99=?????")

    # What is saved is what is seen: a head is out, the threshold is another.
    explorer(tab).locator(".card[data-panel='0'] [data-head='0,0']").click()
    explorer(tab).locator("[data-chip='a0.h0']").wait_for()
    explorer(tab).locator("input[name=threshold]").fill("0.15")
    shown = [lines(tab, index) for index in (0, 1)]
    tab.wait_for_function(
        "text => document.querySelector('[data-saved-explorer]').textContent.includes(text)",
        arg="≥ 0.15",
    )
    command(tab, "docmanager:save")
    tab.wait_for_selector(".jp-NotebookPanel:not(.jp-mod-dirty)", state="attached")
    tab.wait_for_timeout(500)

    # The kernel restarts under the live widget.
    command(tab, "notebook:restart-kernel")
    tab.locator(".jp-Dialog .jp-mod-accept").click()
    message.wait_for()
    assert "The kernel was restarted: run the cell again." in message.inner_text()
    assert explorer(tab).locator(".card[data-panel='0'] [data-head='0,0']").is_disabled()
    explorer(tab).locator("input[name=threshold]").fill("0.5")  # the diagram still works
    assert lines(tab, 0) < shown[0]

    # The notebook, opened without a kernel that knows the widget, shows the figure.
    tab.goto(lab.url("session.ipynb"))
    tab.locator("[data-saved-explorer] .sparse-tl-circuit[data-ready]").wait_for()
    assert saved_lines(tab) == shown
    assert not tab.get_by_text("model not found").is_visible()

    # And so does its export, with the network off.
    html, _ = nbconvert.HTMLExporter().from_notebook_node(nbformat.read(path, as_version=4))
    export = path.with_suffix(".html")
    export.write_text(html, encoding="utf-8")
    offline_page.goto(export.as_uri(), wait_until="commit")
    offline_page.locator("[data-saved-explorer] .sparse-tl-circuit[data-ready]").wait_for()
    assert saved_lines(offline_page) == shown
    svg = offline_page.locator("[data-saved-explorer] svg")
    assert svg.is_visible() and "Dense without 1 head" in svg.text_content()


def click_line(page: Any, panel: int, layer: int, query: int, key: int) -> None:
    """Click the middle of the line of an attention edge."""
    ends = []
    for level, column in ((layer, key), (layer + 1, query)):
        place = f"g[data-panel='{panel}'] circle[data-level='{level}'][data-column='{column}']"
        node = explorer(page).locator(place)
        node.scroll_into_view_if_needed()
        box = node.bounding_box()
        ends.append((box["x"] + box["width"] / 2, box["y"] + box["height"] / 2))
    (x0, y0), (x1, y1) = ends
    page.mouse.click((x0 + x1) / 2, (y0 + y1) / 2)


def say(page: Any, prompt: str) -> None:
    field = explorer(page).locator("input[name=prompt]")
    field.fill(prompt)
    field.press("Enter")


def saved_lines(page: Any) -> list[int]:
    groups = page.locator("[data-saved-explorer] g[data-panel]")
    return [int(n) for n in groups.evaluate_all("all => all.map(g => g.dataset.edgesShown)")]

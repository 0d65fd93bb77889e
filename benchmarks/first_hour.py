"""The first hour of a new user: the README's commands, an own question, the pages and a notebook.

    python benchmarks/first_hour.py --out runs/first-hour [--seconds 20] [--only lab]

No test: it takes minutes, needs SmolLM2 (`sparse-tl get smollm2`), Chromium and JupyterLab, and
leaves screenshots to look at: of every page at two widths, light and dark. It fails where a command
fails, a page scrolls sideways or has an error on its console, the card of a clicked node is out of
view, or the explorer takes more than a second to answer.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "explorer")]

from conftest import find_chromium
from lab import command, open_notebook, running_lab, wait_for_kernel
from legibility import SETTLED
from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = (1440, 1000)
NOUNS = ["key", "book", "picture", "letter", "road", "boat", "song", "door", "lamp", "car"]
PLACES = "near the window", "on the table"
PROMPT = "When Mary and John went to the store, John gave a drink to"
CELLS = (
    "from sparse_tl import *\ndense, sparse = load_language_models()",
    f"prompt = {PROMPT!r}\n"
    'explorer = explore({"Dense": dense, "Sparse": sparse}, prompt, positions=[-1])\nexplorer',
    "scores = attribute_heads(sparse, IOITask().pairs(sparse, 8), logit_difference)\n"
    'head_map({"Sparse": scores}, unit="logits")',
    "scores",
)
KNOWN = "The node to be removed is not a child of this node"  # of JupyterLab itself
ANSWERED = "() => !document.querySelector('.sparse-tl-explorer[data-busy]')"
IN_VIEW = """(element) => {
  const { top, bottom, left, right } = element.getBoundingClientRect();
  return top >= 0 && left >= 0 && bottom <= innerHeight + 1 && right <= innerWidth + 1;
}"""


@contextmanager
def timed(name: str) -> Iterator[list[float]]:
    start, seconds = time.monotonic(), list[float]()
    yield seconds
    seconds.append(time.monotonic() - start)
    print(f"{seconds[0]:7.1f} s  {name}", flush=True)


def run(out: Path, *words: str) -> str:
    """Run Python in the output folder; return what it printed."""
    with timed(" ".join(words)[:90].splitlines()[0]):
        done = subprocess.run([sys.executable, *words], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    return done.stdout


def write_pairs(file: Path) -> None:
    """An own question, in 20 rows: does the verb agree with its subject?"""
    texts = [(f"The {noun}s {place}", f"The {noun} {place}") for noun in NOUNS for place in PLACES]
    rows = [[*both, " are", " is"] for both in texts]
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([["clean", "corrupted", "answer", "wrong"], *rows])


def shell(out: Path, seconds: int) -> list[Path]:
    """The README's commands and its block of Python, and an own question; the pages they name."""
    sparse_tl = partial(run, out, "-m", "sparse_tl")
    sparse_tl("doctor")
    sparse_tl("get", "smollm2")
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run(out, "-c", block[0])
    write_pairs(out / "pairs.csv")
    model, quick = ("--model", "smollm2"), ("--seconds", str(seconds), "--quiet")
    told = sparse_tl("circuits", *model, *quick, "--tasks", "ioi", "--out", "ioi")
    told += sparse_tl("circuits", *model, *quick, "--pairs-file", "pairs.csv", "--out", "own")
    told += sparse_tl("head-behaviour", *model, "--task", "ioi", "--out", "heads")
    told += sparse_tl("graph", *model, "--prompt", PROMPT, "--out", "graph")
    pages = [out / "addition.html", *(out / name for name in re.findall(r"\S+\.html", told))]
    assert all(page.is_file() for page in pages) and len(pages) > 6, pages
    return pages


def pictures(page: Page, out: Path, name: str, dark: Any, part: str = "body") -> None:
    """Screenshots of a part at both widths, light and dark; `dark` switches the theme."""
    for is_dark in (False, True):
        dark(is_dark)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate(SETTLED)
            page.locator(part).first.scroll_into_view_if_needed()
            page.wait_for_timeout(500)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} px wide, in a window of {width}"
            theme = "dark" if is_dark else "light"
            page.screenshot(path=out / f"{name}-{width}-{theme}.png")


def follow_system(page: Page, is_dark: bool) -> None:
    page.emulate_media(color_scheme="dark" if is_dark else "light")


@contextmanager
def opened(browser: Browser) -> Iterator[Page]:
    """A page that has no errors, and asks no other machine for anything."""
    context = browser.new_context(viewport={"width": WIDTHS[0], "height": 900})
    context.set_default_timeout(120_000)
    page, problems = context.new_page(), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    elsewhere = re.compile(r"https?://(?!127\.0\.0\.1)")
    page.on("request", lambda r: problems.append(r.url) if elsewhere.match(r.url) else None)
    yield page
    context.close()
    assert not [problem for problem in problems if KNOWN not in problem], problems


def notebook(browser: Browser, out: Path) -> None:
    """The explorer on 30 layers, in JupyterLab: three nodes and their cards, a head, a figure."""
    with running_lab(Path(mkdtemp())) as lab, opened(browser) as page:
        lab.write("hour.ipynb", *CELLS)
        open_notebook(page, lab, "hour.ipynb")
        explorer = page.locator(".sparse-tl-explorer[data-live]")
        with timed("models are loaded, and their explorer is there"):
            command(page, "notebook:run-all-cells")
            explorer.wait_for()
        wait_for_kernel(page)
        command(page, "application:toggle-left-area")
        waits = list[float]()
        for panel in (0, 1):
            explorer.locator("select[name=panel]").select_option(str(panel))
            circles = explorer.locator(f"g[data-panel='{panel}'] circle[data-level]:visible")
            for at in (0, circles.count() // 2, circles.count() - 1):
                node = circles.nth(at)
                node.scroll_into_view_if_needed()
                place = f"panel {panel}, level {node.get_attribute('data-level')}"
                card = explorer.locator(".card.node:not(.empty)")
                with timed(f"the card of a node of {place}") as seconds:
                    node.click()
                    card.wait_for()
                    page.wait_for_function(ANSWERED)
                waits += seconds
                page.screenshot(path=out / f"lab-node-{len(waits)}.png")
                in_view = node.evaluate(IN_VIEW), card.locator("h4").first.evaluate(IN_VIEW)
                assert in_view == (True, True), f"node and card of {place} in view: {in_view}"
        with timed("a head is removed"):
            explorer.locator(".card[data-panel='1'] [data-head='23,1']").click()
            explorer.locator("[data-chip='a23.h1']").wait_for()
            page.wait_for_function(ANSWERED)

        def dark(is_dark: bool) -> None:
            theme = f"JupyterLab {'Dark' if is_dark else 'Light'}"
            command(page, "apputils:change-theme", theme=theme)
            page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=theme)

        pictures(page, out, "lab-explorer", dark, ".sparse-tl-explorer[data-live] .head")
        pictures(page, out, "lab-figure", dark, ".js-plotly-plot")
        assert sorted(waits)[len(waits) // 2] < 1, "answers take more than a second"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/first-hour"))
    parser.add_argument("--seconds", type=int, default=120, help="of each search for a circuit")
    parser.add_argument("--only", choices=["pages", "lab"])
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(ROOT)
    with sync_playwright() as playwright, timed(f"all; look at the pictures in {out}"):
        switches = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=switches)
        for file in shell(out, asked.seconds) if asked.only != "lab" else ():
            with opened(browser) as page:
                page.goto(file.as_uri())
                name = "-".join(file.relative_to(out).with_suffix("").parts)
                pictures(page, out, name, partial(follow_system, page))
        if asked.only != "pages":
            notebook(browser, out)
        browser.close()


if __name__ == "__main__":
    main()

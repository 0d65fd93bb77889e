"""What a component diagram of 200 and 2,000 circuit edges costs, at GPT-2 small's shape.

Built: wall time of `component_diagram` and its HTML. Re-layout: from the slider's event to the
figure with all its coordinates, in headless Chromium, when the slider comes to the end (all edges)
from elsewhere; the median and the largest of wall times, and the median of the CPU time of the
page's main thread, which other processes hardly change. Text: the smallest on the screen after the
figure is fitted.

    OMP_NUM_THREADS=2 python benchmarks/component_diagram.py --chromium /usr/bin/chromium
"""

from __future__ import annotations

import statistics
import tempfile
import time
from bisect import bisect_right
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import Page, sync_playwright
from random_circuit import random_scores

from sparse_tl import Circuit, Scores, component_diagram

RE_LAYOUT = """value => {
    const slider = document.querySelector('input[type=range]');
    slider.value = value;
    const start = performance.now();
    slider.dispatchEvent(new Event('input'));
    document.querySelector('svg').getBoundingClientRect();
    return performance.now() - start;
}"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll('svg text')].map(text =>
    parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a))"""
ELSEWHERE = [500, 700, 850, 950, 600, 800, 900, 990, 300]


def _connected(scores: Scores, size: int) -> Circuit:
    """About this many edges, the strongest ones, all of them on paths from input to logits."""
    sizes = range(scores.grid.n_parts)
    taken = bisect_right(sizes, size, key=lambda some: len(scores.top(some).connected()))
    return scores.top(taken - 1).connected()


def _re_layouts(page: Page) -> tuple[list[float], list[float]]:
    """Wall and CPU times of drawing all edges, in milliseconds."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(1000 * some["value"] for some in metrics if some["name"] == "TaskDuration")

    wall, cpu = [], []
    for position in ELSEWHERE:
        page.evaluate(RE_LAYOUT, position)
        before = busy()
        wall.append(page.evaluate(RE_LAYOUT, 1000))
        cpu.append(busy() - before)
    return wall, cpu


def main(
    chromium: Annotated[str | None, typer.Option(help="Chromium; playwright's by default.")] = None,
) -> None:
    """Print one line per number of circuit edges and width of the page."""
    scores = random_scores(12, 12)
    connected = {n_edges: _connected(scores, n_edges) for n_edges in (200, 2000)}
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=chromium)
        for n_edges in (200, 2000):
            start = time.perf_counter()
            circuit = connected[n_edges]
            figure = component_diagram(circuit, scores=scores, max_circuit_edges=n_edges)
            size = len(str(figure).encode())
            built = time.perf_counter() - start
            path = figure.save(Path(folder) / "figure.html")
            for width in (1000, 1600):
                page = browser.new_page(viewport={"width": width, "height": 900})
                page.goto(path.as_uri())
                wall, cpu = _re_layouts(page)
                text = page.evaluate(SMALLEST)
                typer.echo(
                    f"{len(circuit):,} edges at {width:,} px: built {built:.2f} s, HTML "
                    f"{size / 1000:.0f} kB, re-layout {statistics.median(wall):.0f} ms (largest "
                    f"{max(wall):.0f}; CPU {statistics.median(cpu):.0f}), text {text:.1f} px"
                )
                page.close()
        browser.close()


if __name__ == "__main__":
    typer.run(main)

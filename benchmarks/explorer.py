"""The explorer in JupyterLab, as a reader has it: how fast it comes up, and how fast it answers.

    python benchmarks/explorer.py starts --runs 20   # fresh kernels, busy ones, busy front end
    python benchmarks/explorer.py switches --model addition
    python benchmarks/explorer.py switches --model gpt2   # GPT-2 small's shape, random weights
    python benchmarks/explorer.py switches --model smollm2   # SmolLM2-135M, 15 tokens
    python benchmarks/explorer.py effects --model smollm2   # of all heads, from a click on

Needs JupyterLab and Chromium; the server is that of the tests.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "explorer")]

from conftest import find_chromium  # noqa: E402
from lab import Lab, command, open_notebook, running_lab, wait_for_kernel  # noqa: E402
from playwright.sync_api import TimeoutError, sync_playwright  # noqa: E402

THREADS = "import os, torch; torch.set_num_threads(os.cpu_count())  # in tests it is one"
ADDITION = f"""
{THREADS}
import warnings; warnings.simplefilter("ignore")
from sparse_tl import circuit_diagram, explore, load_addition_models
dense, sparse = load_addition_models()
models, prompt = {{"Dense": dense, "Sparse": sparse}}, "36+28=?????"
"""
GPT2 = f"""
{THREADS}
import sys; sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import warnings; warnings.simplefilter("ignore")
import torch
from random_gpt2 import random_gpt2
from sparse_tl import explore
models, prompt = {{"GPT-2": random_gpt2()}}, torch.arange(15) * 3000
"""
SMOLLM2 = f"""
{THREADS}
from sparse_tl import explore, load_language_model
models = {{"SmolLM2": load_language_model(prepend_bos=True)}}
prompt = "When Mary and John went to the store, John gave a drink to"
"""
MODELS = {"addition": ADDITION, "gpt2": GPT2, "smollm2": SMOLLM2}
# What stands before it: a diagram of 64 tokens through 12 layers, and attention of 12 heads.
LARGE = f"""
import sys; sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import numpy as np, plotly.express as px, torch
from random_gpt2 import GPT2_SMALL, random_gpt2
from IPython.display import display
narrow = random_gpt2({{**GPT2_SMALL, "n_embd": 192, "vocab_size": 5000}})
display(circuit_diagram({{"narrow": narrow}}, torch.arange(64) * 70, threshold=0.05))
px.imshow(np.random.rand(12, 64, 64), facet_col=0, facet_col_wrap=6)
"""
# The kernel and the browser share a clock; the end of the cell is written to a file.
SHOW = """
import time

def note(result):
    get_ipython().events.unregister("post_run_cell", note)
    open(ENDED, "w").write(str(time.time()))

get_ipython().events.register("post_run_cell", note)
explore(models, prompt)
"""
BUSY = """
ends = time.time() + 2
while time.time() < ends: pass
"""
UP = "document.querySelectorAll('.sparse-tl-explorer :is(.diagram svg, .card[data-panel])').length"


def new_page(chromium: Any) -> Any:
    page = chromium.new_page(viewport={"width": 1600, "height": 1000})
    page.set_default_timeout(120_000)
    return page


def starts(chromium: Any, lab: Lab, runs: int) -> list[float]:
    """Seconds from the end of the cell to the whole view, on a fresh page and kernel each."""
    took = []
    for run in range(runs):
        page = new_page(chromium)
        name, ended = f"start{run}.ipynb", lab.folder / f"ended{run}"
        show = SHOW.replace("ENDED", repr(str(ended)))
        lab.write(name, ADDITION, LARGE, show, BUSY)
        open_notebook(page, lab, name)
        command(page, "notebook:run-all-cells")
        try:
            page.wait_for_function(f"{UP} >= 3 && (window.cameUp ??= Date.now() / 1000)")
            took.append(page.evaluate("window.cameUp") - float(ended.read_text()))
        except TimeoutError:
            took.append(float("inf"))
            print(page.locator(".jp-Notebook").inner_text()[-2000:])
        load = os.getloadavg()[0]
        print(f"run {run}: {took[-1]:.2f} s after the cell, at a load of {load:.1f}", flush=True)
        command(page, "kernelmenu:shutdown")
        page.wait_for_timeout(500)
        page.context.close()
    return took


def open_explorer(chromium: Any, lab: Lab, model: str) -> Any:
    """The page of a notebook with the explorer of a model, which is up."""
    page = new_page(chromium)
    lab.write("explorer.ipynb", MODELS[model], "explore(models, prompt)")
    open_notebook(page, lab, "explorer.ipynb")
    command(page, "notebook:run-all-cells")
    page.wait_for_function(f"{UP} >= 2", timeout=600_000)
    wait_for_kernel(page)
    return page


def effects(chromium: Any, lab: Lab, model: str, runs: int) -> list[float]:
    """Milliseconds from a click on a head to the exact effects of all heads, each time counted in
    the page's status."""
    page = open_explorer(chromium, lab, model)
    took = []
    for _ in range(runs):
        page.wait_for_function(
            "!document.querySelector('.sparse-tl-explorer .status').textContent", timeout=600_000
        )
        start = time.perf_counter()
        page.locator(".sparse-tl-explorer [data-head='2,1']").first.click()
        page.wait_for_function(
            "/^effects: [0-9]+ of [0-9]+ heads/.test(document.querySelector('.sparse-tl-explorer "
            ".status').textContent)"
        )
        page.wait_for_function(
            "!document.querySelector('.sparse-tl-explorer .cell.unknown')", timeout=600_000
        )
        took.append(1000 * (time.perf_counter() - start))
        print(f"{took[-1]:.0f} ms", flush=True)
    return took


def switches(chromium: Any, lab: Lab, model: str, runs: int, pause: float) -> list[float]:
    """Milliseconds from a click on a head to the redrawn view, in the page itself.

    After a pause, in which exact effects and the saved figure may still be made.
    """
    page = open_explorer(chromium, lab, model)
    took = []
    for _ in range(runs):
        page.wait_for_timeout(1000 * pause)
        page.wait_for_selector(".sparse-tl-explorer:not([data-busy])", timeout=180_000)
        took.append(
            page.evaluate(
                """() => new Promise((resolve) => {
                  const diagram = document.querySelector(".sparse-tl-explorer .diagram");
                  const start = performance.now();
                  new MutationObserver((_, observer) => {
                    observer.disconnect();
                    requestAnimationFrame(() => resolve(performance.now() - start));
                  }).observe(diagram, { childList: true });
                  document.querySelector(".sparse-tl-explorer [data-head='2,1']").click();
                })"""
            )
        )
        print(f"{took[-1]:.0f} ms", flush=True)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["starts", "switches", "effects"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--model", choices=list(MODELS), default="addition")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between clicks")
    asked = parser.parse_args()
    begun = time.time()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_lab(Path(folder) / "lab") as lab,
        sync_playwright() as playwright,
    ):
        chromium = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        if asked.what == "starts":
            took = starts(chromium, lab, asked.runs)
            within = sum(seconds <= 5 for seconds in took)
            print(f"{within} of {len(took)} within 5 s; longest {max(took):.2f} s")
        else:
            if asked.what == "effects":
                took = effects(chromium, lab, asked.model, asked.runs)
            else:
                took = switches(chromium, lab, asked.model, asked.runs, asked.pause)
            print(f"median {statistics.median(took):.0f} ms, longest {max(took):.0f} ms")
        chromium.close()
    print(f"{time.time() - begun:.0f} s in all")


if __name__ == "__main__":
    main()

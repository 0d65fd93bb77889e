"""The live attribution diagram: with a stub in the place of the kernel, and in Python."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from test_front_end import STUB

from sparse_tl.backend import boot
from sparse_tl.circuits import attribution_graph, scale_nodes
from sparse_tl.explorer import GraphExplorer
from sparse_tl.plots.page.rendering import script_json

TOKENS = torch.tensor([1, 7, 3, 9, 7])


def test_a_card_scales_its_node(page: Any, tmp_path: Path) -> None:
    model = boot(plain_transformer("llama"))
    graph = attribution_graph(model, TOKENS, max_nodes=20)
    node = graph.to_pandas().query("kind == 'neuron'")["name"].iloc[0]
    explorer = GraphExplorer(model, graph, max_nodes=30)
    traits = {name: getattr(explorer, name) for name in ("_figure", "_factors", "_effects")}
    script = explorer._esm.replace("export default { render };", "")
    stub = STUB.replace("TRAITS_HERE", script_json(traits))
    path = tmp_path / "page.html"
    style = f"<meta charset='utf-8'><style>{explorer._css}</style>"
    path.write_text(f"{style}<div id='view'></div><script type='module'>{script}{stub}</script>")
    page.goto(path.as_uri())
    page.locator(f'g[data-node="{node}"]').click()
    page.locator("button[name=ablate]").click()
    assert page.evaluate("traits._factors") == [{node: 0}]
    page.locator("input[name=factor]").fill("2.5")
    page.locator("input[name=factor]").press("Enter")
    assert page.evaluate("traits._factors") == [{node: 2.5}]
    explorer._factors = [{node: 2.5}]
    before, after = scale_nodes(model, graph, {node: 2.5})
    (said,) = explorer._effects
    assert f"{before:+.3f} \u2192 {after:+.3f} logits, with 2.5 \u00d7 {node}" in said
    page.evaluate("(effects) => window.change('_effects', effects)", explorer._effects)
    assert page.locator(".card output").inner_text() == said
    page.locator("button[name=restore]").click()
    assert page.evaluate("traits._factors") == [{}]
    explorer._factors = [{}]
    assert explorer._effects == [""]

    async def cell() -> GraphExplorer:
        """While it runs, the front end sets a trait on another thread."""
        explorer = GraphExplorer(model, graph, max_nodes=30)
        other = Thread(target=setattr, args=(explorer, "_factors", [{node: 2.5}]))
        other.start()
        other.join()
        assert explorer._effects == [""]
        await asyncio.sleep(0)
        return explorer

    with ThreadPoolExecutor(1) as kernel:  # here, the page has a loop
        assert kernel.submit(asyncio.run, cell()).result()._effects == [said]


def test_every_graph_has_a_model() -> None:
    model = boot(plain_transformer("llama"))
    graph = attribution_graph(model, TOKENS, max_nodes=5)
    with pytest.raises(ValueError, match="Dense"):
        GraphExplorer({"Dense": model}, graph)

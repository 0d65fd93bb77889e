"""An attribution graph whose nodes the running kernel ablates or scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anywidget
import traitlets

from sparse_tl.arguments import checked
from sparse_tl.backend import HookedModel
from sparse_tl.circuits import AttributionGraph, scale_nodes
from sparse_tl.circuits.prompt.transcoders import Basis
from sparse_tl.explorer.threads import on_this_thread
from sparse_tl.plots import attribution_diagram
from sparse_tl.plots.diagrams.component_diagram import ComponentDiagram
from sparse_tl.plots.page.rendering import NOTEBOOK_RULE, STYLE, by_title, read_assets
from sparse_tl.plots.page.token_text import visible_text


@checked
class GraphExplorer(anywidget.AnyWidget):
    """A live attribution diagram: a node's card ablates or scales it, and shows the exact effect.

    The model is run with all scaled nodes of a panel at once; `scale_nodes` gives the same numbers.

    Args:
        models: the model of each graph by panel name, or one model.
        graphs: their graphs, by the same names, or one graph.
        basis: that of the graphs.
        **style: arguments of `attribution_diagram`.

    Raises:
        ValueError: models and graphs have different names, or the graphs cannot be drawn.
    """

    _esm = ComponentDiagram.page_script() + read_assets(
        "graph_explorer.js", package="sparse_tl.explorer"
    )

    _css = read_assets(STYLE) + NOTEBOOK_RULE

    _figure = traitlets.Unicode().tag(sync=True)
    _factors = traitlets.List().tag(sync=True)
    _effects = traitlets.List().tag(sync=True)

    def __init__(
        self,
        models: HookedModel | Mapping[str, HookedModel],
        graphs: AttributionGraph | Mapping[str, AttributionGraph],
        *,
        basis: Basis = "neurons",
        **style: Any,
    ) -> None:
        models, graphs = by_title(models), by_title(graphs)
        if models.keys() != graphs.keys():
            raise ValueError(f"there are graphs of {[*graphs]}, and models {[*models]}")
        self.graphs, self._models, self._basis = graphs, models, basis
        figure, empty = attribution_diagram(graphs, **style), [{} for _ in graphs]
        super().__init__(
            _figure=figure.json,
            _factors=empty,
            _effects=[""] * len(empty),
        )
        self.observe(on_this_thread(self._run), "_factors")

    def _run(self, change: Any) -> None:
        effects = list(self._effects)
        for row, (name, graph) in enumerate(self.graphs.items()):
            factors = change["new"][row]
            if factors == change["old"][row]:
                continue
            effects[row] = ""
            if factors:
                before, after = scale_nodes(self._models[name], graph, factors, basis=self._basis)
                scaled = ", ".join(f"{factor:g} \u00d7 {node}" for node, factor in factors.items())
                effects[row] = (
                    f"{visible_text(name)}: {visible_text(graph.target)} {before:+.3f} \u2192 "
                    f"{after:+.3f} logits, with {scaled}"
                )
        self._effects = effects

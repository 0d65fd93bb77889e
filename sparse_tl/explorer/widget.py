"""The circuit explorer: a circuit diagram whose parts the running kernel removes and restores.

1. The widget opens with all of its traits. The page (`explorer.js`) draws them and requests changes
   by messages ``{"action": ..., "id": ...}``: the action is the name of a method, the other fields
   are its arguments, and ``panel`` is the index of a title. Traits are sent together, with a
   revision that counts updates. Every request is answered with ``{"done": id}``, the latest
   revision, and whether effects are left to compute, so a busy page that missed an update notices
   and requests it again. Requests wait for the cell that runs (`on_this_thread`).
2. A request changes the `Exploration`, whose data returns as traits, as JSON with visible
   whitespace. If it fails, the widget shows a message, and nothing else changes.
3. Exact effects follow in pieces (`ExactEffects`), since removing every head and every edge into a
   node takes hundreds of passes. The page requests them between other requests until all are known.
4. The notebook also gets the figure as self-contained HTML, which the live widget hides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any
from uuid import uuid4

import anywidget
import pandas as pd
import traitlets

from sparse_tl.arguments import NotNegative, checked
from sparse_tl.backend import HookedModel
from sparse_tl.circuits.prompt.attention import (
    EFFECT_SECONDS,
    MAX_EFFECTS,
    AttentionEdge,
    EdgeWeight,
    some_unknown,
)
from sparse_tl.circuits.prompt.tokens import Prompt, Quantity, Token
from sparse_tl.explorer.exploration import AblatedModel, Exploration
from sparse_tl.explorer.threads import on_this_thread
from sparse_tl.metrics import Metric, answer_logit, log_probability, logit_difference, metric_name
from sparse_tl.plots import CircuitDiagram, attention_diagram
from sparse_tl.plots.diagrams.attention_diagram import MOST_UNFOLDED, Threshold, quantity_data
from sparse_tl.plots.page.palette import DARK_FILTER
from sparse_tl.plots.page.rendering import NOTEBOOK_RULE, STYLE, Theme, read_assets
from sparse_tl.plots.page.token_text import ELLIPSIS, visible_text

_WIDTH, _PANEL_HEIGHT = 960, 680
"""Size in pixels of the panels of deep models."""
MAX_TEXT = 60
"""Maximum number of characters of a token or title."""
MAX_KEYS = 48
"""Maximum number of columns in a node's heat map."""
PIECE = 16
"""Number of edges into a node whose effects are computed at a time."""

_PACKAGE = "sparse_tl.explorer"
_SCRIPTS = ("explorer_kernel.js", "explorer_parts.js", "explorer_metric.js", "explorer.js")
_NO_LIVE_VIEW = (  # hides JupyterLab's "model not found"
    ".jp-OutputArea-child:has([data-saved-explorer]) + "
    ".jp-OutputArea-child:not(:has(.sparse-tl-explorer)) { display: none; }"
)


@checked
class CircuitExplorer(anywidget.AnyWidget):
    """A live circuit diagram: remove heads and attention edges, and see how predictions change.

    `explore` is an alias. Every click has a method: `toggle_head`, `toggle_attention_edges`,
    `restore`, `show_prompt`, `select`. `exploration` is the `Exploration` with the data.

    Other arguments are those of `circuit_diagram`; answers stay the same, whatever is removed.

    Args:
        positions: all columns to choose from; by default `position`, and every mask token or,
            without any, the token after the prompt.
        weight: what lines show; by default, attention or, in models of more than 12 layers, what
            edges carry.
        threshold: smallest weight to draw, in 0..1.
        theme: ``"auto"`` (the notebook's), ``"light"`` or ``"dark"``.
        **style: arguments of `plots.attention_diagram`: transition, title.

    Raises:
        ValueError: the threshold, theme or weight is invalid, or the models or the prompt cannot be
            explored, as in `Exploration`.
        TypeError: `plots.attention_diagram` has no such argument.
    """

    _esm = CircuitDiagram.page_script() + read_assets(*_SCRIPTS, package=_PACKAGE)
    _css = (
        read_assets(STYLE)
        + read_assets("explorer.css", package=_PACKAGE)
        + f".sparse-tl-explorer[data-dark] {{ filter: {DARK_FILTER}; }}\n"
        + NOTEBOOK_RULE
    )

    # Traits tagged as late change after the widget is created.
    _prompt = traitlets.Unicode().tag(sync=True, late=True)
    # All columns that can be predicted, including those that are not predicted yet.
    _positions = traitlets.List().tag(sync=True, late=True)
    # Data of the diagram, as text: ipywidgets would visit every item of a list.
    _figure = traitlets.Unicode().tag(sync=True, late=True)
    _panels = traitlets.List().tag(sync=True, late=True)
    _metric = traitlets.Dict().tag(sync=True, late=True)
    _effects = traitlets.Dict().tag(sync=True, late=True)
    _node = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True, late=True)
    _message = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True, late=True)
    _revision = traitlets.Int().tag(sync=True, late=True)
    _theme = traitlets.Unicode().tag(sync=True)
    _saved_id = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        models: HookedModel | Mapping[str, HookedModel],
        prompt: Prompt,
        *,
        position: int | None = None,
        positions: Sequence[int] | None = None,
        labels: Sequence[str] | None = None,
        weight: EdgeWeight | None = None,
        metric: Metric = log_probability,
        answer: Token | None = None,
        wrong: Token | None = None,
        threshold: Threshold = 0.1,
        theme: Theme = "auto",
        **style: Any,
    ) -> None:
        signature(attention_diagram).bind_partial(**style)  # fail early on unknown arguments
        self._style: dict[str, Any] = style
        offered = log_probability, logit_difference, answer_logit, metric
        self._offered = {metric_name(each): each for each in offered}
        self.exploration = Exploration(
            models,
            prompt,
            position=position,
            positions=positions,
            labels=labels,
            quantity=Quantity(metric, answer, wrong),
        )
        # The reader's choices, for the saved figure.
        target = self.exploration.first_target
        n_panels = len(self.exploration.models)
        depth = max(model.adapter.n_layers for model in self.exploration.models.values())
        is_deep = depth > MOST_UNFOLDED
        if is_deep:  # each panel fits on a screen
            self._style = {"size": (_WIDTH, _PANEL_HEIGHT * n_panels)} | style
        if weight is None:
            weight = "carried" if is_deep else "attention"
        self._state: dict[str, Any] = {"target": target, "weight": weight, "threshold": threshold}
        self._saved: Any = None  # the figure in the notebook
        # All traits at once: a busy page can miss an update right after the widget opens.
        saved_id = f"sparse-tl-{uuid4().hex[:12]}"
        super().__init__(**self._shown(None), _theme=theme, _saved_id=saved_id, _revision=1)
        self.on_msg(on_this_thread(self._on_request))

    # ---- requests ------------------------------------------------------------------------------

    def toggle_head(self, title: str, layer: int, head: int) -> None:
        """Remove a head, or restore it; see `AblatedModel.toggle_head`."""
        self.exploration.models[title].toggle_head(layer, head)
        self._refresh()

    def toggle_attention_edges(self, title: str, edges: Iterable[AttentionEdge]) -> None:
        """Remove attention edges, or restore them; see `AblatedModel.toggle_attention_edges`."""
        self.exploration.models[title].toggle_attention_edges(edges)
        self._refresh()

    def restore(self, title: str | None = None) -> None:
        """Restore everything, in one model or in all."""
        self.exploration.restore(title)
        self._refresh()

    def show_prompt(self, prompt: Prompt, labels: Sequence[str] | None = None) -> None:
        """Switch to another prompt; see `Exploration.show_prompt`."""
        exploration = self.exploration
        had_edges = any(model.removed_edges for model in exploration.models.values())
        same = exploration.show_prompt(prompt, labels)
        target = min(self._state["target"], len(exploration.targets) - 1)
        self._state = {**self._state, "target": target}
        self._present(**self._shown(None))
        if had_edges and not same:
            self._notify("The number of tokens changed: removed edges were restored.", "info")

    def show_position(self, column: int) -> None:
        """Show the prediction at a column; see `Exploration.show_position`."""
        target = self.exploration.show_position(column)
        self._state = {**self._state, "target": target}
        self._refresh()

    def choose_metric(self, metric: Metric | str, wrong: Token | None = None) -> None:
        """Show effects on another metric, given as a function or by name."""
        if isinstance(metric, str):
            if metric not in self._offered:
                raise ValueError(f"{metric!r} is not one of the metrics {list(self._offered)}")
            metric = self._offered[metric]
        wrong = None if wrong == "" else wrong
        quantity = replace(self.exploration.quantity, metric=metric, wrong=wrong)
        self.exploration.measure(quantity)
        self._offered[metric_name(metric)] = metric
        self._refresh()

    def choose(self, *, target: int, weight: EdgeWeight, threshold: Threshold) -> None:
        """Set what the saved figure shows: the index of a target, what lines show, and which."""
        if target not in range(len(self.exploration.targets)):
            raise ValueError(f"there is no target {target}: see exploration.targets")
        self._state = {"target": target, "weight": weight, "threshold": threshold}
        self._exact.weight = weight

    def select(self, title: str, level: int, column: int) -> None:
        """Open the card of a node: its attention and its logit lens; level 0 is the input."""
        node = _node_data(self.exploration, title, level, column)
        self._exact.look_at(node)
        self._present(_node=node, _effects=self._exact.known, _message=None)

    def unselect(self) -> None:
        """Close the node's card."""
        self._exact.look_at(None)
        self._present(_node=None, _message=None)

    def compute_effects(self, seconds: NotNegative | None = None) -> None:
        """Compute the exact effects on the cards: all, or as many as the given seconds allow."""
        if self._exact.more:
            if self._exact.advance(math.inf if seconds is None else seconds):
                self._present(_figure=self._diagram(str).json)
            self._present(_effects=self._exact.known)

    # ---- saving ---------------------------------------------------------------------------------

    def figure(self) -> CircuitDiagram:
        """The current diagram, to show or save; panel names count the removed parts."""
        figure = self._diagram(self._name)
        return figure.dark() if self._theme == "dark" else figure

    def save(self, path: str | Path, **options: Any) -> Path:
        """Write `figure()` to a path ending in ``.html``, ``.svg`` or ``.png``."""
        return self.figure().save(path, **options)

    def update_saved(self) -> None:
        """Update the figure that is saved with the notebook."""
        if self._saved is not None:
            self._saved.update(self._saved_bundle(), raw=True)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # Two outputs, since a front end shows only one format of each.
        self._saved = display(self._saved_bundle(), raw=True, display_id=self._saved_id)
        display(self._repr_mimebundle_()[0], raw=True)  # type: ignore[index]

    def _saved_bundle(self) -> dict[str, str]:
        start = f'<div data-saved-explorer="{self._saved_id}">\n<style>{_NO_LIVE_VIEW}</style>'
        return {"text/html": f"{start}\n{self.figure()}\n</div>", "text/plain": repr(self)}

    def _diagram(self, name: Callable[[str], str]) -> CircuitDiagram:
        """The diagram with the reader's choices; `name` maps titles to panel names."""
        models = self.exploration.models
        panels = {name(title): model.now.graph for title, model in models.items()}
        return attention_diagram(panels, **self._state, **self._style)

    def _name(self, title: str) -> str:
        """A title with the number of heads and edges removed from that model."""
        model = self.exploration.models[title]
        counts = {"head": len(model.removed_heads), "edge": len(model.removed_edges)}
        words = [f"{n} {what}{'s' * (n > 1)}" for what, n in counts.items() if n]
        return f"{title} without {' and '.join(words)}" if words else title

    # ---- to and from the page --------------------------------------------------------------------

    def _shown(self, node: Mapping[str, Any] | None) -> dict[str, Any]:
        """Values of all traits; `node` is the previous data of the open card, if there is one."""
        exploration = self.exploration
        if node is not None:
            title = exploration.titles[node["panel"]]
            node = _node_data(exploration, title, node["level"], node["column"])
        self._exact = ExactEffects(exploration, self._state["weight"], node)
        quantity = exploration.quantity
        return {
            "_prompt": exploration.prompt,
            "_positions": exploration.predicted_columns,
            "_panels": _panels_data(exploration),
            "_metric": {
                "name": metric_name(quantity.metric),
                "wrong": quantity.wrong if isinstance(quantity.wrong, str) else "",
                "offered": list(self._offered),
            },
            "_effects": self._exact.known,
            "_node": node,
            "_message": None,
            "_figure": self._diagram(str).json,
        }

    def _refresh(self) -> None:
        self._present(**self._shown(self._node))

    def _on_request(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        more = False
        try:
            self._perform(content)
            more = self._exact.more
        except Exception as error:  # show the reader any failure
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            self._notify(f"{kind}{error}")
        self.send({"done": content.get("id"), "revision": self._revision, "more": more})

    def _perform(self, content: dict[str, Any]) -> None:
        changed = self.exploration.refresh()
        if changed:
            self._refresh()
        arguments = {name: value for name, value in content.items() if name not in ("action", "id")}
        if "panel" in arguments:
            arguments["title"] = self.exploration.titles[arguments.pop("panel")]
        if "edges" in arguments:  # JSON has no tuples
            arguments["edges"] = [tuple(edge) for edge in arguments["edges"]]
        if content["action"] != "hello":  # which only needs the answer
            getattr(self, content["action"])(**arguments)
        if changed:
            names = " and ".join(map(repr, changed))
            self._notify(f"The weights of {names} have changed: all results are new.", "info")

    def _present(self, **traits: Any) -> None:
        """Set traits, and send them in one message."""
        with self.hold_sync():
            for name, value in traits.items():
                setattr(self, name, value)
            self._revision += 1

    def send_again(self) -> None:
        """Send all traits again, to a page that missed an update."""
        self.send_state(self.trait_names(late=True))

    def _notify(self, text: str, kind: str = "error") -> None:
        # The revision makes the same words a change.
        self._present(_message={"text": text, "kind": kind, "at": self._revision})

    def __repr__(self) -> str:
        titles = ", ".join(map(repr, self.exploration.titles))
        return f"CircuitExplorer({titles}, prompt {self.exploration.prompt!r})"


explore = CircuitExplorer


# ---- data of the page ----------------------------------------------------------------------------


def _panels_data(exploration: Exploration) -> list[dict[str, Any]]:
    """For each panel: likely tokens at each predicted column, size of the model, and removals."""
    targets = range(len(exploration.targets))
    panels = []
    for title, model in exploration.models.items():
        graph = model.now.graph
        before_and_after = zip(*(x.tolist() for x in model.values()), strict=True)
        panels.append(
            {
                "name": _shown(title),
                "shape": [graph.n_layers, graph.n_heads],
                "removedHeads": sorted(model.removed_heads),
                "removedEdges": sorted(model.removed_edges),
                "outputs": [_rows(model.outputs(target)) for target in targets],
                "quantity": quantity_data(graph),
                "values": [[_short(x) for x in pair] for pair in before_and_after],
            }
        )
    return panels


def _node_data(exploration: Exploration, title: str, level: int, column: int) -> dict[str, Any]:
    """What a node attends to, and its logit lens."""
    model = exploration.models[title]
    if column == model.n_read < model.n_columns:  # a last "?" is predicted at the token before it
        column -= 1
    tokens = model.logit_lens(level, column)  # first, since it checks the node
    graph = model.now.graph
    n_keys = column + 1 if graph.causal else model.n_read
    into = max(level - 1, 0), slice(None) if level else slice(0, 0), column, slice(n_keys)
    attention, removed = graph.attention[into], model.removed[into]
    keys = list(range(n_keys))
    if n_keys > MAX_KEYS and level:
        weights = attention.amax(dim=0)
        weights[removed.any(dim=0)] = 2.0  # removed edges must remain clickable
        keys = sorted(weights.topk(MAX_KEYS).indices.tolist())
    return {
        "panel": exploration.titles.index(title),
        "level": level,
        "column": column,
        "text": _shown(graph.input_tokens[column]),
        "keys": [{"key": key, "text": _shown(graph.input_tokens[key])} for key in keys],
        "nKeys": n_keys,
        "attention": [[round(x, 4) for x in row] for row in attention[:, keys].tolist()],
        "removed": removed[:, keys].tolist(),
        "open": graph.gates[into][:, keys].tolist(),
        "tokens": _rows(tokens),
    }


def _rows(tokens: pd.DataFrame) -> list[dict[Any, Any]]:
    """The rows of a table of tokens."""
    texts, numbers = tokens["token"], tokens.drop(columns="token").map(_short)
    return numbers.assign(text=texts, token=texts.map(_shown)).to_dict("records")


def _shown(text: str) -> str:
    """The text for display: every character visible, and clipped."""
    shown = visible_text(text[: MAX_TEXT + 1])
    return shown if len(text) <= MAX_TEXT else shown[:MAX_TEXT] + ELLIPSIS


def _short(number: float) -> float:
    """A number rounded to five significant digits."""
    return float(f"{number:.5g}")


TargetEffects = list[tuple[float, float, str]]
"""For each target: changes of the metric and of the answer's probability, and the prediction."""


class ExactEffects:
    """The effects that are known so far, and the pieces that are left to compute.

    A piece is some of the edges into a node, all of them together first; the heads of a layer; or
    some of the diagram's edges: in the end all of them if there are at most 500; otherwise, while
    it shows effects, strongest first and for 3 seconds per model.

    Args:
        exploration: models in their current state; after a change, make a new object.
        weight: what the lines of the diagram show.
        node: the node of the open card, from `_node_data`; its edges come first.
    """

    def __init__(
        self, exploration: Exploration, weight: EdgeWeight, node: Mapping[str, Any] | None
    ) -> None:
        self.weight, self._models = weight, list(exploration.models.values())
        self._heads: list[dict[str, TargetEffects]] = [{} for _ in self._models]
        depths = [model.adapter.n_layers for model in self._models]
        layers = [(layer, panel) for panel, depth in enumerate(depths) for layer in range(depth)]
        self._layers_left = sorted(layers, key=lambda piece: -piece[0])  # the last are the fastest
        self._seconds_left = [EFFECT_SECONDS] * len(self._models)
        self.look_at(node)

    @property
    def more(self) -> bool:
        """Whether any effects are left to compute."""
        return bool(self._layers_left or self._groups_left) or self._diagram_left is not None

    @property
    def _diagram_left(self) -> int | None:
        """A panel whose edges in the diagram are left to compute: few, or shown."""
        for panel, graph in enumerate(model.now.graph for model in self._models):
            is_shown = self.weight == "effect" and self._seconds_left[panel] > 0
            if some_unknown(graph) and (is_shown or int(graph.gates.sum()) <= MAX_EFFECTS):
                return panel
        return None

    @property
    def known(self) -> dict[str, Any]:
        """The known effects by head, for each panel, and by edge, for the node."""
        node = None if self._node is None else dict(self._node)
        return {"heads": [dict(heads) for heads in self._heads], "node": node}

    def look_at(self, node: Mapping[str, Any] | None) -> None:
        """Compute the effects of the edges of another node next."""
        self._node: dict[str, TargetEffects] | None = None if node is None else {}
        self._groups_left: list[list[AttentionEdge]] = []
        if node is None:
            return
        self._looked_at = self._models[node["panel"]]
        layer, column = node["level"] - 1, node["column"]
        gates, alone = self._looked_at.now.graph.gates, []
        if layer < 0:  # edges from the input token to other positions
            read = gates[..., column].clone()
            read[..., column] = False
            edges = [(at, head, query, column) for at, head, query in read.nonzero().tolist()]
        else:
            read = gates[layer, :, column]
            edges = [(layer, head, column, key) for head, key in read.nonzero().tolist()]
            shown = {key["key"] for key in node["keys"]}
            alone = [[edge] for edge in edges if edge[-1] in shown]
        self._groups_left = [edges, *alone] if edges else []

    def advance(self, seconds: float) -> bool:
        """Compute a piece, and more while there is time for another that takes as long.

        Returns:
            Whether the effects of a panel of the diagram are complete, or as far as time allowed.
        """
        end, diagram = time.monotonic() + seconds, False
        while self.more:
            start = time.monotonic()
            if self._groups_left:
                groups, self._groups_left = self._groups_left[:PIECE], self._groups_left[PIECE:]
                self._compute_groups(groups)
            elif self._layers_left and (self.weight != "effect" or self._diagram_left is None):
                self._compute_heads(*self._layers_left.pop(0))
            else:
                panel = self._diagram_left
                assert panel is not None
                self._models[panel].compute_edge_effects(min(seconds, self._seconds_left[panel]))
                self._seconds_left[panel] -= time.monotonic() - start
                diagram |= self._diagram_left != panel
            now = time.monotonic()
            if now + (now - start) > end:
                break
        return diagram

    def _compute_heads(self, layer: int, panel: int) -> None:
        model = self._models[panel]
        effects = _by_target(model, model.head_effects([layer]))
        self._heads[panel] |= {f"{layer},{head}": each for head, each in enumerate(effects)}

    def _compute_groups(self, groups: Sequence[Sequence[AttentionEdge]]) -> None:
        assert self._node is not None
        model = self._looked_at
        effects = _by_target(model, model.attention_edge_effects(groups))
        for group, by_target in zip(groups, effects, strict=True):
            self._node.setdefault("all", by_target)  # the first group has all edges of the node
            if len(group) == 1:  # also the first group, if the node has a single edge
                self._node[",".join(map(str, group[0]))] = by_target


def _by_target(model: AblatedModel, effects: pd.DataFrame) -> list[TargetEffects]:
    """For each part, its effects on every target."""
    shown = effects["effect"].map(_short), effects["probability"].map(_short)
    rows, n = [*zip(*shown, effects["prediction"].map(_shown), strict=True)], len(model.targets)
    return [rows[start : start + n] for start in range(0, len(rows), n)]

"""The circuit explorer: a circuit diagram whose parts the running kernel removes and restores.

1. The widget opens with all of its traits. The page (`explorer.js`) draws them and requests changes
   by messages ``{"action": ..., "id": ...}``, whose other fields are arguments of a method;
   ``panel`` is the index of a title. Traits are sent together, with a revision that counts updates.
   Every request is answered with ``{"done": id}``, the latest revision, and whether effects are
   left to compute, so a busy page that missed an update notices and requests it again.
2. A request changes the `Exploration`, whose data (`payload`) returns as traits. If it fails, the
   widget shows a message, and nothing else changes. The same holds at the start: if the models or
   the prompt cannot be shown, the widget shows a message and accepts another prompt.
3. Exact effects follow in pieces, between other requests.
4. The notebook also gets the figure as self-contained HTML, which the live widget hides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from inspect import signature
from pathlib import Path
from typing import Any
from uuid import uuid4

import anywidget
import traitlets

from sparse_tl.backend import HookedModel
from sparse_tl.calls.arguments import NotNegative, checked
from sparse_tl.circuits.prompt.attention_graph import EdgeWeight
from sparse_tl.circuits.prompt.removal import AttentionEdge
from sparse_tl.circuits.prompt.tokens import Prompt, Quantity, Token
from sparse_tl.explorer.exploration import Exploration
from sparse_tl.explorer.payload import ExactEffects, node_payload, panels_payload
from sparse_tl.metrics import Metric, answer_logit, log_probability, logit_difference, metric_name
from sparse_tl.plots import CircuitDiagram, circuit_diagram
from sparse_tl.plots.diagrams.circuit_diagram import Threshold
from sparse_tl.plots.page.palette import DARK_FILTER
from sparse_tl.plots.page.rendering import DARK_NOTEBOOKS, STYLE, Theme, read_assets

_PACKAGE = "sparse_tl.explorer"
_SCRIPTS = ("explorer_page.js", "explorer_parts.js", "explorer_metric.js", "explorer.js")
_METHODS = {
    "prompt": "show_prompt",
    "position": "show_position",
    "head": "toggle_head",
    "edges": "toggle_attention_edges",
    "node": "select",
    "choose": "choose",
    "metric": "choose_metric",
    "restore": "restore",
    "close": "unselect",
    "read": "clear_message",
    "effects": "compute_effects",
    "settle": "update_saved",
    "send": "send_again",
}
"""The method that each request calls; "hello" only needs the answer."""
_NO_LIVE_VIEW = (  # hides JupyterLab's "model not found"
    ".jp-OutputArea-child:has([data-saved-explorer]) + "
    ".jp-OutputArea-child:not(:has(.sparse-tl-explorer)) { display: none; }"
)


@checked
class CircuitExplorer(anywidget.AnyWidget):
    """A live circuit diagram: remove heads and attention edges, and see how predictions change.

    `explore` is an alias. Every click has a method: `toggle_head`, `toggle_attention_edges`,
    `restore`, `show_prompt`, `select`. `exploration` holds the data. If the models or the prompt
    cannot be shown, the widget says why and accepts another prompt; `exploration`, `figure` and
    `save` then raise ValueError.

    Args:
        models: a dense or sparse model, or several by panel title, from top to bottom.
        prompt: text or tokens.
        position: predicted column shown first, as in `trace_attention`; by default the last one.
        positions: all columns to choose from; by default `position`, and every mask token or,
            without any, the token after the prompt.
        labels: text of each column, if not the tokenizer's.
        weight: what lines show, as in `circuit_diagram`; with more than 500 open edges, exact
            effects are computed for 3 seconds per model, strongest first; others are estimates.
        metric: metric whose change is the effect of a part, as in `circuit_diagram`.
        answer: token to measure, which stays the same whatever is removed.
        wrong: token to compare it with, likewise.
        threshold: smallest weight to draw, in 0..1.
        theme: ``"auto"`` (the notebook's), ``"light"`` or ``"dark"``.
        **style: arguments of `plots.circuit_diagram`: transition, title.

    Raises:
        ValueError: the threshold, theme or weight is invalid.
        TypeError: `plots.circuit_diagram` has no such argument.
    """

    _esm = (
        read_assets("interactive_figure.js", *CircuitDiagram.scripts)
        + f"const DARK_PAGES = {json.dumps(', '.join(DARK_NOTEBOOKS))};\n"
        + read_assets(*_SCRIPTS, package=_PACKAGE)
    )
    _css = (
        read_assets(STYLE)
        + read_assets("explorer.css", package=_PACKAGE)
        + f".sparse-tl-explorer[data-dark] {{ filter: {DARK_FILTER}; }}\n"
    )

    # Traits tagged as late change after the widget is created.
    _prompt = traitlets.Unicode().tag(sync=True, late=True)
    # All columns that can be predicted, including those that are not predicted yet.
    _positions = traitlets.List().tag(sync=True, late=True)
    _figure = traitlets.Dict().tag(sync=True, late=True)
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
        weight: EdgeWeight = "attention",
        metric: Metric = log_probability,
        answer: Token | None = None,
        wrong: Token | None = None,
        threshold: Threshold = 0.1,
        theme: Theme = "auto",
        **style: Any,
    ) -> None:
        signature(circuit_diagram).bind_partial(**style)  # fail early on unknown arguments
        self._models, self._style = models, style
        self._quantity = Quantity(metric, answer, wrong)
        offered = log_probability, logit_difference, answer_logit, metric
        self._offered = {metric_name(each): each for each in offered}
        self._exploration: Exploration | None = None
        self._exact: ExactEffects | None = None
        # The reader's choices, for the saved figure.
        self._state: dict[str, Any] = {"target": 0, "weight": weight, "threshold": threshold}
        self._problem = ""  # why nothing can be shown
        self._saved: Any = None  # the figure in the notebook
        try:
            shown = self._start(prompt, position=position, positions=positions, labels=labels)
        except ValueError:
            text = prompt if isinstance(prompt, str) else ""
            shown = {"_prompt": text, "_message": {"text": self._problem, "kind": "error"}}
        # All traits at once: a busy page can miss an update right after the widget opens.
        saved_id = f"sparse-tl-{uuid4().hex[:12]}"
        super().__init__(**shown, _theme=theme, _saved_id=saved_id, _revision=1)
        self.on_msg(self._on_request)

    @property
    def exploration(self) -> Exploration:
        """The models on the prompt, with their removed parts.

        Raises:
            ValueError: the models or the prompt cannot be shown; the message says why.
        """
        if self._exploration is None:
            raise ValueError(self._problem)
        return self._exploration

    def _start(self, prompt: Prompt, **columns: Any) -> dict[str, Any]:
        """Start with a prompt, and return the traits; if it cannot be shown, record why."""
        state = self._state
        try:
            exploration = Exploration(self._models, prompt, **columns, quantity=self._quantity)
            self._exploration = exploration
            self._state = {**state, "target": exploration.first_target}
            return self._shown(None)
        except BaseException as error:
            self._exploration, self._state, self._problem = None, state, str(error)
            raise

    # ---- requests ------------------------------------------------------------------------------

    def toggle_head(self, title: str, layer: int, head: int) -> None:
        """Remove a head, or restore it; see `Exploration.toggle_head`."""
        self.exploration.toggle_head(title, layer, head)
        self._refresh()

    def toggle_attention_edges(self, title: str, edges: Iterable[AttentionEdge]) -> None:
        """Remove attention edges, or restore them; see `Exploration.toggle_attention_edges`."""
        self.exploration.toggle_attention_edges(title, edges)
        self._refresh()

    def restore(self, title: str | None = None) -> None:
        """Restore everything, in one model or in all."""
        self.exploration.restore(title)
        self._refresh()

    def show_prompt(self, prompt: Prompt, labels: Sequence[str] | None = None) -> None:
        """Switch to another prompt; see `Exploration.show_prompt`."""
        if self._exploration is None:
            self._present(**self._start(prompt, labels=labels))  # chooses columns anew
            return
        exploration = self._exploration
        had_edges = any(exploration.removed_attention_edges(title) for title in exploration.titles)
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
        """Show effects on another metric, with arguments as in the constructor.

        Raises:
            ValueError: no metric has that name, or the wrong answer is not one token of each model.
        """
        if isinstance(metric, str):
            if metric not in self._offered:
                raise ValueError(f"{metric!r} is not one of the metrics {list(self._offered)}")
            metric = self._offered[metric]
        wrong = None if wrong == "" else wrong
        quantity = replace(self._quantity, metric=metric, wrong=wrong)
        self.exploration.measure(quantity)
        self._quantity = quantity
        self._offered[metric_name(metric)] = metric
        self._refresh()

    def choose(self, *, target: int, weight: EdgeWeight, threshold: Threshold) -> None:
        """Set what the saved figure shows.

        Args:
            target: index into the predicted columns, `exploration.targets`.
            weight: what lines show, as in the constructor.
            threshold: smallest weight to draw, in 0..1.

        Raises:
            ValueError: an argument is out of range.
        """
        if target not in range(len(self.exploration.targets)):
            raise ValueError(f"there is no target {target}: see exploration.targets")
        self._state = {"target": target, "weight": weight, "threshold": threshold}
        if self._exact is not None:
            self._exact.weight = weight

    def select(self, title: str, level: int, column: int) -> None:
        """Open the card of a node: its attention and its logit lens; level 0 is the input."""
        node = node_payload(self.exploration, title, level, column)
        assert self._exact is not None
        self._exact.look_at(node)
        self._present(_node=node, _effects=self._exact.payload, _message=None)

    def unselect(self) -> None:
        """Close the node's card."""
        if self._exact is not None:
            self._exact.look_at(None)
        self._present(_node=None)

    def compute_effects(self, seconds: NotNegative | None = None) -> None:
        """Compute the exact effects on the cards: all, or as many as the given seconds allow."""
        if self._exact is not None and self._exact.more:
            if self._exact.advance(math.inf if seconds is None else seconds):
                self._present(_figure=self._figure_data())
            self._present(_effects=self._exact.payload)

    def clear_message(self) -> None:
        """Close the message."""
        self._present(_message=None)

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
        problem = f'<p role="alert">{escape(self._problem)}</p>'
        content = problem if self._exploration is None else str(self.figure())
        start = f'<div data-saved-explorer="{self._saved_id}">\n<style>{_NO_LIVE_VIEW}</style>'
        return {"text/html": f"{start}\n{content}\n</div>", "text/plain": repr(self)}

    def _diagram(self, name: Callable[[str], str]) -> CircuitDiagram:
        """The diagram with the reader's choices; `name` maps titles to panel names."""
        graph = self.exploration.graph
        panels = {name(title): graph(title) for title in self.exploration.titles}
        return circuit_diagram(panels, **self._state, **self._style)

    def _name(self, title: str) -> str:
        """A title with the number of heads and edges removed from that model."""
        counts = {
            "head": len(self.exploration.removed_heads(title)),
            "edge": len(self.exploration.removed_attention_edges(title)),
        }
        words = [f"{n} {what}{'s' * (n > 1)}" for what, n in counts.items() if n]
        return f"{title} without {' and '.join(words)}" if words else title

    # ---- to and from the page --------------------------------------------------------------------

    def _shown(self, node: Mapping[str, Any] | None) -> dict[str, Any]:
        """Values of all traits; `node` is the previous data of the open card, if there is one."""
        exploration = self.exploration
        if node is not None:
            title = exploration.titles[node["panel"]]
            node = node_payload(exploration, title, node["level"], node["column"])
        self._exact = ExactEffects(exploration, self._state["weight"], node)
        wrong = self._quantity.wrong
        return {
            "_prompt": exploration.prompt,
            "_positions": exploration.predicted_columns,
            "_panels": panels_payload(exploration),
            "_metric": {
                "name": metric_name(self._quantity.metric),
                "wrong": wrong if isinstance(wrong, str) else "",
                "offered": list(self._offered),
            },
            "_effects": self._exact.payload,
            "_node": node,
            "_message": None,
            "_figure": self._figure_data(),
        }

    def _refresh(self) -> None:
        self._present(**self._shown(self._node))

    def _figure_data(self) -> dict[str, str]:
        """The diagram, with its data as text, since ipywidgets visits every item of a list."""
        figure = self._diagram(str)
        return {"svg": figure.svg, "json": figure.json}

    def _on_request(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        more = False
        try:
            self._perform(content)
            more = self._exact is not None and self._exact.more
        except Exception as error:  # show the reader any failure
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            self._notify(f"{kind}{error}")
        self.send({"done": content.get("id"), "revision": self._revision, "more": more})

    def _perform(self, content: dict[str, Any]) -> None:
        changed = () if self._exploration is None else self._exploration.refresh()
        if changed:
            self._refresh()
        arguments = {name: value for name, value in content.items() if name not in ("action", "id")}
        if "panel" in arguments:
            arguments["title"] = self.exploration.titles[arguments.pop("panel")]
        if "edges" in arguments:  # JSON has no tuples
            arguments["edges"] = [tuple(edge) for edge in arguments["edges"]]
        if content["action"] != "hello":
            getattr(self, _METHODS[content["action"]])(**arguments)
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

    def set_state(self, sync_data: Any) -> None:
        """Refuse values from the front end, which must send requests."""
        self._notify("the page sends requests, not values")

    def _notify(self, text: str, kind: str = "error") -> None:
        self._present(_message={"text": text, "kind": kind})

    def __repr__(self) -> str:
        if self._exploration is None:
            return f"CircuitExplorer(nothing to show: {self._problem})"
        titles = ", ".join(map(repr, self.exploration.titles))
        return f"CircuitExplorer({titles}, prompt {self.exploration.prompt!r})"


explore = CircuitExplorer

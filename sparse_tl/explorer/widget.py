"""The circuit explorer: a circuit diagram whose parts the running kernel removes and restores.

1. The widget opens with all of its traits. The front end (`explorer.js`) draws them and requests
   changes by messages (`requests`), which are answered with the revision of the traits. It requests
   missing traits again, since a busy front end can miss an update.
2. A request changes the `Exploration`, whose data returns as traits. If a request fails, the widget
   shows a message, and nothing else changes. The same holds at the start: if the models or the
   prompt cannot be shown, the widget shows a message and accepts another prompt.
3. Exact effects follow in pieces (`effects`), between other requests.
4. The notebook also gets the figure as self-contained HTML (`saved`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from inspect import signature
from pathlib import Path
from typing import Any
from uuid import uuid4

from sparse_tl.calls.arguments import NotNegative, checked
from sparse_tl.circuits.prompt.attention_graph import EdgeWeight
from sparse_tl.circuits.prompt.quantity import Quantity
from sparse_tl.circuits.prompt.removal import AttentionEdge
from sparse_tl.circuits.prompt.tokens import Prompt, Token
from sparse_tl.explorer.effects import ExactEffects
from sparse_tl.explorer.exploration import Exploration
from sparse_tl.explorer.metric_choice import MetricChoice
from sparse_tl.explorer.payload import figure_payload, node_payload, panels_payload
from sparse_tl.explorer.requests import read_request
from sparse_tl.explorer.saved import SavedWidget
from sparse_tl.lens import HookedModel
from sparse_tl.metrics import Metric, log_probability
from sparse_tl.plots import CircuitDiagram, circuit_diagram
from sparse_tl.plots.diagrams.circuit_diagram import Threshold
from sparse_tl.plots.page.rendering import Theme


@checked
class CircuitExplorer(SavedWidget):
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
        self._measured = MetricChoice(Quantity(metric, answer, wrong))
        self._exploration: Exploration | None = None
        self._exact: ExactEffects | None = None
        # The reader's choices, for the saved figure.
        self._state: dict[str, Any] = {"target": 0, "weight": weight, "threshold": threshold}
        self._problem = ""  # why nothing can be shown
        try:
            shown = self._start(prompt, position=position, positions=positions, labels=labels)
        except ValueError:
            text = prompt if isinstance(prompt, str) else ""
            shown = {"_prompt": text, "_message": {"text": self._problem, "kind": "error"}}
        # All traits at once: a busy front end can miss an update right after the widget opens.
        super().__init__(**shown, _theme=theme, _saved_id=f"sparse-tl-{uuid4().hex[:12]}")

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
        """Start with a prompt; if it cannot be shown, record why, and raise.

        Returns:
            Values of the traits.
        """
        state = self._state
        try:
            exploration = Exploration(
                self._models, prompt, **columns, quantity=self._measured.quantity
            )
            self._exploration = exploration
            self._state = {**state, "target": exploration.first_target}
            return self._shown(None)
        except BaseException as error:
            self._exploration, self._state = None, state
            self._problem = str(error)
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
        chosen = self._measured.of(metric, wrong)
        self.exploration.measure(chosen.quantity)
        self._measured = chosen
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
        n_targets = len(self.exploration.targets)
        if not 0 <= target < n_targets:
            raise ValueError(f"expected a target in 0..{n_targets - 1}; got {target}")
        self._state = {"target": target, "weight": weight, "threshold": threshold}
        if self._exact is not None:
            self._exact.draw(weight)

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
                self._present(_figure=figure_payload(self._diagram(str)))
            self._present(_effects=self._exact.payload)

    # ---- saving ---------------------------------------------------------------------------------

    def figure(self) -> CircuitDiagram:
        """The current diagram, to show or save; panel names count the removed parts."""
        figure = self._diagram(self._name)
        return figure.dark() if self._theme == "dark" else figure

    def save(self, path: str | Path, **options: Any) -> Path:
        """Write `figure()` to a path ending in ``.html``, ``.svg`` or ``.png``."""
        return self.figure().save(path, **options)

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

    # ---- to and from the front end ---------------------------------------------------------------

    def _shown(self, node: Mapping[str, Any] | None) -> dict[str, Any]:
        """Values of all traits that are shown.

        Args:
            node: the previous data of the open card, if there is one.
        """
        exploration = self.exploration
        if node is not None:
            title = exploration.titles[node["panel"]]
            node = node_payload(exploration, title, node["level"], node["column"])
        self._exact = ExactEffects(exploration)
        self._exact.draw(self._state["weight"])
        self._exact.look_at(node)
        return {
            "_prompt": exploration.prompt,
            "_positions": exploration.predicted_columns,
            "_panels": panels_payload(exploration),
            "_metric": self._measured.payload,
            "_effects": self._exact.payload,
            "_node": node,
            "_message": None,
            "_figure": figure_payload(self._diagram(str)),
        }

    def _refresh(self) -> None:
        self._present(**self._shown(self._node))

    def _perform(self, content: Any) -> bool:
        changed = () if self._exploration is None else self._exploration.refresh()
        if changed:
            self._refresh()
        titles = () if self._exploration is None else self._exploration.titles
        method, arguments = read_request(content, titles)
        if method:
            getattr(self, method)(**arguments)
        if changed:
            names = " and ".join(map(repr, changed))
            self._notify(f"The weights of {names} have changed: all results are new.", "info")
        return self._exact is not None and self._exact.more

    def _saved_html(self) -> str:
        problem = f'<p role="alert">{escape(self._problem)}</p>'
        return problem if self._exploration is None else str(self.figure())

    def __repr__(self) -> str:
        if self._exploration is None:
            return f"CircuitExplorer(nothing to show: {self._problem})"
        titles = ", ".join(map(repr, self.exploration.titles))
        return f"CircuitExplorer({titles}, prompt {self.exploration.prompt!r})"


explore = CircuitExplorer

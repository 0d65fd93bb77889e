"""The circuit explorer: a circuit diagram whose parts the running kernel removes and restores.

1. The front end (`explorer.js`) draws the traits and requests changes by messages.
2. A message changes the `Exploration`; its data goes back as traits. A request that fails becomes a
   message in the widget, and nothing else changes. The same holds from the start: models or a
   prompt that cannot be shown give a message in the widget, where another prompt can be tried.
3. Next to the live widget, the notebook gets the same figure as self-contained HTML. The live
   widget hides it; without a kernel, in saved and exported notebooks, it is shown instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args
from uuid import uuid4

import anywidget
import traitlets

from sparse_tl.circuits.attention_graph import EdgeWeight
from sparse_tl.circuits.removal import AttentionEdge
from sparse_tl.circuits.trace import Prompt
from sparse_tl.explorer.exploration import Exploration
from sparse_tl.explorer.payload import node_payload, panels_payload
from sparse_tl.lens import HookedModel
from sparse_tl.plots import CircuitDiagram, circuit_diagram
from sparse_tl.plots.circuit_diagram import check_options
from sparse_tl.plots.interactive_html import SCRIPTS, STYLE, read_assets
from sparse_tl.plots.palette import DARK_FILTER

Ground = Literal["light", "dark"]

_PACKAGE = "sparse_tl.explorer"
# JupyterLab writes "model not found" in place of the live view.
_NO_LIVE_VIEW = (
    ".jp-OutputArea-child:has([data-saved-explorer]) + "
    ".jp-OutputArea-child:not(:has(.sparse-tl-explorer)) { display: none; }"
)


class CircuitExplorer(anywidget.AnyWidget):
    """A live circuit diagram: remove heads and attention edges, and see how predictions change.

    `explore` is an alias. Everything that can be clicked can also be called: `toggle_head`,
    `toggle_attention_edges`, `restore`, `show_prompt`, `select`. `exploration` holds the data.
    If there is nothing to show (no model, a model without attention patterns to hook, a prompt
    or position that does not fit), the widget says why and accepts another prompt; `exploration`,
    `figure` and `save` then raise ValueError.

    Args:
        models: dense or sparse models by panel title, from top to bottom.
        prompt: text or tokens.
        position: predicted column shown first; the last one by default.
        positions: all columns to choose from; by default every mask token of the prompt or the
            token after it, and `position`.
        labels: text of each column, if not the tokenizer's.
        weight: "attention" (gate times attention), "effect" (of removing the edge, in logits:
            exact if few edges are open) or "first-order" (its estimate).
        threshold: smallest weight to draw, in 0..1.
        theme: ``"light"``, as other figures in notebooks, or ``"dark"``.
        **style: arguments of `plots.circuit_diagram`: transition, title.

    Raises:
        ValueError: the threshold, theme or weight is invalid.
        TypeError: `plots.circuit_diagram` does not have an argument.
    """

    _esm = read_assets(*SCRIPTS["circuit_diagram"]) + read_assets(
        "explorer_parts.js", "explorer.js", package=_PACKAGE
    )
    _css = (
        read_assets(STYLE)
        + read_assets("explorer.css", package=_PACKAGE)
        + f".sparse-tl-explorer[data-dark] {{ filter: {DARK_FILTER}; }}\n"
    )

    _prompt = traitlets.Unicode().tag(sync=True)
    _figure = traitlets.Dict().tag(sync=True)
    _panels = traitlets.List().tag(sync=True)
    _node = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    # Why there is nothing to show, and the latest message.
    _problem = ""
    _message = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    # The reader's choices: target, weight and threshold.
    _state = traitlets.Dict().tag(sync=True)
    _dark = traitlets.Bool().tag(sync=True)
    _saved_id = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        models: Mapping[str, HookedModel],
        prompt: Prompt,
        *,
        position: int | None = None,
        positions: Sequence[int] | None = None,
        labels: Sequence[str] | None = None,
        weight: EdgeWeight = "attention",
        threshold: float = 0.1,
        theme: Ground | str = "light",
        **style: Any,
    ) -> None:
        if theme not in get_args(Ground):
            raise ValueError(f"expected a theme of {get_args(Ground)}; got {theme!r}")
        check_options(weight, threshold)
        signature(circuit_diagram).bind_partial(**style)  # fail early on unknown arguments
        self._models = models
        self._exploration: Exploration | None = None
        self._style = style
        self._saved: Any = None
        super().__init__(
            _state={"target": 0, "weight": weight, "threshold": threshold},
            _dark=theme == "dark",
            _saved_id=f"sparse-tl-{uuid4().hex[:12]}",
        )
        self.on_msg(self._on_request)
        try:
            self._start(prompt, position=position, positions=positions, labels=labels)
        except ValueError:
            self._prompt = prompt if isinstance(prompt, str) else ""
            self._say(self._problem)

    @property
    def exploration(self) -> Exploration:
        """The data that is shown.

        Raises:
            ValueError: the models or the prompt cannot be shown; the message says why.
        """
        if self._exploration is None:
            raise ValueError(self._problem)
        return self._exploration

    def _start(self, prompt: Prompt, **columns: Any) -> None:
        """Start with a prompt; if it cannot be shown, remember why."""
        state = self._state
        try:
            self._exploration = exploration = Exploration(self._models, prompt, **columns)
            self._state = {**state, "target": exploration.first_target}
            self._refresh()
        except BaseException as error:
            self._exploration, self._state = None, state
            self._problem = str(error)
            raise

    # ---- what can be clicked ---------------------------------------------------------------------

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
            self._start(prompt, labels=labels)  # choose its columns again
            return
        exploration = self._exploration
        had_edges = any(exploration.removed_attention_edges(title) for title in exploration.titles)
        same = exploration.show_prompt(prompt, labels)
        self._node = None
        if self._state["target"] >= len(exploration.targets):
            self._state = {**self._state, "target": len(exploration.targets) - 1}
        self._refresh()
        if had_edges and not same:
            self._say("The prompt has another number of tokens: removed edges are back.", "info")

    def select(self, title: str, level: int, column: int) -> None:
        """Show what a node attends to and would predict; level 0 is the input."""
        self._node = node_payload(self.exploration, title, level, column)
        self._message = None

    # ---- what is kept ----------------------------------------------------------------------------

    def figure(self) -> CircuitDiagram:
        """The current diagram, to show or save; panel names state what is removed."""
        figure = self._diagram(self._name)
        return figure.dark() if self._dark else figure

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
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

    def _refresh(self) -> None:
        """Send all traits again, in one message."""
        exploration = self.exploration
        diagram = self._diagram(str)
        panels = panels_payload(exploration)
        node = self._node
        if node is not None:
            title = exploration.titles[node["panel"]]
            node = node_payload(exploration, title, node["level"], node["column"])
        with self.hold_sync():
            self._prompt = exploration.prompt
            self._panels = panels
            self._node = node
            self._message = None
            self._figure = {"svg": diagram.svg, "data": diagram.data}

    def _say(self, text: str, kind: str = "error") -> None:
        self._message = {"text": text, "kind": kind}

    def _on_request(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        try:
            self._act(content)
        except ValueError as error:
            self._say(str(error))
        except Exception as error:  # show the reader any failure
            self._say(f"{type(error).__name__}: {error}")
        self.send({"done": content.get("id")})

    def _act(self, content: Mapping[str, Any]) -> None:
        match content:
            case {"action": "prompt", "text": str(text)}:
                self.show_prompt(text)
            case {"action": "head", "panel": panel, "head": [int(layer), int(head)]}:
                self.toggle_head(self._title(panel), layer, head)
            case {"action": "edges", "panel": panel, "edges": [*edges]}:
                self.toggle_attention_edges(self._title(panel), map(tuple, edges))
            case {"action": "restore"}:
                self.restore()
            case {"action": "node", "panel": panel, "level": int(level), "column": int(column)}:
                self.select(self._title(panel), level, column)
            case {"action": "close"}:
                self._node = None
            case {"action": "settle"}:
                if self._saved is not None:  # keep the saved figure up to date
                    self._saved.update(self._saved_bundle(), raw=True)
            case _:
                raise ValueError(f"expected a known request; got {dict(content)}")

    def _title(self, panel: Any) -> str:
        titles = self.exploration.titles
        if not (isinstance(panel, int) and 0 <= panel < len(titles)):
            raise ValueError(f"expected a panel in 0..{len(titles) - 1}; got {panel!r}")
        return titles[panel]

    # ---- in the notebook -------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # Two outputs, since a front end shows one form of each: the HTML for when there is no
        # kernel, and the live widget, which hides it.
        self._saved = display(self._saved_bundle(), raw=True, display_id=self._saved_id)
        display(self._repr_mimebundle_()[0], raw=True)  # type: ignore[index]

    def _saved_bundle(self) -> dict[str, str]:
        if self._exploration is None:
            seen = f'<p role="alert">{escape(self._problem)}</p>'
        else:
            seen = str(self.figure())
        start = f'<div data-saved-explorer="{self._saved_id}">\n<style>{_NO_LIVE_VIEW}</style>'
        return {"text/html": f"{start}\n{seen}\n</div>", "text/plain": repr(self)}

    def __repr__(self) -> str:
        if self._exploration is None:
            return f"CircuitExplorer(nothing to show: {self._problem})"
        titles = ", ".join(map(repr, self.exploration.titles))
        return f"CircuitExplorer({titles}, prompt {self.exploration.prompt!r})"


explore = CircuitExplorer

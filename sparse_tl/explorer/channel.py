"""Messages between the explorer and its front end: traits to it, and requests from it.

Traits are sent together, with a revision that counts updates. Every request is answered with the
latest revision, so a front end that missed an update notices and requests it again.
"""

from __future__ import annotations

import json
from typing import Any

import anywidget
import traitlets

from sparse_tl.plots import CircuitDiagram
from sparse_tl.plots.page.palette import DARK_FILTER
from sparse_tl.plots.page.rendering import DARK_NOTEBOOKS, STYLE, read_assets

_PACKAGE = "sparse_tl.explorer"
_SCRIPTS = ("explorer_page.js", "explorer_parts.js", "explorer_metric.js", "explorer.js")


class Channel(anywidget.AnyWidget):
    """A widget that sends traits to its front end and takes requests, but no values, from it."""

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
    # Counts updates, so that the front end knows whether it has the latest.
    _revision = traitlets.Int().tag(sync=True, late=True)
    _theme = traitlets.Unicode().tag(sync=True)
    _saved_id = traitlets.Unicode().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits, _revision=1)
        self.on_msg(self._on_request)

    def _perform(self, content: Any) -> bool:
        """Carry out a request.

        Returns:
            Whether any effects are left to compute.

        Raises:
            ValueError: the request cannot be carried out.
        """
        raise NotImplementedError

    def _on_request(self, _widget: Any, content: Any, _buffers: Any) -> None:
        more = False
        try:
            more = self._perform(content)
        except ValueError as error:
            self._notify(str(error))
        except Exception as error:  # show the reader any failure
            self._notify(f"{type(error).__name__}: {error}")
        number = content.get("id") if isinstance(content, dict) else None
        self.send({"done": number, "revision": self._revision, "more": more})

    def _present(self, **traits: Any) -> None:
        """Set traits, and send them in one message."""
        with self.hold_sync():
            for name, value in traits.items():
                setattr(self, name, value)
            self._revision += 1

    def send_again(self) -> None:
        """Send all traits again, to a front end that missed an update."""
        self.send_state(self.trait_names(late=True))

    def _notify(self, text: str, kind: str = "error") -> None:
        self._present(_message={"text": text, "kind": kind})

    def clear_message(self) -> None:
        """Close the message."""
        self._present(_message=None)

    def set_state(self, sync_data: Any) -> None:
        """Refuse values from the front end, which must send requests."""
        self._notify(f"expected requests, not values of {list(sync_data)!r:.200}")

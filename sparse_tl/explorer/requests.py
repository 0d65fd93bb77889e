"""Requests of the front end: calls of the explorer's methods, which check their arguments.

A request is a message ``{"action": ..., "id": ...}`` with the arguments of the method as its other
fields; ``panel`` is the index of a title. The widget answers with ``{"done": id}``, its revision,
and whether effects are left to compute; errors are shown as a message in the widget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparse_tl.calls.arguments import checked

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
    "hello": "",  # only needs the answer
}


def read_request(request: Any, titles: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The name of the method that a request calls, and its arguments.

    Args:
        request: the message.
        titles: titles of the panels.

    Raises:
        ValueError: the request is unknown, or there is no such panel.
        TypeError: edges are not lists of numbers.
    """
    if not isinstance(request, Mapping):
        raise ValueError(f"expected a request with an action; got {request!r:.80}")
    fields = {name: value for name, value in request.items() if name != "id"}
    action = fields.pop("action", None)
    if not isinstance(action, str) or action not in _METHODS:
        raise ValueError(f"expected an action of {list(_METHODS)}; got {action!r:.80}")
    if "panel" in fields:
        panel = fields.pop("panel")
        if type(panel) is not int or not 0 <= panel < len(titles):
            raise ValueError(f"expected one of {len(titles)} panels; got {panel!r:.80}")
        fields["title"] = titles[panel]
    if "edges" in fields:
        fields["edges"] = attention_edges(fields["edges"])
    return _METHODS[action], fields


@checked
def attention_edges(edges: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Edges as tuples, which JSON does not have."""
    return [tuple(edge) for edge in edges]

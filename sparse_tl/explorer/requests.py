"""What the front end may ask for: methods of the explorer, which check their own arguments.

A request is a message ``{"action": ..., "id": ...}`` with the arguments of the method as its other
fields; a title is told by ``panel``, its index. The widget answers with ``{"done": id}``, the
revision of what it shows, and whether effects are still to be computed; problems become a message
in the widget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparse_tl.arguments import checked
from sparse_tl.wording import shown

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
    "read": "unsay",
    "effects": "compute_effects",
    "settle": "update_saved",
    "send": "send_again",
    "hello": "",  # the answer is all that is asked for
}


def read_request(request: Any, titles: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The name of the method that a message of the front end asks for, and its arguments.

    Args:
        request: the message.
        titles: titles of the panels.

    Raises:
        ValueError: it is not a known request, or there is no such panel.
        TypeError: its edges are not lists of numbers.
    """
    if not isinstance(request, Mapping):
        raise ValueError(f"expected a request with an action; got {shown(request)}")
    fields = {name: value for name, value in request.items() if name != "id"}
    action = fields.pop("action", None)
    if not isinstance(action, str) or action not in _METHODS:
        raise ValueError(f"expected an action of {list(_METHODS)}; got {shown(action)}")
    if "panel" in fields:
        panel = fields.pop("panel")
        if type(panel) is not int or not 0 <= panel < len(titles):
            raise ValueError(f"expected a panel in 0..{len(titles) - 1}; got {shown(panel)}")
        fields["title"] = titles[panel]
    if "edges" in fields:
        fields["edges"] = attention_edges(fields["edges"])
    return _METHODS[action], fields


@checked
def attention_edges(edges: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Edges as tuples, which JSON does not have."""
    return [tuple(edge) for edge in edges]

"""What the front end may ask for, checked before anything is done.

A request is a message ``{"action": ..., "id": ...}``. The widget answers with ``{"done": id}``, the
revision of what it shows, and whether effects are still to be computed; problems become a message
in the widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_tl.explorer.widget import CircuitExplorer

EFFECTS_SECONDS = 0.3
"""How long other requests wait while effects are computed."""


def perform(explorer: CircuitExplorer, request: Any) -> None:
    """Do what a message of the front end asks for.

    Raises:
        ValueError: it is not a known request, its fields are not what they should be, or what it
            asks for cannot be done.
    """
    if not isinstance(request, Mapping):
        raise ValueError(f"expected a request with an action; got {_clipped(request)}")
    action = request.get("action")
    act = _ACTIONS.get(action) if isinstance(action, str) else None
    if act is None:
        raise ValueError(f"expected an action of {list(_ACTIONS)}; got {_clipped(action)}")
    act(explorer, request)


def _prompt(explorer: CircuitExplorer, request: Mapping[str, Any]) -> None:
    explorer.show_prompt(_field(request, "text", str))


def _position(explorer: CircuitExplorer, request: Mapping[str, Any]) -> None:
    explorer.show_position(_field(request, "column", int))


def _head(explorer: CircuitExplorer, request: Mapping[str, Any]) -> None:
    layer, head = _numbers(request.get("head"), "head", 2)
    explorer.toggle_head(_title(explorer, request), layer, head)


def _edges(explorer: CircuitExplorer, request: Mapping[str, Any]) -> None:
    edges = [_numbers(edge, "edge", 4) for edge in _field(request, "edges", list)]
    if not edges:
        raise ValueError("expected at least one edge; got none")
    title = _title(explorer, request)
    explorer.toggle_attention_edges(title, [(a, b, c, d) for a, b, c, d in edges])


def _node(explorer: CircuitExplorer, request: Mapping[str, Any]) -> None:
    level, column = _field(request, "level", int), _field(request, "column", int)
    explorer.select(_title(explorer, request), level, column)


def _choose(explorer: CircuitExplorer, request: Mapping[str, Any]) -> None:
    threshold = request.get("threshold")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise ValueError(f"expected a number as threshold; got {_clipped(threshold)}")
    target, weight = _field(request, "target", int), _field(request, "weight", str)
    explorer.choose(target=target, weight=weight, threshold=float(threshold))


def _field(request: Mapping[str, Any], name: str, kind: type) -> Any:
    value = request.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        what = {"str": "a text", "int": "a whole number", "list": "a list"}[kind.__name__]
        raise ValueError(f"expected {what} as {name}; got {_clipped(value)}")
    return value


def _numbers(value: Any, name: str, size: int) -> Sequence[int]:
    fits = isinstance(value, list) and len(value) == size
    if not fits or any(type(number) is not int for number in value):
        raise ValueError(f"expected {size} whole numbers as {name}; got {_clipped(value)}")
    return value


def _title(explorer: CircuitExplorer, request: Mapping[str, Any]) -> str:
    titles, panel = explorer.exploration.titles, _field(request, "panel", int)
    if not 0 <= panel < len(titles):
        raise ValueError(f"expected a panel in 0..{len(titles) - 1}; got {panel}")
    return titles[panel]


def _clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


_ACTIONS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "prompt": _prompt,
    "position": _position,
    "head": _head,
    "edges": _edges,
    "node": _node,
    "choose": _choose,
    "restore": lambda explorer, _: explorer.restore(),
    "close": lambda explorer, _: explorer.unselect(),
    "read": lambda explorer, _: explorer.unsay(),
    "effects": lambda explorer, _: explorer.compute_effects(EFFECTS_SECONDS),
    "settle": lambda explorer, _: explorer.update_saved(),
    "hello": lambda explorer, _: None,
    "send": lambda explorer, _: explorer.send_again(),
}

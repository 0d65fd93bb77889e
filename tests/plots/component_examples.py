"""A small circuit and a hostile text, which the tests of the component diagram share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.plots import ComponentDiagram, component_diagram

ATTACK = "</script><img src=x onerror=alert(1)>"

EDGES = {
    "a2.h1->logits": -1.0,
    "input->a0.h0<v>": -0.81,
    "a0.h0->m1": 0.49,
    "m1->a2.h1<q>": -0.25,
    "input->a1.h1<k>": 0.09,
    "m0->logits": -0.04,
}
"""Four edges make a path; the last but one leads nowhere, the last comes from nowhere."""


class Scored(NamedTuple):
    """A circuit, and the scores of its edges."""

    circuit: Circuit
    scores: Scores | None


def draw(panels: Mapping[str, Scored], **options: Any) -> ComponentDiagram:
    """The diagram of circuits with the scores that they have."""
    scores = {name: panel.scores for name, panel in panels.items() if panel.scores is not None}
    circuits = {name: panel.circuit for name, panel in panels.items()}
    return component_diagram(circuits, scores=scores, **options)

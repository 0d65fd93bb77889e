"""A small circuit and a hostile text, which the tests of diagrams share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from sparse_tl.circuits import Circuit, DrivingToken, NeuronEffects, Scores
from sparse_tl.head_roles import AblationCurve, HeadRoles
from sparse_tl.plots import ComponentDiagram, Figure, component_diagram

SVG = "{http://www.w3.org/2000/svg}"
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


def panels_of(figure: Figure) -> list[ElementTree.Element]:
    """The panels of a drawn diagram."""
    root = ElementTree.fromstring(figure.svg)
    return [group for group in root.iter(f"{SVG}g") if "data-panel" in group.attrib]


class Scored(NamedTuple):
    """A circuit, and the scores of its edges."""

    circuit: Circuit
    scores: Scores | None


def draw(panels: Mapping[str, Scored], **options: Any) -> ComponentDiagram:
    """The diagram of circuits with the scores that they have."""
    scores = {name: panel.scores for name, panel in panels.items() if panel.scores is not None}
    circuits = {name: panel.circuit for name, panel in panels.items()}
    return component_diagram(circuits, scores=scores, **options)


def neurons_of(mlp: str, n: int = 2, before: str = "gave a drink", **fields: Any) -> NeuronEffects:
    """Made-up effects of `n` of 1,536 neurons, the first one the strongest."""
    names = [f"{mlp}.n{neuron}" for neuron in range(n)]
    effect, others = torch.full((1536,), torch.nan), torch.linspace(0.5, -0.5, 1536)
    effect[:n] = -0.5 * 0.9 ** torch.arange(n)
    token = DrivingToken(1, 7, before, " to", " her", 2.5, -0.125, -0.4)
    texts = {name: (" Mary", ATTACK, "\n") for name in names}
    values: dict[str, Any] = {
        "mlp": mlp,
        "readers": [f"m{layer}" for layer in range(3, 11)],
        "n_pairs": 8,
        "effect": effect,
        "score": 0.9 * effect.nan_to_num(),
        "clean": others,
        "corrupted": -others / 4,
        "tokens": {name: (token,) * 5 for name in names},
        "promotes": texts,
        "suppresses": dict.fromkeys(names, ()),
    }
    return NeuronEffects(**values | fields)


def head_roles_of(trajectories: torch.Tensor) -> HeadRoles:
    """Roles of heads with these gates, by kind of gate, seed, record, layer and head."""
    _, n_seeds, n_records, *shape = trajectories.shape
    return HeadRoles(
        seeds=tuple(range(n_seeds)),
        lambda_=0.1,
        trajectories=trajectories,
        recorded_at=tuple(range(0, 10 * n_records, 10)),
        losses=torch.zeros(3, n_seeds),
        dense_loss=0.0,
        fitted=torch.ones(n_seeds, dtype=torch.bool),
        removed=torch.zeros(shape),
        removed_together=torch.zeros(2, 3, n_seeds),
    )


def ablation_of(role: str, values: torch.Tensor, in_role: int) -> AblationCurve:
    """A curve of two seeds with these values, and a control of a third of them."""
    counts = tuple(range(values.shape[1]))
    return AblationCurve(role, counts, values, (in_role, in_role), control=values / 3)

"""The figures of head roles show what they are given."""

from __future__ import annotations

import pytest
import torch
from component_examples import head_roles_of

from sparse_tl.head_roles import AblationCurve, HeadRoles
from sparse_tl.plots import ablation_grid, head_roles_figure
from sparse_tl.plots.page.palette import EMPTY_CELL, ROLES

ENDS = {"facilitation": -3, "irrelevance": -0.01, "interference": 0.6}


def curves(scale: float = 1.0, in_role: int = 11, control: bool = True) -> list[AblationCurve]:
    steps = torch.arange(11) / 10
    seeds = torch.tensor([[0.9], [1.1]])
    random = scale * -1.0 * steps * seeds
    return [
        AblationCurve(
            *(by, tuple(range(11)), scale * end * steps * seeds, (in_role,) * 2),
            control=random if control else None,
        )
        for by, end in ENDS.items()
    ]


@pytest.fixture
def roles() -> HeadRoles:
    gates = torch.rand(3, 1, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    gates[1:, :, -1] = torch.tensor([[0.0, 1.0], [0.5, 0.0]])
    return head_roles_of(gates)


def test_a_line_is_thin_and_pale_where_no_head_of_its_role_is_left() -> None:
    red = ROLES["interference"]
    beyond = {2: list(range(2, 11)), 0: list(range(11))}
    for in_role, solid in ((2, [0, 1, 2]), (0, [])):
        curve = curves(in_role=in_role, control=False)[2]
        figure = ablation_grid({"Math": {"Dense": [curve]}}).plotly
        listed = [(trace.name, trace.opacity) for trace in figure.data if trace.showlegend]
        assert listed == [("Interference", 1), ("In the role", 1), ("Beyond it", 0.45)]
        lines = [t for t in figure.data if t.line.color == red and len(t.x) > 1]
        thick = [line for line in lines if line.opacity == 1]
        assert [list(line.x) for line in thick] == ([solid] if solid else [])
        (pale,) = (line for line in lines if line.opacity < 1)
        assert list(pale.x) == beyond[in_role] and pale.line.width == 1
        # The interval, too, is of the heads in the role only.
        assert sum(trace.fill == "toself" for trace in figure.data) == len(thick)
    whole = curves(in_role=11, control=False)[2]
    traces = ablation_grid({"Math": {"Dense": [whole]}}).plotly.data
    assert [trace.name for trace in traces if trace.showlegend] == ["Interference"]


def test_a_heat_map_is_drawn_in_its_colours(roles: HeadRoles) -> None:
    figure = head_roles_figure(roles)
    assert figure.plotly.data[0].z == ([0.0, 1.0], [0.5, 0.0])
    assert "<b>a0.h1</b><br>facilitation 1.000" in str(figure.plotly.data[0].text)
    for role, map_ in zip(ENDS, figure.plotly.data, strict=True):
        assert map_.colorscale == ((0, EMPTY_CELL), (1, ROLES[role]))
        assert (map_.zmin, map_.zmax) == (0, 1)
        assert map_.colorbar.title.text == f"{role.capitalize()} score"


def test_a_result_makes_its_own_figure(roles: HeadRoles) -> None:
    assert roles.figure().plotly == head_roles_figure(roles).plotly
    curve = curves()[0]
    assert curve.figure(title="IOI").plotly == ablation_grid({"": {"IOI": [curve]}}).plotly

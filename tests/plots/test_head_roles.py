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


@pytest.mark.parametrize(("in_role", "n_solid"), [(11, 11), (2, 3), (0, 0)])
def test_a_line_is_pale_where_no_head_of_its_role_is_left(in_role: int, n_solid: int) -> None:
    curve = curves(in_role=in_role, control=False)[2]
    drawn = ablation_grid({"Math": {"Dense": [curve]}}).plotly.data
    lines = [t for t in drawn if t.line.color == ROLES["interference"] and len(t.x) > 1]
    found = {line.opacity == 1: [*zip(line.x, line.y, strict=True)] for line in lines}
    points = [*enumerate(curve.mean.tolist())]
    assert found.get(True, []) == points[:n_solid]
    assert found.get(False, []) == points[in_role:]
    # The interval, too, is of the heads in the role only.
    assert sum(trace.fill == "toself" for trace in drawn) == (n_solid > 0)


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

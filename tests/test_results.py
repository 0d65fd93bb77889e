"""Results as tables in notebooks."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pandas as pd

from sparse_tl.gates import SparseTransformer
from sparse_tl.models import build_addition_model
from sparse_tl.results import table_html
from sparse_tl.runs import Comparison
from sparse_tl.runs.addition import AdditionRun, draw
from sparse_tl.runs.head_roles import HeadRolesRun
from sparse_tl.runs.text import TextRun
from sparse_tl.tasks import AdditionTask
from sparse_tl.training import HeldOut

ATTACK = "<img src=x onerror=alert(1)>"


def cells(html: str) -> list[list[str]]:
    """The rows of a fragment's table, the first one its headings."""
    rows = ElementTree.fromstring(f"<div>{html}</div>").iter("tr")
    return [[cell.text or "" for cell in row] for row in rows]


def test_words_and_cells_are_escaped():
    html = table_html(pd.DataFrame({ATTACK: [ATTACK]}, index=[ATTACK]), ATTACK, index=True)
    assert "<img" not in html and html.count("&lt;img") == 4


def test_numbers_are_short():
    table = pd.DataFrame({"loss": [1.23456789], "edges": [18911232.4]})
    assert cells(table_html(table)) == [["loss", "edges"], ["1.235", "18,911,232"]]


def test_a_measurement_is_one_row():
    names, values = cells(HeldOut(0.25, 0.5, 12.0, 3.0, 24.0, 2)._repr_html_())
    assert dict(zip(names, values, strict=True)) == {
        "loss": "0.25",
        "accuracy": "0.5",
        "active_edges": "12",
        "active_edges_per_token": "3",
        "possible_edges": "24",
        "active_heads": "2",
    }


def test_runs_show_both_models():
    sides = {"heldout_loss": 0.5, "active_heads": 3}
    base, sparse = build_addition_model(), SparseTransformer(build_addition_model())
    diagram = draw(base, sparse, AdditionTask())
    addition = AdditionRun({"base": sides, "sparse": sides}, "Met.", base, sparse, diagram)
    text = TextRun({"dense": sides, "sparse": sides}, "Met.", sparse)
    assert repr(addition) == "AdditionRun(Met.)" and repr(text) == "TextRun(Met.)"
    assert str(diagram) in addition._repr_html_()
    for run, names in ((addition, ["base", "sparse"]), (text, ["dense", "sparse"])):
        assert cells(run._repr_html_().partition("</table>")[0] + "</table>") == [
            ["", *names],
            ["heldout_loss", "0.5", "0.5"],
            ["active_heads", "3", "3"],
        ]


def test_a_comparison_has_a_row_per_task_and_kind_of_part():
    side = {"heads_at_0.9": 4.0, "edges_at_0.9": None}
    said = {"dense": side, "sparse": side, "multiplier_heads": 1.0, "multiplier_edges": None}
    run = Comparison({"ioi": said}, pd.DataFrame())
    assert cells(run._repr_html_()) == [
        ["task", "parts", "dense", "sparse", "multiplier"],
        ["ioi", "heads", "4", "4", "1"],
        ["ioi", "edges", "NaN", "NaN", "NaN"],
    ]


def test_head_roles_have_a_row_per_task_model_and_role():
    roles = ("facilitation", "irrelevance", "interference")
    said = {role: {"heads": n, "change_when_ablated": -0.5} for n, role in enumerate(roles)}
    run = HeadRolesRun({"tasks": {"ioi": {"dense": said}}}, pd.DataFrame(), pd.DataFrame())
    rows = cells(run._repr_html_())[1:]
    assert rows == [["ioi", "dense", role, str(n), "-0.5"] for n, role in enumerate(roles)]

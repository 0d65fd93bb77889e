"""The benchmarks that compare circuit methods, on a small pair: tables, and resuming."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import small_task_models

from sparse_tl.circuits import EffectCurve

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import circuit_methods  # noqa: E402

SMALL = ("--task", "greater_than", "--pairs", "8", "--device", "cpu")
SMALL += ("--acdc-start", "12", "--pruning-steps", "2")


def curve(effects: dict[int, float]) -> EffectCurve:
    mean = list(effects.values())
    return EffectCurve("m", list(effects), mean, mean, mean)


@pytest.mark.slow
def test_it_prints_a_table_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_methods, "load_task_models", small_task_models)
    words = (*SMALL, "--out", str(tmp_path / "out"))
    circuit_methods.main([*words, "--sizes", "8", "--thresholds", "0.1"])
    said = capsys.readouterr().out
    before, table = said.split("\n\n", 1)
    for side in ("dense ", "sparse"):
        for name in ("EAP-IG ranking", "pruning-8", "warm-8", "acdc-0.1"):
            assert f"{side} {name}" in before
    rows = table.splitlines()[2:]
    assert [row.count("|") for row in rows] == [5] * 6
    assert rows[0] == "| method | dense | sparse | dense / sparse |"
    assert rows[2].startswith("| EAP-IG ranking | ") and rows[2].endswith("x |")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(circuit_methods, "acdc", refuse)
    monkeypatch.setattr(circuit_methods, "attribute_circuit_edges", refuse)
    circuit_methods.main([*words, "--sizes", "8,4", "--thresholds", "0.1"])
    again = capsys.readouterr().out
    assert "pruning-4" in again and again.splitlines()[-4] == rows[2]
    circuit_methods.main([*words, "--side", "dense", "--sizes", "8", "--thresholds", "0.1"])
    alone = capsys.readouterr().out
    assert "sparse pruning" not in alone and alone.splitlines()[-4].endswith(" | - | - |")
    with pytest.raises(ValueError, match="holds a run with other settings"):
        circuit_methods.main([*words, "--seed", "1"])


def test_bounds_are_told_as_such() -> None:
    reached, short = curve({10: 0.5, 100: 0.9}), curve({10: 0.5, 2000: 0.6})
    enough, worse = curve({10: 0.95, 100: 1.0}), curve({10: 0.95, 20: 0.8, 80: 1.0})
    cells = [circuit_methods.needed(some, 0.9) for some in (reached, short, enough, worse, None)]
    assert cells == ["100", "> 2,000", "<= 10", "40", "-"]
    assert circuit_methods.ratio(reached, worse, 0.9) == "2.5x"
    for other in (short, enough, None):
        assert circuit_methods.ratio(reached, other, 0.9) == "-"


def test_of_two_circuits_with_one_size_the_better_counts() -> None:
    found = circuit_methods.curve_of("m", [(20, 0.4), (5, 0.1), (20, 0.7)])
    assert found is not None
    assert (found.sizes, found.mean) == ((5, 20), (0.1, 0.7))
    assert circuit_methods.curve_of("m", []) is None

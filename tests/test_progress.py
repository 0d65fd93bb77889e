"""Progress in a log."""

from __future__ import annotations

import pytest

from sparse_tl.progress import tracked


def test_a_log_is_written_once_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with tracked("training", 200) as step:
        for number in range(1, 201):
            now += 1
            step(f"loss {number}")
    captured = capsys.readouterr()
    assert captured.out == ""
    written = captured.err.split("\n")
    assert written.pop() == ""
    assert [(line[:8], line.split()[-1]) for line in written] == [
        ("training", f"{number}]") for number in (60, 120, 180, 200)
    ]
    assert "60/200 [01:00<02:20," in written[0]

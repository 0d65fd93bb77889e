"""Progress in a log."""

from __future__ import annotations

import pytest

from sparse_tl import progress
from sparse_tl.progress import tracked


def test_a_log_has_a_line_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with tracked("training", 200) as step:
        for number in range(1, 201):
            now += 1
            step(f"loss {number}")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "training · 10 of 200 · 3:10 left · loss 10",
        "training · 70 of 200 · 2:10 left · loss 70",
        "training · 130 of 200 · 1:10 left · loss 130",
        "training · 190 of 200 · 0:10 left · loss 190",
        "training · 200 of 200 · 3:20 · loss 200",
    ]

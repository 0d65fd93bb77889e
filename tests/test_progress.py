"""Progress in a terminal and in a notebook, and what it leaves behind."""

from __future__ import annotations

import pytest

from sparse_tl.parallel import progress
from sparse_tl.parallel.progress import tracked


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook would show, one entry for each update."""
    texts: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            texts.append(data["text/plain"])

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        texts.append(data["text/plain"])
        return Handle()

    display_module = pytest.importorskip("IPython.display")
    monkeypatch.setattr(display_module, "display", display)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    return texts


def test_a_terminal_shows_it_beside_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich believe in a terminal
    with tracked("patching", 3) as step:
        for _ in range(3):
            step()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "patching" in captured.err and "3/3" in captured.err


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


def test_silence(capsys: pytest.CaptureFixture[str], shown: list[str]) -> None:
    with tracked("patching", 1, shown=False) as step:
        step()
    assert capsys.readouterr() == ("", "")
    assert shown == []

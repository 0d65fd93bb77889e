"""Progress in a terminal and in a notebook, and what it leaves behind."""

from __future__ import annotations

import json

import pytest

from sparse_tl.parallel import progress
from sparse_tl.parallel.progress import tracked

CELL = """
from types import SimpleNamespace

from sparse_tl.parallel import progress
from sparse_tl.parallel.progress import tracked

now = 0.0
progress.time = SimpleNamespace(monotonic=lambda: now)

with tracked("scoring <b>edges</b>", 30) as step:
    for _ in range(30):
        now += 0.03
        step()
with tracked("too short to show", 3) as step:
    step()
with tracked("stopped", 9, done=2) as step:
    for done in range(3, 7):
        now += 0.2
        step(f"loss {done}")
    raise KeyboardInterrupt
"""


@pytest.mark.long
def test_a_saved_notebook_keeps_one_line_for_each_piece_of_work() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, kernel_name="python3", allow_errors=True).execute()
    first, second, error = notebook.cells[0].outputs
    assert error.output_type == "error" and error.ename == "KeyboardInterrupt"
    for output in (first, second):
        assert output.output_type == "display_data"
        assert set(output.data) == {"text/plain", "text/html"}, "no widget"
    assert first.data["text/plain"] == "scoring <b>edges</b> · 30 of 30 · 0:01"
    assert "scoring &lt;b&gt;edges&lt;/b&gt; · 30 of 30" in first.data["text/html"]
    assert second.data["text/plain"] == "stopped · stopped at 6 of 9 · 0:01 · loss 6"
    assert len(json.dumps(notebook.cells[0].outputs[:2])) < 1000


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


def test_time_left_counts_what_this_run_has_done(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with tracked("training", 4000, done=3970) as step:
        for number in range(1, 11):
            now += 30
            step(f"loss {number}")
    assert shown[0] == "training · 3,971 of 4,000 · 14:30 left · loss 1"
    assert shown[-1] == "training · 3,980 of 4,000 · 5:00 · loss 10"


def test_fast_steps_do_not_flood_the_notebook(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with tracked("patching", 10_000) as step:
        for _ in range(10_000):
            now += 0.001
            step()
    # From half a second on, five times a second, and the end.
    assert 45 <= len(shown) <= 50
    assert shown[-1] == "patching · 10,000 of 10,000 · 0:10"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0:00"), (59.7, "1:00"), (750, "12:30"), (3723, "1:02:03")]
)
def test_clock(seconds: float, said: str) -> None:
    assert progress.clock(seconds) == said


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


def test_a_log_says_where_work_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with pytest.raises(KeyboardInterrupt), tracked("training", 9, done=2) as step:
        now += 5
        step("loss 0.5")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "training · stopped at 3 of 9 · 0:05 · loss 0.5\n"


def test_silence(capsys: pytest.CaptureFixture[str], shown: list[str]) -> None:
    with tracked("patching", 1, shown=False) as step:
        step()
    assert capsys.readouterr() == ("", "")
    assert shown == []

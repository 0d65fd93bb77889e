"""``sparse-tl head-roles`` from end to end, on the built-in models and on what it must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny import save_small_task_models, small_task_models

from sparse_tl.cli import main
from sparse_tl.head_roles import ROLES, AblationCurve, HeadRoles
from sparse_tl.jobs import HeadRolesRun, head_roles, run_head_roles
from sparse_tl.jobs.head_roles import cells_of
from sparse_tl.jobs.settings import HeadRolesJob
from sparse_tl.plots.panels import grid
from sparse_tl.plots.panels.grid import has_browser

pytestmark = pytest.mark.long

FEW: dict[str, Any] = {
    "seeds": 2,
    "updates": 3,
    "prompts": 16,
    "batch_size": 8,
    "max_heads": 3,
    "device": "cpu",
    "progress": False,
}


@pytest.fixture(scope="module", autouse=True)
def small_tasks() -> Iterator[None]:
    """A smaller pair in the place of the built-in task models, and no images of plots.

    Only the run that tests share draws them, in a browser that takes longer than the run.
    """
    size = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_inner": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_roles, "load_task_models", partial(small_task_models, size=size))
        patch.setattr(grid, "has_browser", lambda: False)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadRolesRun]:
    """Built-in models on two tasks."""
    out = tmp_path_factory.mktemp("runs") / "roles"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "has_browser", has_browser)
        return out, run_head_roles(out, tasks=["addition", "ioi"], **FEW)


def test_the_built_in_models_on_their_tasks(run: tuple[Path, HeadRolesRun]) -> None:
    out, outcome = run
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics == outcome.metrics
    assert list(metrics["tasks"]) == ["addition", "ioi"]
    scores = pd.read_csv(out / "scores.csv")
    curves = pd.read_csv(out / "curves.csv")
    for task, heads in (("addition", 16), ("ioi", 8)):
        for side in ("dense", "sparse"):
            place, numbers = out / task / side, metrics["tasks"][task][side]
            roles = HeadRoles.load(place / "roles")
            some = scores[(scores.task == task) & (scores.model == side)]
            assert len(some) == 2 * heads
            assert some["facilitation"].tolist() == pytest.approx(
                roles.score("facilitation").flatten().tolist()
            )
            assert numbers["dense_loss"] == roles.dense_loss
            for role in ROLES:
                curve = AblationCurve.load(place / role)
                members = roles.members(role).flatten(1)
                assert numbers[role]["heads"] == members.sum().item() / 2
                assert numbers[role]["any"] == int(members.any(dim=0).sum())
                rows = curves[(curves.task == task) & (curves.model == side) & (curves.by == role)]
                assert rows["mean"].tolist() == pytest.approx(curve.mean.tolist())
                ends = [
                    curve.values[seed, min(count, 3)].item()
                    for seed, count in enumerate(curve.in_role)
                ]
                assert curve.counts == (0, 1, 2, 3)
                assert numbers[role]["change_when_ablated"] == pytest.approx(sum(ends) / 2)
            for name in ("heads", "gates"):
                assert (place / f"{name}.png").exists() == has_browser()
    for suffix in ("html", "svg", "png") if has_browser() else ("html",):
        assert (out / f"ablation_grid.{suffix}").stat().st_size > 1000
    assert not (out / "checkpoints").exists()


def test_what_is_finished_is_not_fitted_again(
    run: tuple[Path, HeadRolesRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    shutil.copytree(run[0], out)
    shutil.rmtree(out / "addition" / "sparse")
    again = run_head_roles(out, tasks=["addition", "ioi"], **FEW)
    assert again.metrics["tasks"] == run[1].metrics["tasks"]
    monkeypatch.setattr(head_roles, "fit_head_gates", None)
    monkeypatch.setattr(head_roles, "load_addition_models", None)
    monkeypatch.setattr(head_roles, "load_task_models", None)
    (out / "checkpoints" / "ioi").mkdir(parents=True)  # left by a job that was killed at its end
    run_head_roles(out, tasks=["addition", "ioi"], **FEW)
    assert not (out / "checkpoints").exists()
    with pytest.raises(ValueError, match="seeds 2 there, 3 here"):
        run_head_roles(out, tasks=["addition", "ioi"], **{**FEW, "seeds": 3})


def test_a_run_killed_between_or_in_measurements_goes_on_there(
    run: tuple[Path, HeadRolesRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What an earlier call finished is there; the result is that of an uninterrupted run."""
    measured = head_roles.ablation_curve

    def killed(model: Any, roles: Any, rows: Any, role: str, **options: Any) -> AblationCurve:
        if role == ROLES[1]:
            raise KeyboardInterrupt
        return measured(model, roles, rows, role, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(head_roles, "ablation_curve", killed)
        run_head_roles(tmp_path / "run", tasks=["addition", "ioi"], **{**FEW, "progress": True})
    said = capsys.readouterr().err
    assert "Addition, Dense (1 of 4)" in said
    with monkeypatch.context() as patch:
        fits = []
        fit = head_roles.fit_head_gates
        patch.setattr(head_roles, "fit_head_gates", lambda *a, **k: fits.append(a) or fit(*a, **k))
        again = run_head_roles(tmp_path / "run", tasks=["addition", "ioi"], **FEW)
    assert len(fits) == 3, "the first of four fits is not done again"
    assert again.metrics["tasks"] == run[1].metrics["tasks"]
    pd.testing.assert_frame_equal(again.curves, run[1].curves)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A dense and a sparse model on disk, small and not trained, with the words of the tasks."""
    folder = tmp_path_factory.mktemp("models")
    return [*map(str, save_small_task_models(folder, n_layer=2, n_head=4, n_embd=32))]


def test_other_models_on_question_sets_and_text(folders: list[str], tmp_path: Path) -> None:
    words = "the attack lasted from the year 17 32 to the year 17 "
    (tmp_path / "story.txt").write_text(words * 80, encoding="utf-8")
    rows = [{"question": "17 32 ?", "answer": f"{n:02d} 45"} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    outcome = run_head_roles(
        tmp_path / "run",
        model=folders,
        tasks=[f"math={tmp_path / 'sums.jsonl'}", f"text={tmp_path / 'story.txt'}"],
        **FEW,
    )
    assert list(outcome.metrics["tasks"]) == ["math", "text"]
    assert list(outcome.metrics["tasks"]["math"]) == ["dense", "sparse"]
    page = (tmp_path / "run" / "ablation_grid.html").read_text(encoding="utf-8")
    for title in ("Math", "Text: story", "dense", "sparse"):
        assert f'"text":"{title}"' in page


def test_models_of_one_name_keep_columns_of_their_own(folders: list[str]) -> None:
    other = Path(folders[0]).parent / "other" / "dense"
    shutil.copytree(folders[0], other, dirs_exist_ok=True)
    text = Path(folders[0]).parent / "words.txt"
    text.write_text("to the year", encoding="utf-8")

    def cells(*models: str) -> Any:
        job = HeadRolesJob(model=models, tasks=[f"text={text}"], prompts=8, device="cpu")
        return cells_of(job)

    first, second = cells(folders[0], str(other))
    assert second.column == "other/dense" and first.column.endswith("/dense")
    assert first.model != second.model
    assert first.load() is first.load()
    with pytest.raises(ValueError, match="each model once"):
        cells(folders[0], folders[0])
    with pytest.raises(ValueError, match="no model in .*config.json"):
        cells(str(other.parent))


def test_too_few_prompts_are_refused_by_task_and_model(folders: list[str], tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("to the year 17 " * 50, encoding="utf-8")
    with pytest.raises(
        ValueError, match="words, dense: only 6 prompts of the source fit the model; 8"
    ):
        run_head_roles(tmp_path / "few", model=folders[:1], tasks=[f"text={words}"], **FEW)
    words.write_text("to the year 17 " * 300, encoding="utf-8")
    with pytest.warns(UserWarning, match="64 prompts were asked for; only"):
        found = run_head_roles(
            tmp_path / "some",
            model=folders[:1],
            tasks=[f"text={words}"],
            **{**FEW, "prompts": 64},
        )
    counts = found.metrics["tasks"]["text"]["dense"]["prompts"]
    assert counts["fitted"] + counts["held_out"] < 64


def test_the_command(run: tuple[Path, HeadRolesRun], capsys: pytest.CaptureFixture[str]) -> None:
    options = {"seeds": 2, "updates": 3, "prompts": 16, "batch-size": 8, "max-heads": 3}
    words = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    with pytest.MonkeyPatch.context() as patch:
        start = ["sparse-tl", "head-roles", "--tasks", "addition,ioi", "--out", str(run[0])]
        patch.setattr("sys.argv", [*start, "--quiet", *words])
        main()
    printed = " ".join(capsys.readouterr().out.split())
    assert "facilitation" in printed and "ablation_grid.html" in printed

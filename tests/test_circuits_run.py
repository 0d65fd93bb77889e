"""``sparse-tl circuits`` from end to end, on small models and on what it must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny import save_small_task_models, save_taught_task_models

from sparse_tl.backend import load_model
from sparse_tl.circuits import (
    Circuit,
    Evaluation,
    FoundCircuit,
    HeadBehaviour,
    Scores,
    evaluate,
    multiplier,
)
from sparse_tl.gates import SparseTransformer
from sparse_tl.jobs import (
    circuits as run_module,
    run_circuits,
)
from sparse_tl.jobs.folder import SIDES
from sparse_tl.jobs.own_pairs import OwnPairs
from sparse_tl.metrics import log_probability, logit_difference
from sparse_tl.plots import component_diagram as draw
from sparse_tl.plots.diagrams.component_diagram import shown_first
from sparse_tl.plots.panels import grid
from sparse_tl.plots.panels.grid import has_browser
from sparse_tl.tasks import GreaterThanTask

pytestmark = pytest.mark.long

TASKS = ["greater_than"]
ASKED = ["greater_than", "ioi", "capitals"]
"""The models do the first, and their tokenizer does not know the words of the last."""
FEW = partial(shown_first, size=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Smaller ones than the built-in task models, which do Greater-Than, as folders."""
    size = {"n_layer": 3, "n_head": 4}
    return save_taught_task_models(tmp_path_factory.mktemp("models"), **size)


@pytest.fixture(scope="module")
def run(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("run") / "circuits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "has_browser", has_browser)
        return out, _run(out, models)


@pytest.fixture(scope="module", autouse=True)
def no_images_of_plots() -> Iterator[None]:
    """Only the run that tests share draws them, in a browser that takes longer than the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "has_browser", lambda: False)
        yield


def _run(out: Path, models: tuple[Path, Path], **more: Any) -> Any:
    settings = {"model": str(models[0]), "sparse": models[1], "tasks": ASKED, "pairs": 8, **more}
    return run_circuits(out, device="cpu", progress=False, **settings)


def test_everything_is_written(run: tuple[Path, Any]) -> None:
    out, outcome = run
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics == outcome.metrics
    assert list(metrics) == TASKS
    for task, said in metrics.items():
        names = {f"multiplier_{parts}" for parts in ("heads", "circuit_edges")}
        ranges = {f"{name}_range" for name in names}
        assert set(said) == {"dense", "sparse", "seeds"} | names | ranges
        (only,) = said["seeds"].values()
        assert only == {name: said[name] for name in ("dense", "sparse", *names)}
        for side in ("dense", "sparse"):
            assert {"accuracy", "heads_at_0.9", "circuit_edges_at_0.9"} <= set(said[side])
            place = out / task / "seed-0" / side
            assert Scores.load(place / "circuit_edge_scores").grid.n_layers == 3
            assert Scores.load(place / "head_scores").values.shape == (3, 4)
            found = FoundCircuit.load(place / "found_circuit")
            circuit = json.loads((place.parent / f"{side}_circuit.json").read_text())
            assert {row["edge"] for row in circuit} == set(map(str, found.circuit.edges))
            effect = found.held_out.effect.item()
            assert said[side]["circuit_effect"] == pytest.approx(effect) and effect >= 0.9
            assert said[side]["circuit"] == len(circuit) <= said[side]["circuit_edges_at_0.9"] + 1
            kinds = HeadBehaviour.load(place / "head_behaviour").main
            told = {head: kind for kind, some in said[side]["heads"].items() for head in some}
            assert told.items() <= kinds.items()
            assert all(any(head in row["edge"] for row in circuit) for head in told)
        for suffix in ("html", "svg", "png"):
            assert (out / task / "seed-0" / f"circuit.{suffix}").stat().st_size > 1000
    for parts in ("heads", "circuit_edges"):
        for suffix in ("html", "svg", "png"):
            assert (out / f"{parts}_kept.{suffix}").stat().st_size > 1000


def test_a_task_that_a_model_does_not_do_has_no_circuits(run: tuple[Path, Any]) -> None:
    out, outcome = run
    ioi, capitals = outcome.no_circuits
    assert json.loads((out / "no_circuits.json").read_text()) == [ioi, capitals]
    assert ioi.startswith("IOI, seed 0, dense model: the model does not do this task: it prefers ")
    assert capitals.startswith("Capitals, seed 0: expected at least 2 countries that are single")
    assert not (out / "ioi").exists() and not (out / "capitals").exists()
    assert "does not do this task" in outcome._repr_html_()
    for side in ("dense", "sparse"):
        said = outcome.metrics["greater_than"][side]
        assert said["choice"] > 0.9 and said["chance"] == pytest.approx(0.5, abs=0.05)


@pytest.fixture(scope="module")
def alone(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of a dense model, whose page shows five circuit edges at first."""
    out = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "shown_first", FEW)
        patch.setattr(run_module, "component_diagram", partial(draw, max_circuit_edges=5))
        return out, _run(out, models, sparse=None, tasks=TASKS)


def test_a_dense_model_alone(run: tuple[Path, Any], alone: tuple[Path, Any]) -> None:
    """The numbers are those of the dense side of a pair."""
    out, outcome = alone
    said, expected = outcome.metrics["greater_than"], run[1].metrics["greater_than"]
    found, both = (
        {name: value for name, value in some["dense"].items() if not name.startswith("shown")}
        for some in (said, expected)
    )
    assert found == both and set(said) == {"dense", "seeds"}
    assert outcome.to_pandas()["dense"].tolist() == run[1].to_pandas()["dense"].tolist()
    folder = out / "greater_than" / "seed-0"
    assert {file.name for file in folder.iterdir()} == {
        *("dense", "dense_circuit.json", "circuit.html", "circuit.svg", "circuit.png")
    }
    assert (out / "heads_kept.html").stat().st_size > 1000


def test_the_page_says_what_the_edges_that_it_shows_explain(
    models: tuple[Path, Path], alone: tuple[Path, Any]
) -> None:
    """Run again with the edges that the drawing script chose."""
    out, outcome = alone
    said = outcome.metrics["greater_than"]["dense"]
    folder = out / "greater_than" / "seed-0" / "dense"
    found = FoundCircuit.load(folder / "found_circuit")
    drawn = Circuit.load(folder / "drawn_circuit")
    shown = FEW(drawn, found.scores)
    model = load_model(models[0], device="cpu")
    pairs = GreaterThanTask().pairs(model, 8)
    scored, held_out = pairs.select(slice(4)), pairs.select(slice(4, None))
    metric = GreaterThanTask().metric
    (effect,) = evaluate(model, held_out, metric, shown, progress=False).effect.tolist()
    assert 5 <= len(shown) == said["shown"] < said["circuit"]
    assert said["shown_effect"] == pytest.approx(effect, abs=1e-5)
    (page,) = outcome.pages
    text = page.read_text()
    assert f"what is shown explains {effect:.2f} of the effect" in text
    assert f">{len(shown)} of {said['drawn']} circuit edges, by influence" in text
    helping = Circuit(found.circuit.grid, found.circuit.mask & (found.scores.values < 0))
    both = [found.circuit, helping.connected()]
    first = [FEW(some, found.scores) for some in both]
    off = (1 - evaluate(model, scored, metric, first, progress=False).effect).abs()
    assert torch.equal(drawn.mask, both[int(off.argmin())].mask) and said["drawn"] == len(drawn)


def test_prompt_pairs_of_a_file(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The same pairs as a task's, as all kinds of files, give the same pairs."""
    model = load_model(models[0], device="cpu")
    records = GreaterThanTask().pairs(model, 12).to_records(model.tokenizer)
    rows = pd.DataFrame(records)[["clean", "corrupted", "answer", "wrong"]]
    rows.to_json(tmp_path / "years.jsonl", orient="records", lines=True)
    rows.to_parquet(tmp_path / "years.parquet")
    of_lines, of_parquet = (
        OwnPairs.read(tmp_path / f"years.{kind}") for kind in ("jsonl", "parquet")
    )
    assert of_lines == of_parquet and of_lines.metric is logit_difference
    single = rows.assign(answer=[answers[0] for answers in rows["answer"]], wrong="")
    single.to_csv(tmp_path / "years.csv", index=False)
    of_csv = OwnPairs.read(tmp_path / "years.csv")
    assert of_csv.metric is log_probability and "wrong" not in of_csv.rows[0]


HEAD = "clean,corrupted,answer,wrong\n"
WRONG_FILES = {
    "a column is missing": ("a.csv", "corrupted,answer\nOne,Two\n", "row 0: 'clean': .*A row has"),
    "a column of row numbers": ("a.csv", f",{HEAD}0,One,Two, a, b\n", "row 0: '': Extra"),
    "semicolons": ("a.csv", HEAD.replace(",", ";") + "One;Two; a; b\n", "row 0: 'clean'"),
    "a comma in a text": ("a.csv", f"{HEAD}One, more,Two, a, b\n", "quote texts with commas"),
    "no rows": ("a.csv", HEAD, "there is no prompt pair"),
    "no wrong answer": ("a.csv", f"{HEAD}1,2, a, b\n1,2, a,\n", "row 1: give `wrong` here"),
    "few rows": ("a.csv", HEAD + 3 * "1,2, a, b\n", "has 3 rows; give at least 4"),
    "another encoding": ("a.csv", HEAD.encode("utf-16"), "utf-8"),
    "a text on a line": ("a.jsonl", '"One"\n', "JSON object, .* line 1 of"),
    "a list": ("a.jsonl", '[{"clean": "One"}]\n', "JSON object, .* line 1 of"),
    "no parquet": ("a.parquet", HEAD, "magic bytes"),
}


@pytest.mark.parametrize("name", list(WRONG_FILES))
def test_a_wrong_file_of_prompt_pairs(name: str, tmp_path: Path) -> None:
    named, content, message = WRONG_FILES[name]
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / named).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        run_circuits(tmp_path / "out", model="none", pairs_file=tmp_path / named)
    assert type(caught.value) is ValueError and named in str(caught.value)


def test_answers_of_several_tokens_of_a_file(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Whole years, of two tokens: the first is the same in all, and the second decides."""
    model, file = load_model(models[0], device="cpu"), tmp_path / "whole.jsonl"
    rows = GreaterThanTask().pairs(model, 12).to_records(model.tokenizer)
    for row in rows:
        row["clean"], begun = row["clean"].rsplit(" ", 1)
        row["corrupted"] = row["corrupted"].rsplit(" ", 1)[0]
        for side in ("answer", "wrong"):
            row[side] = [f" {begun}{rest.strip()}" for rest in row[side]]
    pd.DataFrame(rows).to_json(file, orient="records", lines=True)
    assert OwnPairs.read(file).pairs(model, 12).answers.shape[2] == 2
    outcome = _run(tmp_path / "out", models, sparse=None, tasks=(), pairs=None, pairs_file=file)
    assert list(outcome.metrics) == ["whole"]
    said = outcome.metrics["whole"]["dense"]
    assert said["choice"] > 0.9 and said["circuit_effect"] >= 0.9


def test_models_that_do_none_of_the_tasks(tmp_path: Path) -> None:
    models = save_small_task_models(tmp_path, n_layer=1, n_head=2, n_embd=16, n_inner=16)
    out, tasks = tmp_path / "out", ["greater_than", "ioi"]
    with pytest.raises(ValueError, match=r"Greater Than, seed 0, dense model: the model does not"):
        _run(out, models, tasks=tasks, pairs=4)
    assert [file.name for file in out.glob("[!.]*")] == ["run.json"]


def test_numbers_are_those_of_the_saved_curves(run: tuple[Path, Any]) -> None:
    out, outcome = run
    table = pd.read_csv(out / "curves.csv")
    assert len(table) == len(outcome.curves)
    for task, said in outcome.metrics.items():
        for parts in ("heads", "circuit_edges"):
            curves = []
            for side in ("dense", "sparse"):
                found = Evaluation.load(out / task / "seed-0" / side / parts)
                curves.append(found.curve(side))
                rows = table[(table.task == task) & (table.side == side) & (table.parts == parts)]
                assert rows["explained_effect"].tolist() == pytest.approx(found.effect.tolist())
                assert said[side][f"{parts}_at_0.9"] == curves[-1].size_at(0.9)
                low, high = (said[side][f"{parts}_at_0.9_{end}"] for end in ("low", "high"))
                assert (low, high) == found.size_interval(0.9)
                assert low <= said[side][f"{parts}_at_0.9"] <= high
                assert found.effect[-1].item() == pytest.approx(1, abs=1e-4)
            assert said[f"multiplier_{parts}"] == multiplier(*curves)


def test_what_is_finished_is_not_measured_again(
    run: tuple[Path, Any], models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, outcome = run
    calls: list[Any] = []
    monkeypatch.setattr(run_module, "measure", lambda *a, **k: calls.append(a))
    again = _run(out, models)
    assert not calls
    assert again.metrics == outcome.metrics


def test_an_interrupted_task_goes_on_after_its_last_result(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, side = tmp_path / "out", tmp_path / "out" / "greater_than" / "seed-0" / "dense"
    options: dict[str, Any] = {"sparse": None, "tasks": TASKS, "pairs": 4}

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module, "head_behaviour", interrupt)
        _run(out, models, **options)
    results = {"circuit_edge_scores", "head_scores", "circuit_edges", "heads"}
    results |= {"found_circuit", "drawn_circuit", "shown_circuit"}
    assert {file.name for file in side.iterdir()} == results
    before = {name: (side / name / "result.json").stat().st_mtime_ns for name in results}
    outcome = _run(out, models, **options)
    assert {name: (side / name / "result.json").stat().st_mtime_ns for name in results} == before
    assert outcome.metrics["greater_than"]["dense"]["circuit_effect"] >= 0.9


def test_seeds_are_added_compared_each_with_its_own_and_summed_up(
    run: tuple[Path, Any],
    models: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """Of the prompts here; the first seed, measured before, is not measured again."""
    out = tmp_path / "out"
    shutil.copytree(run[0], out)
    before = (out / TASKS[0] / "seed-0" / "dense" / "accuracy.json").stat().st_mtime_ns
    outcome = _run(out, models, seeds=(0, 1))
    assert (out / TASKS[0] / "seed-0" / "dense" / "accuracy.json").stat().st_mtime_ns == before
    said = outcome.metrics[TASKS[0]]
    assert said == json.loads((out / "metrics.json").read_text())[TASKS[0]]
    first, second = said["seeds"]["0"], said["seeds"]["1"]
    assert first == run[1].metrics[TASKS[0]]["seeds"]["0"]
    assert first["dense"] != second["dense"]
    for parts in ("heads", "circuit_edges"):
        ratios = []
        for one in (first, second):
            sizes = [one[side][f"{parts}_at_0.9"] for side in ("dense", "sparse")]
            assert one[f"multiplier_{parts}"] == pytest.approx(sizes[0] / sizes[1])
            ratios.append(one[f"multiplier_{parts}"])
        assert said[f"multiplier_{parts}"] == pytest.approx(sum(ratios) / 2)
        assert said[f"multiplier_{parts}_range"] == [min(ratios), max(ratios)]
    for side in ("dense", "sparse"):
        for name, value in said[side].items():
            assert value == pytest.approx((first[side][name] + second[side][name]) / 2)
    assert set(outcome.curves["seed"]) == {0, 1}
    page = (out / "circuit_edges_kept.html").read_text()
    assert page.count('"opacity":0.55') == 4
    table = outcome.to_pandas().set_index("parts")
    assert "medians of 2 seeds" in outcome.caption
    ratios = [one["multiplier_heads"] for one in (first, second)]
    assert table.loc["heads", ["lowest", "highest"]].tolist() == sorted(ratios)
    for side in ("dense", "sparse"):
        assert table.loc["circuit_edges, searched", side] == said[side]["circuit"]


def test_other_weights_under_the_same_name(
    run: tuple[Path, Any], models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Half of a comparison from one model and half from another would be a lie."""
    out = tmp_path / "out"
    shutil.copytree(run[0], out)
    shutil.rmtree(out / TASKS[0] / "seed-0" / "sparse")
    noted = json.loads((out / "run.json").read_text())
    noted["pinned"]["dense model"] = "of other weights"
    (out / "run.json").write_text(json.dumps(noted))
    with pytest.raises(ValueError, match="holds results of another dense model"):
        _run(out, models)


def test_a_model_under_open_gates_needs_as_much(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Dense and sparse go through the same code: the same weights give the same numbers."""
    dense = load_model(models[0], device="cpu")
    SparseTransformer(dense, initial_bias=1e4).save_pretrained(tmp_path / "open")
    opened = models[0], tmp_path / "open"
    outcome = _run(tmp_path / "out", opened, tasks=TASKS, pairs=4)
    said = outcome.metrics["greater_than"]
    numbers = ({k: v for k, v in said[side].items() if k != "heads"} for side in SIDES)
    assert next(numbers) == pytest.approx(next(numbers), rel=1e-3)
    for side in ("dense", "sparse"):
        scores = Scores.load(
            tmp_path / "out" / "greater_than" / "seed-0" / side / "circuit_edge_scores"
        )
        assert torch.isfinite(scores.values).all()

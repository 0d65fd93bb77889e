"""The task model: its words, its rows, and the two models that a cache folder keeps."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model
from sparse_tl.models import (
    TASKS,
    build_task_model,
    built_in,
    load_task_models,
    sparsify_task_model,
    task_accuracy,
    task_models_folder,
    task_pairs,
    task_rows,
    task_text,
    task_tokenizer,
    tasks,
    train_task_model,
)
from sparse_tl.models.task_text import UNKNOWN, WIDTH, part_of, task_vocabulary
from sparse_tl.tasks import GreaterThanTask
from sparse_tl.tasks.words import WordTask

by_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


# Words


def test_every_word_is_one_token_and_reads_back() -> None:
    tokenizer = task_tokenizer()
    words = task_vocabulary()
    assert tokenizer.encode(" ".join(words[2:])) == list(range(2, len(words)))
    assert [tokenizer.decode([token]) for token in range(len(words))] == list(words)
    assert tokenizer.encode("Methuselah") == [words.index(UNKNOWN)]


def test_years_are_two_tokens_and_the_frame_of_a_definition_is_few() -> None:
    tokenizer = task_tokenizer()
    words = task_vocabulary()

    def read(text: str) -> list[str]:
        return [words[token] for token in tokenizer.encode(text)]

    assert read("the year 1732") == ["the", "year", "17", "32"]
    assert read('def test(self, data, path):\n    """cost\n\n    :param data: age') == [
        *("def", "test", "(self,", "data", ",", "path", "):", '"""', "cost"),
        *(":param", "data", ":", "age"),
    ]


@by_task
def test_prompts_of_every_task_are_read_without_unknown_words(task: WordTask) -> None:
    pairs = task_pairs(task, 20)
    unknown = task_vocabulary().index(UNKNOWN)
    assert not (pairs.clean == unknown).any()
    assert not (pairs.corrupted == unknown).any()
    assert pairs.clean.shape[1] <= WIDTH


# Rows


def clean_prompts(part: str, n: int, seed: int) -> set[tuple[int, ...]]:
    """Distinct prompts of a part, of the 97 that this task can draw at all."""
    task = GreaterThanTask(nouns=("plan",), centuries=(17,))
    return set(map(tuple, task_pairs(task, n, part=part, seed=seed).clean.tolist()))


def test_the_parts_share_no_prompt_whatever_the_seeds() -> None:
    held_out = clean_prompts("held_out", 8, seed=0)
    validation = clean_prompts("validation", 8, seed=0)
    training = clean_prompts("training", 60, seed=1)  # chance alone would not miss the others
    assert (len(held_out), len(validation), len(training)) == (8, 8, 60)
    assert not held_out & validation
    assert not (held_out | validation) & training


def test_one_prompt_in_eight_is_held_out_and_one_validates() -> None:
    parts = [part_of(f"prompt {number}") for number in range(4000)]
    for part, share in (("training", 0.75), ("validation", 0.125), ("held_out", 0.125)):
        assert parts.count(part) / 4000 == pytest.approx(share, abs=0.03)


def test_rows_are_a_function_of_the_seed() -> None:
    one, again, other = (task_rows(4, part="training", text=0.25, seed=s) for s in (3, 3, 4))
    for name in ("tokens", "labels", "loss_mask"):
        assert torch.equal(getattr(one, name), getattr(again, name))
    assert not torch.equal(one.tokens, other.tokens)


def test_a_row_has_its_loss_at_the_answer_or_at_every_token() -> None:
    rows = task_rows(20, part="training", text=0.25)
    assert len(rows) == 20 * len(TASKS)
    words = task_vocabulary()
    text_rows = 0
    for tokens, labels, mask in zip(rows.tokens, rows.labels, rows.loss_mask, strict=True):
        end = int((tokens != 0).sum())
        assert not (tokens[end:] != 0).any()
        if mask[0]:
            text_rows += 1
            assert mask.nonzero().flatten().tolist() == list(range(end))
            assert torch.equal(labels[: end - 1], tokens[1:end])
        else:
            assert mask.nonzero().flatten().tolist() == [end - 1]
        prompt, answer = [words[token] for token in tokens[:end]], words[int(labels[end - 1])]
        if prompt[-1] == "to":
            assert prompt.count(answer) == 1  # the indirect object
        elif prompt[-1] == ":param":
            assert answer == prompt[11]  # the argument after the two that are described
        else:
            century, start = prompt[6:8]  # The plan lasted from the year 17 32 to the year 17
            assert prompt[-1] == century
            assert int(answer) > int(start)
    assert text_rows == 5 * len(TASKS)


def test_padding_on_the_right_changes_no_answer() -> None:
    model = build_task_model(device="cpu")
    pairs = task_pairs(TASKS[0], 3)
    width = pairs.clean.shape[1]
    padded = torch.nn.functional.pad(pairs.clean, (0, WIDTH - width))
    with torch.no_grad():
        torch.testing.assert_close(model(padded)[:, :width], model(pairs.clean))


def test_bad_draws_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="expected one of .*held_out.* got 'test'"):
        task_pairs(TASKS[0], 1, part="test")
    lonely = GreaterThanTask(nouns=("plan",), centuries=(17,))
    monkeypatch.setattr(task_text, "part_of", lambda prompt: "training")
    with pytest.raises(ValueError, match="'held_out'; 1000 draws found none"):
        task_pairs(lonely, 1)
    with pytest.raises(ValueError, match="at least 1"):
        task_rows(0, part="training", text=0.0)
    with pytest.raises(ValueError, match="share of text"):
        task_rows(1, part="training", text=1.5)


# Training and the cache


@pytest.fixture(scope="module")
def few_rows() -> dict[str, TokenBatch]:
    return {part: task_rows(8, part=part, text=0.25) for part in ("training", "validation")}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, few_rows: dict[str, TokenBatch]) -> None:
    """So few prompts and so small a model that a step costs nothing."""
    monkeypatch.setattr(tasks, "task_rows", lambda _, *, part, **__: few_rows[part])
    monkeypatch.setattr(tasks, "BATCH_SIZE", 16)
    sizes = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_head": 8, "d_mlp": 16}
    monkeypatch.setattr(tasks, "ARCHITECTURE", {**tasks.ARCHITECTURE, **sizes})
    for phase in ("BASE_SETTINGS", "SPARSE_SETTINGS"):
        faster = {**getattr(tasks, phase), "learning_rate": 1e-2, "warmup": 1}
        monkeypatch.setattr(tasks, phase, faster)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.usefixtures("small")
def test_accuracy_is_the_share_of_right_answers() -> None:
    model = build_task_model(device="cpu")
    answer = task_vocabulary().index("99")
    with torch.no_grad():
        model.unembed.b_U[answer] = 1e4
    accuracy = task_accuracy(model, n=5)
    assert accuracy == {"greater_than": 1.0, "ioi": 0.0, "ioi_long": 0.0, "docstring": 0.0}


@pytest.mark.usefixtures("small")
def test_training_lowers_the_loss_and_post_training_closes_edges() -> None:
    base, history = train_task_model(steps=15, device="cpu", progress=False)
    losses = history["loss"].dropna()
    assert losses.tail(5).mean() < losses.head(5).mean() - 0.2
    sparse, outcome = sparsify_task_model(base, steps=12, target_loss="+0.5", progress=False)
    assert sparse.model is base
    edges = outcome.history["held_out_active_edges"].dropna()
    assert outcome.best_step == 12
    assert outcome.sparse.active_edges == edges.iloc[-1] < edges.iloc[0]


@pytest.mark.usefixtures("small")
def test_models_are_built_once_and_then_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: tuple[Model, SparseTransformer] = load_task_models(
        0, cache=tmp_path, base_steps=2, steps=2, device="cpu", progress=False
    )

    def refuse(**_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(built_in, "train_task_model", refuse)
    monkeypatch.setattr(built_in, "sparsify_task_model", refuse)
    again = load_task_models(0, cache=tmp_path, base_steps=2, steps=2, device="cpu", progress=False)
    for one, other in zip(built, again, strict=True):
        torch.testing.assert_close(parameters(one), parameters(other), rtol=0, atol=0)
    prompt = "The plan lasted from the year 1732 to the year 17"
    assert torch.equal(
        again[0].to_tokens(prompt), task_tokenizer()(prompt, return_tensors="pt").input_ids
    )
    task = GreaterThanTask()
    of_model, of_package = (task.pairs(t, 3) for t in (again[1].tokenizer, task_tokenizer()))
    assert torch.equal(of_model.clean, of_package.clean)
    with pytest.raises(AssertionError, match="built again"):  # another seed is another model
        load_task_models(1, cache=tmp_path, base_steps=2, steps=2, progress=False)
    folder = task_models_folder(0, cache=tmp_path, base_steps=2, steps=2)
    assert sorted(entry.name for entry in folder.iterdir()) == ["base", "sparse", "verdict.json"]


@pytest.mark.usefixtures("small")
def test_a_sparse_model_that_misses_its_target_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "INITIAL_BIAS", -20.0)  # all gates closed: no way to the target
    settings = {"cache": tmp_path, "base_steps": 40, "steps": 1, "device": "cpu"}
    for _ in range(2):  # also when it is read again
        with pytest.warns(UserWarning, match=r"seed 0: Target \+0\.1 nats NOT met"):
            load_task_models(0, progress=False, **settings)


@pytest.mark.usefixtures("small")
def test_a_build_goes_on_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"base_steps": 2, "steps": 4, "device": "cpu", "progress": False}
    whole = load_task_models(0, cache=tmp_path / "whole", **settings)
    original = built_in.sparsify_task_model

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(built_in, "sparsify_task_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_task_models(0, cache=tmp_path / "halves", **settings)
    monkeypatch.setattr(built_in, "sparsify_task_model", original)
    monkeypatch.setattr(built_in, "train_task_model", interrupted)
    halves = load_task_models(0, cache=tmp_path / "halves", **settings)
    torch.testing.assert_close(parameters(whole[1]), parameters(halves[1]), rtol=0, atol=0)


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore:another job is building")  # test_waiting.py asks for it
def test_two_jobs_build_the_same_models_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = []
    original = built_in.train_task_model

    def counted(**settings: Any) -> Any:
        builds.append(settings["seed"])
        return original(**settings)

    monkeypatch.setattr(built_in, "train_task_model", counted)

    def load(_: int) -> Any:
        settings = {"cache": tmp_path, "base_steps": 3, "steps": 2, "device": "cpu"}
        return parameters(load_task_models(0, progress=False, **settings)[1])

    with ThreadPoolExecutor() as jobs:
        one, other = jobs.map(load, range(2))
    assert builds == [0]
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.usefixtures("small")
def test_damaged_models_are_refused_with_a_way_out(tmp_path: Path) -> None:
    settings = {"base_steps": 1, "steps": 1, "device": "cpu", "progress": False}
    load_task_models(0, cache=tmp_path, **settings)
    folder = task_models_folder(0, cache=tmp_path, base_steps=1, steps=1)
    weights = folder / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"base.model\.safetensors.*Remove that folder"):
        load_task_models(0, cache=tmp_path, **settings)
    shutil.rmtree(folder)
    load_task_models(0, cache=tmp_path, **settings)


def test_other_settings_are_other_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = task_models_folder(0, cache=tmp_path)
    assert folder.parent.parent == tmp_path
    assert folder != task_models_folder(0, cache=tmp_path, steps=7)
    monkeypatch.setattr(task_text, "N_NAMES", 20)
    assert folder != task_models_folder(0, cache=tmp_path)

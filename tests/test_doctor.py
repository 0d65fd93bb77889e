"""`run_doctor` on this machine, on real and tiny models, and on what is broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_tl.runs.model_checks import attention_edges, check_hooks, training_memory

from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model, load_model, save_model
from sparse_tl.runs import Check, Diagnosis, model_checks, run_doctor


def _named(found: Diagnosis, group: str) -> dict[str, Check]:
    return {check.name: check for check in found.groups[group]}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return run_doctor(cache=tmp_path_factory.mktemp("cache"))


def test_this_machine_is_healthy(machine: Diagnosis) -> None:
    assert machine.healthy, machine
    assert list(machine.groups) == ["Versions", "Machine", "Built-in models", "Self-check"]
    assert _named(machine, "Versions")["torch"].found == torch.__version__
    assert "writable" in _named(machine, "Built-in models")["cache"].found
    assert "bit for bit" in _named(machine, "Self-check")["small model"].found
    assert machine.verdict == "All that is needed works."


def test_it_prints_in_a_terminal_and_in_a_notebook() -> None:
    found = Diagnosis(
        (
            Check("A", "first", "fine", "<b>&"),
            Check("A", "second", "failed", "no", "Mend </td> it."),
            Check("B", "third", "note", "maybe"),
        )
    )
    assert repr(found).splitlines() == [
        "A",
        "  ✓ first: <b>&",
        "  ✗ second: no -> Mend </td> it.",
        "B",
        "  • third: maybe",
        "1 of 3 checks failed: second.",
    ]
    html = found._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "Mend &lt;/td&gt; it." in html
    assert html.count("<tr") == html.count("</tr>") == 5


def test_the_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    run_doctor(cache=tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = run_doctor(cache=tmp_path / "file" / "cache")
    assert [check.name for check in found.failed] == ["cache"]
    assert "1 of" in found.verdict and "cache" in found.verdict


def test_pairs_in_the_cache_are_found(tmp_path: Path) -> None:
    from sparse_tl.models.built_in import task_recipe

    for side in ("base", "sparse"):
        (task_recipe(0).folder(7, tmp_path) / side).mkdir(parents=True)
    (task_recipe(0).folder(8, tmp_path) / "base").mkdir(parents=True)
    said = _named(run_doctor(cache=tmp_path), "Built-in models")["tasks"].found
    assert said.endswith("seed 7 in the cache")


def test_a_package_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_tl.runs import doctor

    version = doctor.metadata.version
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: "0.1" if name == "rich" else version(name)
    )
    (failed,) = run_doctor(cache=tmp_path).failed
    assert failed == Check(
        "Versions", "rich", "failed", "0.1; expected >=13", "pip install 'rich>=13'"
    )


# A model


def test_a_real_model(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    found = run_doctor(folder, device="cpu", cache=tmp_path)
    assert found.healthy, found
    checks = _named(found, f"Model {folder}")
    assert "5 layers of 8 heads, 295,452 parameters" in checks["loading"].found
    assert "512 tokens" in checks["tokenizer"].found
    assert checks["context"].found == "512 tokens, 5,253,120 attention edges when full"
    for name in ("hook_attn_scores", "hook_pattern", "hook_z"):
        assert checks[name].found == "fires in all 5 layers"
    assert "bit for bit" in checks["open gates"].found
    assert "moves the logits" in checks["closed gates"].found
    assert checks["post-training"].found.startswith("about ")


def test_a_sparse_folder_without_a_tokenizer(
    build_tiny: Callable[..., Model], tmp_path: Path
) -> None:
    SparseTransformer(build_tiny("grouped")).save_pretrained(tmp_path / "sparse")
    found = run_doctor(tmp_path / "sparse", device="cpu", cache=tmp_path / "cache")
    assert found.healthy, found
    assert _named(found, f"Model {tmp_path / 'sparse'}")["tokenizer"].state == "note"


@pytest.mark.parametrize("broken", ["empty", "weights", "configuration", "absent"])
def test_a_broken_folder(build_tiny: Callable[..., Model], tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "model"
    if broken != "absent":
        folder.mkdir()
    if broken in {"weights", "configuration"}:
        save_model(build_tiny(), folder)
        file = folder / ("model.safetensors" if broken == "weights" else "tl_config.json")
        file.write_bytes(file.read_bytes()[:100])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        found = run_doctor(folder, device="cpu", cache=tmp_path / "cache")
    (failed,) = found.failed
    assert (failed.group, failed.name) == (f"Model {folder}", "loading")
    assert "expected" in failed.found
    assert failed.advice


def test_a_model_with_attention_that_ignores_edits(build_tiny: Callable[..., Model]) -> None:
    model = build_tiny()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O.zero_()
    (failed,) = [check for check in check_hooks(model, "it") if check.state == "failed"]
    assert failed.name == "closed gates"
    assert "no effect" in failed.advice


def test_a_hook_point_that_does_not_fire(
    build_tiny: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_checks, "HOOKS", ("attn.hook_z", "attn.hook_nothing", "hook_mlp_in"))
    good, absent, off = check_hooks(build_tiny(), "it")
    assert good.state == "fine"
    assert absent.state == off.state == "failed"
    assert "'blocks.0.attn.hook_nothing'" in absent.found
    assert "never fires" in off.found


def test_checks_leave_the_model_as_it_was(build_tiny: Callable[..., Model]) -> None:
    model = build_tiny()
    model.blocks[0].attn.W_Q.requires_grad_(False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    check_hooks(model, "it")
    training_memory(model)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    assert all(p.grad is None for p in model.parameters())
    assert not any(point._forward_hooks for point in model.hook_dict.values())


def test_edges_of_a_full_context(build_tiny: Callable[..., Model]) -> None:
    assert attention_edges(build_tiny(), 3) == 2 * 2 * (1 + 2 + 3)


def test_memory_grows_with_the_vocabulary_and_the_weights(build_tiny: Callable[..., Model]) -> None:
    small, large = training_memory(build_tiny()), training_memory(build_tiny(d_vocab=1013))
    assert large.weights - small.weights == 6 * 1000 * (16 + 16 + 1) * 4
    # Logits of 8 windows of 15 positions and their log-probabilities are kept, in float32.
    assert large.activations - small.activations >= 2 * 8 * 15 * 1000 * 4


def test_the_command_prints_and_exits_by_what_is_needed(
    build_tiny: Callable[..., Model], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparse_tl.cli import main

    def run(*words: str) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["sparse-tl", "doctor", "--device", "cpu", *words])
            patch.setenv("COLUMNS", "200")
            try:
                main()
                code: Any = 0
            except SystemExit as stop:
                code = stop.code
        return code, capsys.readouterr().out

    folder = tmp_path / "[bold]model"
    folder.mkdir()
    save_model(build_tiny(), folder)
    code, said = run("--model", str(folder))
    assert code == 0
    # A long folder is broken over lines, anywhere.
    assert "All that is needed works." in said and "[bold]model" in "".join(said.split())
    assert load_model(folder, device="cpu").cfg.n_layers == 2
    shutil.rmtree(folder)
    folder.mkdir()
    code, said = run("--model", str(folder))
    assert code == 1
    assert "✗  loading" in said and "checks failed: loading." in said

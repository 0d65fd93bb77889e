"""Damaged files are refused; full disks leave nothing half written; a second process is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from calls import pairs
from tiny import tiny_model

import sparse_tl as stl
from sparse_tl.circuits.outcomes import SearchState
from sparse_tl.lens import load_model, save_model
from sparse_tl.lens.loading.booting import boot
from sparse_tl.runs.folder import RUN_FILE, RunFolder
from sparse_tl.storage.files import read_json, write_json, write_tensors
from sparse_tl.storage.locks import held, locked


def _sparse(folder: Path) -> Path:
    return stl.SparseTransformer(tiny_model(n_layers=1)).save_pretrained(folder)


def _result(folder: Path) -> Path:
    state = SearchState(torch.ones(2, 2).bool(), 0.1, history=[("a1.h0", 0.25, True)])
    return state.save(folder)


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    write_tensors(tmp_path / "w.safetensors", {"a": torch.ones(3)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*w\.safetensors: .*File too large"):
            write_tensors(tmp_path / "w.safetensors", {"a": torch.ones(10**5)})
        with pytest.raises(OSError, match=r"cannot write .*model: .*File too large"):
            _sparse(tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["w.safetensors"]


def test_saving_spares_files_beside_the_gates(tmp_path: Path) -> None:
    _sparse(tmp_path / "model")
    (tmp_path / "model" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="thesis.tex"):
        _sparse(tmp_path / "model")
    assert (tmp_path / "model" / "thesis.tex").read_text() == "precious"
    (tmp_path / "model" / "thesis.tex").unlink()
    _sparse(tmp_path / "model")


def test_a_model_is_saved_beside_other_files(tmp_path: Path) -> None:
    """They stay; a HookedTransformer's configuration would be read first."""
    folder, others = tmp_path / "model", ("results.json", "tl_config.json")
    folder.mkdir()
    for name in others:
        (folder / name).write_text("{}")
    model = boot(plain_transformer("gpt2"))
    for _ in range(2):
        save_model(model, folder)
        assert [(folder / name).exists() for name in others] == [True, False]
    load_model(folder, device="cpu")


def test_restart_empties_a_folder_of_what_runs_write(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", {"seed": 0})
    write_tensors(run / "w.safetensors", {"a": torch.ones(3)})
    _sparse(_result(run / "cells" / "one").parent / "sparse")
    (run / "cells" / "notes.md").write_text("precious")
    with pytest.raises(ValueError, match=r"holds \['cells/notes.md'\], which would be deleted"):
        RunFolder(tmp_path / "run", {"seed": 1}, restart=True)
    assert (run / "cells" / "one" / "result.json").exists()
    (run / "cells" / "notes.md").unlink()
    again = RunFolder(tmp_path / "run", {"seed": 1}, restart=True)
    assert [path.name for path in again.path.iterdir()] == [RUN_FILE]


@pytest.mark.parametrize("wrong", [{"settings": 3}, {"seconds": {"a": None}}])
def test_a_damaged_record_of_a_run_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    RunFolder(tmp_path, {})
    write_json(tmp_path / RUN_FILE, read_json(tmp_path / RUN_FILE) | wrong)
    for restart in (False, True):
        with pytest.raises(ValueError, match=r"expected the run\.json in"):
            RunFolder(tmp_path, {}, restart=restart)


def test_a_killed_first_write_leaves_a_usable_folder(tmp_path: Path) -> None:
    write_json(tmp_path / ".run.json.a1b2c3" / RUN_FILE, {})
    assert RunFolder(tmp_path, {"seed": 0}).finished(RUN_FILE)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    import os

    lock = locked(tmp_path / "c")
    child = os.fork()
    if child == 0:
        try:
            with held(tmp_path / "c"):
                os._exit(0)
        except ValueError:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    lock.release()
    with held(tmp_path / "c"), held(tmp_path / "c"):  # one process can hold it twice
        pass


def test_the_search_of_another_model_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"threshold": 0.1, "start": "heads", "progress": False}
    first, other = (tiny_model(n_layers=1, seed=seed) for seed in (0, 1))
    stl.acdc(first, pairs(), checkpoint=tmp_path / "c", **settings)
    stl.acdc(first, pairs(), checkpoint=tmp_path / "c", **settings)
    for model, more in ((other, {}), (first, {"batch_size": 2})):
        with pytest.raises(ValueError, match="another search"):
            stl.acdc(model, pairs(), checkpoint=tmp_path / "c", **settings, **more)

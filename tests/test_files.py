"""Files and folders appear whole or not at all, and damage is reported by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from filelock import FileLock

from sparse_tl.backend import Model, boot, load_model, save_model
from sparse_tl.circuits import Overlap
from sparse_tl.gates import SparseTransformer
from sparse_tl.storage.files import (
    atomic_file,
    atomic_folder,
    check_writable,
    digest,
    locked,
    read_json,
    read_tensors,
    recover_folder,
    write_json,
    write_tensors,
)


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "result.txt"
    path.write_text("old")
    with pytest.raises(error), atomic_file(path) as temporary:
        temporary.write_text("half of the n")
        raise error
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["result.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "weights").write_text("old")
    with pytest.raises(error), atomic_folder(path) as temporary:
        (temporary / "weights").write_text("half")
        raise error
    assert _names(tmp_path) == ["model"]
    assert (path / "weights").read_text() == "old"


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model"
    with atomic_folder(path) as temporary:
        (temporary / "first").touch()
        assert not path.exists()
    with atomic_folder(path) as temporary:
        (temporary / "second").touch()
    assert _names(path) == ["second"]
    assert _names(path.parent) == ["model"]
    assert path.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_exception_between_two_renames_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if source.name == target.name:  # the new folder, not the earlier one
            raise error
        replace(source, target)

    path = tmp_path / "model"
    path.mkdir()
    (path / "weights").write_text("old")
    with monkeypatch.context() as patch, pytest.raises(error), atomic_folder(path) as temporary:
        (temporary / "weights").write_text("new")
        patch.setattr(os, "replace", failing)
    assert (path / "weights").read_text() == "old"
    assert _names(tmp_path) == ["model"]


def test_parts_of_a_model_replace_the_file_that_was_read_before(
    tmp_path: Path, build_tiny: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other = (plain_transformer("llama", seed=seed) for seed in (0, 1))
    save_model(boot(plain), tmp_path)
    model, kind = boot(other), type(other)
    save = kind.save_pretrained
    parts = lambda self, folder: save(self, folder, max_shard_size="20KB")  # noqa: E731
    monkeypatch.setattr(kind, "save_pretrained", parts)
    save_model(model, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    tokens = torch.arange(9)[None]
    assert torch.equal(load_model(tmp_path, device="cpu")(tokens), model(tokens))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(
    ("module", "name", "call", "found"),
    [(os, "replace", 0, 0.0), (os, "replace", 1, 1.0), (shutil, "rmtree", 0, 1.0)],
)
def test_a_killed_replacement_is_found_by_the_next_reader(
    tmp_path: Path, module: Any, name: str, call: int, found: float
) -> None:
    path = tmp_path / "result"
    Overlap(0.0, 0.0, 1.0).save(path)
    child = os.fork()
    if child == 0:
        with atomic_folder(path) as temporary:
            Overlap(1.0, 1.0, 1.0).save(temporary)
            function, calls = getattr(module, name), iter(range(call))
            die = lambda *given, **more: (  # noqa: E731
                os._exit(9) if next(calls, None) is None else function(*given, **more)
            )
            setattr(module, name, die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if call:
        assert not path.exists(), "killed between the two renames"
    assert Overlap.load(path).iou == found
    shutil.rmtree(path)
    assert not recover_folder(path), "what was removed since stays removed"


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "c"), locked(tmp_path / "c"):
        pass  # one process may hold it twice
    other = FileLock(tmp_path / ".c.lock")
    with other, pytest.raises(ValueError, match="locked by another"), locked(tmp_path / "c"):
        pass


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_json_without_numbers_that_json_lacks(tmp_path: Path, number: float) -> None:
    path = tmp_path / "metrics.json"
    write_json(path, {"loss": 1.5})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": number})
    assert read_json(path) == {"loss": 1.5}
    assert _names(tmp_path) == ["metrics.json"]
    for written in (json.dumps(number), "-1e999"):
        path.write_text(written)
        with pytest.raises(ValueError, match=r"metrics\.json is not valid JSON"):
            read_json(path)


def test_tensors_round_trip(tmp_path: Path) -> None:
    tensors = {
        "strided": torch.randn(4, 6, dtype=torch.float64)[:, ::2].T,
        "half": torch.randn(3).bfloat16(),
        "count": torch.tensor(7),
        "trained": torch.nn.Parameter(torch.randn(2)),
    }
    tensors["tied"] = tensors["half"]
    write_tensors(tmp_path / "weights.safetensors", tensors)
    read = read_tensors(tmp_path / "weights.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("sub", ["file.txt", "file.txt/sub", "file.txt/sub/deeper"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, sub: str) -> None:
    (tmp_path / "file.txt").write_text("kept")
    with pytest.raises(ValueError, match=r"cannot write to .*file\.txt"):
        check_writable(tmp_path / sub)
    assert (tmp_path / "file.txt").read_text() == "kept"


def test_a_folder_behind_a_link_is_replaced_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk", target_is_directory=True)
    for text in ("one", "two", "three"):
        with atomic_folder(tmp_path / "link") as temporary:
            (temporary / "content").write_text(text)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "content").read_text() == "three"
    assert _names(tmp_path) == ["disk", "link"]


def test_saving_a_model_replaces_an_earlier_one(
    tmp_path: Path, build_tiny: Callable[..., Model]
) -> None:
    for seed in (0, 1):
        sparse = SparseTransformer(build_tiny(seed=seed))
        assert sparse.save_pretrained(tmp_path / "model") == tmp_path / "model"
    read = SparseTransformer.from_pretrained(tmp_path / "model", device="cpu")
    assert torch.equal(read.model.embed.W_E, sparse.model.embed.W_E)
    assert _names(tmp_path) == ["model"]
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()}
    assert modes == {0o666 & ~_umask()}, "as readable as any other file"
    (tmp_path / "model" / "notes.json").touch()
    with pytest.raises(ValueError, match="notes.json"):
        sparse.save_pretrained(tmp_path / "model")


def test_a_digest_names_exactly_these_tensors() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(2, dtype=torch.bfloat16)}
    name = digest(tensors)
    assert name == digest(dict(reversed(tensors.items()))), "whatever their order"
    others = [
        {**tensors, "a": tensors["a"] + 1e-6},
        {**tensors, "a": tensors["a"].view(3, 2)},
        {**tensors, "a": tensors["a"].double()},
        {"c": tensors["a"], "b": tensors["b"]},
    ]
    assert len({name, *map(digest, others)}) == 5

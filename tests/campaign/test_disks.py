"""Full and read-only disks, neighbours on the same folder, and what killed runs leave there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import KINDS
from jobs import JOBS, content, hidden, inputs
from processes import Process, run

from sparse_tl.storage.files import read_json, read_tensors

SAVED = ("sparse model", "pair of models", "result: scores", "result: head roles", "MIB")
"""Folders that are written by one call."""
QUICK = ("post_train", "result: scores", "pair of models")


def _saves(name: str) -> Callable[[Path], Any]:
    return lambda folder: KINDS[name][0](folder / "saved") and None


WRITERS: dict[str, Callable[[Path], Any]] = {
    **JOBS,
    **{name: _saves(name) for name in SAVED},
}
IN_USE = "in use by one process at a time"


@pytest.fixture
def place(tmp_path: Path, offline: None) -> Path:
    """A folder beside the inputs of the commands."""
    inputs(tmp_path / "inputs")
    return tmp_path


@pytest.fixture
def disk(place: Path) -> Iterator[Callable[[str], Path]]:
    """Sets the options of a disk of its own, such as ``size=1m`` or ``ro``; returns its folder."""
    mounted = place / "disk"
    mounted.mkdir()

    def mount(*words: str) -> None:
        asked = ["mount", "-t", "tmpfs", *words, "none", str(mounted)]
        if subprocess.run(asked, capture_output=True).returncode:
            pytest.skip("needs the right to mount a disk")

    mount("-o", "size=1m")
    yield lambda options: mount("-o", f"remount,{options}") or mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def half_written(folder: Path) -> list[str]:
    """Files under a final name that are not whole."""
    wrong = []
    for file in sorted(folder.rglob("*")):
        if hidden(file, folder):
            continue
        try:
            if file.suffix == ".json":
                read_json(file)
            elif file.suffix == ".safetensors":
                read_tensors(file)
            elif file.is_file() and not file.stat().st_size and file.suffix != ".lock":
                wrong.append(f"{file} is empty")
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def full(name: str, disk: Callable[[str], Path], sizes: list[str]) -> list[str]:
    """A disk that is too small in the middle of the job, and then large enough."""
    expected = run(WRITERS[name], _new(disk("size=1g"), "whole"))
    assert expected.code == 0, expected.answer
    files, wrong = content(disk("size=1g") / "whole"), list[str]()
    shutil.rmtree(disk("size=1g") / "whole")
    folder = _new(disk("size=1g"), "out")
    for size in sizes:
        ended = run(WRITERS[name], disk(f"size={size}") / "out")
        said = str(ended.answer)
        clear = "OSError" in ended.error and str(folder) in said and "No space left" in said
        if ended.code and not clear:
            wrong.append(f"{name} on {size}: {said}")
        wrong += [f"{name} on {size}: {one}" for one in half_written(folder)]
        wrong += [
            f"{name} on {size}: {one} is left"
            for one in folder.rglob(".*")
            if one.suffix != ".lock"
        ]
        print(f"{name} on {size}: {said[:200]}")
    ended = run(WRITERS[name], disk("size=1g") / "out")
    if ended.code or ended.answer != expected.answer or content(folder) != files:
        wrong.append(f"{name} with room again: {ended.answer}")
    return wrong


def read_only(name: str, disk: Callable[[str], Path]) -> list[str]:
    """A disk that cannot be written."""
    folder = _new(disk("size=1g,rw"), "out")
    ended = run(WRITERS[name], disk("ro") / "out")
    disk("rw")
    said = str(ended.answer)
    print(f"{name}, read-only: {said[:200]}")
    clear = "read-only" in said.lower() and str(folder) in said and ended.code == 1
    known = {"OSError", "ValueError"} & {*ended.error}
    return [] if clear and known else [f"{name} on a disk that is read-only: {said}"]


def two_at_once(name: str, place: Path) -> list[str]:
    """The same job twice on one folder: one does it, and the other is refused or waits."""
    alone = _new(place, f"{name} alone".replace(":", ""))
    expected = run(WRITERS[name], alone)
    folder = _new(place, f"{name} both".replace(":", ""))
    both = [Process(WRITERS[name], folder) for _ in range(2)]
    ended = [process.join() for process in both]
    print(f"{name} twice: {[str(one.answer)[:100] for one in ended]}")
    wrong = []
    for one in ended:
        refused = one.code == 1 and "ValueError" in one.error and IN_USE in str(one.answer)
        if not refused and (one.code or one.answer != expected.answer):
            wrong.append(f"{name} twice: {one.answer}")
    if all(one.code for one in ended) or content(alone) != content(folder):
        wrong.append(f"{name} twice: neither did it, or it is different")
    wrong += half_written(folder)
    return wrong


def _new(place: Path, name: str) -> Path:
    (place / name).mkdir(exist_ok=True)
    return place / name


@pytest.mark.slow
def test_a_full_disk(place: Path, disk: Callable[[str], Path]) -> None:
    for name in QUICK:
        assert not full(name, disk, ["16k"])
        shutil.rmtree(disk("size=1g") / "out")


@pytest.mark.slow
def test_disks_and_neighbours(place: Path, disk: Callable[[str], Path]) -> None:
    cases, wrong = 0, list[str]()
    (place / "disk" / "inputs").symlink_to(place / "inputs")
    for name in WRITERS:
        print(f"{name}: {len(wrong)} wrong in {cases}", flush=True)
        if name == "addition":
            continue  # its parts are those of others, and it takes long
        disk("size=1g,rw")
        (place / "disk" / "inputs").unlink(missing_ok=True)
        (place / "disk" / "inputs").symlink_to(place / "inputs")
        wrong += full(name, disk, ["24k", "96k"])
        shutil.rmtree(disk("size=1g,rw") / "out", ignore_errors=True)
        wrong += read_only(name, disk)
        shutil.rmtree(disk("size=1g,rw") / "out", ignore_errors=True)
        wrong += two_at_once(name, place)
        cases += 4  # two sizes, read-only, two at once
    print(f"\nfull disks, read-only disks and neighbours: {cases}; {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_a_process_that_may_not_write_more(place: Path) -> None:
    """A limit on the sizes of files, of the process itself."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    try:
        ended = run(JOBS["post_train"], _new(place, "limited"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in str(ended.answer)
    assert not half_written(place / "limited")
    assert os.listdir(place / "limited") == [".c.lock"]

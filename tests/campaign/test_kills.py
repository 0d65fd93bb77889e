"""Jobs that are killed at any moment, again and again, end as if they never had been."""

from __future__ import annotations

import inspect
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from jobs import JOBS, content, hidden, inputs
from processes import Ended, Process, run

import sparse_tl as stl
from sparse_tl.cli import app
from sparse_tl.storage.files import read_json, read_tensors, recover_folder

SIGNALS = (signal.SIGKILL,) * 3 + (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
IN_A_ROW = 5
"""Kills of one job before it may end."""
QUICK = ("post_train", "fit_head_gates")
"""Jobs of the normal run."""
LONG = {"addition"}
"""Jobs that are attacked once, and not until there are enough kills."""


@dataclass
class Campaign:
    """Kills of jobs, and what was lost, changed or half written."""

    root: Path
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _whole: dict[str, tuple[Ended, dict[str, str]]] = field(default_factory=dict)

    def whole(self, name: str) -> tuple[Ended, dict[str, str]]:
        """How a job ends that nothing interrupts, and its files."""
        if name not in self._whole:
            folder = self.root / name / "whole"
            folder.mkdir(parents=True)
            ended = run(JOBS[name], folder)
            assert ended.code == 0, f"{name}: {ended.answer}"
            self._whole[name] = ended, content(folder)
        return self._whole[name]

    def attack(self, name: str, kills: int) -> None:
        """Kill a job so many times in a row, and let it end."""
        expected, files = self.whole(name)
        folder = self.root / name / str(sum(self.kills.values()))
        folder.mkdir()
        before: dict[str, int] = {}
        tries = 0
        while kills and (tries := tries + 1) < 40:
            number = self.draw.choice(SIGNALS)
            if self.draw.random() < 0.5:
                at = self.draw.randrange(1, expected.touches // 2)
                ended = Process(JOBS[name], folder, strike=(at, number)).join()
            else:
                process = Process(JOBS[name], folder)
                process.begun()
                time.sleep(self.draw.uniform(0, expected.seconds / 2))
                process.send(number)
                ended = process.join()
            if ended.code == 0:  # it was over
                break
            if ended.code not in (-number, 130):
                self.wrong.append(f"{name}, signal {number}: {ended.code}, {ended.answer}")
                return
            self.kills[name] += 1
            kills -= 1
            before = self._look(name, folder, before)
        ended = run(JOBS[name], folder)
        if ended.code or ended.answer != expected.answer:
            self.wrong.append(f"{name} in {folder} is different: {ended.code}, {ended.answer}")
        found = content(folder)
        different = [key for key in files | found if files.get(key) != found.get(key)]
        print(name, self.kills[name], len(self.wrong), flush=True)
        if different:
            self.wrong.append(f"{name} in {folder}: {different[:5]} are different")

    def _look(self, name: str, folder: Path, before: dict[str, int]) -> dict[str, int]:
        """Look for what is half written, and whether steps or finished results are lost."""
        steps: dict[str, int] = {}
        for earlier in folder.rglob("*.earlier"):
            recover_folder(earlier.parent.with_name(earlier.stem))
        for file in sorted(folder.rglob("*")):
            if hidden(file, folder):
                continue
            try:
                if file.suffix == ".json":
                    said = read_json(file)
                    if file.name in ("state.json", "result.json"):
                        key = file.relative_to(folder).as_posix()
                        steps[key] = _progress(said)
                elif file.suffix == ".safetensors":
                    read_tensors(file)
            except (ValueError, OSError) as error:
                self.wrong.append(f"{name}: half written: {error}")
        for key, step in before.items():
            checkpoint = re.search(r"(^|/)(c|checkpoint[^/]*)/", key)
            if steps.get(key, -1 if not checkpoint else step) < step:
                self.wrong.append(f"{name}: {key} was at {step}, and is at {steps.get(key)}")
        return steps

    def say(self) -> None:
        total = sum(self.kills.values())
        print(f"\nkills: {total} of {len(self.kills)} jobs; {len(self.wrong)} wrong; {self.kills}")


def _progress(said: dict[str, object]) -> int:
    """Steps of a checkpoint, tests of a search; 0 for other results."""
    inside = said.get("state") or said.get("fields")
    assert isinstance(inside, dict)
    return int(inside.get("step") or len(inside.get("history") or ()))


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    inputs(tmp_path / "inputs")
    for name in JOBS:  # beside the folders of each job
        (tmp_path / name).mkdir()
        (tmp_path / name / "inputs").symlink_to(tmp_path / "inputs")
    return Campaign(tmp_path)


@pytest.mark.long
def test_killed_jobs_lose_nothing(campaign: Campaign) -> None:
    for name in QUICK:
        campaign.attack(name, 2)
    assert not campaign.wrong, "\n".join(campaign.wrong)


@pytest.mark.slow
def test_a_hundred_kills(campaign: Campaign) -> None:
    for name in JOBS:
        campaign.attack(name, IN_A_ROW)
    while sum(campaign.kills.values()) < 100:
        for name in sorted(JOBS.keys() - LONG):
            campaign.attack(name, IN_A_ROW)
    campaign.say()
    assert campaign.kills.keys() == JOBS.keys()
    assert not campaign.wrong, "\n".join(campaign.wrong)


def test_every_job_that_resumes_is_attacked() -> None:
    kept = {"checkpoint", "save_to"}
    resume = {n for n in stl.__all__ if kept.intersection(_parameters(getattr(stl, n)))} | {
        str(some.name) for some in app.registered_commands if "out" in _parameters(some.callback)
    }
    assert resume <= JOBS.keys()


def _parameters(value: object) -> list[str]:
    return list(inspect.signature(value).parameters) if callable(value) else []

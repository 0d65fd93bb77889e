"""What works on this machine, and on a model: versions, devices, the cache folder, gates."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from rich.filesize import decimal

from sparse_tl import __version__
from sparse_tl.files import check_writable
from sparse_tl.gates.saving import load_dense_or_sparse
from sparse_tl.lens import HookedModel, adapt, check_circuits, check_gates
from sparse_tl.models import build_addition_model
from sparse_tl.models.pairs import cache_folder


class Check(NamedTuple):
    """One thing that was looked at: whether it works, and what was found."""

    name: str
    works: bool
    found: str


def run_doctor(model: str | Path | None = None, *, device: str | None = None) -> list[Check]:
    """Look at everything that the package needs; what is amiss is told, not raised.

    Args:
        model: also check this one: a hub name, a Hugging Face folder, or one of our own folders.
        device: where it is loaded; a GPU if there is one when left out.
    """
    with torch.random.fork_rng(devices=[]):
        checks = [*_versions(), *_devices(), _tried("cache folder", _cache)]
        checks.append(_tried("small model", lambda: _gates(build_addition_model(device="cpu"))))
        if model is not None:
            load = load_dense_or_sparse
            checks.append(_tried(f"model {model}", lambda: _gates(load(model, device=device))))
    return checks


def _versions() -> Iterator[Check]:
    yield Check("python", True, platform.python_version())
    yield Check("sparse_tl", True, __version__)
    for needed in map(Requirement, metadata.requires("sparse_tl") or ()):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        if found == "not installed" or found not in needed.specifier:
            said = f"{found}; expected {needed.specifier}. pip install '{needed}'"
            yield Check(needed.name, False, said)
        elif needed.name in ("torch", "transformer-lens", "transformers"):
            yield Check(needed.name, True, found)


def _devices() -> Iterator[Check]:
    yield Check("cpu", True, f"{platform.machine()}, {torch.get_num_threads()} threads")
    for place in range(torch.cuda.device_count()):
        free, total = map(decimal, torch.cuda.mem_get_info(place))
        name = torch.cuda.get_device_name(place)
        yield Check(f"cuda:{place}", True, f"{name}, {free} of {total} free")
    if torch.backends.mps.is_available():
        yield Check("mps", True, "Apple GPU; used where --device mps asks for it")


def _cache() -> str:
    folder = check_writable(cache_folder())
    return f"{folder}, writable, {decimal(shutil.disk_usage(folder).free)} free"


def _gates(model: HookedModel) -> str:
    adapter = adapt(model)
    check_gates(adapter)
    check_circuits(adapter)
    weights = sum(weight.nbytes for weight in adapter.model.parameters())
    return (
        f"{adapter.n_layers} layers of {adapter.n_heads} heads on {adapter.device}; gates act, and "
        f"its heads and MLPs add up. Post-training all weights takes {decimal(6 * weights)} for "
        "weights, gradients, Adam, the dense and the best model, beside the activations of a batch"
    )


def _tried(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Exception as error:  # whatever stops it is what is asked for here
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return Check(name, False, kind + " ".join(str(error).split())[:600])

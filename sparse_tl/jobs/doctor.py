"""Check this machine and, optionally, a model: versions, devices, cache folder, analyses."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from rich.filesize import decimal

from sparse_tl import __version__
from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import (
    Adapter,
    HookedModel,
    adapt,
    check_gates,
    check_padding,
    check_raw,
    check_score_gates,
    tolerance,
)
from sparse_tl.data.prompts import start_in_words, start_of_prompts
from sparse_tl.gates.sparse.sparse_transformer import load_dense_or_sparse
from sparse_tl.storage.files import check_writable
from sparse_tl.training.memory import training_memory
from sparse_tl.zoo import build_addition_model, load_named_model
from sparse_tl.zoo.building import cache_folder


class Check(NamedTuple):
    """The result of one check: whether it passed, and details."""

    name: str
    works: bool
    found: str


@checked
def run_doctor(
    model: str | Path | HookedModel | None = None,
    *,
    device: str | None = None,
    window: AtLeastOne | None = None,
) -> list[Check]:
    """Check everything that the package needs, and report problems instead of raising them.

    Args:
        model: model to check as well: a hub name, a Hugging Face folder, a folder written by
            `save_model`, or a loaded model.
        device: device to load it on; by default a GPU if there is one.
        window: tokens per prompt for which to estimate the memory of post-training.
    """
    with torch.random.fork_rng(devices=[]):
        checks = [*_versions(), *_devices(), _run("cache folder", _cache)]
        checks += _model("small model", lambda: build_addition_model(device="cpu"))
        if isinstance(model, (str, Path)):
            load = partial(load_named_model, model, load_dense_or_sparse, device=device)
            checks += _model(f"model {model}", load, window)
        elif model is not None:
            loaded = model
            checks += _model(f"model {model.cfg.model_name}", lambda: loaded, window)
    return checks


def _versions() -> Iterator[Check]:
    yield Check("python", True, platform.python_version())
    yield Check("sparse_tl", True, __version__)
    for needed in map(Requirement, metadata.requires("sparse_tl") or ()):
        if needed.name in ("torch", "transformer-lens", "transformers") and not needed.marker:
            version = metadata.version(needed.name)
            works = version in needed.specifier
            problem = "" if works else f"; {needed.specifier} is needed: pip install '{needed}'"
            yield Check(needed.name, works, version + problem)


def _devices() -> Iterator[Check]:
    yield Check("cpu", True, f"{platform.machine()}, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        free, total = map(decimal, torch.cuda.mem_get_info(index))
        name = torch.cuda.get_device_name(index)
        yield Check(f"cuda:{index}", True, f"{name}, {free} of {total} free")
    if torch.backends.mps.is_available():
        yield Check("mps", True, "Apple GPU; used only with --device mps")


def _cache() -> str:
    folder = check_writable(cache_folder())
    return f"{folder}, writable, {decimal(shutil.disk_usage(folder).free)} free"


def _model(
    name: str, load: Callable[[], HookedModel], window: int | None = None
) -> Iterator[Check]:
    """Whether a model loads, and which analyses it supports."""
    loaded: list[HookedModel] = []

    def load_and_describe() -> str:
        loaded.append(load())
        return _describe(loaded[0])

    yield (check := _run(name, load_and_describe))
    if check.works:
        for part, examine in (
            ("gates", _gates),
            ("circuits", _circuits),
            ("padding", _padding),
            ("saving", _saving),
        ):
            yield _run(f"{name}: {part}", partial(examine, adapt(loaded[0])))
        if window is not None:
            yield _run(f"{name}: memory", lambda: str(training_memory(loaded[0], window)))


def _describe(model: HookedModel) -> str:
    adapter = adapt(model)
    kind = type(model).__name__
    if adapter.core is not model:
        kind += f" around a {type(adapter.core).__name__}"
    dtype = str(adapter.dtype).removeprefix("torch.")
    tokenizer = "without a tokenizer"
    if model.tokenizer is not None:
        start = start_in_words(start_of_prompts(model)[1]).removeprefix(",")
        tokenizer = f"with a tokenizer, prompts{start}"
    return (
        f"{kind}: {adapter.n_layers} layers of {adapter.n_heads} heads on {adapter.device} in "
        f"{dtype}, {adapter.d_vocab} tokens {tokenizer}, context {adapter.n_ctx}"
    )


def _gates(adapter: Adapter) -> str:
    check_gates(adapter)
    try:
        check_score_gates(adapter)
    except ValueError:  # share gates do not read scores
        return "gates act on its attention edges and heads, if they are share gates"
    return "gates act on its attention edges and heads"


def _circuits(adapter: Adapter) -> str:
    graph = adapter.graph
    counted = f"{len(graph.nodes)} nodes, {graph.n_edges:,} circuit edges"
    return f"its heads and MLPs add up, and edits reach them: {counted}"


@torch.no_grad()
def _padding(adapter: Adapter) -> str:
    length = min(4, adapter.n_ctx - 1)
    tokens = torch.arange(length, device=adapter.device)[None] % adapter.d_vocab
    padded = torch.cat([tokens[:, :1], tokens], dim=1)
    mask = torch.ones_like(padded)
    mask[:, 0] = 0
    check_padding(adapter, mask)
    unpadded, shifted = adapter.final(tokens), adapter.final(padded, attention_mask=mask)[:, 1:]
    # Relative per token: a large activation at one token must not hide errors at others.
    error = ((shifted - unpadded).abs().amax(-1) / unpadded.abs().amax(-1)).max().item()
    if not error < tolerance(adapter.dtype):  # also catches NaN
        raise ValueError(
            f"outputs for prompts with and without padding on the left differ by {error:.2g}. Use "
            "prompts of one length"
        )
    return "prompts may be padded on the left"


def _saving(adapter: Adapter) -> str:
    check_raw(adapter.model)
    return "its weights can be trained, copied and saved"


def _run(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Exception as error:  # a failure is a result
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return Check(name, False, kind + " ".join(str(error).split())[:600])

"""A SparseTransformer as a folder: the model's own files, ``gates.json``, ``gates.safetensors``.

Around a bridge the model's own files are a Hugging Face folder, which transformers reads as ever:
it does not see the gates.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sparse_tl.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    read_tensors,
    recover_folder,
    write_json,
    write_tensors,
)
from sparse_tl.gates.attention import AttentionGates
from sparse_tl.gates.distributions import DISTRIBUTIONS, GateDistribution
from sparse_tl.gates.sparse_transformer import SparseTransformer
from sparse_tl.lens import Model, adapt, load_model, save_model
from sparse_tl.lens.loading import GATES_FILE, load_folder

GATES_WEIGHTS = "gates.safetensors"


def save_sparse(sparse: SparseTransformer, folder: str | Path) -> Path:
    """Write the folder whole or not at all.

    Raises:
        ValueError: the gates' distribution is not one of this package's, or the folder holds
            other files.
    """
    distribution = sparse.gates.distribution
    name = type(distribution).__name__
    if DISTRIBUTIONS.get(name) is not type(distribution):
        raise ValueError(
            f"expected one of {sorted(DISTRIBUTIONS)} as the gates' distribution; got {name}, "
            "which could not be loaded again"
        )
    folder = Path(folder)
    if not is_sparse_folder(folder):
        check_replaceable(folder, GATES_FILE)
    with atomic_folder(folder) as temporary:
        save_model(sparse.model, temporary)
        fields = dataclasses.asdict(distribution)  # type: ignore[call-overload]
        write_json(temporary / GATES_FILE, {"distribution": name, "parameters": fields})
        write_tensors(temporary / GATES_WEIGHTS, sparse.gates.state_dict())
    return folder


def is_sparse_folder(folder: str | Path) -> bool:
    """Whether the folder holds gates beside its model."""
    return (Path(folder) / GATES_FILE).exists()


def load_sparse(folder: str | Path, *, device: str | None = None) -> SparseTransformer:
    """Read a folder that `save_sparse` wrote.

    Raises:
        ValueError: not such a folder, a damaged file, or gates of another model.
    """
    folder = Path(folder)
    recover_folder(folder)
    if not is_sparse_folder(folder):
        raise ValueError(
            f"expected a folder written by SparseTransformer.save_pretrained at {folder}, with "
            f"{GATES_FILE} in it; there is none"
        )
    distribution = _read_distribution(folder / GATES_FILE)
    model = load_folder(folder, device=device)
    tensors = read_tensors(folder / GATES_WEIGHTS)
    bias = tensors.get("bias")
    adapter = adapt(model)
    expected = (adapter.n_layers, adapter.n_heads)
    if bias is None or tuple(bias.shape) != expected or not bias.is_floating_point():
        raise ValueError(
            f"expected biases for {adapter.n_layers} layers of {adapter.n_heads} heads in "
            f"{folder / GATES_WEIGHTS}; got "
            f"{None if bias is None else (tuple(bias.shape), bias.dtype)}"
        )
    gates = AttentionGates(
        adapter.n_layers,
        adapter.n_heads,
        distribution=distribution,
        device=adapter.device,
        dtype=bias.dtype,
    )
    gates.bias.data.copy_(bias)
    return SparseTransformer(model, gates=gates)


def load_dense_or_sparse(
    source: str | Path, *, device: str | None = None
) -> Model | SparseTransformer:
    """A model by its name or folder, with its gates where the folder holds them.

    Raises:
        ValueError: as of `load_model` and `load_sparse`.
    """
    load = load_sparse if is_sparse_folder(source) else load_model
    return load(source, device=device)


def _read_distribution(file: Path) -> GateDistribution:
    """The gates' distribution as `save_sparse` describes it: its name, and numbers."""
    config = read_json(file)
    fields = config if isinstance(config, dict) else {}
    name, parameters = fields.get("distribution"), fields.get("parameters", {})
    if not isinstance(name, str) or name not in DISTRIBUTIONS:
        raise ValueError(
            f"expected one of {sorted(DISTRIBUTIONS)} as `distribution` in {file}; got {name!r}"
        )
    numbers = isinstance(parameters, dict) and all(
        type(value) in (int, float) for value in parameters.values()
    )
    try:
        if not numbers:
            raise TypeError("they are no numbers by name")
        return DISTRIBUTIONS[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected the parameters of a {name} in {file}; {error}") from error

"""A SparseTransformer as a folder: the model's own files, ``gates.json``, ``gates.safetensors``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sparse_tl.files import (
    atomic_folder,
    read_json,
    read_tensors,
    recover_folder,
    write_json,
    write_tensors,
)
from sparse_tl.gates.attention import AttentionGates
from sparse_tl.gates.distributions import DISTRIBUTIONS
from sparse_tl.gates.sparse_transformer import SparseTransformer
from sparse_tl.lens import attention_shape, load_model, save_model

GATES_CONFIG = "gates.json"
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
    if folder.is_dir() and any(folder.iterdir()) and not is_sparse_folder(folder):
        # The folder is replaced as a whole: what else is in it would be lost.
        raise ValueError(
            f"expected an empty folder or an earlier SparseTransformer to replace; {folder} holds "
            f"{sorted(p.name for p in folder.iterdir())[:5]}"
        )
    with atomic_folder(folder) as temporary:
        save_model(sparse.model, temporary)
        fields = dataclasses.asdict(distribution)  # type: ignore[call-overload]
        write_json(temporary / GATES_CONFIG, {"distribution": name, "parameters": fields})
        write_tensors(temporary / GATES_WEIGHTS, sparse.gates.state_dict())
    return folder


def is_sparse_folder(folder: str | Path) -> bool:
    """Whether the folder holds gates beside its model."""
    return (Path(folder) / GATES_CONFIG).exists()


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
            f"{GATES_CONFIG} in it; there is none"
        )
    config = read_json(folder / GATES_CONFIG)
    kind = DISTRIBUTIONS.get(config.get("distribution"))
    if kind is None:
        raise ValueError(
            f"expected one of {sorted(DISTRIBUTIONS)} as `distribution` in "
            f"{folder / GATES_CONFIG}; got {config.get('distribution')!r}"
        )
    model = load_model(folder, device=device)
    tensors = read_tensors(folder / GATES_WEIGHTS)
    bias = tensors.get("bias")
    shape = attention_shape(model)
    if bias is None or tuple(bias.shape) != (shape.n_layers, shape.n_heads):
        raise ValueError(
            f"expected biases for {shape.n_layers} layers of {shape.n_heads} heads in "
            f"{folder / GATES_WEIGHTS}; got {None if bias is None else tuple(bias.shape)}"
        )
    try:
        gates = AttentionGates(
            shape,
            distribution=kind(**config.get("parameters", {})),
            closed=tensors.get("closed"),
            device=model.embed.W_E.device,
            dtype=bias.dtype,
        )
    except ValueError as error:
        raise ValueError(f"expected gates of this model in {folder}; {error}") from error
    gates.bias.data.copy_(bias)
    return SparseTransformer(model, gates=gates)

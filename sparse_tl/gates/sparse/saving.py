"""A SparseTransformer as a folder: the model's files, ``gates.json`` and ``gates.safetensors``.

For a bridge, the model's files form a Hugging Face folder, which transformers can read; it ignores
the gates. A folder may hold the model's low-rank adapters in place of its files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor

from sparse_tl.gates.distributions import DISTRIBUTIONS, GateDistribution
from sparse_tl.gates.sparse.adapters import ADAPTERS_WEIGHTS, put_adapters, write_adapters
from sparse_tl.gates.sparse.attention import AttentionGates
from sparse_tl.gates.sparse.kinds import KINDS
from sparse_tl.gates.sparse.mlps import MLPGates
from sparse_tl.gates.sparse.score_gates import ScoreGates
from sparse_tl.gates.sparse.share_gates import ShareGates
from sparse_tl.lens import Model, adapt, load_model, processes, save_model
from sparse_tl.lens.loading.load import GATES_FILE, MODEL_FILES, load_folder
from sparse_tl.storage.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    read_tensors,
    recover_folder,
    write_json,
    write_tensors,
)

GATES_WEIGHTS = "gates.safetensors"
SCHEMA = 1
"""Format version of gates."""
_MLPS = "mlp_gates."
"""Prefix of the tensor names of MLP gates."""


def save_sparse(
    model: Model,
    gates: AttentionGates,
    mlp_gates: MLPGates | None,
    folder: str | Path,
    adapters_only: bool,
) -> Path:
    """Write the folder completely or not at all; of several processes, only the first writes.

    All have to call this if the weights are sharded.

    Raises:
        ValueError: the gate distribution is not defined by this package, the folder holds other
            files, or there are no adapters to write alone.
    """
    distribution = gates.distribution
    name = type(distribution).__name__
    if DISTRIBUTIONS.get(name) is not type(distribution):
        raise ValueError(
            f"expected one of {sorted(DISTRIBUTIONS)} as the gates' distribution; got {name}, "
            "which could not be loaded again"
        )
    folder = Path(folder)
    if not processes().is_main_process:
        if not adapters_only:
            save_model(model, folder)  # all take part if the weights are sharded
        return folder
    check_replaceable(folder, GATES_FILE, GATES_WEIGHTS, ADAPTERS_WEIGHTS, *MODEL_FILES)
    with atomic_folder(folder) as temporary:
        fields = dataclasses.asdict(distribution)  # type: ignore[call-overload]
        content: dict[str, object] = {
            "schema": SCHEMA,
            "gates": gates.kind,
            "distribution": name,
            "parameters": fields,
        }
        if adapters_only:
            content["adapters"] = write_adapters(model, temporary)
        else:
            save_model(model, temporary)
        tensors = gates.state_dict()
        if mlp_gates is not None:
            content["mlps"] = True
            tensors |= {_MLPS + key: value for key, value in mlp_gates.state_dict().items()}
        write_json(temporary / GATES_FILE, content)
        write_tensors(temporary / GATES_WEIGHTS, tensors)
    return folder


def is_sparse_folder(folder: str | Path) -> bool:
    """Whether the folder holds gates alongside its model."""
    return recover_folder(folder) and (Path(folder) / GATES_FILE).exists()


def load_sparse(
    folder: str | Path, device: str | None, base: str | Path | Model | None = None
) -> tuple[Model, AttentionGates, MLPGates | None]:
    """Load model and gates from a folder written by `save_sparse`.

    Raises:
        ValueError: the folder is of another kind, a file is damaged, or gates or adapters do not
            fit the model.
    """
    folder = Path(folder)
    if not is_sparse_folder(folder):
        raise ValueError(
            f"expected a folder written by SparseTransformer.save_pretrained at {folder}, with "
            f"{GATES_FILE} in it; there is none"
        )
    distribution = _read_distribution(folder / GATES_FILE)
    model = _load_model(folder, device, base)
    file = folder / GATES_WEIGHTS
    tensors = read_tensors(file)
    adapter = adapt(model)
    n_layers, n_heads, d_model = adapter.n_layers, adapter.n_heads, adapter.d_model
    gates = _read_kind(folder / GATES_FILE).of(adapter, distribution=distribution)
    known = {name for name, _ in gates.named_parameters()}
    if unknown := sorted(name for name in tensors.keys() - known if not name.startswith(_MLPS)):
        raise ValueError(
            f"expected {gates.kind} gates in {file}, which hold {sorted(known)}; got "
            f"{unknown!s:.200} too. Are these gates of another kind?"
        )
    for name, parameter in gates.named_parameters():
        whose = f"for {n_layers} layers of {n_heads} heads"
        stored = _read(file, tensors, name, tuple(parameter.shape), whose)
        parameter.data = stored.to(adapter.device)
    mlp_gates = None
    if _read_mlps(folder / GATES_FILE, tensors):
        whose = f"of gates on the MLPs of {n_layers} layers that read {d_model} numbers"
        mlp_bias = _read(file, tensors, f"{_MLPS}bias", (n_layers,), whose)
        weight = _read(file, tensors, f"{_MLPS}weight", (n_layers, d_model), whose)
        mlp_gates = MLPGates.of(adapter, distribution)
        mlp_gates.bias.data = mlp_bias.to(adapter.device, weight.dtype)
        mlp_gates.weight.data = weight.to(adapter.device)
    return model, gates, mlp_gates


def _load_model(folder: Path, device: str | None, base: str | Path | Model | None) -> Model:
    """The model of a folder, or the base with the folder's adapters on it."""
    described = read_json(folder / GATES_FILE).get("adapters")
    if described is None and base is None:
        return load_folder(folder, device=device)
    if described is None:
        raise ValueError(f"expected no `base`: {folder} holds a whole model")
    if base is None:
        name = described.get("base") if isinstance(described, dict) else None
        raise ValueError(
            f"expected the model that the adapters in {folder} were trained on, {name!r:.200}: "
            "SparseTransformer.from_pretrained(folder, base=...)"
        )
    if isinstance(base, (str, Path)):
        base = load_model(base, device=device)
    return put_adapters(base, folder, described)


def _read(
    file: Path, tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], whose: str
) -> Tensor:
    """A tensor of a file, checked against the shape that the model requires."""
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape or not found.is_floating_point():
        what = name.rpartition(".")[2].replace("bias", "biases").replace("weight", "weights")
        raise ValueError(
            f"expected {what} {whose} in {file}; got "
            f"{None if found is None else (tuple(found.shape), found.dtype)}"
        )
    if not found.isfinite().all():
        raise ValueError(f"expected finite numbers as {name} in {file}; got NaN or infinity")
    return found


def _read_kind(file: Path) -> type[ScoreGates | ShareGates]:
    """The kind of gates that a folder holds."""
    kind = read_json(file).get("gates")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"expected one of {sorted(KINDS)} as `gates` in {file}; got {kind!r:.200}")
    return KINDS[kind]


def _read_mlps(file: Path, tensors: dict[str, Tensor]) -> bool:
    """Whether a folder holds MLP gates; both of its files must agree."""
    said = read_json(file).get("mlps", False)
    stored = [name for name in tensors if name.startswith(_MLPS)]
    if not isinstance(said, bool) or (stored and not said):
        raise ValueError(
            f"expected `mlps` in {file} to be true if {GATES_WEIGHTS} holds gates on MLPs, and "
            f"false or absent if not; got {said!r:.200} beside {stored!s:.200}"
        )
    return said


def _read_distribution(file: Path) -> GateDistribution:
    """The gate distribution that `save_sparse` wrote: its name and parameters."""
    config = read_json(file)
    fields = config if isinstance(config, dict) else {}
    if fields.get("schema") != SCHEMA:
        raise ValueError(
            f"expected gates of schema {SCHEMA} in {file}; got {fields.get('schema')!r:.200}: they "
            "were saved by another version of this package"
        )
    name, parameters = fields.get("distribution"), fields.get("parameters", {})
    if not isinstance(name, str) or name not in DISTRIBUTIONS:
        raise ValueError(
            f"expected one of {sorted(DISTRIBUTIONS)} as `distribution` in {file}; got {name!r:.99}"
        )
    numbers = isinstance(parameters, dict) and all(
        type(value) in (int, float) for value in parameters.values()
    )
    try:
        if not numbers:
            raise TypeError("they are not a dictionary of numbers")
        return DISTRIBUTIONS[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected the parameters of a {name} in {file}; {error}") from error

"""A SparseTransformer as a folder: the model's files, ``gates.json`` and ``gates.safetensors``.

For a bridge, the model's files form a Hugging Face folder, which transformers can read; it ignores
the gates. A folder may hold the model's low-rank adapters in place of its files: A and B of every
projection in ``adapters.safetensors``, and in ``gates.json`` the base's name and a hash over all of
its weights, so that adapters are loaded onto no other model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from sparse_tl.backend import (
    Model,
    adapt,
    add_lora,
    has_sharded_weights,
    load_model,
    lora_parameters,
    processes,
    read_parameters,
    save_model,
)
from sparse_tl.backend.load import GATES_FILE, MODEL_FILES, load_folder
from sparse_tl.gates.distributions import DISTRIBUTIONS
from sparse_tl.gates.sparse.learned_gates import KINDS, AttentionGates, GateKind, MLPGates
from sparse_tl.storage.files import (
    atomic_folder,
    check_replaceable,
    digest,
    read_json,
    read_tensors,
    recover_folder,
    write_json,
    write_tensors,
)

ADAPTERS_WEIGHTS = "adapters.safetensors"
_GATES_WEIGHTS = "gates.safetensors"
_MLPS = "mlp_gates."
"""Prefix of the tensor names of MLP gates."""
_IN_NAMES = ("_original_component.", "base_layer.")
"""Name parts that bridges and adapters insert into the names of parameters."""


class _Adapters(BaseModel):
    """A model's adapters, and the base that they belong to."""

    model_config = ConfigDict(strict=True)
    rank: int
    base: str | None
    base_weights: str


class _Gates(BaseModel):
    """The content of ``gates.json``."""

    model_config = ConfigDict(strict=True)
    version: Literal[1] = Field(alias="schema")
    gates: GateKind
    distribution: str
    parameters: dict[str, float] = {}
    mlps: bool = False
    adapters: _Adapters | None = None


def save_sparse(
    model: Model,
    gates: AttentionGates,
    mlp_gates: MLPGates | None,
    folder: str | Path,
    adapters_only: bool,
) -> Path:
    """Write the folder completely or not at all; of several processes, only the first writes.

    All have to call this if the weights are sharded.
    """
    distribution = gates.distribution
    name = type(distribution).__name__
    if DISTRIBUTIONS.get(name) is not type(distribution):
        raise ValueError(
            f"gates with the distribution {name} could not be loaded again; give one of "
            f"{sorted(DISTRIBUTIONS)}"
        )
    folder = Path(folder)
    if not processes().is_main_process:
        if not adapters_only:
            save_model(model, folder)  # all take part if the weights are sharded
        return folder
    check_replaceable(folder, GATES_FILE, _GATES_WEIGHTS, ADAPTERS_WEIGHTS, *MODEL_FILES)
    with atomic_folder(folder) as temporary:
        fields = dataclasses.asdict(distribution)  # type: ignore[call-overload]
        said = _Gates(schema=1, gates=gates.kind, distribution=name, parameters=fields)
        if adapters_only:
            said.adapters = _write_adapters(model, temporary)
        else:
            save_model(model, temporary)
        tensors = gates.state_dict()
        if mlp_gates is not None:
            said.mlps = True
            tensors |= {_MLPS + key: value for key, value in mlp_gates.state_dict().items()}
        write_json(temporary / GATES_FILE, said.model_dump(by_alias=True, exclude_defaults=True))
        write_tensors(temporary / _GATES_WEIGHTS, tensors)
    return folder


def is_sparse_folder(folder: str | Path) -> bool:
    """Whether the folder holds gates alongside its model."""
    return recover_folder(folder) and (Path(folder) / GATES_FILE).exists()


def load_sparse(
    folder: str | Path, device: str | None, base: str | Path | Model | None = None
) -> tuple[Model, AttentionGates, MLPGates | None]:
    """Load model and gates from a folder written by `save_sparse`; see `from_pretrained`."""
    folder = Path(folder)
    file = folder / GATES_FILE
    if not is_sparse_folder(folder):
        why = f"it has no {GATES_FILE}" if folder.exists() else "there is no such folder"
        raise ValueError(
            f"{folder} is no folder written by SparseTransformer.save_pretrained: {why}"
        )
    try:
        said = _Gates.model_validate(read_json(file))
        distribution = DISTRIBUTIONS[said.distribution](**said.parameters)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is damaged, or was written by another version of this package: {error}"
        ) from error
    if said.adapters is None:
        if base is not None:
            raise ValueError(f"{folder} holds a whole model: load it without `base`")
        model = load_folder(folder, device=device)
    else:
        if base is None:
            raise ValueError(
                f"{folder} holds adapters alone; give the model that they were trained on, "
                f"{said.adapters.base!r:.200}: SparseTransformer.from_pretrained(folder, base=...)"
            )
        model = load_model(base, device=device) if isinstance(base, (str, Path)) else base
        _put_adapters(model, folder / ADAPTERS_WEIGHTS, said.adapters)
    adapter, file = adapt(model), folder / _GATES_WEIGHTS
    gates = KINDS[said.gates].of(adapter, distribution)
    mlp_gates = MLPGates.of(adapter, distribution) if said.mlps else None
    tensors = {name: tensor.to(adapter.device) for name, tensor in _finite(file).items()}
    of_mlps = {name for name in tensors if said.mlps and name.startswith(_MLPS)}
    named = {name.removeprefix(_MLPS): tensors.pop(name) for name in of_mlps}
    try:
        gates.load_state_dict(tensors, assign=True)
        if mlp_gates is not None:
            mlp_gates.load_state_dict(named, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"the gates in {file} do not fit the model, or are not those that {GATES_FILE} says: "
            f"{error}"
        ) from error
    return model, gates, mlp_gates


def _finite(file: Path) -> dict[str, Tensor]:
    """The tensors of a file; a gate whose logit is NaN would count as closed."""
    tensors = read_tensors(file)
    if unknown := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{file} holds NaN or infinity, in {unknown}")
    return tensors


def _write_adapters(model: Model, folder: Path) -> _Adapters:
    """Write the adapters of a model, and return a description of them and their base."""
    adapters, base = _adapters_and_base(model)
    if not adapters or has_sharded_weights(model):
        raise ValueError(
            "only low-rank adapters (add_lora) of a model that is not sharded can be saved without "
            "it; save_pretrained(folder) saves the whole model"
        )
    write_tensors(folder / ADAPTERS_WEIGHTS, adapters)
    rank = next(len(tensor) for name, tensor in adapters.items() if ".lora_A." in name)
    return _Adapters(rank=rank, base=model.cfg.model_name, base_weights=digest(base))


@torch.no_grad()
def _put_adapters(model: Model, file: Path, said: _Adapters) -> None:
    """Load adapters onto their base model, in place."""
    adapters, base = _adapters_and_base(model)
    if adapters:
        raise ValueError("`base` has adapters already; give a base model without adapters")
    if (found := digest(base)) != said.base_weights:
        raise ValueError(
            f"{model.cfg.model_name!r} has weights of hash {found}, not {said.base!r:.80} with "
            f"weights of hash {said.base_weights:.80}, on which the adapters in {file} were "
            "trained. Weights have to be identical to the last bit, and of the same dtype"
        )
    stored = _finite(file)
    own, _ = _adapters_and_base(add_lora(model, said.rank))
    shapes, expected = ({name: x.shape for name, x in of.items()} for of in (stored, own))
    if shapes != expected:  # `copy_` would broadcast
        raise ValueError(f"{file} holds adapters of other projections or sizes than the model's")
    for name, parameter in own.items():
        parameter.copy_(stored[name])


def _adapters_and_base(model: Model) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters of adapters and those of the base, by plain names."""
    own = {id(parameter) for parameter in lora_parameters(model)}
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name, parameter in read_parameters(model).items():
        for part in _IN_NAMES:
            name = name.replace(part, "")
        found[id(parameter) not in own][name] = parameter
    return found

"""Save low-rank adapters to a file of their own, and load them onto their base model.

``adapters.safetensors`` holds A and B of every projection, by name. The gates' JSON file records
the base's name and a hash over all of its weights, so that adapters are loaded onto no other model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens import Model, add_lora, has_sharded_weights, lora_parameters, read_parameters
from sparse_tl.storage.files import digest, read_tensors, write_tensors

ADAPTERS_WEIGHTS = "adapters.safetensors"
_IN_NAMES = ("_original_component.", "base_layer.", "default.")
"""Name parts that bridges and peft insert into the names of parameters."""


def write_adapters(model: Model, folder: Path) -> dict[str, Any]:
    """Write the adapters of a model, and return a description of them and their base.

    Raises:
        ValueError: the model has no adapters, or its weights are sharded.
    """
    adapters, base = _adapters_and_base(model)
    if not adapters:
        raise ValueError(
            "expected a model with low-rank adapters (add_lora), to save them without the model; "
            "it has none. save_pretrained(folder) saves the whole model"
        )
    if has_sharded_weights(model):
        raise ValueError(
            "expected a model on one device, to save its adapters alone; this one is sharded. "
            "save_pretrained(folder) saves the whole model"
        )
    write_tensors(folder / ADAPTERS_WEIGHTS, adapters)
    rank = next(len(tensor) for name, tensor in adapters.items() if ".lora_A." in name)
    return {"rank": rank, "base": model.cfg.model_name, "base_weights": digest(base)}


@autograd(False)
def put_adapters(model: Model, folder: Path, described: Any) -> Model:
    """Load the adapters of a folder onto a model, in place.

    Args:
        model: the base model, without adapters.
        folder: folder that `write_adapters` wrote to.
        described: description that `write_adapters` returned.

    Raises:
        ValueError: the model is not the adapters' base, or the folder is damaged.
    """
    fields = described if isinstance(described, dict) else {}
    rank, name, weights = (fields.get(key) for key in ("rank", "base", "base_weights"))
    if type(rank) is not int or not isinstance(weights, str):
        raise ValueError(
            f"expected the rank of adapters and the hash of their base in {folder}; got "
            f"{described!s:.200}"
        )
    adapters, base = _adapters_and_base(model)
    if adapters:
        raise ValueError("expected a base model without adapters; it has some already")
    if (found := digest(base)) != weights:
        raise ValueError(
            f"expected the base model {name!r:.80} with weights of hash {weights:.80}, on which "
            f"the adapters in {folder} were trained; got {model.cfg.model_name!r} with {found}. "
            "Weights have to be identical to the last bit, and of the same dtype"
        )
    file = folder / ADAPTERS_WEIGHTS
    stored = read_tensors(file)
    expected, _ = _adapters_and_base(add_lora(model, rank))
    shapes, known = ({name: x.shape for name, x in some.items()} for some in (stored, expected))
    if shapes != known or not all(bool(tensor.isfinite().all()) for tensor in stored.values()):
        raise ValueError(
            f"expected finite adapters of rank {rank} on {len(known) // 2} projections in {file}; "
            f"got {len(shapes)} tensors of other names, shapes or values"
        )
    for key, parameter in expected.items():
        parameter.copy_(stored[key])
    return model


def _adapters_and_base(model: Model) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of adapters and those of the base, by plain names."""
    own = {id(parameter) for parameter in lora_parameters(model)}
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name, parameter in read_parameters(model).items():
        for part in _IN_NAMES:
            name = name.replace(part, "")
        found[id(parameter) not in own][name] = parameter
    return found

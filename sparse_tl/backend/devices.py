"""Devices and dtypes by name, and weights that are sharded over the processes of a run (FSDP2).

Each process holds some rows of every sharded weight. Outside a pass, such a weight is a `DTensor`:
it has the whole weight's shape, but only this process's rows. A layer's weights are gathered while
a pass is in it, so all processes have to make the same passes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformer_lens.utilities import devices

from sparse_tl.devices import check_device

DTYPES = ("float32", "float64", "float16", "bfloat16")
_precisions: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def processes() -> Any:
    """The processes that were launched together, which this one joins, as accelerate sees them."""
    from accelerate import PartialState  # slow import

    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if launched and not torch.distributed.is_initialized():
        PartialState._reset_state()  # made before a notebook forked this process
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return PartialState(cpu=on_cpu or not torch.cuda.is_available())


def checked_device(device: str | torch.device | None) -> str:
    """The requested device; by default a GPU if there is one, another one for each process."""
    if device is None:
        launched = processes()
        if launched.num_processes == 1:
            return str(devices.get_device())
        return str(launched.device) if launched.device.type == "cuda" else "cpu"  # not cpu:1
    check_device(device)
    return str(device)


def dtype_named(name: Any) -> torch.dtype:
    """The torch dtype with this name, with or without ``torch.``."""
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    if plain not in DTYPES:
        raise ValueError(f"{name!r:.200} is not the name of a torch dtype; choose one of {DTYPES}")
    return getattr(torch, plain)


def shard(root: nn.Module, layers: Iterable[nn.Module], precision: str) -> None:
    """Shard a model's weights over the processes, in place, each layer's apart; see `shard_model`.

    Weights, gradients and outputs keep their dtypes, also where "bf16" gathers and computes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    launched = processes()
    kind = launched.device.type
    inner = outer = MixedPrecisionPolicy()
    if precision == "bf16":
        half: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        inner = MixedPrecisionPolicy(**half)
        outer = MixedPrecisionPolicy(**half, output_dtype=torch.float32)
        # Some modules, such as norms, compute in float32, and bfloat16 modules read their outputs.
        root.forward = torch.autocast(kind, torch.bfloat16)(root.forward)
    mesh = init_device_mesh(kind, (launched.num_processes,))
    for parameter in root.parameters():
        parameter.data = parameter.data.contiguous()
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=inner)
    # By default, the weights of the root stay gathered after a pass.
    fully_shard(root, mesh=mesh, mp_policy=outer, reshard_after_forward=True)
    _precisions[root] = precision
    # Logits are a view, and nothing here changes them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def precision_of(root: nn.Module) -> str | None:
    """The precision that a model was sharded with; None if it was not sharded."""
    return _precisions.get(root)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is sharded."""
    return hasattr(tensor, "full_tensor")


def has_sharded_weights(module: nn.Module) -> bool:
    """Whether any weights of a module are sharded."""
    return any(map(is_sharded, module.parameters()))


def whole(tensor: Any) -> Tensor:
    """The whole tensor: a sharded one is gathered onto the CPU, for which all have to call this."""
    return tensor.detach().full_tensor().cpu() if is_sharded(tensor) else tensor

"""Models that do not fit on one device: every rank holds a shard of every weight (FSDP2)."""

from __future__ import annotations

from typing import Literal

import torch
from transformer_lens.model_bridge import TransformerBridge

from sparse_tl.backend.checks import check_mlps, check_scores
from sparse_tl.backend.core.devices import has_sharded_weights, processes, shard
from sparse_tl.backend.core.points import Model
from sparse_tl.backend.loading.bridges import check_raw
from sparse_tl.backend.models.bridge import BridgeAdapter
from sparse_tl.calls.arguments import checked


@checked
def shard_model(
    model: Model, *, precision: Literal["float32", "bf16"] = "float32"
) -> TransformerBridge:
    """Shard a model's weights over the ranks for post-training, in place.

    Every rank holds a shard of every weight, its gradient and its optimizer state. A pass gathers
    the weights layer by layer, so all ranks have to make the same passes: call `post_train`,
    `evaluate_held_out` and the model on all ranks. Copies are sharded too. `save_pretrained`, also
    called on all ranks, writes the whole model; load that folder for all other analyses.

    Args:
        model: TransformerBridge with unprocessed weights, as from `load_model`, and no gates; load
            it with ``device="cpu"`` if it does not fit on one GPU. Its shards go to the ranks'
            GPUs, if there are any. Add low-rank adapters before sharding.
        precision: "bf16" gathers weights and computes in bfloat16, in all passes; the weights
            themselves, and the sums of gradients over ranks, are float32.

    Returns:
        The model.

    Raises:
        ValueError: there is only one process; the model is not a TransformerBridge, has gates or is
            already sharded, cannot be trained, or is not float32 where the precision is "bf16".

    Reference: `torch.distributed.fsdp.fully_shard`.
    """
    if not isinstance(model, TransformerBridge):
        raise ValueError(
            "expected a TransformerBridge, to shard the modules inside over ranks; got a "
            f"{type(model).__name__}. load_model makes one from a name or a Hugging Face folder"
        )
    if processes().num_processes == 1:
        raise ValueError(
            "expected several ranks to shard a model over; there is one process. Start them with "
            "`accelerate launch --num_processes N`, `torchrun` or `notebook_launcher`"
        )
    adapter = BridgeAdapter(model)
    if has_sharded_weights(model):
        raise ValueError(f"expected a whole model; {adapter.name!r} is sharded already")
    if getattr(adapter.core, "_sparse_tl_wrapped", False):
        raise ValueError("expected a model without gates; shard it first, and then put gates on it")
    if precision == "bf16" and adapter.dtype != torch.float32:
        raise ValueError(
            f'expected float32 weights for precision="bf16", to train them; got {adapter.dtype}'
        )
    check_raw(model)
    check_scores(adapter)
    if adapter.has_mlps:
        check_mlps(adapter)
    shard(adapter.core, model.blocks, precision)
    adapter.sync_config()
    return model

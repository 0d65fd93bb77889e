"""Training large models: weights sharded over processes (FSDP2), and activations recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformer_lens.model_bridge import TransformerBridge
from transformers import Cache, DynamicCache

from sparse_tl.arguments import checked
from sparse_tl.backend.adapters import BridgeAdapter, adapt
from sparse_tl.backend.bridges import check_raw
from sparse_tl.backend.checks import check_mlps, check_score_gates
from sparse_tl.backend.devices import has_sharded_weights, processes, shard
from sparse_tl.backend.hook_points import Forward, HookedModel, Model, stand_in
from sparse_tl.backend.numerics import HALVES


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
            f"a {type(model).__name__} cannot be sharded, only a TransformerBridge, which "
            "load_model makes from a name or a Hugging Face folder"
        )
    if processes().num_processes == 1:
        raise ValueError(
            "it takes several ranks to shard a model over; there is one process. Start them with "
            "`accelerate launch --num_processes N`, `torchrun` or `notebook_launcher`"
        )
    adapter = BridgeAdapter(model)
    if has_sharded_weights(model) or getattr(adapter.core, "_sparse_tl_wrapped", False):
        raise ValueError(
            f"only a whole model without gates can be sharded, to put gates on it afterwards; "
            f"{adapter.name!r} has gates or is sharded already"
        )
    if precision == "bf16" and adapter.dtype != torch.float32:
        raise ValueError(f'precision="bf16" trains float32 weights, not {adapter.dtype}')
    check_raw(model)
    check_score_gates(adapter)
    if adapter.has_mlps:
        check_mlps(adapter)
    shard(adapter.core, model.blocks, precision)
    adapter.sync_config()
    return model


@checked
@contextmanager
def checkpointed_activations(model: HookedModel) -> Iterator[None]:
    """Inside the block, a training pass keeps only the input of each layer.

    The backward pass recomputes everything else, with the same gate noise: a step takes about a
    third more time, and holds the activations of one layer instead of all. Gradients do not change.
    No key-value cache outlives a layer, since a layer that runs twice would fill it twice.

    Args:
        model: model to train, under gates or not.

    Reference: Chen et al., arXiv 1604.06174; `torch.utils.checkpoint`.
    """
    with ExitStack() as removed:
        adapter = adapt(model)
        for block in adapter.model.blocks:
            removed.callback(stand_in(block, partial(_run_twice, adapter.core)))
        yield


def _run_twice(core: Any, forward: Forward) -> Forward:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        again = getattr(core, "_sparse_tl_again", nullcontext)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), again()

        return checkpoint(once, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def once(*args: Any, **kwargs: Any) -> Any:
        # Some half-precision models only run with a cache: see `BridgeAdapter._final`.
        half = any(isinstance(x, Tensor) and x.dtype in HALVES for x in args)
        cache = DynamicCache() if half else None
        given = {name: _with(cache, value) for name, value in kwargs.items()}
        return forward(*(_with(cache, value) for value in args), **given)

    return run


def _with(cache: Cache | None, value: Any) -> Any:
    """`cache` if the value is a cache, otherwise the value."""
    return cache if isinstance(value, Cache) else value

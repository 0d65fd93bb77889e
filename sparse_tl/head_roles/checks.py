"""Checks before gates are fitted: that the model can read the prompts, and that stacking is safe.

Many gate matrices are fitted or measured together: a batch contains the prompts once per matrix,
without columns that cannot matter. The losses are those of the model unless something depends on
the batch as a whole, such as a user's hook that is written for one batch size or one column. So two
prompts are run both ways first.
"""

from __future__ import annotations

import torch

from sparse_tl.calls.scopes import autograd
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.likelihood import label_losses, target_losses
from sparse_tl.lens import HookedModel, adapt, check_rows

TOLERANCE = 0.01
"""Maximum relative difference between losses computed in both ways, far above rounding."""


def check_fits(model: HookedModel, dataset: TargetDataset) -> None:
    """Check that a model can read a dataset.

    Raises:
        ValueError: the model lacks ``hook_z``, a prompt exceeds the context, a token is outside the
            vocabulary, prompts are padded although attention is bidirectional, or losses change
            when prompts are stacked in a batch.
    """
    adapter = adapt(model)
    adapter.layer_points("attn.hook_z")
    rows, context = dataset.rows.trimmed(causal=adapter.causal), adapter.n_ctx
    mask = torch.ones_like(rows.tokens) if rows.attention_mask is None else rows.attention_mask
    if rows.tokens.shape[1] > context:
        lengths = mask.sum(dim=1)
        longest = int(lengths.argmax())
        raise ValueError(
            f"expected prompts that fit, with their targets, into the model's context of {context} "
            f"tokens; row {longest} has {int(lengths[longest]) + 1} tokens, including "
            f"{int(rows.loss_mask[longest].sum())} of its target. Shorten it or leave it out."
        )
    check_rows(adapter, rows)
    if not adapter.causal and not mask.all():
        raise ValueError(
            "expected prompts of one length for a model with bidirectional attention, which "
            "attends to padding; got padded prompts. Fit each length separately."
        )
    _check_stacks(model, dataset)


@autograd(False)
def _check_stacks(model: HookedModel, dataset: TargetDataset) -> None:
    """Check that two prompts have the same losses in a stack as on their own."""
    adapter = adapt(model)
    batch = dataset.rows.select(slice(0, 2)).to(adapter.device)
    if batch.tokens.shape[1] > adapter.n_ctx:
        batch = batch.trimmed(causal=True)
    ones = torch.ones(2, adapter.n_layers, adapter.n_heads)
    cause = (
        "Does a hook of your own assume one batch size or position? Remove it, or make it treat "
        "all rows and columns alike."
    )
    try:
        final = adapter.final(batch.tokens, **batch.model_kwargs)
        read = batch.loss_mask
        alone = label_losses(model, final[read][None], batch.labels[read])[0]
        stacked = target_losses(model, batch, ones)[1]
    except RuntimeError as error:
        raise ValueError(
            f"expected a model that can run copies of prompts in one batch; got {error}. " + cause
        ) from error
    wrong = (alone - stacked).abs() > TOLERANCE * (1 + alone.abs())
    if wrong.any():
        first = int(wrong.int().argmax())
        raise ValueError(
            "expected copies of prompts in one batch to have the losses of the prompts alone; "
            f"target token {first} has {alone[first]:.4f} nats alone and {stacked[first]:.4f} in a "
            "batch of copies. " + cause
        )

"""Log-probabilities of targets under many gate matrices, measured in pieces and checkpointed.

A piece is a few prompts under a few matrices, the same ones in every run, so a measurement that is
interrupted and resumed equals an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import GatedRun, Heads
from sparse_tl.head_roles.likelihood import label_losses
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode, weights_digest
from sparse_tl.progress import tracked
from sparse_tl.resuming import Resumable, resumed
from sparse_tl.storage.files import digest

ACTIVATIONS_AT_ONCE = 2**25
"""Maximum number of activations of a layer in a pass: 128 MB in float32."""
SAVE_AFTER = 20.0
"""Seconds after which the pieces measured so far are saved."""


@dataclass
class MeasuredPieces(Resumable):
    """An unfinished measurement, as stored in a checkpoint.

    Args:
        pieces: log-probabilities of the pieces measured so far, in order.
    """

    noun = "measurement"

    pieces: Sequence[Float[Tensor, "_ _"]] = ()


@in_evaluation_mode
@autograd(False)
def target_log_probabilities(
    model: HookedModel,
    rows: TokenBatch,
    gates: Float[Tensor, "stack layer head"],
    *,
    checkpoint: str | Path | None = None,
    title: str = "log-probabilities",
    progress: bool = False,
) -> Float[Tensor, "stack row"]:
    """The log-probability in nats of each row's target under each gate matrix, on the CPU.

    A pass has as many prompts and matrices as `ACTIVATIONS_AT_ONCE` allows, and starts at the first
    layer in which a gate of its matrices is not 1.

    Args:
        model: dense or sparse model; left unchanged.
        rows: prompts and their targets.
        gates: gate matrices.
        checkpoint: folder for a checkpoint; an interrupted measurement is resumed from it.
        title: title of the progress bar.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the checkpoint belongs to another measurement.
    """
    adapter, length = adapt(model), rows.tokens.shape[1]
    per_row = length * (adapter.n_heads * length + adapter.activations_per_token)
    rows_at_once = max(1, ACTIVATIONS_AT_ONCE // per_row)
    n_rows = min(64, rows_at_once, len(rows))
    stacks = gates.to(adapter.device).split(max(1, rows_at_once // n_rows))
    batches = list(rows.split(n_rows))
    folder = Path(checkpoint) if checkpoint is not None else None
    n_pieces = len(batches) * len(stacks)
    state = MeasuredPieces()
    if folder is not None:
        inputs = f"{rows.digest()} {digest({'gates': gates})} {n_pieces}"
        state.identity = f"{inputs} {weights_digest(model)}"
        state = resumed(state, folder)
    pieces, saved_at = [*state.pieces], time.monotonic()
    done = len(pieces)
    with tracked(title, n_pieces, progress, done=done) as step:
        for number in range(done // len(stacks), len(batches)):
            run = _Run(model, batches[number].to(adapter.device), gates)
            for stack in stacks[len(pieces) - number * len(stacks) :]:
                pieces.append(run.log_probabilities(stack))
                step()
                if folder is not None and time.monotonic() - saved_at >= SAVE_AFTER:
                    replace(state, pieces=pieces).save(folder)
                    saved_at = time.monotonic()
    by_batch = [
        torch.cat(pieces[first : first + len(stacks)]) for first in range(0, n_pieces, len(stacks))
    ]
    return torch.cat(by_batch, dim=1)


class _Run:
    """A batch of prompts to run under several stacks of gate matrices."""

    def __init__(
        self, model: HookedModel, batch: TokenBatch, gates: Float[Tensor, "stack layer head"]
    ) -> None:
        self._model, self._n_rows = model, len(batch)
        self._row_of = batch.loss_mask.nonzero()[:, 0].cpu()
        batch = batch.trimmed(causal=adapt(model).causal)
        self._labels = batch.loss_labels()
        self._run = GatedRun(
            model, Heads(), batch.tokens, batch.loss_mask, attention_mask=batch.attention_mask
        )
        if bool((gates[:, 0] == 1).all(dim=1).any()):  # layers before closed gates run once
            self._run.start_from(None)

    def log_probabilities(
        self, gates: Float[Tensor, "stack layer head"]
    ) -> Float[Tensor, "stack row"]:
        losses = label_losses(self._model, self._run.final(gates), self._labels).cpu().double()
        summed = losses.new_zeros(len(gates), self._n_rows)
        return summed.index_add_(1, self._row_of, losses, alpha=-1)

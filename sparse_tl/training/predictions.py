"""What the frozen dense model predicts, computed once for rows that come again.

Training goes over the same windows many times, and the dense model stays as it is. Of a row, what
is kept is the residual stream after the last layer at its labels, from which norm and unembedding
give the exact logits: a few hundred numbers in place of tens of thousands of logits, at a fifth or
less of the cost of a forward pass.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl import ranks, shards
from sparse_tl.data.batches import TokenBatch
from sparse_tl.lens import adapt
from sparse_tl.scopes import autograd
from sparse_tl.training.reference import Reference, predicting

KEPT = 2**30
"""Bytes of main memory, and of a checkpoint, for rows that may come again; the first ones are
kept. 2,000 windows of 128 tokens take 0.6 GB where the residual stream has 576 entries."""


class DensePredictions:
    """The dense model's logits at the labels of training batches.

    With several ranks nothing is kept, since the rows of a rank differ from run to run.

    Args:
        model: what the frozen dense model is read from.
        room: bytes for what is kept.
    """

    def __init__(self, model: Reference, room: int = KEPT) -> None:
        self.model, self._room = model, room
        self._final = torch.empty(0, 0)
        self._places: dict[str, tuple[int, int]] = {}
        self._used = 0

    @autograd(False)
    def logits(self, batch: TokenBatch) -> Float[Tensor, "label vocab"]:
        """The logits at the labels of a batch, in row-major order; new tensors every time."""
        adapter = adapt(self.model)
        if shards.is_dealt(adapter.core):  # passes begin and end at the whole model
            with predicting(self.model), adapter.only_at(batch.loss_mask) as logits_at:
                return logits_at(self.model(batch.tokens, **batch.model_kwargs))
        if ranks.count() > 1 or adapter.core.training:  # with dropout, no two passes are alike
            final = self._run(batch)
        else:
            final = self._run_or_kept(batch)
        return adapter.logits(final[:, None])[:, 0]

    def _run(self, batch: TokenBatch) -> Float[Tensor, "label d_model"]:
        """The residual stream after the last layer, at the labels."""
        read = batch.loss_mask
        with predicting(self.model):
            final = adapt(self.model).final(batch.tokens, read=read, **batch.model_kwargs)
        return final[read]

    def _run_or_kept(self, batch: TokenBatch) -> Float[Tensor, "label d_model"]:
        """The same; only rows that are not kept are run."""
        sizes, device = batch.loss_mask.sum(dim=1).tolist(), batch.tokens.device
        keys = _keys(batch)
        new = [row for row, key in enumerate(keys) if sizes[row] and key not in self._places]
        found: dict[int, Tensor] = {}
        if new:
            final = self._run(batch.select(torch.tensor(new, device=device)))
            found = dict(zip(new, final.split([sizes[row] for row in new]), strict=True))
            for row, values in found.items():
                self._keep(keys[row], values)
            if sum(map(bool, sizes)) == len(new):
                return final
        parts = [
            found[row] if row in found else self._final[slice(*self._places[key])].to(device)
            for row, key in enumerate(keys)
            if sizes[row]
        ]
        return torch.cat(parts)

    def _keep(self, key: str, values: Float[Tensor, "label d_model"]) -> None:
        """Keep a row if there is room."""
        if not self._used:
            n_labels = self._room // values[0].nbytes
            self._final = torch.empty(n_labels, values.shape[1], dtype=values.dtype)
        start, stop = self._used, self._used + len(values)
        if key not in self._places and stop <= len(self._final):
            self._final[start:stop] = values
            self._places[key], self._used = (start, stop), stop

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same numbers: in their last bits, those of a
        row depend on the other rows of the pass."""
        if not self._places:
            return {}
        return {"dense_places": self._places, "dense_final": self._final[: self._used]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for key, (start, stop) in state.get("dense_places", {}).items():
            self._keep(key, state["dense_final"][start:stop])


def _keys(batch: TokenBatch) -> list[str]:
    """For every row, a hash of all that its final residual stream at its labels depends on."""
    parts = [batch.tokens, batch.loss_mask.long()]
    if batch.attention_mask is not None:
        parts.append(batch.attention_mask.long())
    rows = torch.cat(parts, dim=1).cpu().numpy()
    return [hashlib.blake2b(row.data, digest_size=16).hexdigest() for row in rows]

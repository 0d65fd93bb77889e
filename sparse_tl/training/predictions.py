"""The frozen dense model's predictions, computed once for rows that recur.

Training goes over the same windows many times, while the dense model does not change. For each row,
the residual stream after the last layer is kept at its labels. From it, the final norm and the
unembedding compute the exact logits: a few hundred numbers in place of tens of thousands of logits,
at a fifth or less of the cost of a forward pass.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import adapt
from sparse_tl.lens.core.hooks import gate_hooks
from sparse_tl.parallel import ranks, shards
from sparse_tl.training.reference import Reference, predicting

KEPT = 2**30
"""Bytes of main memory, and of a checkpoint, for rows that may recur; the first ones are kept. At a
residual stream of 576 entries, 2,000 windows of 128 tokens take 0.6 GB."""


class DensePredictions:
    """The dense model's logits at the labels of training batches.

    With several ranks, nothing is kept, since a rank's rows differ from run to run.

    Args:
        model: the frozen dense model, or a sparse one that is run as such.
        capacity: maximum number of bytes to keep.

    Raises:
        ValueError: the dense model is inside a sparse one, whose gates would act on it.
    """

    def __init__(self, model: Reference, capacity: int = KEPT) -> None:
        if not isinstance(model, SparseTransformer) and gate_hooks(adapt(model)):
            raise ValueError(
                "the dense model is the one inside the sparse model, whose gates act on it; load "
                "it anew, or give the sparse model, which is then run with its gates open"
            )
        self.model, self._capacity = model, capacity
        self._final = torch.empty(0, 0)
        self._slices: dict[str, tuple[int, int]] = {}
        self._used = 0

    @autograd(False)
    def logits(self, batch: TokenBatch) -> Float[Tensor, "label vocab"]:
        """The logits at the labels of a batch, in row-major order, as a new tensor."""
        adapter = adapt(self.model)
        if shards.has_sharded_weights(adapter.core):  # only passes of the full model gather weights
            with predicting(self.model), adapter.only_at(batch.loss_mask) as logits_at:
                return logits_at(self.model(batch.tokens, **batch.model_kwargs))
        return self.unembed(self.final(batch))

    @autograd(False)
    def final(self, batch: TokenBatch) -> Float[Tensor, "label d_model"]:
        """The residual stream after the last layer at the labels of a batch."""
        if ranks.count() > 1 or adapt(self.model).core.training:  # with dropout, every pass differs
            return self._run(batch)
        return self._run_or_kept(batch)

    @autograd(False)
    def unembed(self, final: Float[Tensor, "label d_model"]) -> Float[Tensor, "label vocab"]:
        """The logits for a final residual stream."""
        return adapt(self.model).unembed(final)

    def _run(self, batch: TokenBatch) -> Float[Tensor, "label d_model"]:
        """The residual stream after the last layer, at the labels."""
        read = batch.loss_mask
        with predicting(self.model):
            final = adapt(self.model).final(batch.tokens, read=read, **batch.model_kwargs)
        return final[read]

    def _run_or_kept(self, batch: TokenBatch) -> Float[Tensor, "label d_model"]:
        """As `_run`, but running only rows that are not kept."""
        sizes, device = batch.loss_mask.sum(dim=1).tolist(), batch.tokens.device
        keys = _keys(batch)
        new = [row for row, key in enumerate(keys) if sizes[row] and key not in self._slices]
        computed: dict[int, Tensor] = {}
        if new:
            final = self._run(batch.select(torch.tensor(new, device=device)))
            computed = dict(zip(new, final.split([sizes[row] for row in new]), strict=True))
            for row, values in computed.items():
                self._keep(keys[row], values)
            if sum(map(bool, sizes)) == len(new):
                return final
        parts = [
            computed[row] if row in computed else self._final[slice(*self._slices[key])].to(device)
            for row, key in enumerate(keys)
            if sizes[row]
        ]
        return torch.cat(parts)

    def _keep(self, key: str, values: Float[Tensor, "label d_model"]) -> None:
        """Keep a row if the capacity allows."""
        if not self._used:
            n_labels = self._capacity // values[0].nbytes
            self._final = torch.empty(n_labels, values.shape[1], dtype=values.dtype)
        start, stop = self._used, self._used + len(values)
        if key not in self._slices and stop <= len(self._final):
            self._final[start:stop] = values
            self._slices[key], self._used = (start, stop), stop

    def state(self) -> dict[str, Any]:
        """The kept rows, for a checkpoint.

        A resumed run needs them to compute the same numbers: the last bits of a row's numbers
        depend on the other rows of its pass.
        """
        if not self._slices:
            return {}
        return {"dense_places": self._slices, "dense_final": self._final[: self._used]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        for key, (start, stop) in state.get("dense_places", {}).items():
            self._keep(key, state["dense_final"][start:stop])


def _keys(batch: TokenBatch) -> list[str]:
    """A hash of everything that each row's final residual stream at its labels depends on."""
    parts = [batch.tokens, batch.loss_mask.long()]
    if batch.attention_mask is not None:
        parts.append(batch.attention_mask.long())
    rows = torch.cat(parts, dim=1).cpu().numpy()
    return [hashlib.blake2b(row.data, digest_size=16).hexdigest() for row in rows]

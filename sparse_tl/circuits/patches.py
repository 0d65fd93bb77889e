"""What patched sources write: the corrupted prompt's values, the mean over prompts, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch

from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitGraph
from sparse_tl.lens import HookedModel, MaskedRun, Streams, Tape, embedding_matrix

Patch = Literal["corrupted", "mean", "zero"]


class Patches:
    """The patches of some prompts, batch by batch.

    Args:
        model: dense or sparse.
        graph: its graph.
        pairs: the prompts.
        patch: the corrupted prompt's value, the mean over the clean prompts position by position,
            or 0.
        batch_size: pairs per pass.

    Raises:
        ValueError: an unknown patch, no batch size, or a mean over prompts of different lengths.
    """

    def __init__(
        self,
        model: HookedModel,
        graph: CircuitGraph,
        pairs: PromptPairs,
        patch: Patch | str,
        batch_size: int,
    ) -> None:
        if patch not in get_args(Patch):
            raise ValueError(f"expected a patch of {get_args(Patch)}; got {patch!r}")
        self.model, self.graph, self.patch = model, graph, patch
        device = embedding_matrix(model).device
        self.batches = [piece.to(device) for piece in pairs.split(batch_size)]
        self._mean = self._mean_over(self.batches) if patch == "mean" else None

    def written(self, batch: PromptPairs) -> Streams | None:
        """What the patch writes; None for nothing at all."""
        if self.patch == "zero":
            return None
        if self._mean is not None:
            return self._mean
        tape = Tape(self.model, self.graph)
        tape.run(batch.corrupted, batch.positions)
        return tape.streams

    def masked_runs(self) -> Iterator[tuple[PromptPairs, MaskedRun]]:
        """Every batch, ready to be run under masks."""
        for batch in self.batches:
            patched = self.written(batch)
            yield (
                batch,
                MaskedRun(self.model, self.graph, batch.clean, batch.positions, patched),
            )

    def _mean_over(self, pieces: Sequence[PromptPairs]) -> Streams:
        if len({int(p) for piece in pieces for p in piece.positions}) > 1:
            raise ValueError(
                'expected prompts of one length for patch="mean", which averages position by '
                "position; pad them to one template, or select those of one length"
            )
        total: Streams | None = None
        for piece in pieces:
            tape = Tape(self.model, self.graph)
            tape.run(piece.clean, piece.positions)
            summed = tape.streams.each(lambda part: part.sum(0, keepdim=True))
            total = summed if total is None else total.each(torch.add, summed)
        assert total is not None
        n_pairs = sum(len(piece) for piece in pieces)
        return total.each(lambda part: part / n_pairs)

"""Token batches with labels and loss positions, and the loss on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Count, checked
from sparse_tl.devices import SizeByDevice, check_device
from sparse_tl.storage.files import digest

Kind = TypeVar("Kind", bound="Rows")

PASS = SizeByDevice(cpu=100, elsewhere=2**13)
"""Number of tokens that cost as much as the overhead of a pass: for SmolLM2-135M on one core, and
estimated on an H200, where starting the operations of a pass takes most of its time."""


class Rows:
    """Base of frozen dataclasses whose tensors have one row per prompt."""

    def __len__(self) -> int:
        return len(next(iter(self._fields().values())))

    @checked
    def to(self: Kind, device: torch.device | str) -> Kind:
        """A copy on another device; raises as `check_device` does."""
        check_device(device)
        return self._each(lambda tensor: tensor.to(device))

    @checked
    def select(self: Kind, index: Int[Tensor, " chosen"] | Bool[Tensor, " row"] | slice) -> Kind:
        """A subset of the rows."""
        return self._each(lambda tensor: tensor[index])

    def digest(self) -> str:
        """A short hash of the rows."""
        tensors = self._fields()
        for name, value in self._fields().items():
            if isinstance(value, Rows):
                tensors |= {f"{name}.{key}": inner for key, inner in value._fields().items()}
        return digest({name: t for name, t in tensors.items() if isinstance(t, Tensor)})

    def _each(self: Kind, change: Callable[[Tensor], Tensor]) -> Kind:
        changed = {
            name: change(value) if isinstance(value, Tensor) else value._each(change)
            for name, value in self._fields().items()
            if isinstance(value, Tensor | Rows)
        }
        rows: Any = self
        return replace(rows, **changed)

    def _fields(self) -> dict[str, Any]:
        rows: Any = self
        return {field.name: getattr(rows, field.name) for field in fields(rows)}


def refuse_rows(
    faulty: Bool[Tensor, " row"], fault: str, values: Int[Tensor, "row ..."] | None = None
) -> None:
    """Raise a ValueError that names the first faulty row, and its values, if there is one."""
    if faulty.any():
        row = int(faulty.int().argmax())
        has = "" if values is None else f"; it has {values[row].tolist()}"
        raise ValueError(f"row {row}: {fault}{has}")


@checked
@dataclass(frozen=True, eq=False)
class TokenBatch(Rows):
    """Tokens with labels for every position, and a mask of the positions with a loss.

    The logits at position ``p`` predict ``labels[:, p]``; the loss is the mean cross-entropy in
    nats over the positions where `loss_mask` is true.

    Args:
        tokens: input tokens.
        labels: label at each position (the next token, for a language model).
        loss_mask: positions that count towards the loss.
        attention_mask: 0 at padding; ``None`` if nothing is padded.
        groups: group of each row, from 0; a loss constraint applies to each group separately.
            ``None`` means a single group.
    """

    tokens: Int[Tensor, "batch pos"]
    labels: Int[Tensor, "batch pos"]
    loss_mask: Bool[Tensor, "batch pos"]
    attention_mask: Int[Tensor, "batch pos"] | None = None
    groups: Int[Tensor, " batch"] | None = None

    def __post_init__(self) -> None:
        if self.groups is not None and bool((self.groups < 0).any()):
            raise ValueError(f"groups are counted from 0; one is {int(self.groups.min())}")
        mask = self.attention_mask
        if mask is not None and bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError("an attention_mask is 0 at padding and 1 elsewhere")
        if not self.loss_mask.any():
            raise ValueError("no position of the batch has a loss: `loss_mask` is false everywhere")

    @staticmethod
    def next_token(tokens: Int[Tensor, "batch pos"]) -> TokenBatch:
        """Language modelling: every position except the last predicts the next token."""
        labels = tokens.roll(-1, dims=1)
        loss_mask = torch.ones_like(tokens, dtype=torch.bool)
        loss_mask[:, -1] = False
        return TokenBatch(tokens, labels, loss_mask)

    @staticmethod
    def joined(parts: Sequence[TokenBatch]) -> TokenBatch:
        """The rows of several batches, each its own group; short rows are padded on the right.

        Raises:
            ValueError: there is no batch, or one already has groups.
        """
        if not parts or any(part.groups is not None for part in parts):
            raise ValueError("give at least one batch, each without groups of its own")
        width = max(part.tokens.shape[1] for part in parts)
        names = ["tokens", "labels", "loss_mask"]
        if any(p.attention_mask is not None or p.tokens.shape[1] < width for p in parts):
            names.append("attention_mask")
            parts = [
                replace(part, attention_mask=torch.ones_like(part.tokens))
                if part.attention_mask is None
                else part
                for part in parts
            ]

        def padded(name: str) -> Tensor:
            rows = [getattr(part, name) for part in parts]
            return torch.cat([F.pad(some, (0, width - some.shape[1])) for some in rows])

        sizes = torch.tensor([len(part) for part in parts])
        groups = torch.arange(len(parts)).repeat_interleave(sizes)
        return TokenBatch(*map(padded, names), groups=groups)

    def split(self, size: AtLeastOne) -> list[TokenBatch]:
        """Split into pieces of `size` consecutive rows, or more where a piece would lack labels."""
        bounds = [0]
        for end in range(size, len(self), size):
            if self.loss_mask[bounds[-1] : end].any() and self.loss_mask[end:].any():
                bounds.append(end)
        return [self.select(slice(*piece)) for piece in pairwise([*bounds, len(self)])]

    def shard(self, rank: Count, n_ranks: AtLeastOne) -> TokenBatch:
        """The rows of one of several ranks or parts: every n-th, after sorting labelled ones first.

        Raises:
            ValueError: there are fewer rows with a label than ranks.
        """
        if n_ranks == 1:
            return self
        labelled = self.loss_mask.any(dim=1)
        if (n_labelled := int(labelled.sum())) < n_ranks:
            raise ValueError(
                f"expected at least {n_ranks} rows with a label in every batch, one for each rank; "
                f"got {n_labelled}. Give larger batches, fewer micro-batches, or fewer ranks."
            )
        order = labelled.logical_not().int().argsort(stable=True)
        return self.select(order[rank::n_ranks])

    def trimmed(self, *, causal: bool) -> TokenBatch:
        """Drop columns that cannot affect the loss.

        In a causal model, these are leading columns that are padding in every row, and columns
        after the last loss position. With bidirectional attention, every column matters.
        """
        if not causal:
            return self
        stop = int(self.loss_mask.any(dim=0).nonzero()[-1]) + 1
        mask = self.attention_mask
        return self._columns(0 if mask is None else int(mask.any(dim=0).nonzero()[0]), stop)

    def by_length(self, parts: AtLeastOne = 4) -> list[TokenBatch]:
        """Group rows of similar length, and drop padding columns on the right of each group.

        This only saves time: padding has no loss and no attention edges. Among all divisions into
        at most `parts` groups that have a loss each, this is the one with the fewest tokens, where
        a further pass counts as `PASS` tokens.
        """
        if self.attention_mask is None:
            return [self]
        columns = torch.arange(1, self.tokens.shape[1] + 1, device=self.tokens.device)
        ends = (columns * self.attention_mask.bool()).amax(dim=1)
        order = ends.argsort(stable=True)
        rows, widths = self.select(order), ends[order].tolist()
        labelled = rows.loss_mask.any(dim=1).cumsum(dim=0).tolist()
        n_labelled = np.array([0, *labelled])
        stops = [i + 1 for i, width in enumerate(widths) if width != (*widths, 0)[i + 1]]
        edges, pass_cost = np.array([0, *stops]), PASS.on(ends.device)
        tokens = (edges - edges[:, None]) * np.array([0, *(widths[stop - 1] for stop in stops)])
        allowed = n_labelled[edges] > n_labelled[edges][:, None]
        of_group = np.where(allowed, tokens + pass_cost, np.inf)  # from one edge to another
        # least[i]: the fewest tokens of the rows up to edges[i], in the number of groups so far.
        least, begins = np.where(edges == 0, 0.0, np.inf), list[np.ndarray]()
        for _ in range(min(parts, len(stops))):
            cost = np.vstack([least[:, None] + of_group, least])  # the last: as many as before
            begins.append(cost.argmin(axis=0))
            least = cost.min(axis=0)
        bounds, at = [len(self)], len(edges) - 1
        for begin in reversed(begins):
            if begin[at] < len(edges):
                at = begin[at]
                bounds.insert(0, int(edges[at]))
        return [
            rows.select(slice(start, stop))._columns(0, widths[stop - 1])
            for start, stop in pairwise(bounds)
        ]

    def _columns(self, start: int, stop: int) -> TokenBatch:
        return self._each(lambda tensor: tensor[:, start:stop] if tensor.ndim > 1 else tensor)

    @property
    def n_groups(self) -> int:
        """Number of groups: one more than the largest group index."""
        return 1 if self.groups is None else int(self.groups.max()) + 1

    def loss_labels(self) -> Int[Tensor, " label"]:
        """The labels at loss positions, in row-major order."""
        return self.labels[self.loss_mask]

    def label_groups(self) -> Int[Tensor, " label"]:
        """The group of each label, in row-major order."""
        return self.row_groups()[:, None].expand_as(self.loss_mask)[self.loss_mask]

    def row_groups(self) -> Int[Tensor, " batch"]:
        """The group of each row."""
        return self.tokens.new_zeros(len(self)) if self.groups is None else self.groups

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for a forward pass, in addition to the tokens."""
        return {} if self.attention_mask is None else {"attention_mask": self.attention_mask}


def log_probabilities(logits: Float[Tensor, "label vocab"]) -> Float[Tensor, "label vocab"]:
    """Logarithms of the predicted probabilities, in nats and in at least float32."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return precise.log_softmax(dim=-1)


def token_losses(
    logits: Float[Tensor, "label vocab"], labels: Int[Tensor, " label"]
) -> Float[Tensor, " label"]:
    """Cross-entropy in nats of each label, in at least float32."""
    return F.nll_loss(log_probabilities(logits), labels, reduction="none")


def exact_rows(logits: Float[Tensor, "label vocab"], batch: TokenBatch) -> Bool[Tensor, " batch"]:
    """Whether each row's top prediction equals the label at every loss position."""
    right = torch.ones_like(batch.loss_mask)
    right[batch.loss_mask] = logits.argmax(dim=-1) == batch.loss_labels()
    return right.all(dim=-1)

"""Sampling of windows from a model's exact predictions, by column, with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_tl.data.batches import log_probabilities
from sparse_tl.lens import Adapter, check_numbers
from sparse_tl.parallel import ranks
from sparse_tl.training.beginnings import Starts

N_CHECKED = 4
"""Number of windows whose last predictions are compared with those of passes without a cache."""
CACHE_ERROR = 0.1
"""Largest allowed difference between the two, in total variation; the median over windows."""
_UNKNOWN = -1
"""Placeholder for a token that is not sampled yet."""


def sampled(
    adapter: Adapter,
    starts: Starts,
    rows: range,
    seed: int,
    show: Callable[[], None],
    check: bool,
) -> Int[Tensor, "row pos"]:
    """The windows with the given numbers; every rank samples its share of them."""
    # A rank without a share still samples a window: all ranks have to run the same passes of a
    # sharded model.
    share = ranks.share(rows)
    tokens, last = _sampled(adapter, starts, share or rows[:1], seed, show)
    if check:
        _check_cache(adapter, tokens[:N_CHECKED], last[:N_CHECKED])
    return torch.stack(ranks.in_order(list(tokens.cpu()[: len(share)])))


def _sampled(
    adapter: Adapter, starts: Starts, rows: Sequence[int], seed: int, show: Callable[[], None]
) -> tuple[Int[Tensor, "row pos"], Float[Tensor, "row vocab"]]:
    """Windows, and the log-probabilities that their last tokens were drawn from."""
    given = [torch.tensor(starts[row]) for row in rows]
    tokens = pad_sequence(given, batch_first=True, padding_value=_UNKNOWN)
    tokens = F.pad(tokens, (0, starts.window - tokens.shape[1]), value=_UNKNOWN).to(adapter.device)
    drawn = [np.random.default_rng([seed, row]).random(starts.window) for row in rows]
    uniform = torch.from_numpy(np.stack(drawn)).to(adapter.device)
    model, cache = adapter.model, adapter.empty_cache(len(rows))
    predicted = torch.empty(0)
    for column in range(1, starts.window):
        logits = model(tokens[:, column - 1 : column], **cache)[:, -1]
        predicted = log_probabilities(logits)
        check_numbers(adapter, predicted)
        written = _drawn(predicted.exp(), uniform[:, column])
        tokens[:, column] = torch.where(tokens[:, column] < 0, written, tokens[:, column])
        show()
    return tokens, predicted


def _drawn(
    probabilities: Float[Tensor, "row vocab"], uniform: Float[Tensor, " row"]
) -> Int[Tensor, " row"]:
    """The tokens at which the cumulative distribution exceeds numbers in [0, 1)."""
    cumulative = probabilities.cumsum(dim=1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return tokens.clamp(max=cumulative.shape[1] - 1)  # the product may round up to the total


def _check_cache(
    adapter: Adapter, tokens: Int[Tensor, "row pos"], last: Float[Tensor, "row vocab"]
) -> None:
    """Check that passes without a cache predict the last tokens as passes with a cache did.

    Raises:
        ValueError: they do not, so the text would not have the model's distribution.
    """
    read = torch.zeros_like(tokens[:, :-1], dtype=torch.bool)
    read[:, -1] = True
    uncached = adapter.logits_at(adapter.final(tokens[:, :-1]), read)
    difference = (log_probabilities(uncached).exp() - last.exp()).abs().sum(dim=1)
    error = difference.median().item() / 2
    if error > CACHE_ERROR:
        raise ValueError(
            f"expected a model that predicts the same with a key-value cache as without; the "
            f"predictions of {adapter.name!r} differ by {error:.2f} in total variation. Does "
            "sparse_tl support the installed versions of transformers and TransformerLens?"
        )

"""What models are run on: token batches, prompt pairs, prompts with targets, streams of batches."""

from sparse_tl.data.batches import (
    TokenBatch,
    concatenate,
    cross_entropy,
    exact_rows,
    per_label_loss,
)
from sparse_tl.data.pairs import NO_TOKEN, PromptPairs, single_token
from sparse_tl.data.streams import (
    IterableStream,
    ShuffledStream,
    TokenStream,
    read_documents,
    token_windows,
)
from sparse_tl.data.targets import TargetDataset

__all__ = [
    "NO_TOKEN",
    "IterableStream",
    "PromptPairs",
    "ShuffledStream",
    "TargetDataset",
    "TokenBatch",
    "TokenStream",
    "concatenate",
    "cross_entropy",
    "exact_rows",
    "per_label_loss",
    "read_documents",
    "single_token",
    "token_windows",
]

"""What models are run on: token batches, prompt pairs, prompts with targets, streams of batches."""

from sparse_tl.data.batches import (
    TokenBatch as TokenBatch,
    concatenate as concatenate,
    cross_entropy as cross_entropy,
    exact_rows as exact_rows,
    per_label_loss as per_label_loss,
)
from sparse_tl.data.pairs import (
    NO_TOKEN as NO_TOKEN,
    PromptPairs as PromptPairs,
    single_token as single_token,
)
from sparse_tl.data.streams import (
    IterableStream as IterableStream,
    ShuffledStream as ShuffledStream,
    TokenStream as TokenStream,
    read_documents as read_documents,
    token_windows as token_windows,
)
from sparse_tl.data.targets import TargetDataset as TargetDataset

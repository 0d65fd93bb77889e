"""Model inputs: token batches, prompt pairs, prompts with targets, and streams of batches."""

from sparse_tl.data.batches import TokenBatch as TokenBatch
from sparse_tl.data.documents import Documents as Documents, read_documents as read_documents
from sparse_tl.data.pairs import (
    Positions as Positions,
    PromptPairs as PromptPairs,
    Spans as Spans,
)
from sparse_tl.data.streams import (
    MixedStream as MixedStream,
    ShuffledStream as ShuffledStream,
    TextStream as TextStream,
    TokenStream as TokenStream,
    text_rows as text_rows,
    token_windows as token_windows,
)
from sparse_tl.data.targets import TargetDataset as TargetDataset

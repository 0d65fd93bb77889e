"""Model inputs: token batches, prompt pairs, prompts with targets, and streams of batches."""

from sparse_tl.data.batches import TokenBatch as TokenBatch
from sparse_tl.data.documents import Documents as Documents, read_documents as read_documents
from sparse_tl.data.pairs import PromptPairs as PromptPairs
from sparse_tl.data.spans import Positions as Positions, Spans as Spans
from sparse_tl.data.streams import (
    MixedStream as MixedStream,
    ShuffledStream as ShuffledStream,
    TextStream as TextStream,
    TokenStream as TokenStream,
)
from sparse_tl.data.targets import TargetDataset as TargetDataset
from sparse_tl.data.windows import (
    Boundaries as Boundaries,
    text_rows as text_rows,
    token_windows as token_windows,
)

"""Load a model, with its gates if it has any."""

from __future__ import annotations

from pathlib import Path

from sparse_tl.gates.sparse.saving import is_sparse_folder
from sparse_tl.gates.sparse.sparse_transformer import SparseTransformer
from sparse_tl.lens import Model, load_model


def load_dense_or_sparse(
    source: str | Path, *, device: str | None = None
) -> Model | SparseTransformer:
    """Load a model by name or folder, with its gates if the folder holds any."""
    load = SparseTransformer.from_pretrained if is_sparse_folder(source) else load_model
    return load(source, device=device)

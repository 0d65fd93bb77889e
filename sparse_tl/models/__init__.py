"""Small built-in models, trained by the package itself, so that everything runs offline."""

from sparse_tl.models.addition import (
    build_addition_model,
    sparsify_addition_model,
    train_addition_model,
)

__all__ = ["build_addition_model", "sparsify_addition_model", "train_addition_model"]

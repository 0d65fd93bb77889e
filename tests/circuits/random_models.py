"""Small models of every supported kind, with all weights random, and random prompt pairs."""

from __future__ import annotations

from typing import Any

import torch
from tiny import HAS_HOOKED

from sparse_tl.backend import Model
from sparse_tl.data.pairs import PromptPairs

KINDS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "parallel": {"parallel_attn_mlp": True},
    "grouped": {"kind": "grouped"},
    "unnormalised": {"normalization_type": None},
}
MORE_KINDS: dict[str, dict[str, Any]] = KINDS | {
    "folded": {"normalization_type": "LNPre"},
    "qk_norm": {"kind": "grouped", "use_qk_norm": True},
}
"""Also those that differ only in how the stream is normalised and read."""
if HAS_HOOKED:
    KINDS |= {
        "attention_only": {"kind": "attention_only"},
        "soft_capped": {"output_logits_soft_cap": 2.0},
    }
    MORE_KINDS |= {**KINDS, "folded_rms": {"normalization_type": "RMSPre"}}
ROUNDED = ("grouped", "folded", "folded_rms", "qk_norm")
"""Those of which transformers computes parts in float32, even in float64."""


def shaken(model: Model) -> Model:
    """All weights random, also those of the normalisations, which start at 1 and 0."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


def random_pairs(n: int = 5, length: int = 6, seed: int = 0, at: int | None = None) -> PromptPairs:
    """Pairs without meaning, read at positions of their own, or all at the same."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(13, shape, generator=generator)  # noqa: E731
    clean, corrupted, answers, wrong = (draw(n, width) for width in (length, length, 1, 2))
    own = torch.randint(2, length, (n,), generator=generator)
    return PromptPairs(
        clean=clean,
        corrupted=corrupted,
        answers=answers,
        wrong=torch.where(wrong == answers, (wrong + 7) % 13, wrong),
        positions=own if at is None else torch.full((n,), at),
    )

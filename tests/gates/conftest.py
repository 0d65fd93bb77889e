"""Prompts, blocks of attention, and generation with and without a key-value cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_tl import SparseTransformer
from sparse_tl.gates.sparse import blockwise


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 13, (3, 8), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def generate_both_ways() -> Callable[..., tuple[Tensor, Tensor]]:
    """Four tokens more: by `generate` with its cache, and by whole forward passes."""

    def generate(sparse: SparseTransformer, prompts: Tensor) -> tuple[Tensor, Tensor]:
        options = {"max_new_tokens": 4, "temperature": 0, "verbose": False, "stop_at_eos": False}
        cached = sparse.generate(prompts, use_past_kv_cache=True, **options)
        whole = prompts
        for _ in range(4):
            whole = torch.cat([whole, sparse(whole)[:, -1:].argmax(-1)], dim=1)
        return cached, whole

    return generate


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All blocks of attention that are run."""
    seen: list[Any] = []
    plain = blockwise.GatedAttention.on

    def on(self: Any, block: Any, *args: Any) -> Any:
        seen.append(block)
        return plain(self, block, *args)

    monkeypatch.setattr(blockwise.GatedAttention, "on", on)
    return seen

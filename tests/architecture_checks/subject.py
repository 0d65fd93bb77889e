"""One architecture as one kind of model, the prompts that it is given, and how near is near."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from architectures import (
    N_HEADS,
    N_LAYERS,
    hooked_transformer,
    off,
    plain_transformer,
    random_tokens,
)
from oracle import by_head
from torch import Tensor

from sparse_tl import PromptPairs, ShuffledStream, TokenBatch, logit_difference
from sparse_tl.backend import boot
from sparse_tl.training import pretrain

FLOAT32, FLOAT64 = 1e-5, 1e-9
"""How far apart what is computed in two ways may be, of the largest entry."""
QUIET: dict[str, Any] = {"progress": False}


def _pairs() -> PromptPairs:
    clean = random_tokens(4, 8, 0)
    corrupted = clean.clone()
    corrupted[:, [3, 6]] = random_tokens(4, 2, 1)
    answers, wrong = random_tokens(4, 2, 2).split(1, dim=1)
    return PromptPairs(clean, corrupted, answers, wrong, torch.full((4,), 7))


PAIRS = _pairs()
READ = torch.zeros_like(PAIRS.clean, dtype=torch.bool)
READ[:, -1] = True
GATES = torch.rand(N_LAYERS, N_HEADS, generator=torch.Generator().manual_seed(0))


def _echoes() -> TokenBatch:
    tokens = torch.arange(3, 16)
    batch = TokenBatch.next_token(torch.cartesian_prod(tokens, tokens).repeat(1, 4))
    batch.loss_mask[:, 0] = False
    return batch


ECHOES = _echoes()
"""A task that needs attention: any two of 13 tokens in turn, so each repeats the last but one."""


class Subject:
    """One architecture as one kind of model.

    Args:
        name: of the architecture, as in `architectures.ARCHITECTURES`.
        kind: "TransformerBridge" or "HookedTransformer".
    """

    def __init__(self, name: str, kind: str = "TransformerBridge") -> None:
        self.name, self.kind = name, kind

    def build(self, dtype: str = "float32") -> Any:
        """A fresh model, always of the same random weights."""
        if self.kind == "HookedTransformer":
            return hooked_transformer(self.name, dtype)
        return boot(plain_transformer(self.name, dtype), name=self.name)

    @cached_property
    def exact(self) -> Any:
        """In float64, for checks that change nothing."""
        return self.build("float64").requires_grad_(False)

    @cached_property
    def learned(self) -> Any:
        """Trained on `ECHOES` until it knows them, or for 300 steps."""
        model = self.build()
        pretrain(
            model,
            ShuffledStream(ECHOES, 32),
            validation=ECHOES,
            steps=300,
            learning_rate=5e-3,
            warmup=10,
            good_enough=0.02,
            **QUIET,
        )
        return model


def near(found: Any, expected: Any, tolerance: float, what: str) -> float:
    """By how much they differ, of the largest entry.

    Raises:
        ValueError: by more than the tolerance.
    """
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    share = off(one, other)
    wrong = f"{what} differs by {share:.1e} of the largest, more than {tolerance}"
    require(share <= tolerance, wrong)
    return share


def require(true: bool, otherwise: str) -> None:
    """Raise a ValueError that says so, unless it is true."""
    if not true:
        raise ValueError(otherwise)


def metric_of(logits: Tensor) -> Tensor:
    """The mean over pairs, of the logits of whole prompts."""
    return logit_difference(PAIRS.read(logits), PAIRS).mean()


def with_heads(model: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    """Logits with every head's output times its gate, by hooks of TransformerLens."""

    def times(row: Tensor) -> Any:
        return lambda z, hook: (by_head(model, z) * row[:, None]).reshape(z.shape)

    hooks = [(f"blocks.{layer}.attn.hook_z", times(row)) for layer, row in enumerate(gates)]
    return model.run_with_hooks(tokens, fwd_hooks=hooks)

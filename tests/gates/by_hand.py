"""What acts on a model acts as plain hooks do, in full passes, with a cache, and generating."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from tiny import HAS_HOOKED, in_pieces
from torch import Tensor

WIDTH = 8
PROMPT = 5
"""Columns of the prompt; the others are generated."""


def pieces(model: Any, tokens: Tensor) -> Tensor:
    """The logits of a prompt, of two tokens more, and of one more, with a cache between them."""
    parts = tokens[:, :PROMPT], tokens[:, PROMPT : PROMPT + 2], tokens[:, PROMPT + 2 :]
    return torch.cat(list(in_pieces(model, parts)), dim=1)


def generated(model: Any, prompts: Tensor) -> Tensor:
    options = {"do_sample": False, "verbose": False, "stop_at_eos": False}
    return model.generate(prompts, max_new_tokens=WIDTH - PROMPT, **options)


def check(
    model: Any,
    tokens: Tensor,
    inside: Callable[[], AbstractContextManager[None]],
    by_hand: Callable[[Tensor], Tensor],
    tolerance: float = 1e-5,
) -> None:
    """What acts inside a block changes logits and generated tokens as hooks by hand do."""
    # Without a tokenizer, HookedTransformer's `generate` misplaces learned positions.
    generates = not HAS_HOOKED or model.cfg.positional_embedding_type == "rotary"
    before, expected, prompts = model(tokens), by_hand(tokens), tokens[:, :PROMPT]
    with inside():
        torch.testing.assert_close(model(tokens), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(pieces(model, tokens), expected, atol=1e-5, rtol=1e-5)
        found = generated(model, prompts) if generates else None
    for _ in range(WIDTH - PROMPT):
        prompts = torch.cat([prompts, by_hand(prompts)[:, -1:].argmax(-1)], dim=1)
    assert found is None or torch.equal(found, prompts)
    assert not torch.allclose(expected, before, atol=1e-4)
    assert torch.equal(model(tokens), before), "nothing is left behind"

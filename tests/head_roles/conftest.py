"""A model with known roles: trained heads, one dead head, one that pushes a wrong token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted_heads import INTERFERER, WRONG
from tiny import learn_echo

from sparse_tl import ablate_heads
from sparse_tl.backend import Model
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.targets import TargetDataset


@pytest.fixture(scope="session")
def echo_targets(echo_rows: Callable[..., TokenBatch]) -> TargetDataset:
    """`echo_rows` without the wrong token, so that pushing it always harms."""
    rows = echo_rows(n=256, seed=3)
    return TargetDataset(rows.select((rows.tokens != WRONG).all(dim=1)))


@pytest.fixture(scope="session")
def planted(build_tiny: Callable[..., Model], echo_rows: Callable[..., TokenBatch]) -> Model:
    """The echo model with four heads in each layer, of which the first two are trained.

    Heads 2 and 3 of both layers write nothing but for the interferer, which always writes the same
    vector: the one that raises the wrong token's logit. With this seed each trained head does its
    part; with others, one of them hardly matters or is on the border between two roles.
    """
    model = build_tiny(seed=1, n_heads=4, d_head=4)
    with ablate_heads(model, [(layer, head) for layer in range(2) for head in (2, 3)]):
        learn_echo(model, echo_rows)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O[2:] = 0
        layer, head = INTERFERER
        attention = model.blocks[layer].attn
        attention.W_V[head] = 0
        attention.b_V[head] = 1
        push = model.unembed.W_U[:, WRONG] - model.unembed.W_U.mean(dim=1)
        attention.W_O[head] = 5 * push / push.norm() / attention.b_V.shape[1]
    return model


@pytest.fixture(scope="session")
def build_looking_up(build_tiny: Callable[..., Model]) -> Callable[..., Model]:
    """A model of one layer, made by hand, whose head 0 answers token t with t + 1; head 1 is dead.

    Every position attends to all that it sees alike. Token t is a direction of its own in the first
    half of the residual stream, and so is the answer t + 1 in the second half, which alone is read.
    With ``split=6``, head 0 knows the tokens below 6 only, and head 1 the others.
    """

    def build(split: int = 13, **description: Any) -> Model:
        model = build_tiny(n_layers=1, d_model=26, d_head=13, **description)
        one, block = torch.eye(13), model.blocks[0]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for norm in (block.ln1, block.ln2, model.ln_final):
                norm.w.fill_(1.0)
            model.embed.W_E[:, :13] = one
            model.embed.W_E[12] = 0  # the last token is no question
            block.attn.W_V[0, :split] = one[:split]
            block.attn.W_V[1, split:13] = one[split:]
            block.attn.W_O[:, :, 13:] = 2 * one.roll(1, dims=1)
            model.unembed.W_U[13:] = 2 * one
        return model

    return build

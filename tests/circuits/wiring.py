"""Weights set by hand: what a head attends to and moves, in directions that have a name.

All functions but the builders write into a model's weights, under ``torch.no_grad()``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from tiny import small_model
from torch import Tensor

from sparse_tl.backend import Model


def blank_model(**description: Any) -> Model:
    """A float64 model, all weights 0: MLPs write nothing unless told to."""
    defaults = {
        "model_name": "hand_made",
        "d_mlp": 1,
        "act_fn": "relu",
        "normalization_type": None,
        "dtype": "float64",
    }
    model = small_model(**{**defaults, **description})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def normalise(model: Model) -> None:
    """Normalisations with weight 1 and bias 0."""
    for part in (*model.blocks, model):
        for name in ("ln1", "ln2", "ln_final"):
            if hasattr(part, name):
                getattr(part, name).w.fill_(1.0)


def spaces(**sizes: int) -> dict[str, slice]:
    """Consecutive directions of the residual stream, by what is written there."""
    ends = list(accumulate(sizes.values()))
    return {
        name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)
    }


def embed(model: Model, space: dict[str, slice]) -> None:
    """Tokens and places one-hot; logits read "output", one direction a token."""
    model.embed.W_E[:, space["token"]] = torch.eye(model.cfg.d_vocab, dtype=torch.float64)
    model.pos_embed.W_pos[:, space["place"]] = torch.eye(model.cfg.n_ctx, dtype=torch.float64)
    model.unembed.W_U[space["output"]] = torch.eye(model.cfg.d_vocab, dtype=torch.float64)


def attend(
    model: Model, layer: int, head: int, query: slice, key: slice, scores: Tensor, start: int = 0
) -> None:
    """Attention scores by what stands in two spaces; different keys need columns of their own."""
    attn, columns = model.blocks[layer].attn, slice(start, start + scores.shape[1])
    scale = attn.W_Q.shape[2] ** 0.5  # models divide by it
    attn.W_Q[head, query, columns] = scale * scores.to(attn.W_Q)
    attn.W_K[head, key, columns] = torch.eye(scores.shape[1]).to(attn.W_K)


def move(model: Model, layer: int, head: int, read: slice, write: slice, gain: float = 1.0) -> None:
    """Copy from one space, wherever attention goes, to another."""
    attn, size = model.blocks[layer].attn, read.stop - read.start
    attn.W_V[head, read, :size] = torch.eye(size).to(attn.W_V)
    attn.W_O[head, :size, write] = gain * torch.eye(size).to(attn.W_O)


def distract(model: Model, unread: slice) -> None:
    """All heads but the first, and all MLPs, read anything and write what nothing else reads."""
    generator = torch.Generator().manual_seed(0)

    def draw(weight: Tensor) -> Tensor:
        return torch.randn(weight.shape, generator=generator, dtype=weight.dtype)

    for block in model.blocks:
        attn = block.attn
        for weight in (attn.W_Q, attn.W_K, attn.W_V):
            weight[1:] = 0.3 * draw(weight[1:])
        attn.W_O[1:, :, unread] = 0.2 * draw(attn.W_O[1:, :, unread])
        block.mlp.W_in[:] = 0.3 * draw(block.mlp.W_in)
        block.mlp.W_out[:, unread] = 0.2 * draw(block.mlp.W_out[:, unread])


def centred_directions(n: int) -> Tensor:
    """Orthonormal rows of mean 0, in one dimension more than there are rows."""
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(n + 1, n + 1, generator=generator, dtype=torch.float64)
    square[:, 0] = 1.0
    return torch.linalg.qr(square).Q.T[1:]


def carry(model: Model, layer: int, head: int, read: Tensor, write: Tensor) -> None:
    """From one direction, wherever attention goes, to another, by one dimension of a head."""
    model.blocks[layer].attn.W_V[head, :, 0] = read
    model.blocks[layer].attn.W_O[head, 0] = write


def plant_sign(model: Model, layer: int, read: Tensor, write: Tensor, clean: Tensor) -> None:
    """An MLP of one ReLU: +1 at the clean prompts' end, -1 where what it reads is negative."""
    mlp: Any = model.blocks[layer].mlp
    mlp.W_in[:, 0] = read
    mlp.b_out[:] = -write
    _, cache = model.run_with_cache(clean)
    mlp.W_out[0] = 2 / cache[f"blocks.{layer}.mlp.hook_post"][0, -1, 0] * write

"""What a part does for a prediction, exactly: the model runs once without each of its parts.

    effect[target, part] = logit(without the part) - logit(with it)

of the token that is predicted with it; below 0 the part helps.

1. Run the prompt as it is: what is predicted at each target.
2. Repeat the prompt, a row for each part; each row runs without its own part alone, whose gate is
   0: a head writes 0 at ``hook_z``, an attention edge's pattern is 0. As many rows stand in one
   pass as memory allows, and one more, without nothing, tells whether rows run as prompts do.
3. Read the predicted tokens' logits and probabilities in each row, less those of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.lens import (
    HookedModel,
    Order,
    attached,
    embedding_matrix,
    layer_points,
    unembedded,
)

Head = tuple[int, int]
"""Layer and head."""
AttentionEdge = tuple[int, int, int, int]
"""Layer, head, query and key."""

_MOST_NUMBERS = 2**24
"""In the activations of a layer, of all rows of a pass."""


@dataclass(frozen=True, eq=False)
class RemovalEffects:
    """How predicted tokens change when one part is removed.

    Args:
        tokens: the token that is predicted at each target while no part is removed.
        logits: change of its logit, by part; negative: the part helps.
        probabilities: change of its probability.
    """

    tokens: Int[Tensor, " target"]
    logits: Float[Tensor, "target part"]
    probabilities: Float[Tensor, "target part"]


@torch.no_grad()
def removal_effects(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    read_at: Sequence[int],
    *,
    heads: Sequence[Head] = (),
    attention_edges: Sequence[AttentionEdge] = (),
) -> RemovalEffects:
    """What the predictions of a prompt lose when one head or attention edge is removed.

    Args:
        model: dense or sparse; hooks that are on it stay on.
        tokens: the prompt.
        read_at: the columns at which predictions are read, one for each target.
        heads: (layer, head) of each part.
        attention_edges: (layer, head, query, key) of each part; they come after the heads.

    Raises:
        ValueError: a hook of the user's own treats the rows of a batch unequally.
    """
    tokens = tokens.to(embedding_matrix(model).device)
    whole = _logits(model, tokens[None], read_at)
    predicted = whole[0].argmax(dim=-1)
    parts = [*heads, *attention_edges]
    size = _rows_per_pass(model, len(tokens))
    found = [_of(predicted, whole)[:0]]
    for start in range(0, len(parts), size):
        some = parts[start : start + size]
        with attached(model, _hooks(model, some)):
            logits = _logits(model, tokens.repeat(len(some) + 1, 1), read_at)
        _check_rows(logits[-1], whole[0])
        scores = _of(predicted, logits)
        found.append(scores[:-1] - scores[-1])  # of one pass: a part without influence gives 0
    return RemovalEffects(predicted.cpu(), *torch.cat(found).permute(2, 1, 0).cpu())


def _hooks(
    model: HookedModel, parts: Sequence[tuple[int, ...]]
) -> list[tuple[str, Order, Callable[[Tensor], Tensor]]]:
    """Row i of a batch runs without part i."""

    def close(layer: int, length: int, value: Tensor) -> Tensor:
        value = value.clone()
        for row, part in enumerate(parts):
            if len(part) == length and part[0] == layer:
                # z is [row, pos, head, d_head], a pattern [row, head, query, key].
                value[(row, slice(None), part[1]) if length == 2 else (row, *part[1:])] = 0
        return value

    names = {2: layer_points(model, "attn.hook_z"), 4: layer_points(model, "attn.hook_pattern")}
    places = sorted({(part[0], len(part)) for part in parts})
    # Last, so that gates, which come first, cannot open an edge again.
    return [
        (names[length][layer], Order.LAST, partial(close, layer, length))
        for layer, length in places
    ]


def _logits(
    model: HookedModel, tokens: Int[Tensor, "row pos"], read_at: Sequence[int]
) -> Float[Tensor, "row target vocab"]:
    final = model(tokens, stop_at_layer=model.cfg.n_layers)
    return unembedded(model, final[:, list(read_at)]).double()


def _of(
    predicted: Int[Tensor, " target"], logits: Float[Tensor, "row target vocab"]
) -> Float[Tensor, "row target two"]:
    """Logit and probability of the predicted tokens."""
    at = predicted.expand(logits.shape[:-1])[..., None]
    return torch.cat([logits.gather(-1, at), logits.softmax(dim=-1).gather(-1, at)], dim=-1)


def _rows_per_pass(model: HookedModel, length: int) -> int:
    cfg = model.cfg
    stream = length * (4 * cfg.d_model + (cfg.d_mlp or 0))
    return max(1, _MOST_NUMBERS // (stream + 3 * cfg.n_heads * length**2))


def _check_rows(row: Tensor, whole: Tensor) -> None:
    """A row without anything removed gives what the prompt alone gives."""
    off = float((row - whole).abs().max())
    if off > 0.02 * (1 + float(whole.abs().max())):
        raise ValueError(
            f"expected every row of a batch to run as a prompt alone does; got logits that differ "
            f"by {off:.3g}: take your own hooks off this model, or let them treat all rows alike"
        )

"""Follow attention through one prompt: the weights, gates and attributions of every edge.

Phases: tokenize, run once with the (gated) patterns kept, and, where asked for, one backward pass
per predicted position for ``attention * d logit(predicted) / d attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.circuits.attention_graph import AttentionGraph
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import HookedModel, Order, attached, embedding_matrix, layer_points

UNKNOWN = "?"


def trace_attention(
    model: HookedModel,
    prompt: str | Int[Tensor, " pos"],
    *,
    positions: Sequence[int] | None = None,
    attribution: bool = False,
) -> AttentionGraph:
    """The attention edges of a prompt and the characters that they lead to.

    A predicted position is read one column to its left, or at its own column where the prompt
    carries the tokenizer's mask token there. The model reads no further than the last column at
    which something is read.

    Args:
        model: a dense model or a SparseTransformer, with a tokenizer.
        prompt: text, or its tokens.
        positions: the columns to predict; negative ones count from the end of the prompt. Left
            out: every mask token, or else the token after the prompt.
        attribution: also compute each edge's first-order effect on the predicted logit, in logits.

    Raises:
        ValueError: an empty prompt, one longer than the model's context, a position that cannot be
            predicted, or a model without a tokenizer.
    """
    tokens, mask_id = _tokenize(model, prompt)
    targets = _targets(tokens, positions, mask_id)
    n_columns = max(len(tokens), *(column + 1 for column, _ in targets))
    n_read = max(read_at for _, read_at in targets) + 1
    batch = tokens[None, :n_read].to(embedding_matrix(model).device)
    attention, gates, logits, effects = _run(model, batch, targets, attribution)
    predicted = {column: int(logits[read_at].argmax()) for column, read_at in targets}
    texts = [_text(model, int(token)) for token in tokens]
    known = [i < n_read and int(tokens[i]) != mask_id for i in range(n_columns)]
    inputs = [texts[i] if known[i] else UNKNOWN for i in range(n_columns)]
    outputs = [
        _text(model, predicted[i]) if i in predicted else inputs[i] for i in range(n_columns)
    ]
    return AttentionGraph(
        attention=_widen(attention, n_columns),
        gates=_widen(gates, n_columns),
        input_tokens=tuple(inputs),
        output_tokens=tuple(outputs),
        targets=tuple(targets),
        attribution=None if effects is None else _widen(effects, n_columns),
    )


def _tokenize(model: HookedModel, prompt: str | Tensor) -> tuple[Tensor, int | None]:
    if model.tokenizer is None:
        raise ValueError("expected a model with a tokenizer, for the texts under the columns")
    if prompt == "":
        raise ValueError("expected a prompt; got an empty text")
    # Truncation would lose the end of the prompt without a word.
    tokens = model.to_tokens(prompt, truncate=False)[0] if isinstance(prompt, str) else prompt
    if tokens.ndim != 1 or len(tokens) == 0:
        raise ValueError(f"expected the tokens of one prompt; got shape {tuple(tokens.shape)}")
    if len(tokens) > model.cfg.n_ctx:
        raise ValueError(
            f"expected a prompt of at most {model.cfg.n_ctx} tokens, the model's context; "
            f"got {len(tokens)}"
        )
    d_vocab = model.cfg.d_vocab
    outside = tokens[(tokens < 0) | (tokens >= d_vocab)].tolist()
    if outside:
        raise ValueError(f"expected tokens in 0..{d_vocab - 1}; got {outside[0]}")
    return tokens.cpu(), model.tokenizer.mask_token_id


def _targets(
    tokens: Tensor, positions: Sequence[int] | None, mask_id: int | None
) -> list[tuple[int, int]]:
    n = len(tokens)
    masked = [i for i in range(n) if int(tokens[i]) == mask_id]
    if positions is None:
        positions = masked or [n]
    columns = [position + n if position < 0 else position for position in positions]
    for position, column in zip(positions, columns, strict=True):
        if not (0 <= column < n and column in masked) and not 1 <= column <= n:
            raise ValueError(
                f"expected positions in 1..{n}, the columns that can be predicted; got {position}"
            )
    if not columns:
        raise ValueError("expected at least one position to predict; got none")
    return [(column, column if column in masked else column - 1) for column in columns]


def _run(
    model: HookedModel,
    batch: Int[Tensor, "one pos"],
    targets: Sequence[tuple[int, int]],
    attribution: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Attention, gates, logits and attributions, on the CPU."""
    patterns: dict[int, Tensor] = {}
    nudges: dict[int, Tensor] = {}

    def keep(layer: int, pattern: Float[Tensor, "one head query key"]) -> Tensor | None:
        patterns[layer] = pattern.detach()
        if not attribution:
            return None
        # A zero that requires a gradient collects d logit / d pattern, through every later layer,
        # also where the model's own weights are frozen.
        nudges[layer] = torch.zeros_like(pattern, requires_grad=True)
        return pattern + nudges[layer]

    names = layer_points(model, "attn.hook_pattern")
    hooks = [(name, Order.LAST, partial(keep, layer)) for layer, name in enumerate(names)]
    with attached(model, hooks), torch.set_grad_enabled(attribution):
        logits, gates = _forward(model, batch)
    layers = range(len(names))
    attention = torch.cat([patterns[layer] for layer in layers])
    effects = None
    if attribution:
        rows = []
        for _, read_at in targets:
            best = logits[read_at].max()
            gradients = torch.autograd.grad(
                best, [nudges[layer] for layer in layers], retain_graph=True
            )
            rows.append(attention * torch.cat(gradients))
        effects = torch.stack(rows).cpu()
    return attention.cpu(), gates.cpu(), logits.detach().cpu(), effects


def _forward(model: HookedModel, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[pos, vocab]`` and open gates ``[layer, head, query, key]``."""
    if isinstance(model, SparseTransformer):
        with model.recorded(keep_gates=True) as record:
            logits = model(batch)[0]
        return logits, record.gates()[:, 0]
    logits = model(batch)[0]
    pos = batch.shape[1]
    causal = torch.ones(pos, pos, dtype=torch.bool, device=batch.device).tril()
    return logits, causal.expand(model.cfg.n_layers, model.cfg.n_heads, pos, pos)


def _widen(edges: Tensor, n_columns: int) -> Tensor:
    """Room for columns that the model does not read: they have no edges."""
    missing = n_columns - edges.shape[-1]
    return torch.nn.functional.pad(edges, (0, missing, 0, missing))


def _text(model: HookedModel, token: int) -> str:
    return model.tokenizer.decode([token])

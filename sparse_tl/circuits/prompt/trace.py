"""The attention edges of one prompt, with the weight, the gate and the effect of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.arguments import Count, NotNegative, checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.circuits.prompt.carried import carried, carried_points
from sparse_tl.circuits.prompt.edge_effects import EdgeEffects
from sparse_tl.circuits.prompt.quantity import Answers, Quantity
from sparse_tl.circuits.prompt.removal import LeaveOneOut
from sparse_tl.circuits.prompt.tokens import Prompt, output_text, prompt_tokens, token_texts
from sparse_tl.data import PromptPairs
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import (
    AttentionMask,
    Hook,
    HookedModel,
    Order,
    adapt,
    attached,
    check_numbers,
    in_evaluation_mode,
    mask_hooks,
)
from sparse_tl.metrics import Metric, log_probability, measure, metric_name

UNKNOWN = "?"
MAX_EFFECTS = 500
"""Maximum number of open edges for which figures compute all exact effects."""
EFFECT_SECONDS = 3.0
"""Time in which figures that show effects compute exact ones, if more edges are open."""


@checked
@in_evaluation_mode
def trace_attention(
    model: HookedModel,
    prompt: Prompt,
    *,
    positions: Sequence[int] | None = None,
    attribution: bool = False,
    max_effects: Count = 0,
    seconds: NotNegative = 0,
    metric: Metric = log_probability,
    answer: Answers | None = None,
    wrong: Answers | None = None,
    labels: Sequence[str] | None = None,
) -> AttentionGraph:
    """The attention edges of a prompt, and the tokens that they predict.

    The effect of an edge is the change of a metric when the edge is removed. By default, the metric
    is the log-probability of the predicted token. `metrics.logit_difference` is the logit of
    `answer` minus that of `wrong`. `metrics.answer_logit` also changes when a number is added
    to all logits, although that changes no prediction.

    A prediction is read one column to the left of the predicted position, or at the position itself
    if that holds the tokenizer's mask token or attention is bidirectional. A causal model runs up
    to the last column that is read.

    Args:
        model: a dense model or a SparseTransformer.
        prompt: text or tokens.
        positions: columns to predict; by default, all mask tokens. Without any, a causal model
            predicts the token after the prompt, and a bidirectional one needs `positions`. -1 is
            the last column that can be predicted.
        attribution: whether to estimate effects to first order as well,
            ``-attention * d metric / d attention``; positions share backward passes.
        max_effects: maximum number of open edges for which to compute all exact effects, with one
            run of the prompt per edge.
        seconds: approximate time in which to compute exact effects if more edges are open, largest
            estimates first. Other effects are NaN; the graph then has estimates.
        metric: metric function.
        answer: answer at each position, or one for all of them, as text or number; by default, the
            model's prediction.
        wrong: wrong answer, likewise; by default, and where it equals the answer, the most likely
            token other than the answer.
        labels: text of each column; by default the tokenizer's, or token ids if the model has no
            tokenizer.

    Raises:
        ValueError: the prompt is empty, exceeds the model's context, or has text that the tokenizer
            does not know; the number of labels is wrong; a position cannot be predicted; or an
            answer is not one token.
    """
    tokens = prompt_tokens(model, prompt)
    texts = token_texts(model, tokens) if labels is None else labels
    if len(texts) != len(tokens):
        raise ValueError(f"expected {len(tokens)} labels, one per token; got {len(texts)}")
    causal, masked = adapt(model).causal, _masked(model, tokens)
    targets = _targets(model, tokens, positions, masked)
    n_columns = max(len(tokens), *(column + 1 for column, _ in targets))
    n_read = max(read_at for _, read_at in targets) + 1 if causal else len(tokens)
    # Every mask token that is run has a prediction, even if it is not a target.
    read_at = {column: column for column in masked if column < n_read} | dict(targets)
    read = tokens[:n_read]
    quantity = Quantity(metric, answer, wrong)
    run = _run(model, read, targets, quantity, attribution or seconds > 0)
    attention, shares, possible, gates, mlps, logits, pairs, estimates = run
    predicted = {column: int(logits[at].argmax()) for column, at in read_at.items()}
    known = [i < n_read and i not in masked for i in range(n_columns)]
    inputs = [texts[i] if known[i] else UNKNOWN for i in range(n_columns)]
    outputs = [
        output_text(model, predicted[i], tokens[:i]) if i in predicted else inputs[i]
        for i in range(n_columns)
    ]
    graph = AttentionGraph(
        attention=_widen(attention, n_columns),
        gates=_widen(gates, n_columns),
        input_tokens=tuple(inputs),
        output_tokens=tuple(outputs),
        targets=tuple(targets),
        attribution=None if estimates is None else _widen(estimates, n_columns),
        carried=_widen(shares, n_columns),
        causal=causal,
        mlps=None if mlps is None else _pad(mlps, n_columns),
        possible=_widen(possible, n_columns),
        metric=metric_name(metric),
        answers=_texts(model, pairs.answers[:, 0], tokens, targets),
        wrong=_texts(model, pairs.wrong[:, 0], tokens, targets),
    )
    few = 0 < max_effects >= int(gates.sum())
    if few or seconds:
        effects = EdgeEffects(graph, LeaveOneOut(model, pairs, metric))
        effects.advance(None if few else seconds)
        graph = effects.graph
        attribution = attribution or effects.more
    return graph if attribution else replace(graph, attribution=None)


def predicted_columns(model: HookedModel, prompt: Prompt) -> list[int]:
    """All columns that a model predicts: its mask tokens, or the column after every token.

    Without mask tokens, a bidirectional model predicts every column.
    """
    tokens = prompt_tokens(model, prompt)
    masked = _masked(model, tokens)
    if masked:
        return masked
    first = int(adapt(model).causal)
    return list(range(first, len(tokens) + first))


def predicted_column(model: HookedModel, prompt: Prompt, position: int) -> int:
    """The column of a position; -1 is the last of `predicted_columns`."""
    return position if position >= 0 else position + predicted_columns(model, prompt)[-1] + 1


def _texts(
    model: HookedModel,
    outputs: Int[Tensor, " target"],
    tokens: Int[Tensor, " pos"],
    targets: Sequence[tuple[int, int]],
) -> tuple[str, ...]:
    """The text of an output at each target."""
    pairs = zip(outputs.tolist(), targets, strict=True)
    return tuple(output_text(model, output, tokens[:column]) for output, (column, _) in pairs)


def _masked(model: HookedModel, tokens: Int[Tensor, " pos"]) -> list[int]:
    """The columns that hold the tokenizer's mask token."""
    mask_id = None if model.tokenizer is None else model.tokenizer.mask_token_id
    return [] if mask_id is None else (tokens == mask_id).nonzero()[:, 0].tolist()


def _targets(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    positions: Sequence[int] | None,
    masked: Sequence[int],
) -> list[tuple[int, int]]:
    """The predicted columns, each with the column where its prediction is read."""
    n, causal = len(tokens), adapt(model).causal
    read_in_place = masked if causal else range(n)
    if positions is None:
        positions = masked
        if not positions and not causal:
            raise ValueError(
                "expected positions= to read, since attention is bidirectional and the prompt has "
                "no mask token; got none"
            )
        positions = positions or [n]
    first, last = (1, n) if causal else (0, n - 1)
    columns = [predicted_column(model, tokens, position) for position in positions]
    for position, column in zip(positions, columns, strict=True):
        if column not in read_in_place and not (causal and 1 <= column <= n):
            raise ValueError(
                f"expected positions in {first}..{last}, the columns that can be predicted; got "
                f"{position}"
            )
    if not columns:
        raise ValueError("expected at least one position to predict; got none")
    return [(column, column if column in read_in_place else column - 1) for column in columns]


def _run(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    targets: Sequence[tuple[int, int]],
    quantity: Quantity,
    attribution: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, PromptPairs, Tensor | None]:
    """One pass: attention, what it carries, possible edges, open edges and MLPs, logits, the prompt
    with its answers, and first-order estimates, on the CPU."""
    kept: dict[str, Tensor] = {}
    nudges: list[Tensor] = []
    masks: dict[int, AttentionMask] = {}

    def keep(name: str, value: Tensor) -> None:
        kept[name] = value.detach()

    def nudge(pattern: Float[Tensor, "one head query key"]) -> Tensor:
        # A zero tensor that requires grad collects the gradient with respect to the pattern, even
        # if the weights of the model are frozen.
        nudges.append(torch.zeros_like(pattern, requires_grad=True))
        return pattern + nudges[-1]

    adapter = adapt(model)
    layers = range(adapter.n_layers)
    points = dict.fromkeys(point for layer in layers for point in carried_points(adapter, layer))
    hooks: list[Hook] = [(name, Order.LAST, partial(keep, name)) for name in points]
    patterns = adapter.layer_points("attn.hook_pattern")
    if attribution:
        hooks += [(name, Order.LAST, nudge) for name in patterns]
    hooks += mask_hooks(adapter, masks)
    batch = tokens[None].to(adapter.device)
    with attached(adapter, hooks), autograd(attribution):
        logits, gates, mlps = _forward(model, batch)
    check_numbers(adapter, logits)
    attention = torch.cat([kept[name] for name in patterns])
    shares = torch.stack([carried(adapter, layer, kept) for layer in layers]).cpu()
    allowed = torch.stack([masks[layer].pairs(len(tokens)) for layer in layers])
    possible = allowed[:, None].expand_as(attention)
    read_at = [column for _, column in targets]
    with autograd(attribution):
        read, estimates = logits[read_at], None
        pairs = quantity.pairs(model, tokens, read_at, read)
        if attribution:
            read = read.to(torch.promote_types(read.dtype, torch.float32))
            outputs = measure(quantity.metric, read, pairs.to(read.device))
            estimates = (-attention * _gradients(outputs, nudges)).cpu()
    logits, mlps = logits.detach().cpu(), None if mlps is None else mlps.cpu()
    gates = possible if gates is None else gates.cpu()  # in a dense model, all are open
    return attention.cpu(), shares, possible, gates, mlps, logits, pairs, estimates


def _gradients(
    outputs: Float[Tensor, " target"], inputs: Sequence[Float[Tensor, "one head query key"]]
) -> Float[Tensor, "target layer head query key"]:
    """The derivative of every output with respect to every input, several outputs per pass."""
    by_output = []
    for rows in torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device).split(16):
        gradients = torch.autograd.grad(
            outputs, list(inputs), rows, retain_graph=True, is_grads_batched=True
        )
        by_output.append(torch.cat(gradients, dim=1))
    return torch.cat(by_output)


def _forward(model: HookedModel, batch: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logits ``[pos, vocab]``, open gates ``[layer, head, query, key]`` and ``[layer, pos]``."""
    if not isinstance(model, SparseTransformer):
        return model(batch)[0], None, None
    logits, counts = model.run_with_counts(batch, keep_gates=True)
    assert counts.gates is not None
    mlps = None if counts.mlp_gates is None else counts.mlp_gates[:, 0]
    return logits[0], counts.gates[:, 0], mlps


def _widen(edges: Tensor, n_columns: int) -> Tensor:
    """Add columns that the model does not read, without edges."""
    return _pad(_pad(edges, n_columns).mT, n_columns).mT


def _pad(columns: Tensor, n_columns: int) -> Tensor:
    return torch.nn.functional.pad(columns, (0, n_columns - columns.shape[-1]))

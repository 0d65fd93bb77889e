"""The attention edges of one prompt, with the weight, the gate and the effect of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sparse_tl.backend import (
    Adapter,
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
from sparse_tl.calls.arguments import Count, NotNegative, checked
from sparse_tl.calls.autograd import autograd
from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.circuits.prompt.removal import EdgeEffects, LeaveOneOut
from sparse_tl.circuits.prompt.tokens import (
    Answers,
    Prompt,
    Quantity,
    output_text,
    prompt_tokens,
    token_texts,
)
from sparse_tl.data import PromptPairs
from sparse_tl.gates import SparseTransformer
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
    tokens, quantity = prompt_tokens(model, prompt), Quantity(metric, answer, wrong)
    estimated = attribution or seconds > 0
    graph, _, pairs = traced(model, tokens, positions, labels, quantity, attribution=estimated)
    few = 0 < max_effects >= int(graph.gates.sum())
    if few or seconds:
        effects = EdgeEffects(graph, LeaveOneOut(model, pairs, metric))
        effects.advance(None if few else seconds)
        graph = effects.graph
        attribution = attribution or effects.more
    return graph if attribution else replace(graph, attribution=None)


@in_evaluation_mode
def traced(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    positions: Sequence[int] | None,
    labels: Sequence[str] | None,
    quantity: Quantity,
    *,
    attribution: bool,
) -> tuple[AttentionGraph, Float[Tensor, "read vocab"], PromptPairs]:
    """The graph of `trace_attention`, without exact effects; logits of the columns that are read;
    and the prompt with its answers."""
    texts = token_texts(model, tokens) if labels is None else labels
    if len(texts) != len(tokens):
        raise ValueError(f"{len(texts)} labels for {len(tokens)} tokens: give one for each")
    causal, masked = adapt(model).causal, _masked(model, tokens)
    targets = _targets(model, tokens, positions, masked)
    n_columns = max(len(tokens), *(column + 1 for column, _ in targets))
    n_read = max(read_at for _, read_at in targets) + 1 if causal else len(tokens)
    edges, mlps, logits, pairs = _run(model, tokens[:n_read], targets, quantity, attribution)
    # Every mask token that is run has a prediction, even if it is not a target.
    read_at = {column: column for column in masked if column < n_read} | dict(targets)
    known = [i < n_read and i not in masked for i in range(n_columns)]
    inputs = [texts[i] if known[i] else UNKNOWN for i in range(n_columns)]
    outputs = list(inputs)
    for column, at in read_at.items():
        outputs[column] = output_text(model, int(logits[at].argmax()), tokens[:column])
    answers, others = (
        tuple(
            output_text(model, o, tokens[:column])
            for (column, _), o in zip(targets, ids, strict=True)
        )
        for ids in (pairs.answers[:, 0].tolist(), pairs.wrong[:, 0].tolist())
    )
    # Columns that the model does not read have no edges.
    more = n_columns - n_read
    graph = AttentionGraph(
        **{name: pad(values, (0, more, 0, more)) for name, values in edges.items()},
        input_tokens=tuple(inputs),
        output_tokens=tuple(outputs),
        targets=tuple(targets),
        causal=causal,
        mlps=None if mlps is None else pad(mlps, (0, more)),
        metric=metric_name(quantity.metric),
        answers=answers,
        wrong=others,
    )
    return graph, logits, pairs


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
        positions = masked or ([n] if causal else [])
    elif not positions:
        raise ValueError("positions is empty")
    if not positions:
        raise ValueError(
            "there is no position to predict: pass positions=, which a bidirectional model needs "
            "for a prompt without mask tokens"
        )
    first, last = (1, n) if causal else (0, n - 1)
    targets = []
    for position in positions:
        column = predicted_column(model, tokens, position)
        in_place = column in read_in_place
        if not in_place and not (causal and 1 <= column <= n):
            raise ValueError(
                f"position {position} cannot be predicted: choose positions in {first}..{last}"
            )
        targets.append((column, column if in_place else column - 1))
    return targets


def _run(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    targets: Sequence[tuple[int, int]],
    quantity: Quantity,
    attribution: bool,
) -> tuple[dict[str, Any], Tensor | None, Float[Tensor, "read vocab"], PromptPairs]:
    """One pass, on the CPU: what `AttentionGraph` holds by edge, open MLPs, logits, and answers."""
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
    points = dict.fromkeys(point for layer in layers for point in _carried_points(adapter, layer))
    hooks: list[Hook] = [(name, Order.LAST, partial(keep, name)) for name in points]
    patterns = adapter.layer_points("attn.hook_pattern")
    if attribution:
        hooks += [(name, Order.LAST, nudge) for name in patterns]
    hooks += mask_hooks(adapter, masks)
    batch, gates, mlps = tokens[None].to(adapter.device), None, None
    with attached(adapter, hooks), autograd(attribution):
        if isinstance(model, SparseTransformer):
            logits, counts = model.run_with_counts(batch, keep_gates=True)
            assert counts.gates is not None
            gates = counts.gates[:, 0].cpu()
            mlps = None if counts.mlp_gates is None else counts.mlp_gates[:, 0].cpu()
        else:
            logits = model(batch)
        logits = logits[0]
    check_numbers(adapter, logits)
    attention = torch.cat([kept[name] for name in patterns])
    allowed = torch.stack([masks[layer].pairs(len(tokens)) for layer in layers])
    possible = allowed[:, None].expand_as(attention)
    edges = {
        "attention": attention.cpu(),
        "carried": torch.stack([_carried(adapter, layer, kept) for layer in layers]).cpu(),
        "possible": possible,
        "gates": possible if gates is None else gates,  # in a dense model, all are open
    }
    read_at = [column for _, column in targets]
    with autograd(attribution):
        read = logits[read_at]
        pairs = quantity.pairs(model, tokens, read_at, read)
        if attribution:
            read = read.to(torch.promote_types(read.dtype, torch.float32))
            outputs = measure(quantity.metric, read, pairs.to(read.device))
            edges["attribution"] = (-attention * _gradients(outputs, nudges)).cpu()
    return edges, mlps, logits.detach().cpu(), pairs


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


def _carried_points(adapter: Adapter, layer: int) -> list[str]:
    """The hook points of a layer whose activations `_carried` needs."""
    attention = [f"blocks.{layer}.attn.{name}" for name in ("hook_pattern", "hook_v", "hook_z")]
    return [f"blocks.{layer}.hook_resid_pre", *attention, adapter.heads_point(layer)]


@torch.no_grad()
def _carried(
    adapter: Adapter, layer: int, kept: Mapping[str, Tensor]
) -> Float[Tensor, "head query key"]:
    """How much each attention edge of a layer carries: what it writes, as a share of the stream.

        carried[q, k] = |w_qk| / (|x_q| + sum over heads and keys of |w_qk|),
            w_qk = A_qk p_qk v_k W_O

    with the gate A, the attention p, and the residual stream x that enters the layer. The share, 0
    to 1, differs from attention most at *sinks*: tokens such as the first one, to which heads
    attend when they have nothing to move. There p is large and v_k W_O small.

    Reference: Kobayashi et al., arXiv 2004.10102, who compare these norms with attention. The
    division is an addition of this package, to make layers comparable.
    """
    parts = (kept[point][0] for point in _carried_points(adapter, layer))
    stream, pattern, v, z, written = (part.to(adapter.gate_dtype) for part in parts)
    weight = adapter.W_O(layer).to(v)
    # |v W_O| from products of the rows of W_O: [key, head, d_model] does not fit for long prompts.
    products = weight @ weight.mT
    v = v.repeat_interleave(adapter.n_heads // v.shape[1], dim=1)
    sizes = torch.einsum("khd,hde,khe->hk", v, products, v).clamp(min=0).sqrt()
    # Some models normalise what attention writes, with a scale for each query.
    scale = written.flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1).clamp(min=1e-30)
    writes = pattern * sizes[:, None, :] * scale[:, None]
    whole = stream.norm(dim=-1) + writes.sum(dim=(0, 2))
    return writes / whole.clamp(min=1e-30)[:, None]

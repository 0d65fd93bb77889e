"""The attention edges of one prompt: the weight, the gate and the effect of each.

Nodes form a grid of *levels* and *columns*. Level 0 is the input; level ``l + 1`` is the residual
stream after layer ``l``. Node ``(l + 1, query)`` receives from ``(l, query)`` through the residual
stream, and from ``(l, key)`` through every attention edge of layer ``l`` from ``key`` to ``query``.

The exact effect of a head or an edge takes one run of the prompt without it:

    effect[target, part] = m(without the part) - m(with the part)

for a metric m of the predictions, such as the log-probability of the token that the full model
predicts. Below 0, the part helps.

1. Run the prompt unchanged.
2. Run copies of the prompt as rows of a batch, each with the gate of one part at 0: a head writes 0
   at ``hook_z``, or the pattern of an attention edge is 0. A pass has as many rows as fit, and one
   unmodified row, which shows whether rows run as single prompts do.
3. Read the metric and the probabilities of the answers in each row, minus those of the unmodified
   row, and the tokens that the row predicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sparse_tl.arguments import Count, NotNegative, checked
from sparse_tl.backend import (
    Adapter,
    AttentionMask,
    Hook,
    HookedModel,
    Order,
    adapt,
    attached,
    check_numbers,
    check_same_alone,
    in_evaluation_mode,
    mask_hooks,
)
from sparse_tl.circuits.prompt.tokens import (
    Answers,
    Prompt,
    Quantity,
    output_text,
    prompt_tokens,
    token_texts,
)
from sparse_tl.contexts import autograd
from sparse_tl.data import PromptPairs
from sparse_tl.gates import (
    AttentionEdges,
    ClosedAttentionEdges,
    GatedRun,
    Heads,
    Site,
    SparseTransformer,
)
from sparse_tl.metrics import UNITS, Metric, log_probability, measure, metric_name
from sparse_tl.results import Result

EdgeWeight = Literal["attention", "carried", "effect", "first-order"]
Head = tuple[int, int]
"""Layer and head."""
AttentionEdge = tuple[int, int, int, int]
"""Layer, head, query and key."""

UNKNOWN = "?"
MAX_EFFECTS = 500
"""Maximum number of open edges for which figures compute all exact effects."""
EFFECT_SECONDS = 3.0
"""Time in which figures that show effects compute exact ones, if more edges are open."""
MOST_NUMBERS = 2**24
"""Maximum number of activations of a layer in a pass."""
_FIRST_BATCH = 8
"""Edges in the first pass of `with_effects`, if time is limited."""


@dataclass(frozen=True, eq=False)
class AttentionGraph(Result):
    """Attention edges of one prompt, with the tokens that they connect.

    Args:
        attention: gate times attention probability of each edge; 0 where the gate is closed or the
            pair is acausal.
        gates: which gates are open; in a dense model, those of all possible edges.
        input_tokens: text below each column, ``?`` if the model does not read it.
        output_tokens: text above each column: the model's prediction, if there is one.
        targets: columns of predicted tokens, each with the column where it is read (one to the
            left for an autoregressive model, the same for a mask token).
        attribution: first-order estimate of `effect` for each target,
            ``-attention * d metric / d attention``; ``None`` if not computed. Where the model is
            not linear, its sign can be wrong.
        effect: for each target, the exact change of the metric when one edge is removed; negative:
            the edge helps. ``None`` if not computed; NaN at edges that were not removed.
        carried: share of the query's residual stream that each edge writes, 0 to 1; ``None`` if not
            traced.
        causal: whether attention is causal.
        mlps: which MLP outputs are open; ``None`` if MLPs have no gates.
        possible: pairs that the model's masks allow among the columns that it reads; ``None`` for
            all causal pairs, or all pairs if attention is bidirectional.
        metric: name of the metric that effects are changes of.
        answers: text of the answer at each target.
        wrong: text of the wrong answer, for metrics that compare the two.
    """

    finite: ClassVar[bool] = False

    attention: Float[Tensor, "layer head query key"]
    gates: Bool[Tensor, "layer head query key"]
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    targets: tuple[tuple[int, int], ...]
    attribution: Float[Tensor, "target layer head query key"] | None = None
    effect: Float[Tensor, "target layer head query key"] | None = None
    carried: Float[Tensor, "layer head query key"] | None = None
    causal: bool = True
    mlps: Bool[Tensor, "layer column"] | None = None
    possible: Bool[Tensor, "layer head query key"] | None = None
    metric: str = "answer_logit"
    answers: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        n = self.n_columns
        if {len(self.input_tokens), len(self.output_tokens)} != {n} or not all(
            0 <= place < n for target in self.targets for place in target
        ):
            raise ValueError(f"tokens and targets do not fit the {n} columns of `attention`")

    @property
    def unit(self) -> str:
        """The unit of effects; empty if it is not known."""
        return UNITS.get(self.metric, "")

    @property
    def n_layers(self) -> int:
        return self.attention.shape[0]

    @property
    def n_heads(self) -> int:
        return self.attention.shape[1]

    @property
    def n_columns(self) -> int:
        return self.attention.shape[-1]

    @property
    def n_read(self) -> int:
        """Number of columns that can matter: in a causal model, up to the last one read."""
        if not self.causal:
            return self.n_columns
        return max(read_at for _, read_at in self.targets) + 1

    @property
    def n_possible(self) -> Int[Tensor, "layer head"]:
        """Number of possible edges of each head, open or not."""
        pairs = torch.ones(*self.attention.shape[:2], self.n_read, self.n_read, dtype=torch.bool)
        every = pairs.tril() if self.causal else pairs
        return (every if self.possible is None else self.possible).sum(dim=(-2, -1))

    @property
    def given(self) -> tuple[int, ...]:
        """Target columns whose token the model is also given, unlike mask tokens."""
        return tuple(column for column, read_at in self.targets if read_at < column < self.n_read)

    def edge_weights(
        self, kind: EdgeWeight = "attention", target: int = -1
    ) -> Float[Tensor, "layer head query key"]:
        """The weight of each edge.

        Args:
            kind: the field `attention`, `carried`, `effect` or, for "first-order", `attribution`.
            target: index into `targets`, for effects.

        Raises:
            ValueError: the kind was not computed.
        """
        weights = self._weights(target)
        if kind not in weights:
            raise ValueError(
                f"the graph has no weights of kind {kind!r}: trace the model with max_effects=... "
                "for effects, with attribution=True for first-order ones"
            )
        return weights[kind]

    def _weights(self, target: int) -> dict[str, Float[Tensor, "layer head query key"]]:
        """The weights that were computed, by kind."""
        weights = {"attention": self.attention}
        if self.carried is not None:
            weights["carried"] = self.carried
        if self.effect is not None:
            weights["effect"] = self.effect[target]
        if self.attribution is not None:
            weights["first-order"] = self.attribution[target]
        return weights

    def to_pandas(self, target: int = -1) -> pd.DataFrame:
        """One row per open edge, by decreasing attention, with its effects on a target."""
        edges = self.gates.nonzero().tolist()
        table = pd.DataFrame(edges, columns=["layer", "head", "query", "key"])
        for kind, weights in self._weights(target).items():
            table[kind] = weights[self.gates].tolist()
        return table.sort_values("attention", ascending=False, kind="stable", ignore_index=True)

    def __repr__(self) -> str:
        mlps = ""
        if self.mlps is not None:
            mlps = f", {int(self.mlps.sum()):,} of {self.mlps.numel():,} MLP outputs"
        effects = ""
        if self.effect is not None or self.attribution is not None:
            effects = f"; effects on {self.metric}" + (f", in {self.unit}" if self.unit else "")
        return (
            f"AttentionGraph({' '.join(self.input_tokens)!r}: {int(self.gates.sum()):,} of "
            f"{int(self.n_possible.sum()):,} attention edges{mlps} open{effects})"
        )


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
    run = run_prompt(model, tokens, positions, labels, quantity, attribution=estimated)
    graph = run.graph
    few = 0 < max_effects >= int(graph.gates.sum())
    if few or seconds:
        one_out = LeaveOneOut(model, run.pairs, metric)
        graph = with_effects(graph, one_out, None if few else seconds)
        attribution = attribution or some_unknown(graph)
    return graph if attribution else replace(graph, attribution=None)


@dataclass(frozen=True, eq=False)
class PromptRun:
    """One run of a prompt, on the CPU.

    Args:
        graph: the graph of `trace_attention`, without exact effects.
        logits: logits at every column that the model reads.
        pairs: the prompt with its answers, once per target.
        streams: residual stream of the input and after each layer, on the model's device.
    """

    graph: AttentionGraph
    logits: Float[Tensor, "read vocab"]
    pairs: PromptPairs
    streams: Float[Tensor, "level read d_model"]


@in_evaluation_mode
def run_prompt(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    positions: Sequence[int] | None,
    labels: Sequence[str] | None,
    quantity: Quantity,
    *,
    attribution: bool,
) -> PromptRun:
    """One pass, with arguments as in `trace_attention`."""
    texts = token_texts(model, tokens) if labels is None else labels
    if len(texts) != len(tokens):
        raise ValueError(f"{len(texts)} labels for {len(tokens)} tokens: give one for each")
    adapter, masked = adapt(model), _masked(model, tokens)
    targets = _targets(model, tokens, positions, masked)
    read_at = [column for _, column in targets]
    n_columns = max(len(tokens), *(column + 1 for column, _ in targets))
    n_read = max(read_at) + 1 if adapter.causal else len(tokens)
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

    layers = range(adapter.n_layers)
    patterns = adapter.layer_points("attn.hook_pattern")
    levels = [*adapter.layer_points("hook_resid_pre"), adapter.layer_points("hook_resid_post")[-1]]
    carried = [point for layer in layers for point in _carried_points(adapter, layer)]
    points = dict.fromkeys([*carried, levels[-1]])
    hooks: list[Hook] = [(name, Order.LAST, partial(keep, name)) for name in points]
    if attribution:
        hooks += [(name, Order.LAST, nudge) for name in patterns]
    hooks += mask_hooks(adapter, masks)
    batch, gates, mlps = tokens[None, :n_read].to(adapter.device), None, None
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
    allowed = torch.stack([masks[layer].pairs(n_read) for layer in layers])
    possible = allowed[:, None].expand_as(attention)
    edges = {
        "attention": attention.cpu(),
        "carried": torch.stack([_carried(adapter, layer, kept) for layer in layers]).cpu(),
        "possible": possible,
        "gates": possible if gates is None else gates,  # in a dense model, all are open
    }
    with autograd(attribution):
        read = logits[read_at]
        pairs = quantity.pairs(model, tokens[:n_read], read_at, read)
        if attribution:
            read = read.to(torch.promote_types(read.dtype, torch.float32))
            outputs = measure(quantity.metric, read, pairs.to(read.device))
            edges["attribution"] = (-attention * _gradients(outputs, nudges)).cpu()
    streams, logits = torch.cat([kept[name] for name in levels]), logits.detach().cpu()

    # Every mask token that is run has a prediction, even if it is not a target.
    predicted = {column: column for column in masked if column < n_read} | dict(targets)
    known = [i < n_read and i not in masked for i in range(n_columns)]
    below = [texts[i] if known[i] else UNKNOWN for i in range(n_columns)]
    above = list(below)
    for column, at in predicted.items():
        above[column] = output_text(model, int(logits[at].argmax()), tokens[:column])

    def texts_of(answers: Int[Tensor, "target 1"]) -> tuple[str, ...]:
        at_targets = zip(targets, answers[:, 0].tolist(), strict=True)
        return tuple(
            output_text(model, token, tokens[:column]) for (column, _), token in at_targets
        )

    more = n_columns - n_read  # columns that the model does not read have no edges
    graph = AttentionGraph(
        **{name: pad(values, (0, more, 0, more)) for name, values in edges.items()},
        input_tokens=tuple(below),
        output_tokens=tuple(above),
        targets=tuple(targets),
        causal=adapter.causal,
        mlps=None if mlps is None else pad(mlps, (0, more)),
        metric=metric_name(quantity.metric),
        answers=texts_of(pairs.answers),
        wrong=texts_of(pairs.wrong),
    )
    return PromptRun(graph, logits, pairs, streams)


def predicted_columns(model: HookedModel, prompt: Prompt) -> list[int]:
    """All columns that a model predicts: mask tokens or, without any, the column after every token
    (each column, if bidirectional)."""
    tokens, first = prompt_tokens(model, prompt), int(adapt(model).causal)
    return _masked(model, tokens) or list(range(first, len(tokens) + first))


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
    if not positions:
        raise ValueError(
            "there is no position to predict: pass positions=, which a bidirectional model needs "
            "for a prompt without mask tokens"
        )
    targets = []
    for position in positions:
        column = predicted_column(model, tokens, position)
        in_place = column in read_in_place
        if not in_place and not (causal and 1 <= column <= n):
            some = f"1..{n}" if causal else f"0..{n - 1}"
            raise ValueError(f"position {position} cannot be predicted: choose positions in {some}")
        targets.append((column, column if in_place else column - 1))
    return targets


def _gradients(
    outputs: Float[Tensor, " target"], inputs: Sequence[Float[Tensor, "one head query key"]]
) -> Float[Tensor, "target layer head query key"]:
    """The derivative of every output with respect to every input, several outputs per pass."""
    by_output = []
    for rows in torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device).split(16):
        with torch.autograd.set_detect_anomaly(False):  # batches cannot be searched for NaN
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
    parts = [kept[point][0] for point in _carried_points(adapter, layer)[:3]]
    parts += [adapter.attention_scale(layer, kept)[0]]
    stream, pattern, v, scale = (part.to(adapter.gate_dtype) for part in parts)
    weight = adapter.W_O(layer).to(v)
    # |v W_O| from products of the rows of W_O: [key, head, d_model] does not fit for long prompts.
    products = weight @ weight.mT
    v = adapter.values_by_head(v)
    sizes = torch.einsum("khd,hde,khe->hk", v, products, v).clamp(min=0).sqrt()
    writes = pattern * sizes[:, None, :] * scale[:, None]
    whole = stream.norm(dim=-1) + writes.sum(dim=(0, 2))
    return writes / whole.clamp(min=1e-30)[:, None]


class LeaveOneOut:
    """Runs of a prompt without one part at a time; `pairs` has the prompt once per target.

    The whole model runs once per site, when a part of that site is first removed. Hooks on the
    model stay active; they and weights must not change between the first and the last call.
    """

    def __init__(self, model: HookedModel, pairs: PromptPairs, metric: Metric) -> None:
        self.adapter, self.metric = adapt(model), metric
        self.pairs = pairs.to(self.adapter.device)
        tokens, read_at = self.pairs.clean[0], pairs.positions.tolist()
        read = torch.zeros(1, len(tokens), dtype=torch.bool, device=self.adapter.device)
        read[0, read_at] = True
        # The index of each target among the logits that are read.
        self._columns = [int(read[0, :column].sum()) for column in read_at]
        self._start = model, tokens[None], read
        self._runs: dict[type, tuple[GatedRun, Tensor]] = {}
        per_token = self.adapter.activations_per_token + 3 * self.adapter.n_heads * len(tokens)
        self._most_rows = max(1, MOST_NUMBERS // (len(tokens) * per_token))

    @torch.no_grad()
    def effects(
        self, heads: Sequence[Head] = (), groups: Sequence[Sequence[AttentionEdge]] = ()
    ) -> tuple[
        Float[Tensor, "part target"], Float[Tensor, "part target"], Int[Tensor, "part target"]
    ]:
        """What removing each head, then removing each group of attention edges, changes: the metric
        (negative: the part helps) and the answer's probability; and the token predicted then."""
        n_targets, device = len(self.pairs), self.adapter.device
        changes = [torch.zeros(0, 2, n_targets, dtype=torch.float64, device=device)]
        predictions = [torch.zeros(0, n_targets, dtype=torch.long, device=device)]
        for site, parts in ((Heads(), heads), (AttentionEdges(), groups)):
            for start in range(0, len(parts), self._most_rows):
                run, whole = self._run(site)
                some = parts[start : start + self._most_rows]
                gates = _leave_one_out(self.adapter, site, some)
                logits = run.logits(gates)[:, self._columns]
                check_same_alone(logits[-1], whole)
                scores = torch.stack([self._scores(row.double()) for row in logits])
                changes.append(scores[:-1] - scores[-1])  # same pass: without an effect, exactly 0
                predictions.append(logits[:-1].argmax(dim=-1))
        effects, probabilities = torch.cat(changes).cpu().unbind(dim=1)
        return effects, probabilities, torch.cat(predictions).cpu()

    def _scores(self, logits: Float[Tensor, "target vocab"]) -> Float[Tensor, "two target"]:
        """The metric, and the probabilities of the answers."""
        probabilities = log_probability(logits, self.pairs).exp()
        return torch.stack([measure(self.metric, logits, self.pairs), probabilities])

    def _run(self, site: Site) -> tuple[GatedRun, Float[Tensor, "target vocab"]]:
        """The whole model's run, from which later passes at this site start, and its logits."""
        if type(site) not in self._runs:
            model, tokens, read = self._start
            run = GatedRun(model, site, tokens, read)
            self._runs[type(site)] = run, run.start_from(None)[self._columns]
        return self._runs[type(site)]


def _leave_one_out(
    adapter: Adapter, site: Site, parts: Sequence[Sequence[Any]]
) -> Tensor | ClosedAttentionEdges:
    """A stack of gates, of which each entry closes one part, and the last entry none."""
    if isinstance(site, AttentionEdges):
        rows = [row for row, group in enumerate(parts) for _ in group]
        edges = torch.tensor([tuple(edge) for group in parts for edge in group]).view(-1, 4)
        return ClosedAttentionEdges(edges, torch.tensor(rows, dtype=torch.long), len(parts) + 1)
    rows, heads = torch.arange(len(parts)), torch.tensor(parts)
    gates = torch.ones(len(parts) + 1, adapter.n_layers, adapter.n_heads)
    gates[rows, heads[:, 0], heads[:, 1]] = 0
    return gates


def with_effects(
    graph: AttentionGraph, one_out: LeaveOneOut, seconds: float | None = None
) -> AttentionGraph:
    """The graph with the exact effects of its open attention edges: all, or as many as time allows.

    1. Order the edges whose effects are not known by their first-order estimates, relative to the
       largest estimate of each target. (Without estimates, all effects must be computed.)
    2. Remove one edge at a time, in batches whose size follows from the speed of the last batch; at
       least one batch.
    3. Effects that were not computed are NaN.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    effect = torch.zeros(len(graph.targets), *graph.gates.shape, dtype=torch.float64)
    effect[:, graph.gates] = torch.nan  # closed edges have no effect
    effect = effect if graph.effect is None else graph.effect.clone()
    to_do = _strongest_first(graph, effect.isnan().any(dim=0))
    size = len(to_do) if seconds is None else _FIRST_BATCH
    while len(to_do):
        start = time.monotonic()
        batch, to_do = to_do[:size], to_do[size:]
        edges = [[(layer, head, query, key)] for layer, head, query, key in batch.tolist()]
        effect[:, *batch.T] = one_out.effects(groups=edges)[0].T
        now = time.monotonic()
        if now >= end:
            break
        fitting = size * (end - now) / max(now - start, 1e-9)
        size = int(max(1, min(2 * size, fitting)))
    return replace(graph, effect=effect)


def some_unknown(graph: AttentionGraph) -> bool:
    """Whether any exact effects remain to be computed."""
    return graph.effect is None or bool(graph.effect.isnan().any())


def _strongest_first(
    graph: AttentionGraph, edges: Bool[Tensor, "layer head query key"]
) -> Int[Tensor, "edge four"]:
    found = edges.nonzero()
    if graph.attribution is None:
        return found
    sizes = graph.attribution.abs()
    largest = sizes.flatten(start_dim=1).amax(dim=1).clamp(min=1e-30)
    strength = (sizes / largest[:, None, None, None, None]).amax(dim=0)[edges]
    return found[strength.argsort(descending=True, stable=True)]

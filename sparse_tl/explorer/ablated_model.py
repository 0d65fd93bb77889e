"""A model on a prompt, with selected heads and attention edges removed.

Every removed edge gets a gate of 0, applied after the gates of the model. Removing a head removes
all of its edges, so a diagram shows none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits import trace_attention
from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.circuits.prompt.edge_effects import EdgeEffects
from sparse_tl.circuits.prompt.quantity import Quantity
from sparse_tl.circuits.prompt.removal import AttentionEdge, Head, LeaveOneOut, RemovalEffects
from sparse_tl.circuits.prompt.tokens import Prompt, output_text, prompt_tokens
from sparse_tl.circuits.prompt.trace import MAX_EFFECTS
from sparse_tl.explorer.fingerprint import fingerprint
from sparse_tl.gates import AttentionEdges, gated
from sparse_tl.lens import EMBEDDED, HookedModel, Order, adapt, attached, check_gates
from sparse_tl.metrics import measure
from sparse_tl.parts.grids import AttentionGrid

Row = Mapping[str, Any]
"""A token with its logit, probability and log-probability, now and before the removals."""


@dataclass(frozen=True, eq=False)
class PromptRun:
    """Results of running the prompt.

    Args:
        graph: attention graph of the run.
        logits: logits at every column that the model reads.
        streams: residual stream of the input, then after each layer.
    """

    graph: AttentionGraph
    logits: Float[Tensor, "pos vocab"]
    streams: Float[Tensor, "level pos d_model"]


class AblatedModel:
    """A model on a prompt: results of the whole model (`whole`) and under removals (`now`).

    Args:
        model: dense or sparse model.
        prompt: text or tokens.
        positions: columns to predict.
        labels: text of each column, if not the tokenizer's.
        quantity: the quantity that effects change; the whole model determines its answers.
    """

    def __init__(
        self,
        model: HookedModel,
        prompt: Prompt,
        positions: Sequence[int] | None,
        labels: Sequence[str] | None,
        quantity: Quantity,
    ) -> None:
        self.model, self.labels, self.quantity = model, labels, quantity
        self.adapter = adapt(model)
        check_gates(self.adapter)  # before adding hooks, which keep the first pass
        self.tokens = prompt_tokens(model, prompt)
        self.heads: set[Head] = set()
        self.edges: set[AttentionEdge] = set()
        self._fingerprint = fingerprint(model)
        # Caches for the current removals; output rows by column and number of tokens.
        self._output_rows: dict[tuple[int, int], tuple[Row, ...]] = {}
        self._leave_one_out: LeaveOneOut | None = None
        self._edge_effects: EdgeEffects | None = None
        self.now = self.whole = self._run(positions)
        graph = self.whole.graph
        assert graph.possible is not None
        self.targets, self.n_read = graph.targets, graph.n_read
        read_at = [column for _, column in self.targets]
        tokens, logits = self.tokens[: self.n_read], self.whole.logits[read_at]
        self.pairs = quantity.pairs(model, tokens, read_at, logits)
        # The answers stay the same, whatever is removed.
        answer, wrong = (ids[:, 0].tolist() for ids in (self.pairs.answers, self.pairs.wrong))
        self.quantity = replace(quantity, answer=answer, wrong=wrong)
        allowed = graph.possible[:, 0, : graph.n_read, : graph.n_read]
        sizes = graph.n_layers, graph.n_heads, graph.n_read
        self.grid = AttentionGrid(*sizes, graph.causal, allowed)
        self._compute_few_effects()
        self.whole = self.now

    @property
    def positions(self) -> list[int]:
        return [column for column, _ in self.targets]

    @property
    def changed(self) -> bool:
        """Whether the model's weights or gates have changed since it ran."""
        return self._fingerprint != fingerprint(self.model)

    def remove(self, heads: set[Head], edges: set[AttentionEdge]) -> None:
        """Set the removed heads and edges; if the model cannot run like that, nothing changes."""
        old = self.heads, self.edges
        self.heads, self.edges = heads, edges
        run = self.whole
        try:
            if heads or edges:
                with self._ablated():
                    run = self._run(self.positions)
        except BaseException:
            self.heads, self.edges = old
            raise
        self._leave_one_out, self._edge_effects, self._output_rows = None, None, {}
        if run is not self.whole:
            graph = replace(run.graph, gates=run.graph.gates & ~self.removed())
            run = replace(run, graph=graph)
        self.now = run
        self._compute_few_effects()

    def removed(self) -> Bool[Tensor, "layer head query key"]:
        """Which attention edges are removed, individually or with their head."""
        removed = torch.zeros(self.whole.graph.attention.shape, dtype=torch.bool)
        for index in (*self.heads, *self.edges):
            removed[index] = True
        return removed

    def effects(
        self, heads: Sequence[Head] = (), groups: Sequence[Sequence[AttentionEdge]] = ()
    ) -> RemovalEffects:
        """Effects of removing each head, then each group of edges, on top of the removals."""
        with self._ablated():
            return self._without_each.effects(heads, groups)

    def compute_edge_effects(self, seconds: float | None) -> bool:
        """Compute exact effects of the graph's edges, strongest first, as in `EdgeEffects`.

        Returns:
            Whether any are left to compute.
        """
        effect = self.now.graph.effect
        if effect is not None and not bool(effect.isnan().any()):
            return False
        with self._ablated():
            if self._edge_effects is None:
                self._edge_effects = EdgeEffects(self.now.graph, self._without_each)
            self._edge_effects.advance(seconds)
        self.now = replace(self.now, graph=self._edge_effects.graph)
        return self._edge_effects.more

    def _compute_few_effects(self) -> None:
        """Compute exact effects of the graph's edges if few are open."""
        if int(self.now.graph.gates.sum()) <= MAX_EFFECTS:
            self.compute_edge_effects(None)

    @property
    def _without_each(self) -> LeaveOneOut:
        if self._leave_one_out is None:
            self._leave_one_out = LeaveOneOut(self.model, self.pairs, self.quantity.metric)
        return self._leave_one_out

    def values(self, run: PromptRun) -> Float[Tensor, " target"]:
        """The quantity that effects change, in one run."""
        logits = run.logits[self.pairs.positions].double()
        return measure(self.quantity.metric, logits, self.pairs)

    def output_rows(self, read_at: int, top: int) -> tuple[Row, ...]:
        """The likely tokens at a column before or after the removals, and both top predictions."""
        # Cached, as most requests change only one of several models.
        if (read_at, top) not in self._output_rows:
            before, after = (run.logits[read_at].double() for run in (self.whole, self.now))
            largest = torch.maximum(before.softmax(dim=-1), after.softmax(dim=-1))
            largest[before.argmax()] = largest[after.argmax()] = 2.0
            tokens = largest.topk(min(top, len(largest))).indices
            tokens = tokens[after[tokens].argsort(descending=True, stable=True)]
            rows = zip(
                self._rows(after, tokens, read_at), self._rows(before, tokens, read_at), strict=True
            )
            self._output_rows[read_at, top] = tuple(
                {**row, **{f"{name}_before": old[name] for name in old if name != "token"}}
                for row, old in rows
            )
        return self._output_rows[read_at, top]

    @autograd(False)
    def lens_rows(self, level: int, column: int, top: int) -> list[Row]:
        """The most likely tokens by the logit lens at a node of the residual stream."""
        logits = self.adapter.logits(self.now.streams[level, None])[0, column].cpu().double()
        return self._rows(logits, logits.topk(min(top, len(logits))).indices, column)

    def output_text(self, output: int, read_at: int) -> str:
        """The text of an output token that is read at a column."""
        return output_text(self.model, output, self.tokens[: read_at + 1])

    def _rows(
        self, logits: Float[Tensor, " vocab"], tokens: Int[Tensor, " token"], read_at: int
    ) -> list[Row]:
        texts = [self.output_text(token, read_at) for token in tokens.tolist()]
        log_probability = logits.log_softmax(dim=-1)
        values = logits, log_probability.exp(), log_probability
        names = "logit", "probability", "log_probability"
        columns = (column[tokens].tolist() for column in values)
        return [
            {"token": text, **dict(zip(names, row, strict=True))}
            for text, *row in zip(texts, *columns, strict=True)
        ]

    def _run(self, positions: Sequence[int] | None) -> PromptRun:
        streams: dict[str, Tensor] = {}

        def keep(name: str, stream: Tensor) -> None:
            streams.setdefault(name, stream.detach())  # only the first pass: no further ablation

        points = [EMBEDDED, *self.adapter.layer_points("hook_resid_post")]
        hooks = [(point, Order.LAST, partial(keep, point)) for point in points]
        with attached(self.adapter, hooks):
            graph = trace_attention(
                self.model,
                self.tokens,
                attribution=True,
                positions=positions,
                labels=self.labels,
                metric=self.quantity.metric,
                answer=self.quantity.answer,
                wrong=self.quantity.wrong,
            )
        levels = torch.cat([streams[point] for point in points])[:, : graph.n_read]
        with autograd(False):
            logits = self.adapter.logits(levels[-1:])[0]
        return PromptRun(graph, logits.cpu(), levels)

    def _ablated(self) -> AbstractContextManager[None]:
        """Run the model without the removed parts inside the block."""
        if not (self.heads or self.edges):
            return nullcontext()
        kept = ~self.removed()[..., : self.n_read, : self.n_read]
        return gated(self.model, AttentionEdges(), kept)


def by_title(models: HookedModel | Mapping[str, HookedModel]) -> dict[str, HookedModel]:
    """Models by panel title; a single model gets the title "Model".

    Raises:
        ValueError: there is no model.
    """
    if not isinstance(models, Mapping):
        return {"Model": models}
    if not models:
        raise ValueError("expected at least one model by title; got none")
    return {str(title): model for title, model in models.items()}


def start_together(
    models: Mapping[str, HookedModel],
    prompt: Prompt,
    positions: Sequence[int] | None,
    labels: Sequence[str] | None,
    quantity: Quantity,
) -> dict[str, AblatedModel]:
    """Models by title on one prompt, with nothing removed.

    Raises:
        ValueError: they divide the prompt into different columns.
    """
    ablated = {
        title: AblatedModel(model, prompt, positions, labels, quantity)
        for title, model in models.items()
    }
    title, first = next(iter(ablated.items()))
    expected = first.whole.graph
    for other, model in ablated.items():
        graph = model.whole.graph
        if (graph.n_columns, graph.targets) != (expected.n_columns, expected.targets):
            raise ValueError(
                f"expected models that divide the prompt into the same columns; {title!r} has "
                f"{expected.n_columns} and {other!r} {graph.n_columns}; explore models with "
                "different tokenizers separately"
            )
    return ablated

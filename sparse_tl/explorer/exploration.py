"""Several models on one prompt, with parts removed: the data behind the explorer.

Every model runs once in full and, after removals, without the removed parts: each removed edge gets
a gate of 0, applied after the gates of the model, and removing a head removes all of its edges. The
rest is derived from these runs: the graph for the diagram, effects of heads, likely tokens before
and after, and the logit lens of a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import HookedModel, adapt, check_gates, heads_of
from sparse_tl.circuits.prompt.attention import (
    AttentionEdge,
    Head,
    LeaveOneOut,
    PromptRun,
    predicted_column,
    predicted_columns,
    run_prompt,
    with_effects,
)
from sparse_tl.circuits.prompt.tokens import Prompt, Quantity, output_text, prompt_tokens
from sparse_tl.gates import AttentionEdges, gated
from sparse_tl.graph import AttentionGrid
from sparse_tl.metrics import measure
from sparse_tl.plots.page.rendering import by_title


class Exploration:
    """Models on one prompt; heads and attention edges of each of `models` can be removed.

    No hooks are left on the models between calls. Parameters are those of `CircuitExplorer`, whose
    metric and answers are the `quantity` (log-probability of the prediction).

    Raises:
        ValueError: there is no model, a model has no attention patterns to hook, the prompt is
            empty, too long or unknown to the tokenizer, a position cannot be predicted, an answer
            is not one token, or models divide the prompt into different columns.
    """

    def __init__(
        self,
        models: HookedModel | Mapping[str, HookedModel],
        prompt: Prompt,
        *,
        position: int | None = None,
        positions: Sequence[int] | None = None,
        labels: Sequence[str] | None = None,
        quantity: Quantity | None = None,
    ) -> None:
        self._whole_models = by_title(models)
        self.models: dict[str, AblatedModel] = {}
        quantity = Quantity() if quantity is None else quantity
        self._show(prompt, positions, labels, quantity)
        self.first_target = len(self.targets) - 1
        if position is None:
            return
        column = predicted_column(self._first.model, self._first.tokens, position)
        if column not in self._first.positions:
            if positions is not None:
                raise ValueError(f"position is {position}, which is not one of {list(positions)}")
            self._show(prompt, [column], labels, quantity)
        self.first_target = self._first.positions.index(column)

    def _show(
        self,
        prompt: Prompt,
        positions: Sequence[int] | None,
        labels: Sequence[str] | None,
        quantity: Quantity,
    ) -> None:
        """Run all models, without their removed parts; if that fails, nothing changes."""
        new = {
            title: AblatedModel(model, prompt, positions, labels, quantity)
            for title, model in self._whole_models.items()
        }
        title, first = next(iter(new.items()))
        for other, model in new.items():
            if (model.n_columns, model.targets) != (first.n_columns, first.targets):
                raise ValueError(
                    f"the models do not divide the prompt into the same columns; {title!r} has "
                    f"{first.n_columns} and {other!r} {model.n_columns}; explore models with "
                    "different tokenizers separately"
                )
            old = self.models.get(other)
            if old is not None:
                same = len(old.tokens) == len(model.tokens)
                edges = {edge for edge in old.removed_edges if same and edge[2] < model.n_read}
                model.remove(old.removed_heads, edges)
        self.models, self._prompt, self._labels, self.quantity = new, prompt, labels, quantity

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(self.models)

    @property
    def prompt(self) -> str:
        """The prompt as text; empty for tokens of a model without a tokenizer."""
        if isinstance(self._prompt, str):
            return self._prompt
        tokenizer = self._first.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self._prompt.tolist())

    @property
    def targets(self) -> tuple[tuple[int, int], ...]:
        """The predicted columns, each with the column where it is read."""
        return self._first.targets

    @property
    def predicted_columns(self) -> list[int]:
        """All columns that can be predicted: mask tokens or, without any, those after each token
        (bidirectional models: every column)."""
        return predicted_columns(self._first.model, self._first.tokens)

    def show_prompt(self, prompt: Prompt, labels: Sequence[str] | None = None) -> bool:
        """Switch to another prompt; if it cannot be run, nothing changes.

        Removed heads stay removed. If both prompts have the same number of tokens, removed edges
        stay removed and the same columns are predicted; otherwise edges are restored and columns
        are chosen anew. Returns whether they have.
        """
        old = self._first
        same = len(prompt_tokens(old.model, prompt)) == len(old.tokens)
        self._show(prompt, old.positions if same else None, labels, self.quantity)
        return same

    def show_position(self, column: int) -> int:
        """Also predict the token at a column; return its index into `targets`."""
        columns = self._first.positions
        if column not in columns:
            self._show(self._prompt, sorted([*columns, column]), self._labels, self.quantity)
        return self._first.positions.index(column)

    def measure(self, quantity: Quantity) -> None:
        """Measure effects on another quantity."""
        self._show(self._prompt, self._first.positions, self._labels, quantity)

    def refresh(self) -> tuple[str, ...]:
        """Run all again if weights or gates have changed; return the titles of those models."""
        changed = tuple(title for title, model in self.models.items() if model.changed)
        if changed:
            self.measure(self.quantity)
        return changed

    def restore(self, title: str | None = None) -> None:
        """Restore everything, in one model or in all."""
        for name in self.titles if title is None else (title,):
            self.models[name].remove(set(), set())

    @property
    def _first(self) -> AblatedModel:
        return next(iter(self.models.values()))


class AblatedModel:
    """A model on a prompt, from which heads and attention edges can be removed and restored.

    The whole model determines the answers of the quantity that effects change; they stay the same,
    whatever is removed.

    Attributes:
        whole: results of the whole model.
        now: results under the removals; `now.graph` has the remaining edges, with exact effects
            after `compute_edge_effects`, and `now.logits` the logits at every column that is read.
        removed_heads: the removed heads: layer and head.
        removed_edges: the attention edges removed one by one: layer, head, query and key.
        removed: whether each attention edge is removed, for either reason.
    """

    def __init__(
        self,
        model: HookedModel,
        prompt: Prompt,
        positions: Sequence[int] | None,
        labels: Sequence[str] | None,
        quantity: Quantity,
    ) -> None:
        self.model, self.adapter, self._labels = model, adapt(model), labels
        check_gates(self.adapter)
        self.tokens = prompt_tokens(model, prompt)
        self._fingerprint = _fingerprint(model)
        whole = self._run(positions, quantity)
        graph, pairs = whole.graph, whole.pairs
        assert graph.possible is not None
        self.targets, self.n_read, self.n_columns = graph.targets, graph.n_read, graph.n_columns
        self.positions = [column for column, _ in graph.targets]
        answer, wrong = (ids[:, 0].tolist() for ids in (pairs.answers, pairs.wrong))
        self._quantity = replace(quantity, answer=answer, wrong=wrong)
        allowed = graph.possible[:, 0, : graph.n_read, : graph.n_read]
        sizes = graph.n_layers, graph.n_heads, graph.n_read
        self.grid = AttentionGrid(*sizes, graph.causal, allowed)
        self.whole = whole
        self.remove(set(), set())

    @property
    def changed(self) -> bool:
        """Whether the model's weights or gates have changed since it ran."""
        return self._fingerprint != _fingerprint(self.model)

    def remove(self, heads: set[Head], edges: set[AttentionEdge]) -> None:
        """Set the removed heads and edges; if the model cannot run like that, nothing changes."""
        removed = torch.zeros(self.whole.graph.attention.shape, dtype=torch.bool)
        for index in (*heads, *edges):
            removed[index] = True
        run = self.whole
        with self._without(removed):
            if heads or edges:
                run = self._run(self.positions, self._quantity)
                graph = replace(run.graph, gates=run.graph.gates & ~removed)
                run = replace(run, graph=graph)
            self.one_out = LeaveOneOut(self.model, run.pairs, self._quantity.metric)
        self.removed_heads, self.removed_edges = heads, edges
        self.removed, self.now = removed, run

    def compute_edge_effects(self, seconds: float | None = None) -> None:
        """Compute exact effects of the graph's edges: all, or as many as there is time for."""
        with self._without(self.removed):
            graph = with_effects(self.now.graph, self.one_out, seconds)
        self.now = replace(self.now, graph=graph)
        if not (self.removed_heads or self.removed_edges):
            self.whole = self.now

    def toggle_head(self, layer: int, head: int) -> None:
        """Remove a head, or restore it."""
        toggled = set(heads_of(self.adapter, [(layer, head)]))
        self.remove(self.removed_heads ^ toggled, self.removed_edges)

    def toggle_attention_edges(self, edges: Iterable[AttentionEdge]) -> None:
        """Remove attention edges (layer, head, query, key), or restore them if all are removed."""
        toggled = set(edges)
        for edge in toggled:
            self.grid.index(edge)
        restore = toggled <= self.removed_edges
        change = self.removed_edges - toggled if restore else self.removed_edges | toggled
        self.remove(self.removed_heads, change)

    def values(self) -> tuple[Float[Tensor, " target"], Float[Tensor, " target"]]:
        """The quantity that effects change, in the whole model and under the removals."""
        pairs = self.whole.pairs
        runs = (run.logits[pairs.positions].double() for run in (self.whole, self.now))
        before, now = (measure(self._quantity.metric, logits, pairs) for logits in runs)
        return before, now

    def head_effects(self, layers: Sequence[int] | None = None) -> pd.DataFrame:
        """The effects on each predicted token of removing each head, on top of the removals.

        Args:
            layers: layers of the heads; by default all, in order.

        Returns:
            One row per head and predicted token: part, such as "a2.h1"; column of the prediction,
            and its answer; effect, the change of the quantity (negative: the part helps);
            probability, the change of the answer's; prediction without the part.
        """
        layers = range(self.adapter.n_layers) if layers is None else layers
        heads = heads_of(self.adapter, list(product(layers, range(self.adapter.n_heads))))
        return self._effects([f"a{layer}.h{head}" for layer, head in heads], heads=heads)

    def attention_edge_effects(self, groups: Sequence[Sequence[AttentionEdge]]) -> pd.DataFrame:
        """Effect on each predicted token of removing each group of edges, on top of the removals.

        The edges (layer, head, query, key) of a group are removed together. The table is that of
        `head_effects`.
        """
        for edge in chain.from_iterable(groups):
            self.grid.index(edge)
        names = [", ".join(self.grid.names(torch.tensor(group))) for group in groups]
        return self._effects(names, groups=groups)

    def _effects(self, names: Sequence[str], **parts: Any) -> pd.DataFrame:
        with self._without(self.removed):
            found = self.one_out.effects(**parts)
        effects, probabilities, predictions = (each.ravel().tolist() for each in found)
        read_at = [at for _, at in self.targets] * len(names)
        answers = self.whole.pairs.answers[:, 0].tolist() * len(names)
        table = pd.DataFrame(product(names, self.positions), columns=["part", "column"])
        return table.assign(
            answer=[*map(self.output_text, answers, read_at)],
            effect=effects,
            probability=probabilities,
            prediction=[*map(self.output_text, predictions, read_at)],
        )

    def outputs(self, target: int = -1, top: int = 6) -> pd.DataFrame:
        """The most likely tokens at a predicted column, before or after the removals.

        Args:
            target: index into `targets`.
            top: number of tokens; the top predictions before and after are always included.

        Returns:
            token; logit, probability and log_probability, after and before the removals
            (``logit_before`` etc.); most likely after the removals first.
        """
        _, read_at = self.targets[target]
        before, after = (run.logits[read_at].double() for run in (self.whole, self.now))
        largest = torch.maximum(before.softmax(dim=-1), after.softmax(dim=-1))
        largest[before.argmax()] = largest[after.argmax()] = 2.0
        tokens = largest.topk(min(top, len(largest))).indices
        tokens = tokens[after[tokens].argsort(descending=True, stable=True)]
        return self._table(tokens, read_at, {"": after, "_before": before})

    @torch.no_grad()
    def logit_lens(self, level: int, column: int, top: int = 6) -> pd.DataFrame:
        """The most likely tokens by the logit lens: a node's residual stream through the final
        normalisation and the unembedding, as if no later layer wrote anything.

        Args:
            level: 0 is the input, ``l + 1`` the residual stream after layer ``l``.
            column: token position.
            top: number of tokens.

        Returns:
            token, logit, probability, log_probability; most likely first.
        """
        if not (0 <= level <= self.adapter.n_layers and 0 <= column < self.n_read):
            raise ValueError(
                f"there is no node at level {level} and column {column}: levels end at "
                f"{self.adapter.n_layers}, and the model reads columns up to {self.n_read - 1}"
            )
        stream = self.now.streams[level, None]
        logits = self.adapter.logits(stream)[0, column].cpu().double()
        tokens = logits.topk(min(top, len(logits))).indices
        return self._table(tokens, column, {"": logits})

    def output_text(self, output: int, read_at: int) -> str:
        """The text of an output token that is read at a column."""
        return output_text(self.model, output, self.tokens[: read_at + 1])

    def _table(
        self, tokens: Int[Tensor, " token"], read_at: int, by_suffix: Mapping[str, Tensor]
    ) -> pd.DataFrame:
        """Tokens with their text and, by suffix of the columns, the numbers from some logits."""
        table = pd.DataFrame({"token": [self.output_text(n, read_at) for n in tokens.tolist()]})
        for suffix, logits in by_suffix.items():
            logs = logits.log_softmax(dim=-1)
            table[f"logit{suffix}"] = logits[tokens].tolist()
            table[f"probability{suffix}"] = logs.exp()[tokens].tolist()
            table[f"log_probability{suffix}"] = logs[tokens].tolist()
        return table

    def _run(self, positions: Sequence[int] | None, quantity: Quantity) -> PromptRun:
        return run_prompt(
            self.model, self.tokens, positions, self._labels, quantity, attribution=True
        )

    def _without(self, removed: Tensor) -> AbstractContextManager[None]:
        if not removed.any():
            return nullcontext()
        return gated(self.model, AttentionEdges(), ~removed[..., : self.n_read, : self.n_read])


def _fingerprint(model: HookedModel) -> list[tuple[int, int, list[float]]]:
    """For each tensor of a model: its address, its count of in-place writes, and some values."""
    assert isinstance(model, torch.nn.Module)
    prints = []
    for tensor in chain(model.parameters(), model.buffers()):
        values = tensor.detach()
        some = values.flatten() if values.is_contiguous() else values[(0,) * (values.ndim - 1)]
        some = some[:: max(1, some.numel() // 16)].float().tolist()
        prints.append((tensor.data_ptr(), tensor._version, some))
    return prints

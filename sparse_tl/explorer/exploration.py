"""Several models on one prompt, with parts removed: the data behind the explorer.

Every model runs once in full and, after removals, without the removed parts: each removed edge gets
a gate of 0, applied after the gates of the model, and removing a head removes all of its edges. The
rest is derived from these runs: the graph for the diagram, effects of heads, likely tokens before
and after, and the logit lens of a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.backend import (
    EMBEDDED,
    HookedModel,
    Order,
    adapt,
    attached,
    check_gates,
    check_head,
    heads_of,
)
from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.circuits.prompt.removal import (
    AttentionEdge,
    EdgeEffects,
    Head,
    LeaveOneOut,
    RemovalEffects,
)
from sparse_tl.circuits.prompt.tokens import (
    LOG_PROBABILITY,
    Prompt,
    Quantity,
    output_text,
    prompt_tokens,
)
from sparse_tl.circuits.prompt.trace import (
    MAX_EFFECTS,
    predicted_column,
    predicted_columns,
    traced,
)
from sparse_tl.data import PromptPairs
from sparse_tl.gates import AttentionEdges, gated
from sparse_tl.graph import AttentionGrid
from sparse_tl.metrics import measure


def by_title(models: HookedModel | Mapping[str, HookedModel]) -> dict[str, HookedModel]:
    """Models by panel title; a single model gets the title "Model"."""
    if not isinstance(models, Mapping):
        return {"Model": models}
    if not models:
        raise ValueError("there is no model: pass one, or several by title")
    return {str(title): model for title, model in models.items()}


class Exploration:
    """Models on one prompt, from which heads and attention edges can be removed and restored.

    No hooks are left on the models between calls. Parameters are those of `CircuitExplorer`, whose
    metric and answers are the `quantity`.

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
        quantity: Quantity = LOG_PROBABILITY,
    ) -> None:
        self._models = by_title(models)
        self._prompt, self._labels = prompt, labels
        self.quantity = quantity
        self._ablated = self._start(prompt, positions, labels)
        columns = self._first.positions
        self.first_target = len(columns) - 1
        if position is None:
            return
        column = predicted_column(self._first.model, self._first.tokens, position)
        if column in columns:
            self.first_target = columns.index(column)
        elif positions is not None:
            raise ValueError(f"position is {position}, which is not one of {list(positions)}")
        else:
            self._ablated = self._start(prompt, [column], labels)
            self.first_target = 0

    # ---- the prompt ----------------------------------------------------------------------------

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(self._ablated)

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
    def n_read(self) -> int:
        """Number of columns that the models read; later columns only hold predictions."""
        return self._first.n_read

    @property
    def predicted_columns(self) -> list[int]:
        """All columns that can be predicted, as in `circuits.prompt.trace.predicted_columns`."""
        return predicted_columns(self._first.model, self._first.tokens)

    def show_prompt(self, prompt: Prompt, labels: Sequence[str] | None = None) -> bool:
        """Switch to another prompt; if it cannot be run, nothing changes.

        Removed heads stay removed. If both prompts have the same number of tokens, removed edges
        stay removed and the same columns are predicted; otherwise edges are restored and columns
        are chosen anew. Returns whether they have.
        """
        # Start without positions, so that errors concern the text itself.
        new = self._start(prompt, None, labels)
        first = next(iter(new.values()))
        same = len(first.tokens) == len(self._first.tokens)
        if same and first.positions != self._first.positions:
            new = self._start(prompt, self._first.positions, labels)
        for title, model in new.items():
            old = self._ablated[title]
            model.remove(old.heads, {edge for edge in old.edges if same and edge[2] < model.n_read})
        self._prompt, self._labels, self._ablated = prompt, labels, new
        return same

    def show_position(self, column: int) -> int:
        """Also predict the token at a column; return its index into `targets`."""
        columns = self._first.positions
        if column not in columns:
            self._rerun(self.titles, sorted([*columns, column]))
        return self._first.positions.index(column)

    def measure(self, quantity: Quantity) -> None:
        """Measure effects on another quantity."""
        old, self.quantity = self.quantity, quantity
        try:
            self._rerun(self.titles, self._first.positions)
        except BaseException:
            self.quantity = old
            raise

    def refresh(self) -> tuple[str, ...]:
        """Rerun models whose weights or gates have changed; return their titles."""
        changed = tuple(title for title, model in self._ablated.items() if model.changed)
        self._rerun(changed, self._first.positions)
        return changed

    def _start(
        self, prompt: Prompt, positions: Sequence[int] | None, labels: Sequence[str] | None
    ) -> dict[str, AblatedModel]:
        """All models on a prompt, with nothing removed."""
        ablated = {
            title: AblatedModel(model, prompt, positions, labels, self.quantity)
            for title, model in self._models.items()
        }
        title, first = next(iter(ablated.items()))
        for other, model in ablated.items():
            if (model.n_columns, model.targets) != (first.n_columns, first.targets):
                raise ValueError(
                    f"the models do not divide the prompt into the same columns; {title!r} has "
                    f"{first.n_columns} and {other!r} {model.n_columns}; explore models with "
                    "different tokenizers separately"
                )
        return ablated

    def _rerun(self, titles: Sequence[str], positions: Sequence[int]) -> None:
        """Rerun models, without their removed parts; if that fails, nothing changes."""
        new = dict(self._ablated)
        for title in titles:
            old = self._ablated[title]
            new[title] = AblatedModel(
                old.model, self._prompt, positions, self._labels, self.quantity
            )
            new[title].remove(old.heads, old.edges)
        self._ablated = new

    # ---- removing and restoring ------------------------------------------------------------------

    def removed_heads(self, title: str) -> tuple[Head, ...]:
        """The removed heads of a model, sorted."""
        return tuple(sorted(self.model(title).heads))

    def removed_attention_edges(self, title: str) -> tuple[AttentionEdge, ...]:
        """The individually removed attention edges of a model, sorted."""
        return tuple(sorted(self.model(title).edges))

    def removed(self, title: str) -> Bool[Tensor, "layer head query key"]:
        """Which attention edges are removed, individually or with their head."""
        return self.model(title).removed

    def toggle_head(self, title: str, layer: int, head: int) -> None:
        """Remove a head, or restore it."""
        model = self.model(title)
        check_head(model.adapter, layer, head)
        model.remove(model.heads ^ {(layer, head)}, model.edges)

    def toggle_attention_edges(self, title: str, edges: Iterable[AttentionEdge]) -> None:
        """Remove attention edges (layer, head, query, key), or restore them if all are removed."""
        model = self.model(title)
        toggled = set(edges)
        for edge in toggled:
            model.grid.index(edge)
        removed = model.edges - toggled if toggled <= model.edges else model.edges | toggled
        model.remove(model.heads, removed)

    def restore(self, title: str | None = None) -> None:
        """Restore everything, in one model or in all."""
        for name in self.titles if title is None else (title,):
            self.model(name).remove(set(), set())

    # ---- results, under the removals -------------------------------------------------------------

    def graph(self, title: str) -> AttentionGraph:
        """The remaining attention edges, with their effects."""
        return self.model(title).now.graph

    def logits(self, title: str) -> Float[Tensor, "pos vocab"]:
        """The logits under the removals, at every column that the model reads."""
        return self.model(title).now.logits

    def values(self, title: str) -> tuple[Float[Tensor, " target"], Float[Tensor, " target"]]:
        """The quantity that effects change, in the whole model and under the removals."""
        model = self.model(title)
        pairs = model.whole.pairs
        runs = (run.logits[pairs.positions].double() for run in (model.whole, model.now))
        before, now = (measure(model.quantity.metric, logits, pairs) for logits in runs)
        return before, now

    def head_effects(self, title: str, layers: Sequence[int] | None = None) -> RemovalEffects:
        """Effect on each predicted token of removing each head, on top of the removals.

        The heads are those of some layers; by default of all, in order.
        """
        model = self.model(title)
        layers = range(model.adapter.n_layers) if layers is None else layers
        heads = list(product(layers, range(model.adapter.n_heads)))
        return model.effects(heads=heads_of(model.adapter, heads))

    def attention_edge_effects(
        self, title: str, groups: Sequence[Sequence[AttentionEdge]]
    ) -> RemovalEffects:
        """Effect on each predicted token of removing each group of edges, on top of the removals.

        The edges (layer, head, query, key) of a group are removed together.
        """
        model = self.model(title)
        for edge in chain.from_iterable(groups):
            model.grid.index(edge)
        return model.effects(groups=groups)

    def outputs(self, title: str, target: int = -1, top: int = 6) -> pd.DataFrame:
        """The most likely tokens at a predicted column, before or after the removals.

        Args:
            title: title of the model.
            target: index into `targets`.
            top: number of tokens; the top predictions before and after are always included.

        Returns:
            token; logit, probability and log_probability, after and before the removals
            (``logit_before`` etc.); most likely after the removals first.
        """
        return self.model(title).outputs(self.targets[target][1], top)

    def logit_lens(self, title: str, level: int, column: int, top: int = 6) -> pd.DataFrame:
        """The most likely tokens by the logit lens: a node's residual stream through the final
        normalisation and the unembedding, as if no later layer wrote anything.

        Args:
            title: title of the model.
            level: 0 is the input, ``l + 1`` the residual stream after layer ``l``.
            column: token position.
            top: number of tokens.

        Returns:
            token, logit, probability, log_probability; most likely first.
        """
        model = self.model(title)
        if not (0 <= level <= model.adapter.n_layers and 0 <= column < model.n_read):
            raise ValueError(
                f"there is no node at level {level} and column {column}: levels end at "
                f"{model.adapter.n_layers}, and the model reads columns up to {model.n_read - 1}"
            )
        return model.logit_lens(level, column, top)

    @property
    def _first(self) -> AblatedModel:
        return next(iter(self._ablated.values()))

    def model(self, title: str) -> AblatedModel:
        """One of the models on the prompt."""
        if title not in self._ablated:
            raise ValueError(f"there is no panel {title!r}, only {list(self._ablated)}")
        return self._ablated[title]


@dataclass(frozen=True, eq=False)
class _PromptRun:
    """One run of the prompt, with the residual stream of the input and after each layer."""

    graph: AttentionGraph
    logits: Float[Tensor, "pos vocab"]
    pairs: PromptPairs
    streams: Float[Tensor, "level pos d_model"]


class AblatedModel:
    """A model on a prompt: results of the whole model (`whole`) and under removals (`now`).

    The whole model determines the answers of the quantity that effects change; they stay the same,
    whatever is removed.
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
        self._fingerprint = _fingerprint(model)
        self.whole = self._run(positions)
        graph = self.whole.graph
        assert graph.possible is not None
        self.targets, self.n_read, self.n_columns = graph.targets, graph.n_read, graph.n_columns
        self.positions = [column for column, _ in graph.targets]
        pairs = self.whole.pairs
        answer, wrong = (ids[:, 0].tolist() for ids in (pairs.answers, pairs.wrong))
        self.quantity = replace(quantity, answer=answer, wrong=wrong)
        allowed = graph.possible[:, 0, : graph.n_read, : graph.n_read]
        sizes = graph.n_layers, graph.n_heads, graph.n_read
        self.grid = AttentionGrid(*sizes, graph.causal, allowed)
        self.remove(set(), set())
        self.whole = self.now

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
                run = self._run(self.positions)
                graph = replace(run.graph, gates=run.graph.gates & ~removed)
                run = replace(run, graph=graph)
            self._without_each = LeaveOneOut(self.model, run.pairs, self.quantity.metric)
        self.heads, self.edges, self.removed, self.now = heads, edges, removed, run
        self._edge_effects: EdgeEffects | None = None
        if int(run.graph.gates.sum()) <= MAX_EFFECTS:
            self.compute_edge_effects(None)

    def effects(
        self, heads: Sequence[Head] = (), groups: Sequence[Sequence[AttentionEdge]] = ()
    ) -> RemovalEffects:
        """Effects of removing each head, then each group of edges, on top of the removals."""
        with self._without(self.removed):
            return self._without_each.effects(heads, groups)

    def compute_edge_effects(self, seconds: float | None) -> bool:
        """Compute exact effects of the graph's edges; return whether any are left to compute."""
        effect = self.now.graph.effect
        if effect is not None and not bool(effect.isnan().any()):
            return False
        with self._without(self.removed):
            if self._edge_effects is None:
                self._edge_effects = EdgeEffects(self.now.graph, self._without_each)
            self._edge_effects.advance(seconds)
        self.now = replace(self.now, graph=self._edge_effects.graph)
        return self._edge_effects.more

    def outputs(self, read_at: int, top: int) -> pd.DataFrame:
        """The likely tokens at a column before or after the removals, and both top predictions."""
        before, after = (run.logits[read_at].double() for run in (self.whole, self.now))
        largest = torch.maximum(before.softmax(dim=-1), after.softmax(dim=-1))
        largest[before.argmax()] = largest[after.argmax()] = 2.0
        tokens = largest.topk(min(top, len(largest))).indices
        tokens = tokens[after[tokens].argsort(descending=True, stable=True)]
        return self._table(tokens, read_at, {"": after, "_before": before})

    @torch.no_grad()
    def logit_lens(self, level: int, column: int, top: int) -> pd.DataFrame:
        """The most likely tokens by the logit lens at a node of the residual stream."""
        logits = self.adapter.logits(self.now.streams[level, None])[0, column].cpu().double()
        return self._table(logits.topk(min(top, len(logits))).indices, column, {"": logits})

    def output_text(self, output: int, read_at: int) -> str:
        """The text of an output token that is read at a column."""
        return output_text(self.model, output, self.tokens[: read_at + 1])

    def _table(
        self, tokens: Int[Tensor, " token"], read_at: int, by_suffix: Mapping[str, Tensor]
    ) -> pd.DataFrame:
        table = pd.DataFrame({"token": [self.output_text(n, read_at) for n in tokens.tolist()]})
        for suffix, logits in by_suffix.items():
            logs = logits.log_softmax(dim=-1)
            table[f"logit{suffix}"] = logits[tokens].tolist()
            table[f"probability{suffix}"] = logs.exp()[tokens].tolist()
            table[f"log_probability{suffix}"] = logs[tokens].tolist()
        return table

    def _run(self, positions: Sequence[int] | None) -> _PromptRun:
        streams: dict[str, Tensor] = {}

        def keep(name: str, stream: Tensor) -> None:
            streams.setdefault(name, stream.detach())  # only the first pass: no further ablation

        points = [EMBEDDED, *self.adapter.layer_points("hook_resid_post")]
        hooks = [(point, Order.LAST, partial(keep, point)) for point in points]
        with attached(self.adapter, hooks):
            graph, logits, pairs = traced(
                self.model, self.tokens, positions, self.labels, self.quantity, attribution=True
            )
        levels = torch.cat([streams[point] for point in points])[:, : graph.n_read]
        return _PromptRun(graph, logits, pairs, levels)

    def _without(
        self, removed: Bool[Tensor, "layer head query key"]
    ) -> AbstractContextManager[None]:
        """Run the model without the removed edges inside the block."""
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

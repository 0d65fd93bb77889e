"""Several models on one prompt, with parts removed: the data behind the explorer.

Every model is run without its removed parts (`ablated_model`), and once in full for comparison.
Everything else is derived from those runs: the graph for the diagram, head effects, likely tokens
before and after, and what a node would predict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import pandas as pd
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.circuits.attention_graph import AttentionGraph
from sparse_tl.circuits.removal import AttentionEdge, Head, RemovalEffects
from sparse_tl.circuits.trace import Prompt, predicted_columns
from sparse_tl.explorer.ablated_model import AblatedModel, Row, by_title, start_together
from sparse_tl.lens import HookedModel, check_head


class Exploration:
    """Models on one prompt, from which heads and attention edges can be removed and restored.

    Nothing is left on the models between calls. For the parameters see `CircuitExplorer`.

    Raises:
        ValueError: there is no model, a model has no attention patterns to hook, the prompt is
            empty, too long or unknown to the tokenizer, a position cannot be predicted, or models
            see the prompt in different columns.
    """

    def __init__(
        self,
        models: HookedModel | Mapping[str, HookedModel],
        prompt: Prompt,
        *,
        position: int | None = None,
        positions: Sequence[int] | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        self._models = by_title(models)
        self._prompt, self._labels = prompt, labels
        self._ablated = self._start(prompt, positions, labels)
        columns = self._first.positions
        self.first_target = len(columns) - 1
        if position is None:
            return
        n_tokens = len(self._first.tokens)
        column = position + n_tokens if position < 0 else position
        if column in columns:
            self.first_target = columns.index(column)
        elif positions is not None:
            raise ValueError(f"expected position to be one of {list(positions)}; got {position}")
        else:
            self._ablated = self._start(prompt, [position], labels)
            self.first_target = 0

    def _start(
        self, prompt: Prompt, positions: Sequence[int] | None, labels: Sequence[str] | None
    ) -> dict[str, AblatedModel]:
        """All models on a prompt, with nothing removed."""
        return start_together(self._models, prompt, positions, labels)

    # ---- what is shown ---------------------------------------------------------------------------

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
    def predicted_columns(self) -> list[int]:
        """All columns that can be predicted: mask tokens, or else the token after every other."""
        return predicted_columns(self._first.model, self._first.tokens)

    @property
    def n_read(self) -> int:
        """Number of columns that the models read; later ones only hold predictions."""
        return self._first.n_read

    def show_prompt(self, prompt: Prompt, labels: Sequence[str] | None = None) -> bool:
        """Switch to another prompt; if it cannot be run, nothing changes.

        Removed heads stay removed. If the new prompt has as many tokens as the old one, removed
        edges stay removed and the same columns are predicted; otherwise edges are restored and the
        columns are chosen again.

        Returns:
            Whether the new prompt has as many tokens.

        Raises:
            ValueError: as in the constructor.
        """
        old = self._ablated
        # Start without positions, so that errors concern the text itself.
        new = self._start(prompt, None, labels)
        first = next(iter(new.values()))
        same = len(first.tokens) == len(self._first.tokens)
        if same and first.positions != self._first.positions:
            new = self._start(prompt, self._first.positions, labels)
        for title, model in new.items():
            edges = {edge for edge in old[title].edges if same and edge[2] < model.n_read}
            model.remove(set(old[title].heads), edges)
        self._prompt, self._labels, self._ablated = prompt, labels, new
        return same

    def refresh(self) -> tuple[str, ...]:
        """Run models again whose weights or gates have changed since they ran.

        Returns:
            Their titles.
        """
        changed = tuple(title for title, model in self._ablated.items() if model.changed)
        for title in changed:
            old = self._ablated[title]
            new = AblatedModel(old.model, self._prompt, old.positions, self._labels)
            new.remove(old.heads, old.edges)
            self._ablated[title] = new
        return changed

    def show_position(self, column: int) -> int:
        """Also predict the token at a column; returns its index into `targets`.

        Raises:
            ValueError: the column cannot be predicted.
        """
        columns = self._first.positions
        if column not in columns:
            new = self._start(self._prompt, sorted([*columns, column]), self._labels)
            for title, model in new.items():
                model.remove(self._of(title).heads, self._of(title).edges)
            self._ablated = new
        return self._first.positions.index(column)

    # ---- removing and restoring ------------------------------------------------------------------

    def removed_heads(self, title: str) -> tuple[Head, ...]:
        """The removed heads of a model, sorted."""
        return tuple(sorted(self._of(title).heads))

    def removed_attention_edges(self, title: str) -> tuple[AttentionEdge, ...]:
        """The individually removed attention edges of a model, sorted."""
        return tuple(sorted(self._of(title).edges))

    def removed(self, title: str) -> Bool[Tensor, "layer head query key"]:
        """Which attention edges are removed, individually or with their head."""
        return self._of(title).removed()

    def toggle_head(self, title: str, layer: int, head: int) -> None:
        """Remove a head, or restore it.

        Raises:
            ValueError: the model or head does not exist.
        """
        model = self._of(title)
        check_head(model.adapter, layer, head)
        model.remove(model.heads ^ {(layer, head)}, model.edges)

    def toggle_attention_edges(self, title: str, edges: Iterable[AttentionEdge]) -> None:
        """Remove attention edges, or restore them if all of them are removed.

        Args:
            title: title of the model.
            edges: (layer, head, query, key) edges.

        Raises:
            ValueError: the model or an edge does not exist.
        """
        model, given = self._of(title), set(edges)
        for edge in given:
            model.grid.index(edge)
        left = model.edges - given if given <= model.edges else model.edges | given
        model.remove(model.heads, left)

    def restore(self, title: str | None = None) -> None:
        """Restore everything, in one model or in all."""
        for one in self.titles if title is None else (title,):
            self._of(one).remove(set(), set())

    # ---- reading off -----------------------------------------------------------------------------

    def graph(self, title: str) -> AttentionGraph:
        """The remaining attention edges, with their effects."""
        return self._of(title).now.graph

    def head_effects(self, title: str, layer: int | None = None) -> RemovalEffects:
        """Effect on each predicted token of removing each head, beside the removals.

        Args:
            title: title of the model.
            layer: the heads of one layer; by default those of all layers, in order.

        Raises:
            ValueError: the model or layer does not exist.
        """
        model = self._of(title)
        layers = range(model.adapter.n_layers) if layer is None else [layer]
        heads = list(product(layers, range(model.adapter.n_heads)))
        for head in heads:
            check_head(model.adapter, *head)
        return model.effects(heads)

    def attention_edge_effects(
        self, title: str, groups: Sequence[Sequence[AttentionEdge]]
    ) -> RemovalEffects:
        """Effect on each predicted token of removing each group of edges, beside the removals.

        Args:
            title: title of the model.
            groups: (layer, head, query, key) edges; those of a group are removed together.

        Raises:
            ValueError: the model or an edge does not exist, or a group is empty.
        """
        model = self._of(title)
        for group in groups:
            if not group:
                raise ValueError("expected attention edges in every group; got an empty one")
            for edge in group:
                model.grid.index(edge)
        return model.effects(groups=groups)

    def outputs(self, title: str, target: int = -1, top: int = 6) -> pd.DataFrame:
        """The most likely tokens at a predicted column, before or after the removals.

        Args:
            title: title of the model.
            target: index into `targets`.
            top: number of tokens; the top predictions before and after are always included.

        Returns:
            token, logit, probability, logit_before, probability_before; sorted by decreasing
            likelihood after the removals.
        """
        return pd.DataFrame(self.output_rows(title, target, top))

    def output_rows(self, title: str, target: int = -1, top: int = 6) -> tuple[Row, ...]:
        """The rows of `outputs`."""
        _, read_at = self.targets[target]
        return self._of(title).output_rows(read_at, top)

    def logit_lens(self, title: str, level: int, column: int, top: int = 6) -> pd.DataFrame:
        """The tokens that a node would predict: its stream through the final normalisation and the
        unembedding, as if no later layer wrote anything.

        Args:
            title: title of the model.
            level: 0 is the input, ``l + 1`` the residual stream after layer ``l``.
            column: token position.
            top: number of tokens.

        Returns:
            token, logit, probability; most likely first.

        Raises:
            ValueError: the model or node does not exist, or the model does not read the column.
        """
        model = self._of(title)
        if not 0 <= level <= model.adapter.n_layers:
            raise ValueError(f"expected a level in 0..{model.adapter.n_layers}; got {level}")
        if not 0 <= column < model.n_read:
            raise ValueError(
                f"expected a column that the model reads, 0..{model.n_read - 1}; got {column}, at "
                "which only its prediction stands"
            )
        return pd.DataFrame(model.lens_rows(level, column, top))

    def logits(self, title: str) -> Float[Tensor, "pos vocab"]:
        """The logits under the removals, at every column that the model reads."""
        return self._of(title).now.logits

    def output_text(self, title: str, target: int, output: int) -> str:
        """The text of what a model predicts at a predicted column."""
        return self._of(title).output_text(output, self.targets[target][1])

    @property
    def _first(self) -> AblatedModel:
        return next(iter(self._ablated.values()))

    def _of(self, title: str) -> AblatedModel:
        model = self._ablated.get(title)
        if model is None:
            raise ValueError(f"expected a panel of {list(self._ablated)}; got {title!r}")
        return model

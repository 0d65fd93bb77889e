"""Results of several models on one prompt, under the removals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.circuits.prompt.removal import AttentionEdge, RemovalEffects
from sparse_tl.explorer.ablated_model import AblatedModel, Row
from sparse_tl.lens import heads_of


class Readings:
    """Numbers and texts from models that divide the prompt into the same columns, by title."""

    _ablated: dict[str, AblatedModel]

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(self._ablated)

    @property
    def targets(self) -> tuple[tuple[int, int], ...]:
        """The predicted columns, each with the column where it is read."""
        return self._first.targets

    @property
    def n_read(self) -> int:
        """Number of columns that the models read; later columns only hold predictions."""
        return self._first.n_read

    def graph(self, title: str) -> AttentionGraph:
        """The remaining attention edges, with their effects."""
        return self._of(title).now.graph

    def head_effects(self, title: str, layers: Sequence[int] | None = None) -> RemovalEffects:
        """Effect on each predicted token of removing each head, on top of the removals.

        Args:
            title: title of the model.
            layers: layers of the heads; by default all, in order.

        Raises:
            ValueError: the model or a layer does not exist.
        """
        model = self._of(title)
        layers = range(model.adapter.n_layers) if layers is None else layers
        heads = list(product(layers, range(model.adapter.n_heads)))
        return model.effects(heads_of(model.adapter, heads))

    def attention_edge_effects(
        self, title: str, groups: Sequence[Sequence[AttentionEdge]]
    ) -> RemovalEffects:
        """Effect on each predicted token of removing each group of edges, on top of the removals.

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

    def compute_edge_effects(self, title: str, seconds: float) -> bool:
        """Compute exact effects of the graph's edges, strongest first, for the given time.

        Returns:
            Whether any are left to compute.
        """
        return self._of(title).compute_edge_effects(seconds)

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
        return pd.DataFrame(self.output_rows(title, target, top))

    def output_rows(self, title: str, target: int = -1, top: int = 6) -> tuple[Row, ...]:
        """The rows of `outputs`."""
        _, read_at = self.targets[target]
        return self._of(title).output_rows(read_at, top)

    def logit_lens(self, title: str, level: int, column: int, top: int = 6) -> pd.DataFrame:
        """The most likely tokens by the logit lens: a node's residual stream through the final
        normalisation and the unembedding, as if no later layer wrote anything.

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
                f"expected a column that the model reads, 0..{model.n_read - 1}; got {column}, "
                "which only holds its prediction"
            )
        return pd.DataFrame(model.lens_rows(level, column, top))

    def logits(self, title: str) -> Float[Tensor, "pos vocab"]:
        """The logits under the removals, at every column that the model reads."""
        return self._of(title).now.logits

    def output_text(self, title: str, target: int, output: int) -> str:
        """The text of an output token at a predicted column."""
        return self._of(title).output_text(output, self.targets[target][1])

    def values(self, title: str) -> tuple[Float[Tensor, " target"], Float[Tensor, " target"]]:
        """The quantity that effects change, in the whole model and under the removals."""
        model = self._of(title)
        return model.values(model.whole), model.values(model.now)

    @property
    def _first(self) -> AblatedModel:
        return next(iter(self._ablated.values()))

    def _of(self, title: str) -> AblatedModel:
        model = self._ablated.get(title)
        if model is None:
            raise ValueError(f"expected a panel of {list(self._ablated)}; got {title!r}")
        return model

"""One prompt, several models, parts taken out by hand: all that the explorer shows, as numbers.

Every model is run without its removed parts (`panel`), and once with all of them, for comparison.
The rest is read off those runs: the flow for the diagram, the likely tokens before and after, what
a node attends to and what it would predict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.circuits.attention_graph import AttentionGraph
from sparse_tl.circuits.removal import AttentionEdge, Head, RemovalEffects
from sparse_tl.circuits.trace import Prompt
from sparse_tl.explorer.panel import Panel
from sparse_tl.lens import AttentionShape, HookedModel, embedding_matrix, unembedded


@dataclass(frozen=True)
class TokenScore:
    """One token that could come out: its text, its logit and its probability."""

    text: str
    logit: float
    probability: float


@dataclass(frozen=True)
class TokenChange:
    """One token that could come out, with nothing removed and as it is now."""

    before: TokenScore
    after: TokenScore

    @property
    def text(self) -> str:
        return self.after.text


@dataclass(frozen=True, eq=False)
class NodeReading:
    """What stands at a node of the diagram.

    Args:
        level: 0 is the input, ``l + 1`` the residual stream after layer ``l``.
        column: token position.
        attention: of every head of layer ``level - 1`` at this column, under the removals; without
            rows at level 0.
        removed: which of these edges are removed, by themselves or with their head.
        tokens: the most likely tokens by the logit lens: the stream as it is here, through the
            final normalisation and the unembedding, as if no later layer wrote anything.
    """

    level: int
    column: int
    attention: Float[Tensor, "head key"]
    removed: Bool[Tensor, "head key"]
    tokens: tuple[TokenScore, ...]


class Exploration:
    """Models on one prompt, from which heads and attention edges can be taken out and put back.

    Nothing stays on the models between calls.

    Args:
        models: a model for each panel, by title; dense or sparse.
        prompt: text, or its tokens.
        position: the predicted column to start with; the last one if left out.
        positions: the columns to predict; every mask token of the prompt or the token after it,
            and `position`, if left out.

    Raises:
        ValueError: no model, a model without attention patterns to hook or without a tokenizer, a
            prompt that is empty, too long or holds what the tokenizer does not know, a position
            that cannot be predicted, or models that see the prompt in different columns.
    """

    def __init__(
        self,
        models: Mapping[str, HookedModel],
        prompt: Prompt,
        *,
        position: int | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        if not models:
            raise ValueError("expected at least one model by title; got none")
        self._models = {str(title): model for title, model in models.items()}
        self._prompt = prompt
        self._panels = self._panels_of(prompt, positions)
        self.first_target = len(self.targets) - 1
        if position is not None:
            self.first_target = self._place(position, positions)

    def _place(self, position: int, positions: Sequence[int] | None) -> int:
        """The index of a position among the targets; it becomes the only one if need be."""
        n_tokens = len(self._first.tokens)
        column = position + n_tokens if position < 0 else position
        columns = [column for column, _ in self.targets]
        if column in columns:
            return columns.index(column)
        if positions is not None:
            raise ValueError(f"expected position to be one of {list(positions)}; got {position}")
        self._panels = self._panels_of(self._prompt, [position])
        return 0

    def _panels_of(self, prompt: Prompt, positions: Sequence[int] | None) -> dict[str, Panel]:
        """Every model on a prompt, with nothing removed."""
        panels = {title: Panel(m, prompt, positions) for title, m in self._models.items()}
        title, first = next(iter(panels.items()))
        for other, panel in panels.items():
            if (panel.whole.n_columns, panel.positions) != (first.whole.n_columns, first.positions):
                raise ValueError(
                    f"expected models that see the prompt in the same columns; {title!r} has "
                    f"{first.whole.n_columns} and {other!r} {panel.whole.n_columns}; explore "
                    "models of different tokenizers one by one"
                )
        return panels

    # ---- what is shown ---------------------------------------------------------------------------

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(self._panels)

    @property
    def prompt(self) -> str:
        """The prompt as text."""
        if isinstance(self._prompt, str):
            return self._prompt
        return self._first.model.tokenizer.decode(self._prompt.tolist())

    @property
    def targets(self) -> tuple[tuple[int, int], ...]:
        """The predicted columns, each with the column at which it is read."""
        return self._first.whole.targets

    @property
    def n_read(self) -> int:
        """How many columns the models read; those after them only hold predictions."""
        return self._first.n_read

    def shape(self, panel: str) -> AttentionShape:
        """How many layers and heads the model has."""
        return self._panel(panel).shape

    def show_prompt(self, prompt: Prompt) -> bool:
        """Go on with another prompt; where it cannot be run, everything stays as it was.

        Removed heads stay removed. Where the new prompt has as many tokens as the old one, so do
        edges, and the same columns are predicted; otherwise edges are put back and the columns are
        chosen anew.

        Returns:
            Whether the new prompt has as many tokens.

        Raises:
            ValueError: as at the start.
        """
        old = self._panels
        # Without any position first: a text that does not fit is refused for what it is.
        panels = self._panels_of(prompt, None)
        first = next(iter(panels.values()))
        same = len(first.tokens) == len(self._first.tokens)
        if same and first.positions != self._first.positions:
            panels = self._panels_of(prompt, self._first.positions)
        for title, panel in panels.items():
            edges = {edge for edge in old[title].edges if same and edge[2] < panel.n_read}
            panel.remove(set(old[title].heads), edges)
        self._prompt, self._panels = prompt, panels
        return same

    # ---- removing and restoring ------------------------------------------------------------------

    def removed_heads(self, panel: str) -> tuple[Head, ...]:
        """The removed heads of a panel, in order."""
        return tuple(sorted(self._panel(panel).heads))

    def removed_edges(self, panel: str) -> tuple[AttentionEdge, ...]:
        """The attention edges that were removed by themselves, in order."""
        return tuple(sorted(self._panel(panel).edges))

    def toggle_head(self, panel: str, layer: int, head: int) -> None:
        """Remove a head, or put it back.

        Raises:
            ValueError: a panel or a head that does not exist.
        """
        chosen = self._panel(panel)
        chosen.shape.check_head(layer, head)
        chosen.remove(chosen.heads ^ {(layer, head)}, chosen.edges)

    def toggle_edges(self, panel: str, edges: Iterable[AttentionEdge]) -> None:
        """Remove attention edges, or put them back if all of them are removed.

        Args:
            panel: title.
            edges: (layer, head, query, key) of each.

        Raises:
            ValueError: a panel or an edge that does not exist.
        """
        chosen, given = self._panel(panel), set(edges)
        for edge in given:
            chosen.check_edge(edge)
        left = chosen.edges - given if given <= chosen.edges else chosen.edges | given
        chosen.remove(chosen.heads, left)

    def restore(self, panel: str | None = None) -> None:
        """Put back everything, in one panel or in all."""
        for title in self.titles if panel is None else (panel,):
            self._panel(title).remove(set(), set())

    # ---- reading off -----------------------------------------------------------------------------

    def flow(self, panel: str) -> AttentionGraph:
        """The attention edges that are left, with their effects."""
        return self._panel(panel).flow

    def head_effects(self, panel: str) -> RemovalEffects:
        """What each head does for each predicted token: removed alone, beside the removals."""
        return self._panel(panel).head_effects()

    def outputs(self, panel: str, target: int = -1, top: int = 6) -> tuple[TokenChange, ...]:
        """The tokens that are most likely at a predicted column, before the removals or after.

        Args:
            panel: title.
            target: index into `targets`.
            top: how many; both the first choice before and that after are among them.

        Returns:
            The tokens, the most likely ones after the removals first.
        """
        chosen = self._panel(panel)
        _, read_at = self.targets[target]
        before, after = (run.logits[read_at].double() for run in (chosen.before, chosen.after))
        probabilities = before.softmax(dim=-1), after.softmax(dim=-1)
        largest = torch.maximum(*probabilities)
        largest[before.argmax()] = largest[after.argmax()] = 2.0
        tokens = largest.topk(min(top, len(largest))).indices.tolist()
        tokens.sort(key=lambda token: -float(after[token]))
        return tuple(
            TokenChange(
                *(
                    TokenScore(chosen.text(token), float(logits[token]), float(share[token]))
                    for logits, share in zip((before, after), probabilities, strict=True)
                )
            )
            for token in tokens
        )

    def node(self, panel: str, level: int, column: int, top: int = 6) -> NodeReading:
        """What a node attends to, and what the logit lens reads there.

        Raises:
            ValueError: a panel or node that does not exist, or a column that the model does not
                read.
        """
        chosen = self._panel(panel)
        run = chosen.after
        n_levels, n_read = run.streams.shape[:2]
        if not 0 <= level < n_levels:
            raise ValueError(f"expected a level in 0..{n_levels - 1}; got {level}")
        if not 0 <= column < n_read:
            raise ValueError(
                f"expected a column that the model reads, 0..{n_read - 1}; got {column}, at which "
                "only its prediction stands"
            )
        rows = slice(0, 0) if level == 0 else slice(None)
        layer = max(level - 1, 0)
        with torch.no_grad():
            stream = run.streams[level, column].to(embedding_matrix(chosen.model).device)
            logits = unembedded(chosen.model, stream[None, None])[0, 0].double().cpu()
        shares = logits.softmax(dim=-1)
        return NodeReading(
            level,
            column,
            attention=run.patterns[layer, rows, column, : column + 1],
            removed=chosen.removed()[layer, rows, column, : column + 1],
            tokens=tuple(
                TokenScore(chosen.text(token), float(logits[token]), float(shares[token]))
                for token in logits.topk(min(top, len(logits))).indices.tolist()
            ),
        )

    def pattern(self, panel: str, layer: int, head: int) -> Float[Tensor, "query key"]:
        """A head's attention pattern under the removals: gate times attention."""
        chosen = self._panel(panel)
        chosen.shape.check_head(layer, head)
        return chosen.after.patterns[layer, head]

    def logits(self, panel: str) -> Float[Tensor, "pos vocab"]:
        """The logits under the removals, at every column that the model reads."""
        return self._panel(panel).after.logits

    @property
    def _first(self) -> Panel:
        return next(iter(self._panels.values()))

    def _panel(self, title: str) -> Panel:
        panel = self._panels.get(title)
        if panel is None:
            raise ValueError(f"expected a panel of {list(self._panels)}; got {title!r}")
        return panel

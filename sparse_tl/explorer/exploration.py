"""Several models on one prompt, with parts removed: the data behind the explorer.

Every model runs once in full and, after removals, without the removed parts (`ablated_model`).
The rest is derived from these runs: the graph for the diagram, effects of heads, likely tokens
before and after, and the logit lens of a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxtyping import Bool
from torch import Tensor

from sparse_tl.circuits.prompt.quantity import LOG_PROBABILITY, Quantity
from sparse_tl.circuits.prompt.removal import AttentionEdge, Head
from sparse_tl.circuits.prompt.tokens import Prompt
from sparse_tl.circuits.prompt.trace import predicted_column, predicted_columns
from sparse_tl.explorer.ablated_model import AblatedModel, by_title, start_together
from sparse_tl.explorer.readings import Readings
from sparse_tl.lens import HookedModel, check_head


class Exploration(Readings):
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
            raise ValueError(f"expected position to be one of {list(positions)}; got {position}")
        else:
            self._ablated = self._start(prompt, [column], labels)
            self.first_target = 0

    def _start(
        self, prompt: Prompt, positions: Sequence[int] | None, labels: Sequence[str] | None
    ) -> dict[str, AblatedModel]:
        """All models on a prompt, with nothing removed."""
        return start_together(self._models, prompt, positions, labels, self.quantity)

    # ---- the prompt ----------------------------------------------------------------------------

    @property
    def prompt(self) -> str:
        """The prompt as text; empty for tokens of a model without a tokenizer."""
        if isinstance(self._prompt, str):
            return self._prompt
        tokenizer = self._first.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self._prompt.tolist())

    @property
    def predicted_columns(self) -> list[int]:
        """All columns that can be predicted, as in `circuits.prompt.trace.predicted_columns`."""
        return predicted_columns(self._first.model, self._first.tokens)

    def show_prompt(self, prompt: Prompt, labels: Sequence[str] | None = None) -> bool:
        """Switch to another prompt; if it cannot be run, nothing changes.

        Removed heads stay removed. If both prompts have the same number of tokens, removed edges
        stay removed and the same columns are predicted; otherwise edges are restored and columns
        are chosen anew.

        Returns:
            Whether both prompts have the same number of tokens.

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
        """Rerun models whose weights or gates have changed since their last run.

        Returns:
            The titles of these models.
        """
        changed = tuple(title for title, model in self._ablated.items() if model.changed)
        for title in changed:
            old = self._ablated[title]
            new = AblatedModel(old.model, self._prompt, old.positions, self._labels, self.quantity)
            new.remove(old.heads, old.edges)
            self._ablated[title] = new
        return changed

    def show_position(self, column: int) -> int:
        """Also predict the token at a column; return its index into `targets`.

        Raises:
            ValueError: the column cannot be predicted.
        """
        columns = self._first.positions
        if column not in columns:
            self._rerun(sorted([*columns, column]))
        return self._first.positions.index(column)

    def measure(self, quantity: Quantity) -> None:
        """Measure effects on another quantity.

        Raises:
            ValueError: an answer is not one token of each model.
        """
        old, self.quantity = self.quantity, quantity
        try:
            self._rerun(self._first.positions)
        except BaseException:
            self.quantity = old
            raise

    def _rerun(self, positions: Sequence[int]) -> None:
        """Rerun all models without their removed parts; if that fails, nothing changes."""
        new = self._start(self._prompt, positions, self._labels)
        for title, model in new.items():
            model.remove(self._of(title).heads, self._of(title).edges)
        self._ablated = new

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
        """Remove attention edges, or restore them if all are removed.

        Args:
            title: title of the model.
            edges: (layer, head, query, key) edges.

        Raises:
            ValueError: the model or an edge does not exist.
        """
        model, toggled = self._of(title), set(edges)
        for edge in toggled:
            model.grid.index(edge)
        removed = model.edges - toggled if toggled <= model.edges else model.edges | toggled
        model.remove(model.heads, removed)

    def restore(self, title: str | None = None) -> None:
        """Restore everything, in one model or in all."""
        for name in self.titles if title is None else (title,):
            self._of(name).remove(set(), set())

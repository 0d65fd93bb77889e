"""How every head of a model behaves, and the kinds of heads that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.parts.grids import HeadGrid
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


class Kind(NamedTuple):
    """A kind of head: heads whose score is at least a threshold, or at most a negative one.

    Args:
        by: behaviour that is scored.
        least: the threshold.
        label: short label of such heads.
    """

    by: str
    least: float
    label: str

    def score(self, scores: Mapping[str, Tensor]) -> Float[Tensor, "layer head"]:
        """The score as a multiple of the threshold: at least 1 for heads of this kind."""
        return scores[self.by] / self.least


KINDS: dict[str, Kind] = {
    "mover": Kind("mover", 0.1, "mov"),
    "negative mover": Kind("mover", -0.1, "neg"),
    "suppression": Kind("suppression", 0.1, "sup"),
    "inhibition": Kind("inhibition", 0.05, "inh"),
    "previous token": Kind("previous token", 0.4, "prev"),
    "duplicate token": Kind("duplicate token", 0.4, "dup"),
    "induction": Kind("induction", 0.4, "ind"),
    "sink": Kind("sink", 0.4, ""),
    "copying": Kind("copying", 0.5, "+"),
    "negative copying": Kind("copying", -0.5, "\N{MINUS SIGN}"),
}
"""All kinds of heads, by name."""
_ON_TASK = ("mover", "negative mover", "suppression", "inhibition")
_BY_ATTENTION = ("previous token", "duplicate token", "induction", "sink")


@checked
@dataclass(frozen=True, eq=False)
class HeadBehaviour(Result):
    """The scores of every head for each behaviour, from `head_behaviour`.

    Args:
        scores: scores by behaviour: "previous token", "duplicate token", "induction" and "sink",
            shares of attention; "copying", -1..1; and with prompt pairs, "mover" and "suppression",
            shares of the logit difference, and "inhibition", a share of the movers' attention.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    scores: Mapping[str, Float[Tensor, "layer head"]]
    prompt_start: str | None = None

    def __getitem__(self, behaviour: str) -> Float[Tensor, "layer head"]:
        """The scores of one behaviour.

        Raises:
            ValueError: the behaviour was not measured.
        """
        if behaviour not in self.scores:
            raise ValueError(f"expected one of {list(self.scores)}; got {behaviour!r}")
        return self.scores[behaviour]

    @property
    def grid(self) -> HeadGrid:
        """The heads of the model."""
        return HeadGrid(*next(iter(self.scores.values())).shape)

    def top(self, behaviour: str, size: AtLeastOne = 5) -> list[tuple[int, int]]:
        """The heads (layer, head) with the highest scores of a behaviour, highest first.

        Raises:
            ValueError: the behaviour was not measured.
        """
        scores = self[behaviour]
        order = scores.flatten().argsort(descending=True, stable=True)[:size]
        return [divmod(place, scores.shape[1]) for place in order.tolist()]

    @property
    def heads(self) -> dict[str, list[tuple[int, int]]]:
        """The heads (layer, head) of each kind in `KINDS`, highest scores first.

        A head may be of several kinds, or of none.
        """
        by_kind = {}
        for name, kind in self._kinds.items():
            score = kind.score(self.scores)
            heads = [(layer, head) for layer, head in (score >= 1).nonzero().tolist()]
            by_kind[name] = sorted(heads, key=lambda head: -score[head].item())
        return by_kind

    @property
    def main(self) -> dict[str, str]:
        """The main kind of each head that has one, by name of the head.

        Kinds of behaviour on the task come first, then kinds of attention, then copying. Among
        several, the main one is the kind whose threshold the score exceeds by the largest factor.
        """
        main = dict[str, str]()
        for group in (_ON_TASK, _BY_ATTENTION, ("copying", "negative copying")):
            kinds = {name: kind for name, kind in self._kinds.items() if name in group}
            if not kinds:
                continue
            best = torch.stack([kind.score(self.scores) for kind in kinds.values()]).max(dim=0)
            for layer, head in (best.values >= 1).nonzero().tolist():
                main.setdefault(f"a{layer}.h{head}", list(kinds)[best.indices[layer, head]])
        return main

    @property
    def labels(self) -> dict[str, str]:
        """Short labels of heads, such as "ind+"; sinks that do not copy have none.

        Plus: the head copies what it attends to. Minus: it lowers the logit of what it attends to.
        """
        main = self.main
        labels = {head: KINDS[kind].label for head, kind in main.items()}
        for name in ("copying", "negative copying"):
            for layer, head in self.heads.get(name, []):
                node = f"a{layer}.h{head}"
                if main[node] in _BY_ATTENTION:
                    labels[node] += KINDS[name].label
        return {node: label for node, label in labels.items() if label}

    @property
    def _kinds(self) -> dict[str, Kind]:
        return {name: kind for name, kind in KINDS.items() if kind.by in self.scores}

    def to_pandas(self) -> pd.DataFrame:
        """One row per head: its main kind, if any, and its scores."""
        import pandas as pd

        heads, main = self.grid.columns(self.grid.places), self.main
        kinds = [main.get(head, "") for head in heads["head"]]
        scores = {name: values.flatten().tolist() for name, values in self.scores.items()}
        return pd.DataFrame({**heads, "kind": kinds, **scores})

    def _summary(self) -> pd.DataFrame:
        """The five heads with the highest scores for every behaviour."""
        import pandas as pd

        return pd.DataFrame(
            {
                name: [f"a{layer}.h{head} {self[name][layer, head]:.2f}" for layer, head in best]
                for name in self.scores
                for best in [self.top(name, 5)]
            }
        )

    def __repr__(self) -> str:
        grid, best = self.grid, self._summary().iloc[0]
        listed = ", ".join(f"{name} {best[name]}" for name in self.scores)
        return f"HeadBehaviour({grid.n_layers} layers x {grid.n_heads} heads; {listed})"

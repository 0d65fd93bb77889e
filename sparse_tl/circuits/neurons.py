"""The result of `neuron_effects`: the direct effects of an MLP's neurons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 24
"""Maximum number of characters that a table shows before a token."""


@dataclass(frozen=True)
class DrivingToken:
    """A token of a clean prompt at which a neuron acts.

    Args:
        pair: index of the prompt pair.
        position: column of the token.
        before: text of the prompt before the token.
        token: text of the token.
        after: text of the prompt after the token.
        clean: activation of the neuron at the token.
        corrupted: activation at that position of the corrupted prompt.
        score: first-order effect of patching the neuron there, on this pair, in units of the
            metric.
    """

    pair: int
    position: int
    before: str
    token: str
    after: str
    clean: float
    corrupted: float
    score: float

    def __str__(self) -> str:
        """The token in brackets, after the end of the text before it."""
        start = "\N{HORIZONTAL ELLIPSIS}" if len(self.before) > _SHOWN else ""
        return f"{start}{self.before[-_SHOWN:]}[{self.token}]"


@dataclass(frozen=True, eq=False)
class NeuronEffects(Result):
    """Direct effects of an MLP's neurons, from `neuron_effects`; negative: the neuron helps.

    Args:
        mlp: name of the MLP.
        readers: names of the destinations that read the patched neurons.
        n_pairs: number of prompt pairs.
        effect: exact change of the metric, mean over pairs; NaN for neurons that were only scored.
        score: first-order estimate of the effect, mean over pairs.
        clean: activation at the token with the largest ``|score|`` of a pair, mean over pairs.
        corrupted: activation there in the corrupted prompts, mean over pairs.
        tokens: tokens at which each exactly patched neuron acts most, by name of the neuron.
        promotes: tokens whose logits the output of the neuron raises most, given the sign of its
            clean activation.
        suppresses: tokens whose logits it lowers most.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    finite = False
    mlp: str
    readers: Sequence[str]
    n_pairs: int
    effect: Float[Tensor, " neuron"]
    score: Float[Tensor, " neuron"]
    clean: Float[Tensor, " neuron"]
    corrupted: Float[Tensor, " neuron"]
    tokens: Mapping[str, Sequence[DrivingToken]]
    promotes: Mapping[str, Sequence[str]]
    suppresses: Mapping[str, Sequence[str]]
    prompt_start: str | None = None

    def to_pandas(self) -> pd.DataFrame:
        """One row per neuron: first those patched exactly, by ``|effect|``, then by ``|score|``.

        Lists of tokens are empty where the effect is NaN.
        """
        import pandas as pd

        by_score = self.score.abs().argsort(descending=True, stable=True)
        by_effect = self.effect.abs().nan_to_num(nan=-1.0)[by_score]
        order = by_score[by_effect.argsort(descending=True, stable=True)]
        names = [f"{self.mlp}.n{neuron}" for neuron in order.tolist()]
        columns = ("effect", "score", "clean", "corrupted")
        table = pd.DataFrame({"neuron": names})
        table = table.assign(**{name: getattr(self, name)[order].tolist() for name in columns})
        tokens = {name: [*map(str, listed)] for name, listed in self.tokens.items()}
        lists = {"tokens": tokens, "promotes": self.promotes, "suppresses": self.suppresses}
        for column, by_name in lists.items():
            table[column] = [", ".join(map(repr, dict.fromkeys(by_name.get(n, ())))) for n in names]
        return table

    def _summary(self) -> pd.DataFrame:
        return self.to_pandas().head(len(self.tokens))

    def __repr__(self) -> str:
        best = self.to_pandas().head(3)
        listed = ", ".join(
            f"{name} {effect:+.3g}"
            for name, effect in zip(best["neuron"], best["effect"], strict=True)
        )
        return (
            f"NeuronEffects({self.mlp} on {len(self.readers):,} readers, {self.n_pairs:,} pairs: "
            f"{len(self.tokens):,} of {len(self.score):,} neurons exactly: {listed}, ...)"
        )

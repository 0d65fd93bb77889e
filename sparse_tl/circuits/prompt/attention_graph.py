"""The attention graph of one prompt, from which attention diagrams are drawn.

Nodes form a grid of *levels* and *columns*. Level 0 is the input; level ``l + 1`` is the residual
stream after layer ``l``. Node ``(l + 1, query)`` receives from ``(l, query)`` through the residual
stream, and from ``(l, key)`` through every attention edge of layer ``l`` from ``key`` to ``query``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.metrics import UNITS
from sparse_tl.results import Result

EdgeWeight = Literal["attention", "carried", "effect", "first-order"]


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
        if self.possible is not None:
            return self.possible.sum(dim=(-2, -1))
        n = self.n_read
        n_pairs = n * (n + 1) // 2 if self.causal else n * n
        return torch.full((self.n_layers, self.n_heads), n_pairs)

    @property
    def given(self) -> tuple[int, ...]:
        """Target columns whose token the model is also given, unlike mask tokens."""
        return tuple(column for column, read_at in self.targets if read_at < column < self.n_read)

    def output_row(self, target: int) -> tuple[str, ...]:
        """The text above each column when one target is shown.

        The target's column has its prediction. Every other column has the token that the model was
        given there, or its prediction where it was given none.
        """
        column, _ = self.targets[target]
        given = set(self.given) - {column}
        pairs = enumerate(zip(self.input_tokens, self.output_tokens, strict=True))
        return tuple(known if i in given else predicted for i, (known, predicted) in pairs)

    def edge_weights(
        self, kind: EdgeWeight = "attention", target: int = -1
    ) -> Float[Tensor, "layer head query key"]:
        """The weight of each edge.

        Args:
            kind: "attention": gate times attention; "carried": share of the query's residual stream
                that the edge writes; "effect": exact change of the metric when the edge is removed;
                "first-order": its first-order estimate. Effects are in the metric's unit, and
                negative if the edge helps.
            target: index into `targets`, for effects.

        Raises:
            ValueError: the kind was not computed.
        """
        if kind == "attention":
            return self.attention
        scores = {"carried": self.carried, "effect": self.effect, "first-order": self.attribution}
        weights = scores.get(kind)
        if weights is None:
            how = {"effect": "max_effects=...", "first-order": "attribution=True"}.get(kind)
            remedy = f"trace the model with {how}" if how else f"kinds are {get_args(EdgeWeight)}"
            raise ValueError(f"the graph has no weights of kind {kind!r}: {remedy}")
        return weights if kind == "carried" else weights[target]

    def to_pandas(self, target: int = -1) -> pd.DataFrame:
        """One row per open edge, by decreasing attention, with its effects on a target."""
        edges = self.gates.nonzero().tolist()
        table = pd.DataFrame(edges, columns=["layer", "head", "query", "key"])
        table["attention"] = self.attention[self.gates].tolist()
        if self.carried is not None:
            table["carried"] = self.carried[self.gates].tolist()
        if self.effect is not None:
            table["effect"] = self.effect[target][self.gates].tolist()
        if self.attribution is not None:
            table["first-order"] = self.attribution[target][self.gates].tolist()
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

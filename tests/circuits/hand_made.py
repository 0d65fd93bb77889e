"""Models so small that every score, and the effect of every circuit, is known on paper.

All are float64 and unnormalised, and their metric reads one number of the residual stream: the
answer's logit is that number, the wrong answer's is 0. An edge that is named nowhere is *silent*:
it carries the same clean and corrupted, or leads nowhere; its score is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from wiring import blank_model, normalise

from sparse_tl.backend import Model, adapt
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import Metric, logit_difference

ANSWER, WRONG = 0, 1


@dataclass(frozen=True, eq=False)
class Known:
    """A model and the truth about it.

    Args:
        name: of the model.
        model: its weights are set by hand.
        pairs: prompts.
        metric: in logits.
        clean: the metric of the clean prompts, mean over pairs.
        corrupted: of the corrupted ones.
        scores: EAP's score of every edge that is not silent.
        effects: explained effect of every circuit, by its edges that are not silent.
        integrated: EAP-IG's scores with 5 steps, where they are known too.
    """

    name: str
    model: Model
    pairs: PromptPairs
    clean: float
    corrupted: float
    scores: dict[str, float]
    effects: dict[frozenset[str], float]
    integrated: dict[str, float] = field(default_factory=dict)
    metric: Metric = logit_difference

    @property
    def graph(self) -> CircuitGraph:
        """The graph of the model."""
        return adapt(self.model).graph

    @property
    def patched(self) -> dict[str, float]:
        """``m(one edge patched) - m(clean)`` for every edge that is not silent: exact patching."""
        whole, scale = frozenset(self.scores), self.clean - self.corrupted
        return {edge: (self.effects[whole - {edge}] - 1) * scale for edge in self.scores}


def paths_model() -> Known:
    """Two layers of one uniform head each; a residual stream of one number: four linear paths.

    Token t embeds as t. ``a0`` writes twice the mean of what it sees, ``a1`` four times. With
    clean minus corrupted embeddings d0, d1 at two positions, what reaches the second is

        input -> logits                  d1                          = 1
        input -> a0 -> logits            2 (d0 + d1) / 2             = 2
        input -> a1 -> logits            4 (d0 + d1) / 2             = 4
        input -> a0 -> a1 -> logits      4 (2 d0 + (d0 + d1)) / 2    = 8

    for d0 = d1 = 1, the mean over the two pairs (2, 0) and (0, 2). A path counts when all of its
    edges are kept: effects are sums of 1, 2, 4, 8 over 15. An edge's score is minus the sum of the
    paths through it. Nothing is nonlinear, so patching and integrated gradients say the same.
    """
    model = _scalar_model(n_layers=2, n_ctx=2)
    with torch.no_grad():
        for layer, gain in enumerate((2.0, 4.0)):
            model.blocks[layer].attn.W_V[:] = 1.0
            model.blocks[layer].attn.W_O[:] = gain
    paths = {
        frozenset({"input->logits"}): 1.0,
        frozenset({"input->a0.h0<v>", "a0.h0->logits"}): 2.0,
        frozenset({"input->a1.h0<v>", "a1.h0->logits"}): 4.0,
        frozenset({"input->a0.h0<v>", "a0.h0->a1.h0<v>", "a1.h0->logits"}): 8.0,
    }
    edges = sorted(frozenset().union(*paths))
    scores = {e: -sum(value for path, value in paths.items() if e in path) for e in edges}
    return Known(
        "paths",
        model,
        _pairs(clean=[[3, 1], [1, 4]], corrupted=[[1, 1], [1, 2]]),
        # Metrics are 9 e0 + 6 e1: the paths' sum, term by term.
        clean=((27 + 6) + (9 + 24)) / 2,
        corrupted=((9 + 6) + (9 + 12)) / 2,
        scores=scores,
        effects={
            kept: sum(value for path, value in paths.items() if path <= kept) / 15
            for kept in _subsets(edges)
        },
        integrated=scores,
    )


def threshold_model() -> Known:
    """One token, one head, one MLP with a ReLU: the first-order score is wrong, and by how much.

    ``a0 = 2 e`` and ``m0 = 4 relu(h - 3)`` of ``h = e + a0``; e is 2 clean, 0 corrupted.

        clean      e = 2, a0 = 4, h = 6, m0 = 12, metric 18
        corrupted  e = 0, a0 = 0, h = 0, m0 = 0,  metric 0

    At the MLP's input, h is 6 with both edges kept, 4 with a0's alone, 2 with the input's: m0 is
    12, 4 and 0. At the clean prompt the MLP's slope is 4, so that patching ``a0->m0`` is predicted
    to cost 16 and costs 12. Along the way from corrupted to clean, h = 6 k / 5 passes the
    threshold of 3 from k = 3 of 5 on: EAP-IG's slope is 3/5 of 4.
    """

    def effect(kept: frozenset[str]) -> float:
        head = 4 * ("input->a0.h0<v>" in kept)
        h = 2 * ("input->m0" in kept) + head * ("a0.h0->m0" in kept)
        mlp = 4 * max(h - 3, 0)
        total = 2 * ("input->logits" in kept)
        total += head * ("a0.h0->logits" in kept) + mlp * ("m0->logits" in kept)
        return total / 18

    return Known(
        "threshold",
        _threshold("relu", 3.0),
        _pairs(clean=[[2]], corrupted=[[0]]),
        clean=18.0,
        corrupted=0.0,
        scores=_threshold_scores(4.0),
        effects={kept: effect(kept) for kept in _subsets(_threshold_scores(4.0))},
        integrated=_threshold_scores(4.0 * 3 / 5),
    )


def _threshold(act_fn: str, threshold: float) -> Model:
    """``a0 = 2 e``, ``m0 = 4 act_fn(e + a0 - threshold)``."""
    model = _scalar_model(n_layers=1, n_ctx=1, d_mlp=1, act_fn=act_fn)
    block: Any = model.blocks[0]
    with torch.no_grad():
        block.attn.W_V[:] = 1.0
        block.attn.W_O[:] = 2.0
        block.mlp.W_in[:] = 1.0
        block.mlp.b_in[:] = -threshold
        block.mlp.W_out[:] = 4.0
    return model


def _threshold_scores(slope: float) -> dict[str, float]:
    """Scores by the slope of ``m0``, of which 12 is lost."""
    return {
        "input->a0.h0<v>": -2 * 2 * (1 + slope),
        "input->m0": -2 * slope,
        "a0.h0->m0": -4 * slope,
        "input->logits": -2.0,
        "a0.h0->logits": -4.0,
        "m0->logits": -12.0,
    }


def curved_model() -> tuple[Known, dict[str, float]]:
    """As `threshold_model`, with a GELU, ``m0 = 4 gelu(h - 5)``; and the scores of RelP.

    Clean, h - 5 is 1, where gelu is P(1) with P the normal distribution; corrupted it is -5. The
    slope there is ``4 (P(1) + p(1))`` with p the density, and RelP's ratio is ``4 gelu(1) / 1``.
    """
    below = [math.erfc(-x / math.sqrt(2)) / 2 for x in (1, -5)]
    density = math.exp(-1 / 2) / math.sqrt(2 * math.pi)
    clean, corrupted = 4 * below[0], -20 * below[1]

    def scores(slope: float) -> dict[str, float]:
        return _threshold_scores(slope) | {"m0->logits": corrupted - clean}

    known = Known(
        "curved",
        _threshold("gelu", 5.0),
        _pairs(clean=[[2]], corrupted=[[0]]),
        clean=6 + clean,
        corrupted=corrupted,
        scores=scores(4 * (below[0] + density)),
        effects={},
    )
    return known, scores(clean)


def rescaled_model() -> tuple[Known, dict[str, float]]:
    """A final norm of two numbers, (3, 1) clean, whose first is the metric; and RelP's scores.

    The norm gives (1, -1) whatever the size of the difference, so the slope is 0. RelP keeps the
    scale of 1 fixed: corrupted, at (2, 2), it would give (0, 0).
    """
    model = blank_model(
        n_layers=1, n_heads=1, d_model=2, d_head=2, d_vocab=2, n_ctx=1, normalization_type="LN"
    )
    with torch.no_grad():
        normalise(model)
        model.embed.W_E.copy_(torch.tensor([[2.0, 2.0], [3.0, 1.0]]))
        model.unembed.W_U[0, ANSWER] = 1.0
    pairs = _pairs(clean=[[1]], corrupted=[[0]])
    known = Known("rescaled", model, pairs, clean=1.0, corrupted=0.0, scores={}, effects={})
    return known, {"input->logits": -1.0}


def attending_model() -> Known:
    """One head whose attention depends on the prompt: q, k and v count, and interact.

    Features are query, key, value and output. The last token's query q meets the first token's
    key k; its own key and value are 0. So the first token gets attention ``p = sigmoid(q k)``,
    the head writes ``p v`` to the output, and the last token itself writes u there.

        clean      q = 1, k = ln 3,  v = 8, u = 2:  p = 3/4, metric 6 + 2 = 8
        corrupted  q = 0, k = -ln 3, v = 4, u = 1:  p = 1/2, metric 2 + 1 = 3

    q clean with k corrupted gives p = 1/4: keeping ``<q>`` alone is worse than keeping nothing.
    The score's slope is ``p (1 - p) v = 3/2``: by q it is ``3/2 ln 3``, by k it is 3/2.
    """
    log3 = math.log(3)
    model = blank_model(n_layers=1, n_heads=1, d_model=4, d_head=4, d_vocab=4, n_ctx=2)
    attn = model.blocks[0].attn
    with torch.no_grad():
        # Tokens 0 and 1 come first, clean and corrupted; tokens 2 and 3 come last.
        model.embed.W_E[0] = torch.tensor([0, log3, 8, 0], dtype=torch.float64)
        model.embed.W_E[1] = torch.tensor([0, -log3, 4, 0], dtype=torch.float64)
        model.embed.W_E[2] = torch.tensor([1, 0, 0, 2])
        model.embed.W_E[3] = torch.tensor([0, 0, 0, 1])
        attn.W_Q[0, 0, 0] = 2.0  # scores are divided by the square root of 4
        attn.W_K[0, 1, 0] = attn.W_V[0, 2, 0] = attn.W_O[0, 0, 3] = 1.0
        model.unembed.W_U[3, ANSWER] = 1.0

    def effect(kept: frozenset[str]) -> float:
        shares = {(True, True): 3 / 4, (True, False): 1 / 4}
        share = shares.get(("input->a0.h0<q>" in kept, "input->a0.h0<k>" in kept), 1 / 2)
        head = share * (8 if "input->a0.h0<v>" in kept else 4)
        metric = (head if "a0.h0->logits" in kept else 2) + 1 + ("input->logits" in kept)
        return (metric - 3) / 5

    scores = {
        "input->a0.h0<q>": -1 * 3 / 2 * log3,
        "input->a0.h0<k>": -2 * log3 * 3 / 2,
        "input->a0.h0<v>": -4 * 3 / 4,
        "input->logits": -1.0,
        "a0.h0->logits": 2.0 - 6.0,
    }
    return Known(
        "attending",
        model,
        _pairs(clean=[[0, 2]], corrupted=[[1, 3]]),
        clean=8.0,
        corrupted=3.0,
        scores=scores,
        effects={kept: effect(kept) for kept in _subsets(scores)},
    )


HAND_MADE: dict[str, Callable[[], Known]] = {
    "paths": paths_model,
    "threshold": threshold_model,
    "attending": attending_model,
}


def _scalar_model(**config: Any) -> Model:
    """One head a layer on a residual stream of one number; token t embeds as t."""
    model = blank_model(n_heads=1, d_model=1, d_head=1, d_vocab=5, **config)
    with torch.no_grad():
        model.embed.W_E.copy_(torch.arange(5.0)[:, None])
        model.unembed.W_U[0, ANSWER] = 1.0
    return model


def _pairs(clean: list[list[int]], corrupted: list[list[int]]) -> PromptPairs:
    n = len(clean)
    return PromptPairs(
        torch.tensor(clean),
        torch.tensor(corrupted),
        torch.full((n, 1), ANSWER),
        torch.full((n, 1), WRONG),
        torch.full((n,), len(clean[0]) - 1),
    )


def _subsets(edges: Iterable[str]) -> list[frozenset[str]]:
    edges = sorted(edges)
    return [frozenset(some) for n in range(len(edges) + 1) for some in combinations(edges, n)]

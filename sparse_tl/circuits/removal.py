"""Exact effects of parts on a prediction: run the model once without each of its parts.

    effect[target, part] = logit(without the part) - logit(with it)

for the token that the full model predicts; below 0 the part helps.

1. Run the prompt unchanged to get the prediction at each target.
2. Repeat the prompt, one row per part. Each row runs with only its own part's gate at 0: a head
   writes 0 at ``hook_z``, an attention edge's pattern is 0. A pass holds as many rows as memory
   allows, plus one unmodified row that checks whether rows run as single prompts do.
3. Read the predicted tokens' logits and probabilities in each row, minus those of the last row,
   and the token that the row predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.gates import AttentionEdges, ClosedAttentionEdges, GatedRun, Heads, Site
from sparse_tl.lens import Adapter, HookedModel, adapt
from sparse_tl.scopes import autograd

Head = tuple[int, int]
"""Layer and head."""
AttentionEdge = tuple[int, int, int, int]
"""Layer, head, query and key."""

MOST_NUMBERS = 2**24
"""Maximum number of activations per layer, over all rows of a pass."""


@dataclass(frozen=True, eq=False)
class RemovalEffects:
    """Changes of the predicted tokens when one part is removed.

    Args:
        tokens: predicted token of each target, with no part removed.
        logits: change of that token's logit per part; negative: the part helps.
        probabilities: change of that token's probability per part.
        predictions: the token that is predicted without the part.
    """

    tokens: Int[Tensor, " target"]
    logits: Float[Tensor, "target part"]
    probabilities: Float[Tensor, "target part"]
    predictions: Int[Tensor, "target part"]


class LeaveOneOut:
    """A prompt to run without one part at a time.

    The whole model runs once per site, when the first part there is asked for. The model's hooks
    and weights have to stay as they are until the last one.

    Args:
        model: dense or sparse model; hooks already on it stay active.
        tokens: tokens of the prompt.
        read_at: columns at which predictions are read, one per target.
    """

    def __init__(
        self, model: HookedModel, tokens: Int[Tensor, " pos"], read_at: Sequence[int]
    ) -> None:
        self.adapter = adapt(model)
        tokens = tokens.to(self.adapter.device)
        read = torch.zeros(1, len(tokens), dtype=torch.bool, device=self.adapter.device)
        read[0, list(read_at)] = True
        # Indices among the logits that are read.
        self._columns = [int(read[0, :column].sum()) for column in read_at]
        sites = Heads(), AttentionEdges()
        self._runs = {type(site): GatedRun(model, site, tokens[None], read) for site in sites}
        self._wholes: dict[type, Tensor] = {}
        per_token = self.adapter.activations_per_token + 3 * self.adapter.n_heads * len(tokens)
        self._most_rows = max(1, MOST_NUMBERS // (len(tokens) * per_token))

    @autograd(False)
    def effects(
        self, heads: Sequence[Head] = (), groups: Sequence[Sequence[AttentionEdge]] = ()
    ) -> RemovalEffects:
        """The effects of removing each head, then of removing each group of attention edges.

        Raises:
            ValueError: a user's hook treats the rows of a batch differently.
        """
        whole = self._whole(Heads if heads or not groups else AttentionEdges)
        predicted = whole.argmax(dim=-1)
        found = [_of(predicted, whole[None])[:0]]
        best = [predicted[None][:0]]
        for kind, parts in ((Heads, heads), (AttentionEdges, groups)):
            run = self._runs[kind]
            for start in range(0, len(parts), self._most_rows):
                alone = self._whole(kind)
                gates = _leave_one_out(
                    self.adapter, run.site, parts[start : start + self._most_rows]
                )
                logits = run.logits(gates)[:, self._columns].double()
                _check_rows(logits[-1], alone)
                scores = _of(predicted, logits)
                found.append(scores[:-1] - scores[-1])  # same pass: 0 without influence
                best.append(logits[:-1].argmax(dim=-1))
        logits, probabilities = torch.cat(found).permute(2, 1, 0).cpu()
        return RemovalEffects(predicted.cpu(), logits, probabilities, torch.cat(best).T.cpu())

    def _whole(self, kind: type) -> Float[Tensor, "target vocab"]:
        """Logits of the whole model; passes at this site start at the first layer that differs."""
        if kind not in self._wholes:
            logits = self._runs[kind].start_from(None)
            self._wholes[kind] = logits[self._columns].double()
        return self._wholes[kind]


def _leave_one_out(
    adapter: Adapter, site: Site, parts: Sequence[Sequence[Any]]
) -> Tensor | ClosedAttentionEdges:
    """A stack of gates: each entry closes one part, the last entry none."""
    if isinstance(site, AttentionEdges):
        rows = [row for row, group in enumerate(parts) for _ in group]
        edges = torch.tensor([tuple(edge) for group in parts for edge in group]).view(-1, 4)
        return ClosedAttentionEdges(edges, torch.tensor(rows, dtype=torch.long), len(parts) + 1)
    rows, places = torch.arange(len(parts)), torch.tensor(parts)
    gates = torch.ones(len(parts) + 1, adapter.n_layers, adapter.n_heads)
    gates[rows, places[:, 0], places[:, 1]] = 0
    return gates


def _of(
    predicted: Int[Tensor, " target"], logits: Float[Tensor, "row target vocab"]
) -> Float[Tensor, "row target two"]:
    """Logits and probabilities of the predicted tokens."""
    at = predicted.expand(logits.shape[:-1])[..., None]
    return torch.cat([logits.gather(-1, at), logits.softmax(dim=-1).gather(-1, at)], dim=-1)


def _check_rows(row: Tensor, whole: Tensor) -> None:
    """Check that a row with nothing removed matches the prompt run on its own."""
    off = float((row - whole).abs().max())
    if off > 0.02 * (1 + float(whole.abs().max())):
        raise ValueError(
            f"expected every row of a batch to run as a prompt alone does; got logits that differ "
            f"by {off:.3g}: take your own hooks off this model, or let them treat all rows alike"
        )

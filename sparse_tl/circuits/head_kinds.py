"""What each head does: where it attends, what it copies, and what it moves.

On random tokens that are repeated once, ``x_1 ... x_n x_1 ... x_n``, four scores are the attention
from the second copy to four distinct places, and

    copying = mean over j and t != j of sign(l_j[x_j] - l_j[x_t]),    l_j = W_U^T norm(W_O v_j)

says whether attending to a token raises its own logit above those of the others: ``l_j`` are the
logits, before the bias, that the head would add if it attended to ``x_j`` alone, for j in the first
copy. On prompt pairs, with the attention A from the last position, the values v, and the
unembedding d of the answers minus that of the wrong answers,

    mover       = sum over j, x_j an answer, of A_j norm_share(W_O v_j) . d / logit difference
    suppression = the same over j, x_j a wrong answer
    inhibition  = (z_clean - z_corrupted) . d a / d z,   z at the last position

where ``a`` is the movers' attention to answers minus that to wrong answers, averaged over heads
with weights proportional to positive mover scores. Scores are means over pairs; mover and
suppression scores are divided by the mean logit difference.

Reference: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; Olsson et al.,
arXiv 2209.11895 (prefix matching); Wang et al., arXiv 2211.00593 (name movers, S-inhibition);
McDougall et al., arXiv 2310.04625 (copy suppression). The copying scores of the first two use
weights alone, or logits over the vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
from annotated_types import Ge, Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Seed, checked
from sparse_tl.backend import (
    Adapter,
    HookedModel,
    adapt,
    check_numbers,
    check_tokens,
    in_evaluation_mode,
    record,
    tolerance,
)
from sparse_tl.circuits.pair_runs import batches_of
from sparse_tl.circuits.prompt.logits import towards_answers
from sparse_tl.contexts import autograd
from sparse_tl.data import PromptPairs
from sparse_tl.data.prompts import ordinary_tokens, start_of_prompts
from sparse_tl.graph import HeadGrid
from sparse_tl.progress import tracked
from sparse_tl.results import OfPrompts


class Kind(NamedTuple):
    """Heads whose score by a behaviour is at least a threshold, or at most a negative one."""

    by: str
    least: float
    label: str


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
PerHead = Float[Tensor, "layer head"]


@checked
@dataclass(frozen=True, eq=False)
class HeadBehaviour(OfPrompts):
    """The scores of every head for each behaviour, from `head_behaviour`.

    Args:
        scores: scores by behaviour: "previous token", "duplicate token", "induction" and "sink",
            fractions of attention; "copying", -1..1; and with prompt pairs, "mover" and
            "suppression", fractions of the logit difference, and "inhibition", a fraction of the
            movers' attention.
        note: why there are no scores on prompt pairs, although there were pairs; or empty.
    """

    scores: Mapping[str, PerHead]
    note: str = ""

    def __getitem__(self, behaviour: str) -> PerHead:
        """The scores of one behaviour."""
        return self.scores[behaviour]

    @property
    def grid(self) -> HeadGrid:
        """The heads of the model."""
        return HeadGrid(*next(iter(self.scores.values())).shape)

    def top(self, behaviour: str, size: AtLeastOne = 5) -> list[tuple[int, int]]:
        """The heads (layer, head) with the highest scores of a behaviour, highest first."""
        scores = self[behaviour]
        order = scores.flatten().argsort(descending=True, stable=True)[:size]
        return [divmod(place, scores.shape[1]) for place in order.tolist()]

    @property
    def heads(self) -> dict[str, list[tuple[int, int]]]:
        """The heads (layer, head) of each kind in `KINDS`, highest scores first.

        A head may be of several kinds, or of none.
        """
        return {
            str(kind): score[score >= 1].sort_values(ascending=False, kind="stable").index.tolist()
            for kind, score in self._multiples.items()
        }

    @property
    def main(self) -> dict[str, str]:
        """The main kind of each head that has one, by name of the head.

        Kinds of behaviour on the task come first, then kinds of attention, then copying. Among
        several, the main one is the kind whose threshold the score exceeds by the largest factor.
        """
        main = dict[str, str]()
        for group in (_ON_TASK, _BY_ATTENTION, ("copying", "negative copying")):
            scores: Any = self._multiples.filter(group)
            for (layer, head), kind in scores[(scores >= 1).any(axis=1)].idxmax(axis=1).items():
                main.setdefault(f"a{layer}.h{head}", kind)
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
    def _multiples(self) -> pd.DataFrame:
        """Scores as multiples of thresholds, by head and kind: at least 1 for heads of a kind."""
        scores = {
            name: (self.scores[kind.by] / kind.least).flatten()
            for name, kind in KINDS.items()
            if kind.by in self.scores
        }
        heads = pd.MultiIndex.from_tuples(map(tuple, self.grid.places.tolist()))
        return pd.DataFrame(scores, index=heads)

    def to_pandas(self) -> pd.DataFrame:
        """One row per head: its main kind, if any, and its scores."""
        heads, main = self.grid.columns(self.grid.places), self.main
        kinds = [main.get(head, "") for head in heads["head"]]
        scores = {name: values.flatten().tolist() for name, values in self.scores.items()}
        return pd.DataFrame({**heads, "kind": kinds, **scores})

    def _summary(self) -> pd.DataFrame:
        """The five heads with the highest scores for every behaviour."""
        best = {
            name: [f"a{layer}.h{head} {scores[layer, head]:.2f}" for layer, head in self.top(name)]
            for name, scores in self.scores.items()
        }
        return pd.DataFrame(best)

    def __repr__(self) -> str:
        grid = self.grid
        listed = ", ".join(f"{name} {best}" for name, best in self._summary().iloc[0].items())
        note = f"; {self.note}" if self.note else ""
        return f"HeadBehaviour({grid.n_layers} layers x {grid.n_heads} heads; {listed}{note})"


@checked
@in_evaluation_mode
@torch.no_grad()
def head_behaviour(
    model: HookedModel,
    pairs: PromptPairs | None = None,
    *,
    n: AtLeastOne = 16,
    length: Annotated[int, Ge(3), Le(100_000)] = 32,
    seed: Seed = 0,
    batch_size: AtLeastOne = 8,
    progress: bool = True,
) -> HeadBehaviour:
    """Scores of every head: what it attends to, what it copies and, on a task, what it moves.

    On repeated random tokens: the share of attention to the previous token, to the same token in
    the first copy (duplicate token), to the token after that one (induction) and to the first token
    (sink); and copying, -1 to 1. On prompt pairs:

    - *mover*: share of the logit difference that the head adds by attending to the answers, as the
      name movers of IOI do. Below 0, the head lowers the answer's logit.
    - *suppression*: the same by attending to the wrong answers.
    - *inhibition*: how much of the movers' preference for the answers would be lost, to first
      order, if the head's last output were the corrupted one, as with IOI's S-inhibition heads.

    Args:
        pairs: prompt pairs that contain their answers and wrong answers, such as those of IOI. If
            none contains its answer, the scores on pairs are left out, and the result says so.
        n: number of prompts of random tokens.
        length: number of random tokens, all different, that each prompt repeats.
        seed: random seed for the tokens.

    Raises:
        ValueError: the model is not the sum of its components, predicts something other than
            tokens, or has heads that do not write averages of values; its context or its vocabulary
            is too small; or the model does not prefer the answers.
    """
    adapter = adapt(model)
    adapter.graph  # noqa: B018 - checks that the model is the sum of its parts
    if adapter.d_vocab_out != adapter.d_vocab:
        raise ValueError(
            f"{adapter.name!r} does not predict the tokens that it reads, so it cannot copy them"
        )
    start, prompt_start = start_of_prompts(model)
    vocabulary, rng = ordinary_tokens(model), random.Random(seed)
    if len(vocabulary) < length:
        raise ValueError(
            f"the vocabulary has only {len(vocabulary)} tokens: choose a length below {length}"
        )
    drawn = [rng.sample(vocabulary, length) for _ in range(n)]
    tokens = torch.tensor([[*start, *row, *row] for row in drawn])
    check_tokens(adapter, tokens)
    batches, of_pairs, note = tokens.split(batch_size), list[PromptPairs](), ""
    if pairs is not None:
        pairs = pairs.of_one_token("heads move one token: leave out the pairs")
        of_pairs = batches_of(adapter, pairs, batch_size)
        if not _answer_positions(pairs)[0].any():
            of_pairs, note = [], "no movers, since no clean prompt contains its answer"
    with tracked("scoring heads", len(batches) + len(of_pairs), progress) as step:
        by_batch = list[dict[str, Tensor]]()
        for batch in batches:
            by_batch.append(_on_random_tokens(adapter, batch.to(adapter.device), length))
            step()
        scores = {
            name: torch.cat([batch[name] for batch in by_batch]).mean(dim=0) for name in by_batch[0]
        }
        if of_pairs:
            scores |= _task_behaviour(adapter, of_pairs, step)
    return HeadBehaviour(scores, note, prompt_start=prompt_start)


def _on_random_tokens(
    adapter: Adapter, tokens: Int[Tensor, "prompt pos"], length: int
) -> dict[str, Float[Tensor, "prompt layer head"]]:
    """The scores of each prompt, on the CPU."""
    queries = torch.arange(1 - length, 0) + tokens.shape[1]
    keys_of = {
        "previous token": queries - 1,
        "duplicate token": queries - length,
        "induction": queries - length + 1,
        "sink": torch.zeros_like(queries),
    }
    first = slice(tokens.shape[1] - 2 * length, tokens.shape[1] - length)
    by_layer: dict[str, list[Tensor]] = {name: [] for name in [*keys_of, "copying"]}
    kept, final = record(adapter, tokens, _value_points(adapter))
    check_numbers(adapter, final)
    norm = adapter.final_norm
    unembedded = adapter.unembedding()[0].T[tokens[:, first]].double()
    for layer, pattern, values in _heads_values(adapter, kept):
        for name, keys in keys_of.items():
            by_layer[name].append(pattern[:, :, queries, keys].double().mean(dim=-1))
        written = adapter.heads_written(layer, values[:, first].double())
        shares = norm.share(written, final[:, first].double())
        logits = torch.einsum("hpjd,ptd->phjt", shares, unembedded)
        own = logits.diagonal(dim1=-2, dim2=-1)[..., None]
        by_layer["copying"].append(
            (own - logits).sign().sum(dim=(-2, -1)) / (length * (length - 1))
        )
    return {name: torch.stack(layers, dim=1).cpu() for name, layers in by_layer.items()}


def _task_behaviour(
    adapter: Adapter, batches: Sequence[PromptPairs], step: Callable[[], None]
) -> dict[str, PerHead]:
    """The scores of each behaviour on prompt pairs, on the CPU; `step` is called per batch."""
    moved, difference = map(
        torch.cat, zip(*(_moved(adapter, batch) for batch in batches), strict=True)
    )
    total = difference.mean()
    if not total > 0:
        raise ValueError(
            f"the model does not prefer the answers: the mean logit difference, of which scores "
            f"are shares, is {total.item():.4g}. measure_skill says whether a model does a task."
        )
    mover, suppression = moved.mean(dim=0) / total
    weights = mover.clamp(min=0)
    weights = weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    lost = list[Tensor]()
    for batch in batches:
        lost.append(_lost(adapter, batch, weights))
        step()
    inhibition = torch.cat(lost).mean(dim=0)
    return {"mover": mover, "suppression": suppression, "inhibition": inhibition}


def _value_points(adapter: Adapter) -> list[str]:
    """The hook points whose activations `_heads_values` needs."""
    points = ("pattern", "v", "z")
    return [name for at in points for name in adapter.layer_points(f"attn.hook_{at}")]


def _heads_values(
    adapter: Adapter, kept: Mapping[str, Tensor]
) -> Iterator[
    tuple[int, Float[Tensor, "row head query key"], Float[Tensor, "row key head d_head"]]
]:
    """Each layer, its attention pattern, and the values of each head.

    `kept` has the activations at ``hook_pattern``, ``hook_v`` and ``hook_z``. Checks that heads
    write averages of values, weighted by the pattern.
    """
    for layer in range(adapter.n_layers):
        pattern, values, z = (
            kept[f"blocks.{layer}.attn.hook_{at}"] for at in ("pattern", "v", "z")
        )
        values = adapter.values_by_head(values)
        error = (torch.einsum("bhqk,bkhd->bqhd", pattern.to(values), values) - z).abs().max()
        if not error <= tolerance(values.dtype) * values.abs().max():
            raise ValueError(
                f"what heads of layer {layer} of {adapter.name!r} write cannot be split by the "
                "tokens that they attend to: it is no average of values, weighted by attention "
                f"(off by {error:.3g})"
            )
        yield layer, pattern, values


def _moved(
    adapter: Adapter, batch: PromptPairs
) -> tuple[Float[Tensor, "pair two layer head"], Float[Tensor, " pair"]]:
    """Logits that heads add by attending to right and to wrong answers; the logit difference."""
    at_heads = [adapter.heads_point(layer) for layer in range(adapter.n_layers)]
    kept, final = record(adapter, batch.clean, [*_value_points(adapter), *at_heads])
    check_numbers(adapter, final)
    rows, ends = torch.arange(len(batch), device=final.device), batch.positions
    final, moved = final[rows, ends].double(), list[Tensor]()
    for layer, pattern, values in _heads_values(adapter, kept):
        factor = adapter.attention_scale(layer, kept)[rows, ends].double()
        attention = pattern[rows, :, ends].double()
        parts = [
            torch.einsum("pk,phk,pkhd,p->phd", mask.double(), attention, values.double(), factor)
            for mask in _answer_positions(batch)
        ]
        shares = adapter.heads_written(layer, torch.stack(parts, dim=1))
        added, _ = towards_answers(adapter, batch, shares.permute(0, 2, 1, 3).flatten(0, 1), final)
        moved.append(added.unflatten(0, (-1, 2)))
    of_stream, of_biases = towards_answers(adapter, batch, final[None], final)
    return torch.stack(moved).permute(3, 2, 0, 1).cpu(), (of_stream[0] + of_biases).cpu()


def _lost(
    adapter: Adapter, batch: PromptPairs, weights: PerHead
) -> Float[Tensor, "pair layer head"]:
    """What the movers' attention to answers, minus that to wrong answers, would lose by patching
    each head at the last position, to first order."""
    outputs, patterns = (adapter.layer_points(f"attn.hook_{at}") for at in ("z", "pattern"))
    corrupted, _ = record(adapter, batch.corrupted, outputs)
    clean, _ = record(adapter, batch.clean, [*outputs, *patterns], differentiable=True)
    rows, (answers, wrong) = torch.arange(len(batch)), _answer_positions(batch)
    rows = rows.to(answers.device)
    with autograd(True):
        attention = torch.stack([clean[name][rows, :, batch.positions] for name in patterns])
        sign = answers.to(attention) - wrong.to(attention)
        preferred = torch.einsum("lphk,pk,lh->", attention, sign, weights.to(attention))
        z = [clean[name] for name in outputs]
        gradients = torch.autograd.grad(preferred, z, allow_unused=True, materialize_grads=True)
    lost = [
        ((clean[name].detach() - corrupted[name]) * gradient)[rows, batch.positions]
        for name, gradient in zip(outputs, gradients, strict=True)
    ]
    return torch.stack(lost, dim=1).double().sum(dim=-1).cpu()


def _answer_positions(
    batch: PromptPairs,
) -> tuple[Bool[Tensor, "pair pos"], Bool[Tensor, "pair pos"]]:
    """The positions of answers in the clean prompts, and those of wrong answers."""
    answers = batch.clean[:, :, None] == batch.answers[:, None]
    wrong = batch.clean[:, :, None] == batch.wrong[:, None]
    return answers.any(dim=-1), wrong.any(dim=-1)

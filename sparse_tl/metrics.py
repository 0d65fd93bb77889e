"""Metrics: one number per prompt pair from the logits that it reads; and the explained effect.

A metric takes logits and pairs, and returns one value per pair; larger means better performance on
the task. The logits are those of `PromptPairs.read`: one row per pair where answers have one token,
otherwise one for each token of an answer, read after the tokens before it. A divergence is 0 at its
reference, and larger values are farther from it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.data.batches import log_probabilities
from sparse_tl.data.pairs import NO_TOKEN, PromptPairs

_ADVICE = "there is no effect to explain. Check the corruption, and that the model does the task."

Logits = Float[Tensor, "label vocab"]
PerPair = Float[Tensor, " pair"]
Metric = Callable[[Logits, PromptPairs], PerPair]

UNITS = {
    "log_probability": "nats",
    "logit_difference": "logits",
    "margin": "logits",
    "answer_logit": "logits",
}
"""Units of metrics, by name; other metrics have no known unit."""


@checked
def answer_log_probabilities(
    logits: Logits, pairs: PromptPairs
) -> tuple[Float[Tensor, "pair answer"], Float[Tensor, "pair wrong"]]:
    """The log-probability of each right and each wrong answer as a whole, in nats.

        sum over k of log P(token k | prompt, tokens before k)

    It is -inf where a pair has fewer answers than others.
    """
    return _by_answer(log_probabilities(logits), pairs)


@checked
def logit_difference(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Mean logit of the answers minus mean logit of the wrong answers, in logits.

    For answers of several tokens, the mean log-probability of the answers minus that of the wrong
    ones, in nats. With one token it is the same number, since all share the normaliser.
    """
    right, wrong = map(_mean, _compared(logits, pairs), pairs.sides)
    return right - wrong


@checked
def answer_logit(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Mean logit of the answers, which have one token each, in logits.

    A change that all logits share affects this metric, although it affects no prediction.
    """
    pairs = pairs.of_one_token("answer_logit reads one logit; take log_probability")
    return _mean(_by_answer(logits, pairs)[0], pairs.sides[0])


@checked
def margin(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Mean logit of the answers minus the largest logit of a wrong answer, in logits.

    For answers of several tokens, log-probabilities in nats, as in `logit_difference`.
    """
    right, wrong = _compared(logits, pairs)
    return _mean(right, pairs.sides[0]) - wrong.amax(dim=1)


@checked
def probability_difference(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Probability of the answers minus that of the wrong answers, each summed; -1 to 1."""
    right, wrong = answer_log_probabilities(logits, pairs)
    return right.exp().sum(dim=1) - wrong.exp().sum(dim=1)


@checked
def log_probability(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Log of the summed probability of the answers, in nats."""
    return answer_log_probabilities(logits, pairs)[0].logsumexp(dim=1)


def is_right(logits: Logits, pairs: PromptPairs) -> Bool[Tensor, " pair"]:
    """Whether each token of an answer is the most likely one, as when it is generated greedily."""
    tokens = pairs.sides[0]
    top = logits.argmax(dim=-1)[pairs.forced.where[:, : tokens.shape[1]]]
    same = ((top == tokens) | (tokens == NO_TOKEN)).all(dim=2)
    return (same & (tokens[..., 0] != NO_TOKEN)).any(dim=1)


def chooses_right(logits: Logits, pairs: PromptPairs) -> Bool[Tensor, " pair"]:
    """Whether the likeliest of the right and the wrong answers is a right one."""
    right, wrong = _compared(logits, pairs)
    return right.amax(dim=1) > wrong.amax(dim=1)


def check_wrong(pairs: PromptPairs) -> None:
    """Check that every pair has a wrong answer, to compare the right ones with."""
    none = (pairs.wrong == NO_TOKEN).flatten(1).all(dim=1)
    if none.any():
        raise ValueError(
            f"pair {int(none.int().argmax())} has no wrong answer to compare the right ones with"
        )


def divergence(logits: Logits, reference: Logits) -> PerPair:
    """``KL(reference || logits)`` of the next-token distributions, in nats, at least in float32."""
    log_q, log_p = log_probabilities(reference), log_probabilities(logits)
    return (log_q.exp() * (log_q - log_p)).sum(dim=-1)


def metric_name(metric: Metric) -> str:
    """The name of a metric function, for figures and saved results."""
    return getattr(metric, "__name__", type(metric).__name__)


def measure(metric: Metric, logits: Logits, pairs: PromptPairs) -> PerPair:
    """The metric's value for every pair, checked to be one finite number per pair."""
    values = metric(logits, pairs)
    if not isinstance(values, Tensor) or values.shape != (len(pairs),):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"expected a metric of shape ({len(pairs)},), one value per pair; got {got}"
        )
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).int().argmax())
        raise ValueError(
            f"expected a finite metric; pair {row} has {values[row].item()}. Perhaps a "
            "wrong answer is missing, or the model's logits are NaN or infinite."
        )
    return values


class NoEffectError(ValueError):
    """The corruption does not change the metric, so there is no effect to explain."""


def explained_effect(
    circuit: Float[Tensor, "*circuit pair"],
    clean: PerPair,
    corrupted: PerPair,
) -> Float[Tensor, "*circuit"]:
    """``(m(C) - m(corrupted)) / (m(clean) - m(corrupted))``, each averaged over pairs first.

    At 1, the circuit has the model's full effect; at 0, none.

    Raises:
        NoEffectError: there is no effect to explain.
    """
    effect = (clean - corrupted).mean()
    if not bool(effect.isfinite()) or effect.abs().item() <= 1e-6 * (1 + clean.abs().mean().item()):
        raise NoEffectError(
            f"expected prompts whose corruption changes the metric; on average it is "
            f"{clean.mean().item():.4g} clean and {corrupted.mean().item():.4g} corrupted: "
            f"{_ADVICE}"
        )
    return (circuit - corrupted).mean(dim=-1) / effect


def is_changed(clean: Float[Tensor, "*shape"], patched: Float[Tensor, "*shape"]) -> bool:
    """Whether any number differs beyond rounding; NaN counts as different."""
    same = (clean - patched).abs() <= 1e-6 * (1 + clean.abs())
    return not bool(same.all())


def check_changed(changed: bool, of: str = "") -> None:
    """Raise a NoEffectError unless `is_changed` is true of some batch; `of` says of which pairs."""
    if not changed:
        raise NoEffectError(
            "expected prompts whose corruption changes the metric; with everything patched, it "
            f"changes by more than 1e-6 for no {of}pair: {_ADVICE}"
        )


def _compared(logits: Logits, pairs: PromptPairs) -> tuple[Tensor, Tensor]:
    """Log-probabilities of answers; or their logits if all have one token, and one normaliser."""
    several = pairs.tokens.shape[2] > 1
    return _by_answer(log_probabilities(logits) if several else logits, pairs)


def _by_answer(
    values: Logits, pairs: PromptPairs
) -> tuple[Float[Tensor, "pair answer"], Float[Tensor, "pair wrong"]]:
    """Values summed over the tokens of each right and each wrong answer; -inf where there is none.

    The values are those of every output at the positions that the pairs read; the sums are in at
    least float32.
    """
    tokens, n_vocab = pairs.tokens, values.shape[1]
    if bool((tokens >= n_vocab).any()):
        raise ValueError(
            f"the model predicts {n_vocab:,} tokens, and the answer {int(tokens.max())} is none of "
            "them. Where d_vocab_out differs from d_vocab, output tokens have their own numbers."
        )
    picked = values[pairs.forced.where, tokens.clamp(min=0)]
    precise = torch.promote_types(values.dtype, torch.float32)
    sums = picked.where(tokens != NO_TOKEN, 0).sum(dim=2, dtype=precise)
    sums = sums.masked_fill(tokens[..., 0] == NO_TOKEN, -torch.inf)
    right, wrong = sums.split([pairs.answers.shape[1], pairs.wrong.shape[1]], dim=1)
    return right, wrong


def _mean(
    values: Float[Tensor, "pair answer"], tokens: Int[Tensor, "pair answer token"]
) -> PerPair:
    """The mean over the answers that a pair has."""
    given = tokens[..., 0] != NO_TOKEN
    return values.where(given, 0).sum(dim=1) / given.sum(dim=1)

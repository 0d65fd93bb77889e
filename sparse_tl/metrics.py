"""Metrics: one number per prompt pair from the logits at its position; and the explained effect.

A metric takes logits and pairs, and returns one value per pair; larger means better performance on
the task. A divergence is 0 at its reference, and larger values are farther from it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.data.pairs import NO_TOKEN, PromptPairs

_ADVICE = "there is no effect to explain. Check the corruption, and that the model does the task."

Logits = Float[Tensor, "pair vocab"]
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
def logit_difference(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Mean logit of the answers minus mean logit of the wrong answers, in logits."""
    return _mean(logits, pairs.answers) - _mean(logits, pairs.wrong)


@checked
def answer_logit(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Mean logit of the answers, in logits.

    A change that all logits share affects this metric, although it affects no prediction.
    """
    return _mean(logits, pairs.answers)


@checked
def margin(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Mean logit of the answers minus the largest logit of a wrong answer, in logits."""
    return _mean(logits, pairs.answers) - _largest(logits, pairs.wrong)


@checked
def probability_difference(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Probability of the answers minus that of the wrong answers, each summed; -1 to 1."""
    probabilities = logits.softmax(dim=-1)
    return _sum(probabilities, pairs.answers) - _sum(probabilities, pairs.wrong)


@checked
def log_probability(logits: Logits, pairs: PromptPairs) -> PerPair:
    """Log of the summed probability of the answers, in nats."""
    picked, given = _picked(logits.log_softmax(dim=-1), pairs.answers)
    return picked.masked_fill(~given, -torch.inf).logsumexp(dim=1)


def is_right(logits: Logits, pairs: PromptPairs) -> Bool[Tensor, " pair"]:
    """Whether the most likely token is an answer."""
    return (logits.argmax(dim=-1, keepdim=True) == pairs.answers).any(dim=1)


def chooses_right(logits: Logits, pairs: PromptPairs) -> Bool[Tensor, " pair"]:
    """Whether the likeliest of the right and the wrong answers is a right one."""
    return _largest(logits, pairs.answers) > _largest(logits, pairs.wrong)


def check_wrong(pairs: PromptPairs) -> None:
    """Check that every pair has a wrong answer, to compare the right ones with."""
    none = (pairs.wrong == NO_TOKEN).all(dim=1)
    if none.any():
        raise ValueError(
            f"pair {int(none.int().argmax())} has no wrong answer to compare the right ones with"
        )


def divergence(logits: Logits, reference: Logits) -> PerPair:
    """``KL(reference || logits)`` of the next-token distributions, in nats."""
    log_q, log_p = reference.log_softmax(dim=-1), logits.log_softmax(dim=-1)
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


def check_changed(changed: bool) -> None:
    """Raise a NoEffectError unless `is_changed` is true of some batch."""
    if not changed:
        raise NoEffectError(
            "expected prompts whose corruption changes the metric; with everything patched, it "
            f"changes for no pair: {_ADVICE}"
        )


def _picked(
    values: Logits, tokens: Int[Tensor, "pair token"]
) -> tuple[Float[Tensor, "pair token"], Bool[Tensor, "pair token"]]:
    n_vocab = values.shape[1]
    if bool((tokens >= n_vocab).any()):
        raise ValueError(
            f"the model predicts {n_vocab:,} tokens, and the answer {int(tokens.max())} is none of "
            "them. Where d_vocab_out differs from d_vocab, output tokens have their own numbers."
        )
    return values.gather(1, tokens.clamp(min=0)), tokens != NO_TOKEN


def _largest(values: Logits, tokens: Int[Tensor, "pair token"]) -> PerPair:
    picked, given = _picked(values, tokens)
    return picked.masked_fill(~given, -torch.inf).amax(dim=1)


def _sum(values: Logits, tokens: Int[Tensor, "pair token"]) -> PerPair:
    picked, given = _picked(values, tokens)
    return (picked * given).sum(dim=1)


def _mean(values: Logits, tokens: Int[Tensor, "pair token"]) -> PerPair:
    return _sum(values, tokens) / (tokens != NO_TOKEN).sum(dim=1)

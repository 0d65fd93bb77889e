"""The metric on which the explorer shows effects, and the metrics that a reader can choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparse_tl.circuits.prompt.quantity import Quantity
from sparse_tl.circuits.prompt.tokens import Token
from sparse_tl.metrics import Metric, answer_logit, log_probability, logit_difference, metric_name

_OFFERED = {metric_name(m): m for m in (log_probability, logit_difference, answer_logit)}


@dataclass(frozen=True)
class MetricChoice:
    """The chosen metric, and the metrics to choose from.

    Args:
        quantity: the chosen metric and its answers.
        offered: metrics to choose from, by name; the chosen one is added.
    """

    quantity: Quantity
    offered: Mapping[str, Metric] = field(default_factory=lambda: _OFFERED)

    def __post_init__(self) -> None:
        chosen = {metric_name(self.quantity.metric): self.quantity.metric}
        object.__setattr__(self, "offered", {**self.offered, **chosen})

    def of(self, metric: Metric | str, wrong: Token | None) -> MetricChoice:
        """The choice of another metric, with the same answer.

        Raises:
            ValueError: there is no metric of this name.
        """
        chosen = self.offered.get(metric) if isinstance(metric, str) else metric
        if chosen is None:
            raise ValueError(f"expected a metric of {list(self.offered)}; got {metric!r:.80}")
        wrong = None if wrong == "" else wrong
        return replace(self, quantity=replace(self.quantity, metric=chosen, wrong=wrong))

    @property
    def payload(self) -> dict[str, Any]:
        """The choice as sent to the page, with the wrong answer if it was given as text."""
        wrong = self.quantity.wrong
        return {
            "name": metric_name(self.quantity.metric),
            "wrong": wrong if isinstance(wrong, str) else "",
            "offered": list(self.offered),
        }

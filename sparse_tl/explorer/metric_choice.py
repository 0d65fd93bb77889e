"""The metric that effects are on, and those that a reader of the explorer can choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparse_tl.circuits.prompt import Token
from sparse_tl.circuits.quantity import Quantity
from sparse_tl.metrics import Metric, answer_logit, log_probability, logit_difference, metric_name
from sparse_tl.wording import shown

_OFFERED = {metric_name(some): some for some in (log_probability, logit_difference, answer_logit)}


@dataclass(frozen=True)
class MetricChoice:
    """What is chosen, and what there is to choose from.

    Args:
        quantity: the metric and its answers.
        offered: metrics by name; that of the quantity is added.
    """

    quantity: Quantity
    offered: Mapping[str, Metric] = field(default_factory=lambda: _OFFERED)

    def __post_init__(self) -> None:
        own = {metric_name(self.quantity.metric): self.quantity.metric}
        object.__setattr__(self, "offered", {**self.offered, **own})

    def of(self, metric: Metric | str, wrong: Token | None) -> MetricChoice:
        """Another choice, which keeps the answer.

        Raises:
            ValueError: there is no metric of this name.
        """
        found = self.offered.get(metric) if isinstance(metric, str) else metric
        if found is None:
            raise ValueError(f"expected a metric of {list(self.offered)}; got {shown(metric)}")
        wrong = None if wrong == "" else wrong
        return replace(self, quantity=replace(self.quantity, metric=found, wrong=wrong))

    @property
    def payload(self) -> dict[str, Any]:
        """The choice, as it is sent: a wrong answer is told where it was given as text."""
        wrong = self.quantity.wrong
        return {
            "name": metric_name(self.quantity.metric),
            "wrong": wrong if isinstance(wrong, str) else "",
            "offered": list(self.offered),
        }

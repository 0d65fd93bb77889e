"""Effect of ablating the heads of a role on the likelihood of the targets.

1. Order the heads of each seed by their score for the role.
2. At step k, set the gates of the first k heads to 1 (*retained*) or to 0 (*ablated*); all other
   gates keep the fitted G+.
3. Average Delta log P(k) = log P(target | ablated) - log P(target | retained) over prompts.

k is 0, 1, 2, 3, 4, 6, 8, ..., two values per doubling, and the number of heads in the role for each
seed. Up to that number, the curve falls for facilitation, is flat for irrelevance and rises for
interference. A random order of all heads is the control.

Reference: arXiv 2505.13737.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.calls.arguments import AtLeastOne, Seed, checked
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.fitting import check_fits
from sparse_tl.head_roles.likelihood import target_log_probabilities
from sparse_tl.head_roles.roles import HeadRoles, Role
from sparse_tl.results import Result

Order = Literal[Role, "random"]


@dataclass(frozen=True, eq=False)
class AblationCurve(Result):
    """Delta log-probability of the target, by number of ablated heads.

    Only seeds that fitted are included.

    Args:
        by: role whose score orders the heads, or "random".
        counts: numbers of ablated heads, increasing from 0.
        values: change in nats per target response, for each number of heads.
        in_role: number of heads in the role, by seed; all heads for a random order.
        control: `values` for a random order of all heads; None if not requested.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    by: Order
    counts: tuple[int, ...]
    values: Float[Tensor, "seed count"]
    in_role: tuple[int, ...]
    control: Float[Tensor, "seed count"] | None = None
    prompt_start: str | None = None

    @property
    def mean(self) -> Float[Tensor, " count"]:
        """Mean over seeds."""
        return self.values.mean(dim=0)

    def to_pandas(self) -> pd.DataFrame:
        """One row per number of ablated heads: mean, minimum and maximum over seeds, control."""
        columns = {
            "ablated": self.counts,
            "mean": self.values.mean(dim=0),
            "low": self.values.amin(dim=0),
            "high": self.values.amax(dim=0),
        }
        if self.control is not None:
            columns |= {"control": self.control.mean(dim=0)}
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        return (
            f"AblationCurve(by {self.by}: {self.mean[-1].item():+.3f} nats per response after "
            f"{self.counts[-1]} heads)"
        )


@checked
@in_evaluation_mode
def ablation_curve(
    model: HookedModel,
    roles: HeadRoles,
    dataset: TargetDataset,
    by: Order = "facilitation",
    *,
    max_heads: AtLeastOne = 50,
    control: bool = True,
    seed: Seed = 0,
    progress: bool = True,
) -> AblationCurve:
    """The effect of ablating more and more heads, in the order of their score for a role.

    Args:
        model: model that the roles were fitted on; left unchanged.
        roles: fitted gates, with the scores.
        dataset: held-out prompts and targets.
        by: role whose score orders the heads, or "random".
        max_heads: maximum number of heads to ablate.
        control: whether to measure a random order as well.
        seed: random seed for random orders.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the role is unknown, the gates belong to another model, no seed fitted, or the
            prompts do not fit the model.
    """
    adapter, (n_layers, n_heads) = adapt(model), roles.removed.shape
    if (n_layers, n_heads) != (adapter.n_layers, adapter.n_heads):
        raise ValueError(
            f"expected roles of {adapter.n_layers} layers of {adapter.n_heads} heads; got "
            f"those of {n_layers} layers of {n_heads}"
        )
    roles.check_fitted()
    check_fits(model, dataset)
    baselines = roles.g_plus[roles.fitted]
    orders = {"random": [_random_order(roles, seed, index) for index in range(len(baselines))]}
    in_role = [roles.removed.numel()] * len(baselines)
    if by != "random":
        orders[by] = roles.ranking(by)
        in_role = roles.members(by).sum(dim=(1, 2)).tolist()
    measured = [by, "random"] if control and by != "random" else [by]
    counts = ablated_counts(min(max_heads, roles.removed.numel()), in_role)
    gates = [
        _settings(baseline, order, counts[1:])
        for name in measured
        for baseline, order in zip(baselines, orders[name], strict=True)
    ]
    log_probabilities = target_log_probabilities(
        *(model, dataset.rows, torch.cat(gates)),
        title=f"ablation by {by}",
        progress=progress,
    )
    shape = len(measured), len(baselines), 2, -1
    retained, ablated = log_probabilities.mean(dim=1).view(shape).unbind(2)
    changes = nn.functional.pad(ablated - retained, (1, 0))  # 0 where no head is ablated
    values = dict(zip(measured, changes, strict=True))
    return AblationCurve(
        by,  # type: ignore[arg-type]
        counts,
        values[by].clone(),
        tuple(in_role),
        values["random"].clone() if len(measured) > 1 else None,
        dataset.start,
    )


def ablated_counts(last: int, in_role: Sequence[int]) -> tuple[int, ...]:
    """Numbers of heads to ablate: 0 to `last`, two per doubling, and those in the role."""
    spaced = {round(2 ** (step / 2)) for step in range(2 * last.bit_length())}
    return tuple(sorted(count for count in {0, last, *spaced, *in_role} if count <= last))


def _random_order(roles: HeadRoles, seed: int, index: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    order = torch.randperm(roles.removed.numel(), generator=generator)
    return [divmod(index, roles.removed.shape[1]) for index in order.tolist()]


def _settings(
    baseline: Float[Tensor, "layer head"], order: Sequence[tuple[int, int]], counts: Sequence[int]
) -> Float[Tensor, "setting layer head"]:
    """The baseline with the first heads of an order set to 1, by count; then with them set to 0."""
    retained = baseline.repeat(len(counts), 1, 1)
    ablated = retained.clone()
    for row, count in enumerate(counts):
        for layer, head in order[:count]:
            retained[row, layer, head], ablated[row, layer, head] = 1.0, 0.0
    return torch.cat([retained, ablated])

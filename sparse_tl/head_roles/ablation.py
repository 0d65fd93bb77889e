"""Effect of ablating the heads of a role on the likelihood of the targets.

1. Order the heads of each seed by their score for the role.
2. At step k, *retained* sets the gates of the first k heads to 1, *ablated* to 0; all other gates
   keep the fitted G+.
3. Delta log P(k) = log P(target | ablated) - log P(target | retained), averaged over prompts.

The curve falls for facilitation, is flat for irrelevance and rises for interference, up to the
number of heads with that role. A random order of all heads is the control.

Reference: arXiv 2505.13737.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Seed, checked
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.checks import check_fits
from sparse_tl.head_roles.likelihood import target_log_probabilities
from sparse_tl.head_roles.roles import HeadRoles, Role
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode
from sparse_tl.progress import tracked
from sparse_tl.results import Result

Order = Literal[Role, "random"]


@dataclass(frozen=True, eq=False)
class AblationCurve(Result):
    """Delta log-probability of the target against the number of ablated heads.

    Only seeds that fitted are included.

    Args:
        by: role whose score orders the heads, or "random".
        values: nats per target response, for 0, 1, ... ablated heads.
        in_role: number of heads in the role, by seed; all heads for a random order.
        control: values for a random order of all heads; None if not requested.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    by: Order
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
            "ablated": range(self.values.shape[1]),
            "mean": self.values.mean(dim=0),
            "low": self.values.amin(dim=0),
            "high": self.values.amax(dim=0),
        }
        if self.control is not None:
            columns |= {"control": self.control.mean(dim=0)}
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        last = self.values.shape[1] - 1
        return (
            f"AblationCurve(by {self.by}: {self.mean[-1].item():+.3f} nats per response after "
            f"{last} heads)"
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
    """Ablate an increasing number of heads, in the order of their score for a role.

    Args:
        model: model that the roles were fitted on; left unchanged.
        roles: fitted gates.
        dataset: held-out prompts and targets.
        by: role whose score orders the heads, or "random".
        max_heads: maximum number of heads to ablate, capped at the model's number of heads.
        control: whether to measure a random order as well.
        seed: random seed for random orders.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the role is unknown, the gates belong to another model, no seed fitted, or the
            prompts do not fit the model.
    """
    adapter, found = adapt(model), tuple(roles.removed.shape)
    if found != (adapter.n_layers, adapter.n_heads):
        raise ValueError(
            f"expected roles of {adapter.n_layers} layers of {adapter.n_heads} heads; got "
            f"those of {found[0]} layers of {found[1]}"
        )
    roles.check_fitted()
    check_fits(model, dataset)
    baselines = roles.g_plus[roles.fitted]
    orders = {"random": [_random_order(roles, seed, index) for index in range(len(baselines))]}
    in_role = [roles.removed.numel()] * len(baselines)
    if by != "random":
        orders[by] = roles.ranking(by)
        in_role = roles.members(by).sum(dim=(1, 2)).tolist()
    wanted = [by, "random"] if control and by != "random" else [by]
    curves: dict[str, list[Tensor]] = {name: [] for name in wanted}
    with tracked(f"ablation by {by}", len(wanted) * len(baselines), progress) as step:
        for name, measured in curves.items():
            for baseline, order in zip(baselines, orders[name], strict=True):
                measured.append(_curve(model, dataset, baseline, order[:max_heads]))
                step()
    values = {name: torch.stack(measured) for name, measured in curves.items()}
    return AblationCurve(
        by,  # type: ignore[arg-type]
        values[by],
        tuple(in_role),
        values["random"] if len(wanted) > 1 else None,
        dataset.start,
    )


def _random_order(roles: HeadRoles, seed: int, index: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    order = torch.randperm(roles.removed.numel(), generator=generator)
    return [divmod(place, roles.removed.shape[1]) for place in order.tolist()]


def _curve(
    model: HookedModel,
    dataset: TargetDataset,
    baseline: Float[Tensor, "layer head"],
    order: Sequence[tuple[int, int]],
) -> Float[Tensor, " count"]:
    """Delta log P for 0 to all heads of an order, with all points in the same passes."""
    retained = baseline.repeat(len(order), 1, 1)
    ablated = retained.clone()
    for place, (layer, head) in enumerate(order):
        retained[place:, layer, head] = 1.0
        ablated[place:, layer, head] = 0.0
    found = target_log_probabilities(model, dataset.rows, torch.cat([retained, ablated]))
    given, without = found.mean(dim=1).split(len(order))
    difference = without - given
    return torch.cat([difference.new_zeros(1), difference])  # nothing ablated, nothing changed

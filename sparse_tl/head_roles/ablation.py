"""What ablating the heads of a role does to the targets' likelihood.

1. Order the heads of each seed by a score of their role.
2. At step k, *retained* has the gates of the first k heads at 1, *ablated* at 0; all others stay at
   the fitted G+.
3. Delta log P(k) = log P(target | ablated) - log P(target | retained), averaged over prompts.

Facilitation falls, irrelevance is flat, interference rises, each as long as there are heads of
that role. A random order of all heads is the control.

Reference: arXiv 2505.13737.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.checks import check_fits
from sparse_tl.head_roles.likelihood import target_log_probabilities
from sparse_tl.head_roles.roles import HeadRoles, Role
from sparse_tl.lens import HookedModel, adapt
from sparse_tl.progress import tracked
from sparse_tl.results import Result

Order = Literal[Role, "random"]


@dataclass(frozen=True, eq=False)
class AblationCurve(Result):
    """Delta log-probability of the target response against the number of ablated heads.

    Of the seeds that fitted, no others.

    Args:
        by: what the heads are ordered by.
        values: nats per target response, for 0, 1, ... ablated heads.
        in_role: how many heads are in the role, by seed; for a random order, all.
        control: the same with a random order of all heads; None if it was not asked for.
    """

    by: Order
    values: Float[Tensor, "seed count"]
    in_role: tuple[int, ...]
    control: Float[Tensor, "seed count"] | None = None

    @property
    def mean(self) -> Float[Tensor, " count"]:
        """Mean over seeds."""
        return self.values.mean(dim=0)

    def to_pandas(self) -> pd.DataFrame:
        """One row per number of ablated heads: mean, smallest and largest over seeds, control."""
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


def ablation_curve(
    model: HookedModel,
    roles: HeadRoles,
    dataset: TargetDataset,
    by: Order | str = "facilitation",
    *,
    max_heads: int = 50,
    control: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> AblationCurve:
    """Ablate more and more heads, the first of a role first.

    Args:
        model: the one that the roles were fitted on; it is not changed.
        roles: fitted gates.
        dataset: prompts and targets, held out.
        by: the role whose score orders the heads, or "random".
        max_heads: how many heads are ablated at most; the model's number of heads ends it too.
        control: whether to measure a random order beside it.
        seed: of random orders.
        progress: whether to show it.

    Raises:
        ValueError: an unknown role, gates of another model, roles of which no seed fitted, or
            prompts that do not fit the model.
    """
    if by not in get_args(Order):
        raise ValueError(f"expected an order by {get_args(Order)}; got {by!r}")
    adapter, found = adapt(model), tuple(roles.removed.shape)
    if found != (adapter.n_layers, adapter.n_heads):
        raise ValueError(
            f"expected roles of {adapter.n_layers} layers of {adapter.n_heads} heads; got "
            f"those of {found[0]} layers of {found[1]}"
        )
    if max_heads < 1:
        raise ValueError(f"expected max_heads of at least 1; got {max_heads}")
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
    """Delta log P for 0 to all heads of an order, every point in the same passes."""
    retained = baseline.repeat(len(order), 1, 1)
    ablated = retained.clone()
    for place, (layer, head) in enumerate(order):
        retained[place:, layer, head] = 1.0
        ablated[place:, layer, head] = 0.0
    found = target_log_probabilities(model, dataset.rows, torch.cat([retained, ablated]))
    given, without = found.mean(dim=1).split(len(order))
    difference = without - given
    return torch.cat([difference.new_zeros(1), difference])  # nothing ablated, nothing changed

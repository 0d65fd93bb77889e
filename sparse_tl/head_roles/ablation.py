"""Effect of ablating the heads of a role on the likelihood of the targets.

    Delta log P(k) = log P(target | ablated) - log P(target | retained),   mean over prompts,

where the gates of the k heads with the highest scores are 1 (*retained*) or 0 (*ablated*), and all
others keep the fitted G+. k is 0, 1, 2, 3, 4, 6, 8, ..., two values per doubling, and the number of
heads in the role for each seed. Up to that number, the curve falls for facilitation, is flat for
irrelevance and rises for interference. A random order of all heads is the control.

Reference: arXiv 2505.13737.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.arguments import AtLeastOne, Seed, checked
from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.data.targets import TargetDataset
from sparse_tl.graph import HeadGrid
from sparse_tl.head_roles.fitting import check_fits
from sparse_tl.head_roles.likelihood import target_log_probabilities
from sparse_tl.head_roles.roles import HeadRoles, Role
from sparse_tl.results import OfPrompts

Order = Literal[Role, "random"]


@dataclass(frozen=True, eq=False)
class AblationCurve(OfPrompts):
    """Delta log-probability of the target, by number of ablated heads.

    Only seeds that fitted are included.

    Args:
        by: role whose score orders the heads; "random" for a curve made of a control.
        counts: numbers of ablated heads, increasing from 0.
        values: change in nats per target response, for each number of heads.
        in_role: number of heads in the role, by seed.
        control: `values` for a random order of all heads; None if not requested.
    """

    by: Order
    counts: tuple[int, ...]
    values: Float[Tensor, "seed count"]
    in_role: tuple[int, ...]
    control: Float[Tensor, "seed count"] | None = None

    @property
    def mean(self) -> Float[Tensor, " count"]:
        """Mean over seeds."""
        return self.values.mean(dim=0)

    def to_pandas(self) -> pd.DataFrame:
        """One row per number of ablated heads: mean, minimum and maximum over seeds, control."""
        low, high = self.values.aminmax(dim=0)
        columns = {"ablated": self.counts, "mean": self.mean, "low": low, "high": high}
        if self.control is not None:
            columns["control"] = self.control.mean(dim=0)
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
    by: Role = "facilitation",
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
        by: role whose score orders the heads.
        max_heads: maximum number of heads to ablate.
        control: whether to measure a random order as well.
        seed: random seed for random orders.

    Raises:
        ValueError: the gates belong to another model, no seed fitted, or the prompts do not fit
            the model.
    """
    adapter = adapt(model)
    if roles.grid != (grid := HeadGrid(adapter.n_layers, adapter.n_heads)):
        raise ValueError(f"the roles are of {roles.grid!r}, and the model has {grid!r}")
    roles.check_fitted()
    check_fits(model, dataset)
    baselines = roles.g_plus[roles.fitted].flatten(1)
    n_seeds, n_heads = baselines.shape
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in range(n_seeds)]
    orders, in_role = [roles.order(by)], roles.members(by).sum(dim=(1, 2)).tolist()
    if control:
        orders.append(torch.stack([torch.randperm(n_heads, generator=one) for one in generators]))
    last = min(max_heads, n_heads)
    spaced = {round(2 ** (step / 2)) for step in range(2 * last.bit_length())}
    counts = sorted(count for count in {0, last, *spaced, *in_role} if count <= last)
    place = torch.stack(orders).argsort(dim=-1)[:, :, None]
    chosen = place < torch.tensor(counts[1:])[:, None]
    settings = [torch.where(chosen, value, baselines[:, None]) for value in (1.0, 0.0)]
    gates = torch.stack(settings, dim=2).unflatten(-1, roles.removed.shape).flatten(0, 3)
    found = target_log_probabilities(
        model, dataset.rows, gates, title=f"ablation by {by}", progress=progress
    )
    retained, ablated = found.mean(dim=1).view(len(orders), n_seeds, 2, -1).unbind(2)
    changes = nn.functional.pad(ablated - retained, (1, 0))  # 0 where no head is ablated
    values = [change.clone() for change in changes]
    return AblationCurve(
        by,
        tuple(counts),
        values[0],
        tuple(in_role),
        values[1] if len(values) > 1 else None,
        prompt_start=dataset.start,
    )

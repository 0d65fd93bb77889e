"""What a fit of head gates says: scores, classes, trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Role = Literal["facilitation", "irrelevance", "interference"]
ROLES: tuple[Role, ...] = get_args(Role)
STAGES = ("g0", "g_plus", "g_minus")


@dataclass(frozen=True, eq=False)
class Fit:
    """One stage of a fit.

    Args:
        theta: the gates' logits after the last update.
        recorded: the logits on the way.
        recorded_at: updates before each of them, 0 and all among them.
        losses: mean NLL of a held-out target token in nats.
    """

    theta: Float[Tensor, "seed layer head"]
    recorded: Float[Tensor, "seed record layer head"]
    recorded_at: tuple[int, ...]
    losses: Float[Tensor, " seed"]

    @property
    def gates(self) -> Float[Tensor, "seed layer head"]:
        """The gates in [0, 1]."""
        return self.theta.sigmoid()


@dataclass(frozen=True, eq=False)
class HeadRoles(Result):
    """Gates of every head under three pressures, and what they say of its role.

    Args:
        seeds: of the first gates.
        lambda_: of the penalty.
        g0: gates fitted without penalty.
        g_plus: fitted from g0 while pushed open.
        g_minus: fitted from g0 while pushed shut.
        trajectories: the gates of the three stages on the way.
        recorded_at: updates of the stage before each gate of a trajectory, 0 and all among them.
        losses: mean NLL of a held-out target token in nats, by stage and seed.
        dense_loss: that of the model without gates.
    """

    seeds: tuple[int, ...]
    lambda_: float
    g0: Float[Tensor, "seed layer head"]
    g_plus: Float[Tensor, "seed layer head"]
    g_minus: Float[Tensor, "seed layer head"]
    trajectories: Float[Tensor, "stage seed record layer head"]
    recorded_at: tuple[int, ...]
    losses: Float[Tensor, "stage seed"]
    dense_loss: float

    @classmethod
    def of(
        cls, seeds: Sequence[int], lambda_: float, fits: Sequence[Fit], dense_loss: float
    ) -> HeadRoles:
        """From the three stages, in the order of `STAGES`."""
        return cls(
            seeds=tuple(seeds),
            lambda_=lambda_,
            **{name: fit.gates.cpu() for name, fit in zip(STAGES, fits, strict=True)},
            trajectories=torch.stack([fit.recorded.sigmoid() for fit in fits]),
            recorded_at=fits[0].recorded_at,
            losses=torch.stack([fit.losses for fit in fits]),
            dense_loss=dense_loss,
        )

    @property
    def facilitation(self) -> Float[Tensor, "seed layer head"]:
        """G-: open although pushed shut. The head helps."""
        return self.g_minus

    @property
    def interference(self) -> Float[Tensor, "seed layer head"]:
        """1 - G+: shut although pushed open. The head harms."""
        return 1 - self.g_plus

    @property
    def irrelevance(self) -> Float[Tensor, "seed layer head"]:
        """G+ (1 - G-): goes wherever it is pushed. The head does not matter."""
        return self.g_plus * (1 - self.g_minus)

    def score(self, role: Role | str) -> Float[Tensor, "seed layer head"]:
        """The score of a role, 0 to 1.

        Raises:
            ValueError: an unknown role.
        """
        if role not in ROLES:
            raise ValueError(f"expected a role of {ROLES}; got {role!r}")
        return getattr(self, role)

    def members(self, role: Role | str, threshold: float = 0.5) -> Bool[Tensor, "seed layer head"]:
        """The heads whose score is at least the threshold, for each seed."""
        return self.score(role) >= threshold

    def ranking(self, role: Role | str) -> list[list[tuple[int, int]]]:
        """All heads as (layer, head) by falling score, for each seed; ties in the model's order."""
        n_heads = self.g0.shape[2]
        order = self.score(role).flatten(1).argsort(dim=1, descending=True, stable=True)
        return [[divmod(place, n_heads) for place in seed] for seed in order.tolist()]

    def consistency(self, threshold: float = 0.5) -> pd.DataFrame:
        """How often each head is in each class over seeds: share, and whether always or ever."""
        import pandas as pd

        rows = []
        for role in ROLES:
            share = self.members(role, threshold).double().mean(dim=0)
            rows += [
                {
                    "layer": layer,
                    "head": head,
                    "role": role,
                    "share": value,
                    "always": value == 1.0,
                    "any": value > 0.0,
                }
                for layer, some in enumerate(share.tolist())
                for head, value in enumerate(some)
            ]
        return pd.DataFrame(rows)

    def to_pandas(self) -> pd.DataFrame:
        """One row per seed and head: gates and scores."""
        return head_table(self.seeds, {name: getattr(self, name) for name in (*STAGES, *ROLES)})

    def _summary(self) -> pd.DataFrame:
        return mean_table(self.to_pandas())

    def heatmap(self) -> go.Figure:
        """The mean scores of all heads over seeds, one panel per role."""
        from sparse_tl.plots import head_roles_figure

        return head_roles_figure({role: self.score(role).mean(dim=0).tolist() for role in ROLES})

    def trajectory_figure(self) -> go.Figure:
        """Every head's gate through the stages, mean over seeds, in the colour of its role."""
        from sparse_tl.plots import gate_trajectories

        scores = torch.stack([self.score(role).mean(dim=0) for role in ROLES])
        strongest = scores.argmax(dim=0)
        means = self.trajectories.mean(dim=1)
        lines = {
            (layer, head): (
                ROLES[int(strongest[layer, head])],
                [stage[:, layer, head].tolist() for stage in means],
            )
            for layer in range(self.g0.shape[1])
            for head in range(self.g0.shape[2])
        }
        return gate_trajectories(lines, self.recorded_at)

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{self.members(role).sum(dim=(1, 2)).double().mean():.1f} {role}" for role in ROLES
        )
        n_seeds, n_layers, n_heads = self.g0.shape
        return (
            f"HeadRoles({n_layers} x {n_heads} heads, {n_seeds} seeds; per seed: {counts}; "
            f"NLL {self.losses[1].mean():.4f} with G+, {self.dense_loss:.4f} without gates)"
        )


def head_table(
    seeds: Sequence[int], columns: Mapping[str, Float[Tensor, "seed layer head"]]
) -> pd.DataFrame:
    """One row per seed, layer and head."""
    import pandas as pd

    _, n_layers, n_heads = next(iter(columns.values())).shape
    index = pd.MultiIndex.from_product(
        [seeds, range(n_layers), range(n_heads)], names=["seed", "layer", "head"]
    )
    values = {name: column.flatten().tolist() for name, column in columns.items()}
    return pd.DataFrame(values, index=index).reset_index()


def mean_table(table: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of a table by seed, layer and head."""
    mean: Any = table.drop(columns="seed").groupby(["layer", "head"]).mean()
    return mean

"""What a fit of head gates says: scores, classes, what their heads are worth, trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.head_roles.likelihood import LARGEST_LOGIT
from sparse_tl.results import Result, table_html

Role = Literal["facilitation", "irrelevance", "interference"]
ROLES: tuple[Role, ...] = get_args(Role)
THRESHOLD = 0.5
"""Score from which on a head belongs to a class."""
MOST_NAMED = 5
"""Heads that a warning names."""


@dataclass(frozen=True, eq=False)
class HeadRoles(Result):
    """Gates of every head under three pressures, and what they say of its role.

    Scores and classes are those of the seeds that fitted, no others (see `notes`).

    Args:
        seeds: of the first gates.
        lambda_: of the penalty.
        trajectories: the gates of G0 (no penalty), G+ and G- (from G0, pushed open and pushed shut)
            on the way, those after the last update last.
        recorded_at: updates of the stage before each gate of a trajectory, 0 and all among them.
        losses: mean NLL of a held-out target token in nats, by stage and seed.
        dense_loss: that of the model without gates.
        fitted: whether G+ and G- of a seed are at most ``8 |lambda|`` nats above `dense_loss`,
            twice the standard error aside: otherwise opening all gates would have been better, and
            the gates say nothing about heads.
        removed: nats of NLL that it costs to remove this head alone from the model.
        removed_together: what it costs to remove all heads of a role, by what they are removed
            from (the model, the fitted G+), role and seed.
    """

    seeds: tuple[int, ...]
    lambda_: float
    trajectories: Float[Tensor, "stage seed record layer head"]
    recorded_at: tuple[int, ...]
    losses: Float[Tensor, "stage seed"]
    dense_loss: float
    fitted: Bool[Tensor, " seed"]
    removed: Float[Tensor, "layer head"]
    removed_together: Float[Tensor, "start role seed"]

    @property
    def g0(self) -> Float[Tensor, "seed layer head"]:
        """Gates fitted without penalty."""
        return self.trajectories[0, :, -1]

    @property
    def g_plus(self) -> Float[Tensor, "seed layer head"]:
        """Gates fitted from g0 while pushed open."""
        return self.trajectories[1, :, -1]

    @property
    def g_minus(self) -> Float[Tensor, "seed layer head"]:
        """Gates fitted from g0 while pushed shut."""
        return self.trajectories[2, :, -1]

    @property
    def facilitation(self) -> Float[Tensor, "fitted layer head"]:
        """G-: open although pushed shut. The head helps."""
        return self.score("facilitation")

    @property
    def interference(self) -> Float[Tensor, "fitted layer head"]:
        """1 - G+: shut although pushed open. The head harms."""
        return self.score("interference")

    @property
    def irrelevance(self) -> Float[Tensor, "fitted layer head"]:
        """G+ (1 - G-): goes wherever it is pushed. The head does not matter."""
        return self.score("irrelevance")

    @property
    def price(self) -> float:
        """Nats of the mean NLL that the penalty pays for closing one head: 8 |lambda| / heads."""
        return 2 * LARGEST_LOGIT * abs(self.lambda_) / self.removed.numel()

    def score(self, role: Role | str) -> Float[Tensor, "fitted layer head"]:
        """The score of a role, 0 to 1, for each seed that fitted.

        Raises:
            ValueError: an unknown role.
        """
        if role not in ROLES:
            raise ValueError(f"expected a role of {ROLES}; got {role!r}")
        return role_scores(self.g_plus, self.g_minus)[role][self.fitted]

    def members(
        self, role: Role | str, threshold: float = THRESHOLD
    ) -> Bool[Tensor, "fitted layer head"]:
        """The heads whose score is at least the threshold, for each seed that fitted."""
        return self.score(role) >= threshold

    def ranking(self, role: Role | str) -> list[list[tuple[int, int]]]:
        """All heads as (layer, head) by falling score, for each seed that fitted; ties in the
        model's order."""
        n_heads = self.g0.shape[2]
        order = self.score(role).flatten(1).argsort(dim=1, descending=True, stable=True)
        return [[divmod(place, n_heads) for place in seed] for seed in order.tolist()]

    def consistency(self, threshold: float = THRESHOLD) -> pd.DataFrame:
        """How often each head is in each class over seeds: share, and whether always or ever."""
        found = torch.stack([self.members(role, threshold).double().mean(dim=0) for role in ROLES])
        columns = {"share": found, "always": found == 1.0, "any": found > 0.0}
        return head_table("role", ROLES, columns)

    def to_pandas(self) -> pd.DataFrame:
        """One row per seed and head: gates, scores (NaN where the seed did not fit), and `removed`,
        what it costs to remove this head alone from the model, in nats per target token."""
        columns = {name: getattr(self, name) for name in ("g0", "g_plus", "g_minus")}
        unknown = ~self.fitted[:, None, None]
        for role, score in role_scores(self.g_plus, self.g_minus).items():
            columns[role] = score.masked_fill(unknown, torch.nan)
        columns["removed"] = self.removed.expand_as(self.g0)
        return head_table("seed", self.seeds, columns)

    def classes(self) -> pd.DataFrame:
        """One row per role, mean over seeds: its heads, and what it costs to remove all of them
        from the model and from the fitted G+, in nats per target token."""
        heads = [self.members(role).sum(dim=(1, 2)).double().mean().item() for role in ROLES]
        from_model, from_g_plus = self.removed_together[:, :, self.fitted].mean(dim=2).tolist()
        columns = {"heads": heads, "removed": from_model, "removed_from_g_plus": from_g_plus}
        return pd.DataFrame(columns, index=pd.Index(ROLES, name="role"))

    def notes(self) -> list[str]:
        """What must be known before these roles are believed, as sentences; none where all is well.

        Seeds that did not fit; and irrelevant heads that matter when they are gone: each alone
        costs more than `price`, below which the penalty calls a head irrelevant, or all of them
        together more than so many times that.
        """
        notes = []
        stuck = [place for place, fitted in enumerate(self.fitted.tolist()) if not fitted]
        if stuck:
            pairs = [
                f"seed {self.seeds[place]}: {self.losses[1, place]:.4g} with G+, "
                f"{self.losses[2, place]:.4g} with G-"
                for place in stuck
            ]
            notes.append(
                f"The gates of {len(stuck)} of {len(self.seeds)} seeds did not fit and are left "
                f"out of all classes: NLL {self.dense_loss:.4g} without gates, but for "
                f"{'; '.join(pairs)}. More updates or other seeds may fit."
            )
        often = self.members("irrelevance").double().mean(dim=0) >= 0.5
        costs = self.removed.masked_fill(~often, 0)
        worst = costs.flatten().topk(min(MOST_NAMED, costs.numel()))
        named = [
            "a{}.h{} {:+.3g}".format(*divmod(place, costs.shape[1]), cost)
            for cost, place in zip(*(found.tolist() for found in worst), strict=True)
            if cost > self.price
        ]
        heads, cost, _ = self.classes().loc["irrelevance"]
        if named or cost > heads * self.price:
            alone = f"{', '.join(named)} alone, " if named else ""
            notes.append(
                f"Heads called irrelevant matter when they are gone. Removed from the model they "
                f"cost, in nats per target token: {alone}all of them {cost:+.3g}; the penalty pays "
                f"{self.price:.3g} for closing a head. A small gate may do where a normalisation "
                "undoes scale, or one head stands in for another: see `removed` in the table."
            )
        return notes

    def mean_scores(self) -> Float[Tensor, "role layer head"]:
        """The scores of `ROLES`, mean over the seeds that fitted.

        Raises:
            ValueError: no seed fitted.
        """
        self.check_fitted()
        return torch.stack([self.score(role).mean(dim=0) for role in ROLES])

    def check_fitted(self) -> None:
        """Make sure that at least one seed fitted.

        Raises:
            ValueError: none did.
        """
        if not self.fitted.any():
            raise ValueError(
                f"expected a fit with at least one seed that fitted. {self.notes()[0]}"
            )

    def __repr__(self) -> str:
        n_seeds, n_layers, n_heads = self.g0.shape
        fitted = int(self.fitted.sum())
        seeds = f"{n_seeds} seeds" if fitted == n_seeds else f"{fitted} of {n_seeds} seeds fitted"
        counts = ", ".join(
            f"{heads:.1f} {role} ({cost:+.3g} nats when removed)"
            for role, heads, cost, _ in self.classes().itertuples(name=None)
        )
        return (
            f"HeadRoles({n_layers} x {n_heads} heads, {seeds}; per seed: {counts}; "
            f"NLL {self.losses[1, self.fitted].mean():.4f} with G+, "
            f"{self.dense_loss:.4f} without gates)"
        )

    def _repr_html_(self) -> str:
        words = " ".join([repr(self), *self.notes()])
        return table_html(self.classes(), words) + table_html(self._summary())

    def _summary(self) -> pd.DataFrame:
        return mean_table(self.to_pandas().dropna())


def role_scores(
    g_plus: Float[Tensor, "*stack layer head"], g_minus: Float[Tensor, "*stack layer head"]
) -> dict[Role, Float[Tensor, "*stack layer head"]]:
    """Facilitation G-, irrelevance G+ (1 - G-), interference 1 - G+."""
    return {
        "facilitation": g_minus,
        "irrelevance": g_plus * (1 - g_minus),
        "interference": 1 - g_plus,
    }


def head_table(first: str, labels: Sequence[Any], columns: Mapping[str, Tensor]) -> pd.DataFrame:
    """One row per label, layer and head, of tensors with these three axes."""
    _, n_layers, n_heads = next(iter(columns.values())).shape
    index = pd.MultiIndex.from_product(
        [labels, range(n_layers), range(n_heads)], names=[first, "layer", "head"]
    )
    values = {name: column.flatten().tolist() for name, column in columns.items()}
    return pd.DataFrame(values, index=index).reset_index()


def mean_table(table: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of a table by seed, layer and head."""
    mean: Any = table.drop(columns="seed").groupby(["layer", "head"]).mean()
    return mean

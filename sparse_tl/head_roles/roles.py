"""Results of causal head gating: gates, scores, roles, and costs of removing heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.graph import HeadGrid
from sparse_tl.head_roles.likelihood import LARGEST_LOGIT
from sparse_tl.results import OfPrompts, table_html

Role = Literal["facilitation", "irrelevance", "interference"]
ROLES: tuple[Role, ...] = get_args(Role)
BySeed = Float[Tensor, "seed layer head"]
ByFitted = Float[Tensor, "fitted layer head"]
THRESHOLD = 0.5
"""Minimum score for a head to belong to a role."""
MOST_NAMED = 5
"""Maximum number of heads that a warning names."""


@dataclass(frozen=True, eq=False)
class HeadRoles(OfPrompts):
    """The gates of all heads under three penalties, and the roles that follow from them.

    Scores and roles include only seeds that fitted; see `notes`.

    Args:
        seeds: random seeds of the initial gates.
        lambda_: coefficient of the penalty.
        trajectories: recorded gates of G0 (no penalty), G+ and G- (from G0, pushed open and pushed
            shut), final gates last.
        recorded_at: number of updates before each record, from 0 to all.
        losses: mean NLL per held-out target token in nats, by stage and seed.
        dense_loss: mean NLL of the model without gates.
        fitted: whether G+ and G- cost at most ``8 |lambda|`` nats and two standard errors; if not,
            opening all gates would be better, and the gates are not informative.
        removed: increase of the NLL in nats when one head is removed from the model.
        removed_together: increase of the NLL when all heads of a role are removed, by start (the
            model, or the fitted G+), role and seed.
    """

    seeds: tuple[int, ...]
    lambda_: float
    trajectories: Float[Tensor, "stage=3 seed record layer head"]
    recorded_at: tuple[int, ...]
    losses: Float[Tensor, "stage=3 seed"]
    dense_loss: float
    fitted: Bool[Tensor, " seed"]
    removed: Float[Tensor, "layer head"]
    removed_together: Float[Tensor, "start=2 role=3 seed"]

    @property
    def g0(self) -> BySeed:
        """Gates fitted without a penalty."""
        return self.trajectories[0, :, -1]

    @property
    def g_plus(self) -> BySeed:
        """Gates fitted from g0 under a penalty that opens them."""
        return self.trajectories[1, :, -1]

    @property
    def g_minus(self) -> BySeed:
        """Gates fitted from g0 under a penalty that closes them."""
        return self.trajectories[2, :, -1]

    @property
    def grid(self) -> HeadGrid:
        """The heads of the model."""
        return HeadGrid(*self.removed.shape)

    @property
    def main(self) -> dict[str, str]:
        """The role of each head whose mean score over seeds is at least 0.5 for that role."""
        main = dict[str, str]()
        for role in ROLES:
            heads = (self.score(role).mean(dim=0) >= THRESHOLD).nonzero()
            main |= dict.fromkeys(self.grid.names(heads), role)
        return main

    @property
    def price(self) -> float:
        """The increase of the mean NLL, in nats, that the penalty accepts for closing one head."""
        return 2 * LARGEST_LOGIT * abs(self.lambda_) / self.removed.numel()

    def score(self, role: str) -> ByFitted:
        """The score of a role, 0 to 1, for each seed that fitted.

        - "facilitation": G-: high for heads that help, whose gates stay open although pushed shut.
        - "irrelevance": G+ (1 - G-): high for heads whose gates follow both penalties.
        - "interference": 1 - G+: high for heads that harm, which stay shut although pushed open.
        """
        return role_scores(self.g_plus, self.g_minus)[role][self.fitted]

    def members(self, role: str, threshold: float = THRESHOLD) -> Bool[Tensor, "fitted layer head"]:
        """The heads whose score is at least the threshold, for each seed that fitted."""
        return self.score(role) >= threshold

    def order(self, role: str) -> Int[Tensor, "fitted place"]:
        """Indices of all heads by decreasing score, ties in the model's order."""
        return self.score(role).flatten(1).argsort(dim=1, descending=True, stable=True)

    def consistency(self, threshold: float = THRESHOLD) -> pd.DataFrame:
        """By role and head: the fraction of seeds with the head in the role; whether all; any."""
        share = torch.stack([self.members(role, threshold).double().mean(dim=0) for role in ROLES])
        columns = {"share": share, "always": share == 1.0, "any": share > 0.0}
        return head_table("role", ROLES, columns)

    def to_pandas(self) -> pd.DataFrame:
        """One row per seed and head: gates, scores (NaN if the seed did not fit), and `removed`.

        `removed` is the cost of removing the head alone from the model, in nats per target token.
        """
        columns = {name: getattr(self, name) for name in ("g0", "g_plus", "g_minus")}
        not_fitted = ~self.fitted[:, None, None]
        for role, score in role_scores(self.g_plus, self.g_minus).items():
            columns[role] = score.masked_fill(not_fitted, torch.nan)
        columns["removed"] = self.removed.expand_as(self.g0)
        return head_table("seed", self.seeds, columns)

    def classes(self) -> pd.DataFrame:
        """One row per role, with means over seeds: number of heads, and cost of removing them all.

        The costs are those of removal from the model and from the fitted G+, in nats per target
        token.
        """
        heads = [self.members(role).sum(dim=(1, 2)).double().mean().item() for role in ROLES]
        from_model, from_g_plus = self.removed_together[:, :, self.fitted].mean(dim=2).tolist()
        columns = {"heads": heads, "removed": from_model, "removed_from_g_plus": from_g_plus}
        return pd.DataFrame(columns, index=pd.Index(ROLES, name="role"))

    def notes(self) -> list[str]:
        """Caveats about these roles: seeds that did not fit, and irrelevant heads that matter.

        These are a head that costs more than `price`, below which the penalty calls a head
        irrelevant, or all of them together costing more than their number times `price`.
        """
        notes = []
        if stuck := (~self.fitted).nonzero()[:, 0].tolist():
            losses = "; ".join(
                f"seed {self.seeds[i]}: {self.losses[1, i]:.4g} with G+, "
                f"{self.losses[2, i]:.4g} with G-"
                for i in stuck
            )
            notes.append(
                f"The gates of {len(stuck)} of {len(self.seeds)} seeds did not fit and are left "
                f"out of all classes: the NLL is {self.dense_loss:.4g} without gates, but for "
                f"{losses}. More updates or other seeds may fit."
            )
        mostly_irrelevant = self.members("irrelevance").double().mean(dim=0) >= 0.5
        costs = self.removed.masked_fill(~mostly_irrelevant, 0)
        costly = sorted((costs > self.price).nonzero().tolist(), key=lambda at: -costs[*at].item())
        named = ", ".join(
            f"a{layer}.h{head} {costs[layer, head]:+.3g}" for layer, head in costly[:MOST_NAMED]
        )
        heads, cost, _ = self.classes().to_numpy()[ROLES.index("irrelevance")]
        if named or cost > heads * self.price:
            notes.append(
                "Heads called irrelevant matter when they are removed. In nats per target token, "
                f"removal from the model costs {named}{' alone, ' if named else ''}all of them "
                f"{cost:+.3g}; the penalty accepts {self.price:.3g} for closing a head. A small "
                "gate may suffice where a normalisation cancels scale or one head can replace "
                "another: see `removed` in the table."
            )
        return notes

    def mean_scores(self) -> Float[Tensor, "role layer head"]:
        """The scores of all `ROLES`, mean over the seeds that fitted."""
        self.check_fitted()
        return torch.stack([self.score(role).mean(dim=0) for role in ROLES])

    def check_fitted(self) -> None:
        """Raise a ValueError if no seed fitted."""
        if not self.fitted.any():
            raise ValueError(f"no seed fitted. {self.notes()[0]}")

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
        summary = mean_table(self.to_pandas().dropna())
        return table_html(self.classes(), words) + table_html(summary)


def role_scores(
    g_plus: Float[Tensor, "*stack layer head"], g_minus: Float[Tensor, "*stack layer head"]
) -> dict[str, Float[Tensor, "*stack layer head"]]:
    """The scores of all roles: facilitation G-, irrelevance G+ (1 - G-), interference 1 - G+."""
    return {
        "facilitation": g_minus,
        "irrelevance": g_plus * (1 - g_minus),
        "interference": 1 - g_plus,
    }


def head_table(first: str, labels: tuple[Any, ...], columns: Mapping[str, Tensor]) -> pd.DataFrame:
    """One row per label, layer and head, from tensors with these three axes."""
    _, n_layers, n_heads = next(iter(columns.values())).shape
    index = pd.MultiIndex.from_product(
        [labels, range(n_layers), range(n_heads)], names=[first, "layer", "head"]
    )
    values = {name: column.flatten().tolist() for name, column in columns.items()}
    return pd.DataFrame(values, index=index).reset_index()


def mean_table(table: pd.DataFrame) -> pd.DataFrame:
    """The mean over seeds of a table by seed, layer and head."""
    mean: Any = table.drop(columns="seed").groupby(["layer", "head"]).mean()
    return mean

"""The estimated cost of fitting and measuring head roles, from one timed pass of each kind."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.ablation import ablated_counts
from sparse_tl.head_roles.fitting import FIRST_RATES, GateFitting, first_gates, fit_stage
from sparse_tl.head_roles.likelihood import GatedHeads, Likelihood
from sparse_tl.head_roles.measuring import target_log_probabilities
from sparse_tl.head_roles.roles import ROLES
from sparse_tl.lens import HookedModel, adapt
from sparse_tl.progress import clock


@dataclass(frozen=True)
class RolesCost:
    """The cost of a fit, of the measurement of removed heads, and of all ablation curves.

    Args:
        updates: number of optimizer steps of the three stages.
        per_update: forward and backward passes of a prompt per step, over all seeds.
        forward: further forward passes of a prompt, over all gate matrices.
        seconds: estimated total time.
    """

    updates: int
    per_update: int
    forward: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.updates:,} updates of {self.per_update:,} prompts forwards and backwards, "
            f"{self.forward:,} prompts forwards; about {clock(self.seconds)} in all, estimated "
            "from one timed pass of each kind"
        )


def roles_cost(
    model: HookedModel,
    dataset: TargetDataset,
    held_out: TargetDataset,
    fitting: GateFitting,
    *,
    seeds: int,
    max_heads: int,
) -> RolesCost:
    """The cost of `fit_head_gates` and of an `ablation_curve` of every role, one with a control.

    Args:
        model: dense or sparse model; left unchanged.
        dataset: prompts to fit on.
        held_out: prompts to measure on.
        fitting: settings of the fit.
        seeds: number of seeds.
        max_heads: maximum number of heads to ablate.
    """
    n_heads = adapt(model).n_layers * adapt(model).n_heads
    gates, stream = first_gates(model, range(seeds)), fitting.stream(dataset.rows)
    started = time.perf_counter()
    fit_stage(
        *(Likelihood(GatedHeads(model, gates), 0.0, 1), stream, replace(fitting, updates=1)),
        rates=FIRST_RATES,
        settings={},
        checkpoint=None,
        title="",
        progress=False,
    )
    update = time.perf_counter() - started
    started = time.perf_counter()
    target_log_probabilities(model, held_out.rows, gates[:1])
    forward = time.perf_counter() - started
    # G0, G+, G-; the model; the model without each head; the model and G+ without each role.
    matrices = 3 * seeds + 1 + n_heads + 2 * len(ROLES) * seeds
    n_points = len(ablated_counts(min(max_heads, n_heads), ())) - 1
    curves = 2 * n_points * seeds * (len(ROLES) + 1)
    updates = 3 * fitting.updates
    return RolesCost(
        updates,
        seeds * len(stream.batch(0)),
        (matrices + curves) * len(held_out),
        # Layers before a removed head need not run: on average, half of them.
        updates * update + (matrices - n_heads / 2 + curves) * forward,
    )

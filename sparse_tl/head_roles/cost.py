"""What fitting and measuring head roles will cost, from one timed pass of each kind."""

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
    """The passes of a fit, of the measurement of removed heads, and of all ablation curves.

    Args:
        updates: optimizer steps of the three stages.
        per_update: prompts per step, counted once per seed; each goes forwards and backwards.
        forward: prompts that only go forwards, counted once per gate matrix.
        seconds: estimated duration of everything.
    """

    updates: int
    per_update: int
    forward: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.updates:,} updates of {self.per_update:,} prompts forwards and backwards, "
            f"{self.forward:,} prompts forwards; about {clock(self.seconds)} in all, by one timed "
            "pass of each kind"
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
    """What `fit_head_gates` and an `ablation_curve` of every role, one with a control, will cost.

    Args:
        model: dense or sparse model; left unchanged.
        dataset: prompts to fit on.
        held_out: prompts to measure on.
        fitting: settings of the fit.
        seeds: number of gate matrices that are fitted together.
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
    # G0, G+ and G-, all heads, every head alone, every role from two starts.
    matrices = 3 * seeds + 1 + n_heads + 2 * len(ROLES) * seeds
    n_points = len(ablated_counts(min(max_heads, n_heads), ())) - 1
    curves = 2 * n_points * seeds * (len(ROLES) + 1)
    updates = 3 * fitting.updates
    return RolesCost(
        updates,
        seeds * len(stream.batch(0)),
        (matrices + curves) * len(held_out),
        # Without a head, layers before it need not run: half of them on average.
        updates * update + (matrices - n_heads / 2 + curves) * forward,
    )

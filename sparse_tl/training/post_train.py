"""Sparsity post-training: finetune a model under its attention gates until few edges are left."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.streams import TokenStream
from sparse_tl.files import digest
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import adapt, read_parameters
from sparse_tl.training.config import Metrics, Selection, TrainingConfig, choose_trained
from sparse_tl.training.constraint import LossConstraint, TargetLoss
from sparse_tl.training.evaluation import PostTraining, evaluate_held_out
from sparse_tl.training.loop import train
from sparse_tl.training.objectives import SparsityObjective

TRAINED: dict[str, dict[str, float]] = {
    "all": {"gates": 10.0, "qk": 1.0, "all": 0.1},
    "evenly": {"all": 1.0},
    "qk": {"gates": 10.0, "qk": 1.0},
    "gates": {"gates": 10.0},
}
"""The usual choices of trained weights: groups of parameters, with multiples of the learning rate;
the first group that has a parameter counts.

A gate's bias must move by whole logits, the queries and keys decide the gates, and everything else
only has to adapt: at the queries' rate its noise costs more loss than it can save edges.
"""

NEAR = 1.5
"""How many times the present edges the best weights may have for a retreat to them. In the first
fast fall the target is missed for long, and the last weights that met it are far denser."""


def post_train(
    sparse: SparseTransformer,
    stream: TokenStream,
    *,
    target_loss: float | str,
    validation: TokenBatch,
    steps: int = 2000,
    learning_rate: float = 1e-3,
    trained: str | Mapping[str, float] = "all",
    lambda_: float = 30.0,
    lambda_rate: float = 0.01,
    lambda_fall: float = 0.3,
    lambda_rise: float = 1.0,
    violation_scale: float | None = None,
    distillation: float = 0.0,
    anneal_noise_from: float = 0.5,
    pressure: float = 0.05,
    slack: float = 1.0,
    layer_costs: Sequence[float] | None = None,
    self_cost: float = 1.0,
    closing: float = 0.0,
    brake: float | None = None,
    retreat_after: int | None = None,
    min_accuracy: float = 0.0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    report: Callable[[Metrics], None] | None = None,
    **config: Any,
) -> PostTraining:
    """Finetune weights and gates until as few attention edges as possible are open.

    Solves ``min_theta max_lambda  log(1 + E|A|) + lambda (loss - target)``. On return `sparse`
    holds the best feasible weights: fewest active edges among validation evaluations that meet the
    target.

    Args:
        sparse: the wrapped model; its weights and gates are trained in place.
        stream: training batches; any positions may carry the loss.
        target_loss: nats: absolute (``0.01``), or over the frozen dense model on the same batch
            (``"+0.05"``), which cancels the batch's own noise.
        validation: examples for selection; report on others that neither saw.
        steps: optimizer steps.
        learning_rate: at its peak.
        trained: a name in `TRAINED` ("all", "qk", "gates", "evenly"), or patterns of parameter
            names with multiples of the learning rate, the first match counting.
        lambda_: lambda at the start.
        lambda_rate: how far log lambda moves per step at a full violation.
        lambda_fall: the largest step of log lambda downwards, as a multiple of that rate.
        lambda_rise: the largest step upwards, likewise; above 1, large violations are answered
            faster than small ones.
        violation_scale: nats above the target that count as a full violation; the target itself
            when left out.
        distillation: share, 0 to 1, of ``KL(dense || sparse)`` in what lambda weighs.
        anneal_noise_from: part of the run after which the gates' noise falls to 0.
        pressure: gradient on gates that are confidently open, where the sigmoid has none.
        slack: multiple of the target that is allowed at first: sampled gates cost loss that
            deterministic ones do not, and a loose start lets edges fall fast.
        layer_costs: what an edge of each layer counts in the minimised size; 1 everywhere when left
            out. What is reported is never weighted.
        self_cost: what an edge from a position to itself counts there, in edges to another one: the
            residual stream carries a position's own content anyway.
        closing: part of the run over which the edges that `sparse` has closed are taken from it, in
            ever more of the draws, so that it learns to do without. Pruning starts after it: until
            then lambda rests and nothing brakes, retreats or ends the run early. 0 closes them
            from the first step; evaluations close them always.
        brake: multiple of the allowed loss; where a validation evaluation is beyond it while the
            noise is full, lambda jumps, so that edges which are needed do not close in the fall.
        retreat_after: validation evaluations in a row that miss the target, after which training
            goes back to the best weights with a larger lambda and a smaller learning rate: a gate
            that closed by mistake is rarely found again by gradients. None for never.
        min_accuracy: share of validation rows that must be right everywhere, beside the target.
        checkpoint: folder of the run's checkpoint; found there, an interrupted run goes on.
        progress: whether to show live progress.
        report: called with the metrics of every validation evaluation.
        **config: further fields of `TrainingConfig`: warmup, decay, accumulate, precision, seed...

    Returns:
        The outcome; its `verdict` says whether the target was met.

    Raises:
        ValueError: a target below the dense model's own validation loss, unknown parameter names, a
            checkpoint of another run or on other data.
        NonFiniteLossError: the loss or gradient became NaN or infinite.
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, once the checkpoint is written.

    Reference: arXiv 2512.05865, section 3; deviations: the penalty is the logarithm of the
    expected edges, and the violation is paired with the dense model on the same batch.
    """
    target = TargetLoss.parse(target_loss)
    if not 0 <= distillation <= 1 or not 0 <= anneal_noise_from < 1:
        raise ValueError(
            f"expected distillation in 0..1 and anneal_noise_from in 0..1 (1 excluded); got "
            f"{distillation} and {anneal_noise_from}"
        )
    if closing != 0 and not 0 < closing < anneal_noise_from:
        raise ValueError(
            f"expected closing to be 0, or to end before the noise falls: below anneal_noise_from "
            f"({anneal_noise_from}); got {closing}"
        )
    closed = sparse.gates.closed
    if closing > 0 and closed is None:
        raise ValueError(
            "expected `closing` with closed edges only; `sparse` has none. Give them to "
            "SparseTransformer(model, closed=...)"
        )
    settings = TrainingConfig(steps=steps, learning_rate=learning_rate, **config)
    if not lambda_ > 0:
        raise ValueError(f"expected lambda_ above 0; got {lambda_}")
    if not 0 < lambda_fall <= 1:
        raise ValueError(f"expected lambda_fall above 0 and at most 1; got {lambda_fall}")
    if not 1 <= lambda_rise < math.inf:
        raise ValueError(f"expected lambda_rise of at least 1; got {lambda_rise}")
    if isinstance(trained, str):
        if trained not in TRAINED:
            raise ValueError(f"expected trained to be one of {list(TRAINED)}; got {trained!r}")
        parameters = _chosen(sparse, TRAINED[trained])
    else:
        parameters = choose_trained(sparse, trained)
    reference = sparse.dense_copy()
    dense = evaluate_held_out(reference, validation)
    if target.reference == "absolute" and target.nats < dense.loss:
        raise ValueError(
            "expected a target loss that the model can reach; the dense model's validation loss "
            f"is {dense.loss:.5f} nats, the target {target}. Give a larger one, or an increase "
            f'such as "+{max(dense.loss * 0.02, 0.01):.2g}".'
        )
    reference_loss = dense.loss if target.reference == "dense" else 0.0
    limit = target.nats + reference_loss
    needs_dense = target.reference == "dense" or distillation > 0
    constraint = LossConstraint(
        scale=violation_scale or target.nats,
        rate=lambda_rate,
        fall=lambda_fall,
        rise=lambda_rise,
        log_lambda=math.log(lambda_),
    )
    objective = SparsityObjective(
        sparse,
        reference if needs_dense else None,
        target,
        constraint,
        distillation,
        anneal_noise_from,
        pressure,
        slack,
        layer_costs,
        self_cost,
        closing,
        brake,
    )

    def feasible(metrics: Metrics) -> bool:
        return metrics["loss"] <= limit and metrics["accuracy"] >= min_accuracy

    def better(new: Metrics, old: Metrics) -> bool:
        if feasible(new) != feasible(old):
            return feasible(new)
        decisive = "active_attention_edges" if feasible(new) else "loss"
        return new[decisive] < old[decisive]

    def near(best: Metrics, now: Metrics) -> bool:
        return best["active_attention_edges"] <= NEAR * now["active_attention_edges"]

    def evaluate() -> Metrics:
        measured = evaluate_held_out(sparse, validation)
        objective.evaluated(measured.loss - reference_loss)
        if report is not None:
            report(asdict(measured))
        return asdict(measured)

    state = train(
        sparse,
        objective,
        stream,
        Selection(
            evaluate,
            better,
            acceptable=feasible,
            retreat_after=retreat_after,
            from_step=math.ceil(closing * steps),
            near=near,
        ),
        settings,
        trained=parameters,
        settings={
            **objective.settings(),
            "validation": validation.digest(),
            "gates": repr(sparse.gates.distribution),
            "closed": None if closed is None else digest({"closed": closed}),
            "retreat_after": retreat_after,
            "min_accuracy": min_accuracy,
            "lambda_": lambda_,
            "lambda_rate": lambda_rate,
            "lambda_fall": lambda_fall,
            "lambda_rise": lambda_rise,
            "violation_scale": constraint.scale,
        },
        checkpoint=checkpoint,
        title="post-training",
        progress=progress,
    )
    kept = evaluate_held_out(sparse, validation)
    return PostTraining(
        feasible=feasible(state.best),
        target=target,
        min_accuracy=min_accuracy,
        dense=dense,
        sparse=kept,
        best_step=state.best["step"],
        history=pd.DataFrame(state.history),
    )


def _chosen(sparse: SparseTransformer, groups: Mapping[str, float]) -> dict[str, float]:
    """The names of the parameters in these groups, with the multiple of the first that has one."""
    names = {id(parameter): name for name, parameter in read_parameters(sparse).items()}
    chosen: dict[str, float] = {}
    for group, scale in groups.items():
        members = list(sparse.gates.parameters())
        if group != "gates":
            # "evenly" has the gates among all parameters.
            members = [*adapt(sparse).parameters(group), *(members if group == "all" else ())]  # type: ignore[arg-type]
        for parameter in members:
            chosen.setdefault(names[id(parameter)], scale)
    return chosen

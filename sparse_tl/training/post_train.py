"""Sparsity post-training: finetune a model and its gates until few gates are open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from sparse_tl.arguments import (
    AtLeastOne,
    NotNegative,
    Positive,
    Seed,
    checked,
    is_out_of_memory,
    reason,
)
from sparse_tl.backend import (
    Model,
    adapt,
    check_gates,
    check_raw,
    check_rows,
    has_sharded_weights,
    processes,
)
from sparse_tl.backend.devices import precision_of
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.data.streams import MixedStream, TokenStream
from sparse_tl.gates import AttentionEdgeCounts, SparseTransformer
from sparse_tl.gates.sparse.counting import Counted
from sparse_tl.gates.sparse.learned_gates import check_edge_cost, costs_of_first, using
from sparse_tl.results import Result
from sparse_tl.storage.files import digest
from sparse_tl.training import ranks
from sparse_tl.training.constraint import (
    EVALUATIONS,
    OF_DIVERGENCE,
    OF_EDGES,
    TINY,
    LossConstraint,
    Target,
    Validation,
    is_feasible,
    remaining,
)
from sparse_tl.training.distillation import (
    KEPT,
    DensePredictions,
    Reference,
    distilled,
    distilled_from,
    reference_of,
)
from sparse_tl.training.evaluation import DenseAndSparse
from sparse_tl.training.loop import (
    Metrics,
    Objective,
    Precision,
    TrainingConfig,
    choose_trained,
    train,
)

WARM_UP = 0.1
"""Share of the run over which the learning rate warms up: four evaluations, so that lambda follows
the loss before edges close quickly. The rate then falls, as the gates' noise does."""
LEARNING_RATE = 7e-4
"""Peak learning rate of weights and low-rank adapters."""
GATE_LEARNING_RATE = 3e-3
"""Peak learning rate of gates: they have few parameters, which move further than weights do."""
NOISE = 0.25
"""Initial scale of the gates' noise. At 1, sampled gates diverge from the dense SmolLM2-135M 18
times as much as deterministic ones, and training repairs damage that the noise alone does."""
DISTILLED = 0.5
"""Weight of the dense model's prediction in the minimised cross-entropy; the label has the rest."""
PRESSURE = 0.2
"""Gradient of the expected size w.r.t. the logit of an open gate; the sigmoid's own vanishes."""
HEAD_IN_USE = 0.1
"""Expected edges per example at which 63 percent of a head's cost is charged."""


@checked
def post_train(
    sparse: SparseTransformer,
    stream: TokenStream | Mapping[str, TokenStream],
    *,
    validation: TokenBatch | Mapping[str, TokenBatch],
    target_loss: float | str | None = None,
    target_edges: float | str | None = None,
    held_out: Mapping[str, TokenBatch] | None = None,
    steps: AtLeastOne = 2000,
    learning_rate: Positive | Mapping[str, Positive] = LEARNING_RATE,
    gate_learning_rate: Positive = GATE_LEARNING_RATE,
    edge_cost: Float[Tensor, "*#edge"] | None = None,
    head_cost: NotNegative = 0.0,
    seed: Seed = 0,
    precision: Precision = "float32",
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> PostTraining:
    """Finetune weights and gates until as few attention edges as possible are open.

    Solves ``min_theta max_lambda  mean_g log(1 + size_g) + mean_g lambda_g (loss_g - target)``,
    where the size is the expected cost per example of the open attention edges and, if MLPs have
    gates too, of the open MLP outputs (one per layer and position). Each group ``g`` of rows, such
    as a kind of text or a task, must meet the target on its own. On return, `sparse` holds the best
    feasible weights: among the validation evaluations that meet the target, those with the smallest
    ``mean_g log(1 + size_g)``.

    With `target_edges`, the number of edges is given and the divergence is minimised: one lambda
    for all groups steers the edges along a line to the target, at six tenths of the run,
    and holds them there. The best feasible weights are then, among the evaluations with at most so
    many edges, those with the smallest mean divergence over groups.

    Args:
        sparse: wrapped model, trained in place: its weights and gates, or, if it has low-rank
            adapters (`add_lora`), the adapters and gates. The dense model is then the model
            without adapters, and otherwise `sparse` with the weights it has now and its gates open.
            Weights in bfloat16 are trained through float32 copies.
        stream: training batches, with a loss at any positions; or a stream for each group, by name.
        validation: rows for the constraint and model selection, or those of each group, in the same
            order. Report results on other rows.
        target_loss: in nats per label: the loss (``0.01``), its increase over the frozen dense
            model's on the same rows (``"+0.05"``), or the divergence ``KL(dense || sparse)``
            (``"kl+0.05"``, the default), which fitting the training text does not lower.
        target_edges: instead of a target loss, active attention edges per token (``300``), or how
            many times fewer than in the dense model (``"100x"``): the mean over groups of edges per
            token, summed over layers and heads, on validation rows under deterministic gates.
        held_out: other rows to report on, by name: of a group, under its name, or another text.
        steps: number of optimizer steps.
        learning_rate: peak learning rate of all weights, or of the adapters; or rates by
            parameter, which freeze all other parameters but the gates: ``"qk"`` (weights of queries
            and keys; in latent attention, including those that keys share with values), ``"lora"``
            (adapters), ``"gates"``, ``"all"``, or patterns of parameter names. A parameter takes
            the first rate that matches it.
        gate_learning_rate: peak learning rate of all gates, unless `learning_rate` names them.
        edge_cost: cost of an open attention edge, relative to 1 for an open MLP output;
            broadcastable to ``[layer, head, query, key]``. Reported counts are never weighted.
        head_cost: cost of a head that is open anywhere in a batch, relative to 1 for an attention
            edge; above 0, rarely used heads close permanently.
        seed: random seed for gate noise.
        precision: "bf16" runs all forward passes under autocast, with the dense copy in bfloat16.
        checkpoint: folder for checkpoints; a run interrupted there is resumed.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the dense model itself misses the target loss, or has fewer edges than are
            asked for; an argument is invalid; the stream and the validation rows have different
            groups; or the checkpoint belongs to another run or other data.
        NonFiniteLossError: the loss or gradient became NaN or infinite.
        MemoryError: out of memory; the message says how to use less.
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, once the checkpoint is written.

    Reference: arXiv 2512.05865, section 3. Deviations: the logarithm of the size is minimised, a PI
    controller moves lambda, and the violation is measured on validation rows under deterministic
    gates.
    """
    target = Target.parse(target_loss, target_edges)
    if isinstance(stream, Mapping):
        if not isinstance(validation, Mapping) or list(stream) != list(validation):
            named = list(validation) if isinstance(validation, Mapping) else "no names"
            raise ValueError(
                f"the streams have the groups {list(stream)}, and the validation rows {named}; "
                "give both for the same groups, in the same order"
            )
        stream = MixedStream(stream)
    if not isinstance(learning_rate, Mapping):
        learning_rate = {"gates": gate_learning_rate, "all": learning_rate}
    rates = {**learning_rate, "gates": learning_rate.get("gates", gate_learning_rate)}
    peak = max(rates.values())
    trained = choose_trained(sparse, {name: rate / peak for name, rate in rates.items()})
    if edge_cost is not None:
        check_edge_cost(edge_cost, (*sparse.gates.bias.shape, None, None))
        if not bool((edge_cost.isfinite() & (edge_cost >= 0)).all()) or not bool(edge_cost.any()):
            raise ValueError("edge_cost has to be at least 0 everywhere and above 0 somewhere")
    config = TrainingConfig(
        steps=steps,
        learning_rate=peak,
        warmup=max(1, round(WARM_UP * steps)),
        decay=1.0,
        accumulate=getattr(stream, "accumulate", 1),
        precision=precision,
        seed=seed,
        evaluate_every=max(1, steps // EVALUATIONS),
    )
    check_gates(adapt(sparse))
    check_raw(sparse.model)
    with out_of_memory_explained(sparse, stream):
        dense = None if target.of == "loss" else reference_of(sparse, trained, precision)
        if isinstance(dense, Model):
            dense = SparseTransformer(dense)  # once: a dense model would be wrapped for every batch
        validated = Validation(
            sparse, validation, held_out or {}, target, edge_cost, precision, dense
        )
        if isinstance(dense, SparseTransformer) and dense is not sparse:
            validated.check_own_reference()
        constraint = LossConstraint(
            validated.loss_budget,
            target_edges=validated.target_edges,
            evaluated_every=config.evaluate_every,
            **(OF_EDGES if target.of_edges else OF_DIVERGENCE if target.of_divergence else {}),
        )
        objective = SparsityObjective(
            sparse,
            dense,
            constraint,
            edge_cost,
            head_cost,
            share=1.0 if target.of_divergence else DISTILLED,
            validation=validated,
        )
        state = train(
            sparse,
            objective,
            stream,
            config,
            trained=trained,
            settings={
                "target": str(target),
                "validation": validated.rows.digest(),
                "gates": repr(sparse.gates.distribution),
                "edge_cost": None if edge_cost is None else digest({"edge_cost": edge_cost}),
                "head_cost": head_cost,
                "sharded_precision": precision_of(adapt(sparse).core) or "float32",
            },
            checkpoint=checkpoint,
            title="post-training",
            progress=progress,
        )
        return PostTraining(
            feasible=is_feasible(state.best),
            target=target,
            dense=validated.dense,
            sparse=validated.measured(validated.rows),
            best_step=state.best["step"],
            history=pd.DataFrame(state.history),
            groups=validated.compared(validated.groups, validated.dense_groups),
            held_out=validated.compared(validated.held_out, validated.dense_held_out),
        )


@contextmanager
def out_of_memory_explained(sparse: SparseTransformer, stream: TokenStream) -> Iterator[None]:
    """Explain an out-of-memory error in the block, in a step or an evaluation of post-training."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, window = stream.batch(0).tokens.shape
        raise MemoryError(
            f"post-training ran out of memory on {adapt(sparse).device}, in steps of {rows} rows "
            f"of {window} tokens; `sparse-tl doctor --window {window}` estimates the memory of one "
            "row. Less is needed with micro-batches (--accumulate), --checkpoint-activations, "
            "shorter windows, --precision bf16, --shard, or low-rank adapters (--trained lora); "
            f"in an evaluation, with fewer or shorter validation rows. ({reason(error)})"
        ) from error


@dataclass
class SparsityObjective(Objective):
    """The smallest size at a bounded loss, with sampled gates.

    Minimises ``(mean_g log(1 + size_g) + mean_g lambda_g loss_g) / (1 + mean_g lambda_g)``. If the
    dense model is given, its prediction replaces the label in a share of the cross-entropy, which
    has the gradient of ``KL(dense || sparse)``. The size per example of a group is

        size_g = sum edge_cost * P(attention edge is open) + sum P(MLP output is open)
                 + head_cost * sum_h (1 - exp(-E_h / 0.1))

    where E_h is the group's expected number of edges of head h. The divisor keeps the gradients at
    one scale, so that clipping means the same throughout. It is the same for all micro-batches of a
    step; the sizes are each micro-batch's own.

    Each group's lambda is raised to at least ``1 / (limit_g (1 + size_g))``, with the size of the
    previous step: closing one more edge, which lowers the logarithm by ``1 / (1 + size_g)``, is
    then worth no more than the group's whole limit.

    Arguments are as in `post_train`, besides the frozen `dense` model, if its predictions are used,
    and their `share`; the `constraint` is moved, and weights selected, on the `validation` rows.
    """

    sparse: SparseTransformer
    dense: Reference | None
    constraint: LossConstraint
    edge_cost: Float[Tensor, "*#edge"] | None = None
    head_cost: float = 0.0
    share: float = DISTILLED
    validation: Validation | None = None

    def __post_init__(self) -> None:
        # Of several ranks, a rank gets other rows in every epoch.
        kept = KEPT if processes().num_processes == 1 else 0
        self._predictions = None if self.dense is None else DensePredictions(self.dense, kept)
        unknown = torch.finfo(self.constraint.budget.dtype).max  # JSON has no infinity
        self._sizes = torch.full_like(self.constraint.budget, unknown)
        self._shares = torch.ones(1)
        self._summed = self._rows = torch.zeros_like(self.constraint.budget)

    def begin(self, batch: TokenBatch) -> None:
        labels, n_groups = batch.label_groups(), len(self.constraint.budget)
        if batch.n_groups > n_groups:
            raise ValueError(
                f"expected rows of the {n_groups} groups that the validation rows have; got group "
                f"{batch.n_groups - 1} in the training batch"
            )
        self._shares = labels.bincount(minlength=batch.n_groups) / len(labels)
        self._summed = self._rows = torch.zeros_like(self.constraint.budget)

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        check_rows(adapt(self.sparse), batch)
        if self.edge_cost is not None:
            width = batch.tokens.shape[1]
            check_edge_cost(self.edge_cost, (*self.sparse.gates.bias.shape, width, width))
        limit = self.constraint.limit(fraction_done)
        lambdas = self.constraint.lambda_.maximum(1 / (limit * (1 + self._sizes)))
        rows, noise = ranks.own_parts(batch, self.sparse), NOISE * remaining(fraction_done)
        *losses, counts = zip(*(self._run(p, generator, noise) for p in rows), strict=True)
        minimised, loss = map(torch.cat, losses)
        counts = AttentionEdgeCounts.concatenate(counts)
        of_labels = torch.cat([part.label_groups() for part in rows])
        of_rows = torch.cat([part.row_groups() for part in rows])
        lambdas = lambdas.to(loss)
        # A label's weight makes the mean over all labels the mean over groups.
        by_group = lambdas[: len(self._shares)] / self._shares.to(lambdas)
        weights = by_group[of_labels] / int((self._shares > 0).sum())
        task = ranks.mean(weights * minimised)
        sizes, n_rows = self.sizes(counts, of_rows)
        objective = (torch.log1p(sizes[n_rows > 0]).mean() + task) / (1 + lambdas.mean())
        known, n_rows = sizes.detach().cpu().double(), n_rows.cpu().double()
        self._summed = self._summed + known * n_rows
        self._rows = self._rows + n_rows
        measured = {
            "loss": ranks.mean(loss).item(),
            "lambda": ranks.mean(weights).item(),
            "size": (known @ n_rows / n_rows.sum()).item(),
            "expected_per_token": ranks.total(counts.expected.sum()).item()
            / ranks.total(counts.tokens.sum()).item(),
        }
        if counts.expected_mlps is not None:
            measured["expected_mlps"] = ranks.mean(counts.expected_mlps, dim=1).sum().item()
        return objective, measured

    def _run(
        self, batch: TokenBatch, generator: torch.Generator, noise: float
    ) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"], AttentionEdgeCounts]:
        """Each label's value to minimise and loss, and the edge counts, under sampled gates."""
        cost = costs_of_first(self.edge_cost, batch.tokens.shape[1])
        gates = [some for some in (self.sparse.gates, self.sparse.mlp_gates) if some is not None]
        layers: list[Counted] = []
        real = batch.attention_mask
        adapter, labels, read = adapt(self.sparse), batch.loss_labels(), batch.loss_mask
        dense, sharded = self._predictions, has_sharded_weights(self.sparse)
        with (
            self.sparse.sampled(generator, noise),
            using(gates, pressure=PRESSURE, edge_cost=cost, counts=layers, real=real),
        ):
            if dense is None or sharded:
                with adapter.only_at(read) as logits_at:
                    output = logits_at(self.sparse(batch.tokens, **batch.model_kwargs))
            else:
                output = adapter.final(batch.tokens, read=read, **batch.model_kwargs)[read]
        if dense is None:
            minimised = loss = token_losses(output, labels)
        elif sharded:
            minimised, loss = distilled(output, dense.logits(batch), labels, self.share)
        else:
            both = (output, adapter.unembed, dense.final(batch), dense.unembed)
            minimised, loss = distilled_from(*both, labels, self.share)
        return minimised, loss.detach(), AttentionEdgeCounts.of_pass(layers)

    def sizes(
        self, counts: AttentionEdgeCounts, groups: Int[Tensor, " prompt"]
    ) -> tuple[Float[Tensor, " group"], Float[Tensor, " group"]]:
        """Every group's size per example, and its number of examples; sizes of none are 0."""
        edges = counts.expected if counts.cost is None else counts.cost
        per_row = edges.sum(dim=(0, 2))
        if counts.expected_mlps is not None:
            per_row = per_row + counts.expected_mlps.sum(dim=0)
        member = one_hot(groups, len(self.constraint.budget)).T.to(per_row)
        n_rows = ranks.total(member.sum(dim=1))
        per = n_rows.clamp(min=1)
        sizes = ranks.total((member * per_row).sum(dim=1)) / per  # autocast would round a product
        if self.head_cost:
            by_head = (member[:, None, :, None] * counts.expected).sum(dim=2)
            by_head = ranks.total(by_head) / per[:, None, None]
            in_use = 1 - torch.exp(-by_head / HEAD_IN_USE)
            sizes = sizes + self.head_cost * in_use.sum(dim=(1, 2))
        return sizes, n_rows

    def update(self, fraction_done: float) -> dict[str, float]:
        """Move lambda by one step, as the last evaluations demand."""
        seen = self._rows > 0
        self._sizes = torch.where(seen, self._summed / self._rows.clamp(min=1), self._sizes)
        return {"over_limit": self.constraint.update(fraction_done)}

    def evaluate(self) -> Metrics:
        """Measure the model on validation rows; what is found moves lambda in the next steps."""
        assert self.validation is not None
        measured = self.validation.measured(self.validation.rows)
        self.constraint.record(self.validation.gaps(measured), measured.edges_per_token)
        return self.validation.metrics(measured)

    def better(self, new: Metrics, old: Metrics) -> bool:
        """Whether to return the weights of an evaluation rather than those of an earlier one.

        Feasible weights are better than others; of two feasible ones, those with the smaller size,
        or the smaller gap under a target of edges; of two others, those with the smaller violation.
        Step 0 is never preferred: it meets most targets, but is not sparse.
        """
        if old["step"] == 0:
            return True
        if is_feasible(new) != is_feasible(old):
            return is_feasible(new)
        minimised = "log_size" if self.constraint.target_edges is None else "gap"
        decisive = minimised if is_feasible(new) else "violation"
        return new[decisive] < old[decisive]

    def state(self) -> dict[str, Any]:
        kept = {} if self._predictions is None else self._predictions.state()
        return {**self.constraint.state(), "sizes": self._sizes.tolist(), **kept}

    def load_state(self, state: dict[str, Any]) -> None:
        self.constraint.load_state(state)
        self._sizes = torch.tensor(state["sizes"], dtype=torch.float64)
        if self._predictions is not None:
            self._predictions.load_state(state)


@dataclass(frozen=True, eq=False)
class PostTraining(DenseAndSparse, Result):
    """The result of a post-training run.

    Args:
        dense: validation measurements of the dense model.
        sparse: validation measurements of the selected weights.
        feasible: whether any validation evaluation met the target, except that before training.
        target: the target that every group had to meet, or that the mean of their edges had to.
        best_step: step of the selected weights.
        history: one row per step; validation columns are set at steps with an evaluation.
        groups: validation measurements of every group, by name, if the groups have names.
        held_out: measurements on held-out rows, by name: those of a group, or of other texts.
    """

    feasible: bool
    target: Target
    best_step: int
    history: pd.DataFrame
    groups: Mapping[str, DenseAndSparse] = field(default_factory=dict)
    held_out: Mapping[str, DenseAndSparse] = field(default_factory=dict)

    @property
    def reported(self) -> dict[str, DenseAndSparse]:
        """Measurements of every group and held-out text; of groups on held-out rows, if any."""
        return {**self.groups, **self.held_out}

    @property
    def verdict(self) -> str:
        """The outcome in a few sentences."""
        n_groups = len(self.dense.group_losses)
        edges = (
            f"{self.sparse.active_attention_edges:,.2f} of "
            f"{self.sparse.possible_attention_edges:,.0f} attention edges active per example "
            f"({self.times_fewer:.1f}x fewer)"
        )
        if self.target.of_edges:
            active, possible = self.sparse.edges_per_token, self.dense.edges_per_token
            edges = (
                f"{active:,.2f} of {possible:,.1f} attention edges active per token "
                f"({possible / max(active, TINY):.1f}x fewer)"
            )
        measured = (
            f"{edges}{self.sparse.mlps} at validation loss "
            f"{self.sparse.loss:.4f} nats ({self.loss_increase:+.4f} over the dense model"
        )
        if self.sparse.divergence is not None:
            measured += f", {self.sparse.divergence:.4f} divergence from it"
        if self.target.of_edges:
            target, among = f"of {self.target}", f", on average over {n_groups} groups,"
            advice = "or allow more edges"
        else:
            divergence = f"divergence of {self.target.amount:g}"
            target = f"{divergence if self.target.of_divergence else self.target} nats"
            among = f" in each of {n_groups} groups"
            advice = "start from a smaller threshold or a larger bias, or allow more loss"
        target += among if n_groups > 1 else ""
        if self.feasible:
            outcome = f"Target {target} met at step {self.best_step}: {measured})."
        else:
            outcome = (
                f"Target {target} NOT met by any validation evaluation after the first step; kept "
                f"the weights that came closest, from step {self.best_step}: {measured}). Train "
                f"for longer, {advice}."
            )
        return " ".join([outcome, *map(self._line, self.reported)])

    def _line(self, name: str) -> str:
        """A sentence on a group or a held-out text."""
        models = self.reported[name]
        held_out = " (held-out rows)" if name in self.groups else " (held out)"
        loss = f"loss {models.sparse.loss:.3f} nats ({models.loss_increase:+.3f})"
        if models.sparse.divergence is not None:
            loss += f", divergence {models.sparse.divergence:.3f}"
        edges = f"{models.sparse.active_attention_edges_per_token:,.1f} edges per token"
        name += held_out if name in self.held_out else ""
        return f"{name}: {edges} ({models.times_fewer:.1f}x fewer), {loss}."

    def to_pandas(self) -> pd.DataFrame:
        """Dense and sparse side by side; with named groups or held-out texts, one row for each."""
        if self.reported:
            rows = {name: models.row() for name, models in self.reported.items()}
            return pd.DataFrame.from_dict(rows, orient="index")
        return pd.DataFrame({"dense": self.dense.numbers, "sparse": self.sparse.numbers})

    def __repr__(self) -> str:
        return f"PostTraining({self.verdict})"

"""The neurons of one MLP, ranked by their direct effect on what reads the MLP.

    effect[n] = m(readers read the MLP with neuron n's part patched) - m(clean)

A neuron's part is its activation times its output direction (`sparse_tl.lens.neurons`). Readers are
reached by circuit edges, as in `patch_exactly`, of which this is a refinement. Steps:

1. First order, for all neurons at once, from one backward pass per batch:
   ``score[n] = sum_pos (corrupted_n - clean_n) W_out[n] . sum_readers d m / d input``. All scores
   add up to the "eap" scores of the edges, less what a gate on the MLP, or a norm after it, makes
   of its bias, which belongs to no neuron.
2. The neurons of largest ``|score|`` are patched exactly, many in one forward pass.
3. For these: the tokens at which they act, and the logits that their directions change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.evaluation import positions_of
from sparse_tl.circuits.gradient_passes import AttributionPlan
from sparse_tl.circuits.neurons import DrivingToken, NeuronEffects
from sparse_tl.circuits.pair_runs import PairRuns, read_mask
from sparse_tl.circuits.prompt import output_text, text_around
from sparse_tl.circuits.read_gradients import ReadGradients
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, EdgesOfNeurons, GatedRun, NeuronPatch
from sparse_tl.lens import (
    Adapter,
    HookedModel,
    Norm,
    adapt,
    in_evaluation_mode,
    neuron_coefficients,
    neuron_directions,
    record,
)
from sparse_tl.metrics import Metric, measure
from sparse_tl.nodes import Node
from sparse_tl.positioned_graph import PositionedGraph
from sparse_tl.progress import tracked
from sparse_tl.scopes import autograd

LISTED = 5
"""Number of tokens that are listed of each kind."""


@checked
@in_evaluation_mode
def neuron_effects(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    mlp: Node | str,
    *,
    readers: Circuit | Sequence[str] | str | None = None,
    n: AtLeastOne = 20,
    batch_size: AtLeastOne = 32,
    rows: AtLeastOne = 256,
    progress: bool = True,
) -> NeuronEffects:
    """Direct effects of an MLP's neurons: of patching one neuron's output, for some readers alone.

    All neurons are ranked to first order, and the first `n` are patched exactly.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs; the patch is the neuron's output on the corrupted prompt.
        metric: metric function with one value per pair.
        mlp: the MLP, such as "m5".
        readers: destinations that read the patched neuron, such as "m7", "a9.h3<v>" or "logits"; or
            a circuit of circuit edges, with or without positions, for those that read the MLP in
            it. All by default.
        n: number of neurons to patch exactly.
        batch_size: prompt pairs per forward pass.
        rows: maximum number of pairs times neurons in one forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the model has no such MLP, or one that is not the sum of its neurons; a reader
            does not exist or reads nothing of the MLP, the pairs lack the circuit's positions, or
            the metric is not one finite number per pair.
        NoEffectError: patching everything changes the metric of no pair.
    """
    source = _source(adapt(model), mlp, readers, pairs)
    at = source.positions
    runs = PairRuns(model, CircuitEdges(), pairs, "corrupted", batch_size, positions=at)
    score, peaks = _rank(source, runs, metric, progress)
    chosen = score.abs().argsort(descending=True, stable=True)[:n]
    effect = torch.full_like(score, torch.nan)
    effect[chosen] = _patch(source, runs, metric, chosen, rows, progress)
    clean, corrupted = (each.double().mean(dim=0) for each in (peaks.clean, peaks.corrupted))
    added = _added_logits(source, chosen) * clean[chosen, None].sign()
    raised, lowered = (_largest(model, values) for values in (added, -added))
    names = {neuron: f"{source.mlp}.n{neuron}" for neuron in chosen.tolist()}
    return NeuronEffects(
        str(source.mlp),
        source.readers,
        len(pairs),
        effect,
        score,
        clean,
        corrupted,
        {name: peaks.at(model, pairs, neuron) for neuron, name in names.items()},
        dict(zip(names.values(), raised, strict=True)),
        dict(zip(names.values(), lowered, strict=True)),
        pairs.start,
    )


@dataclass(frozen=True)
class _Source:
    """An MLP, and which destinations read its neurons."""

    adapter: Adapter
    mlp: Node
    reads: Bool[Tensor, "*span destination"]
    readers: tuple[str, ...]
    positions: Positions | None
    directions: Float[Tensor, "neuron d_model"]

    @autograd(False)
    def run(self, tokens: Int[Tensor, "batch pos"]) -> tuple[Tensor, Tensor]:
        """Each neuron's activation, and the multiple of its direction that it writes."""
        block = f"blocks.{self.mlp.layer}"
        names = [f"{block}.mlp.hook_post", f"{block}.hook_mlp_out"]
        kept, _ = record(self.adapter, tokens, names)
        post, out = (kept[name] for name in names)
        written = neuron_coefficients(self.adapter, self.mlp.layer, post, out)
        return post.view(written.shape), written

    def at(self, batch: PromptPairs) -> Bool[Tensor, "batch pos destination"]:
        """Which destinations read the neurons at each token."""
        reads = self.reads.to(batch.clean.device)
        if self.positions is None or batch.spans is None:
            return reads.expand(*batch.clean.shape, -1)
        return reads[batch.spans.at]


def _source(
    adapter: Adapter,
    mlp: Node | str,
    readers: Circuit | Sequence[str] | str | None,
    pairs: PromptPairs,
) -> _Source:
    graph, node = adapter.graph, Node.parse(str(mlp))
    row = graph.source_index(node)
    if node.kind != "mlp":
        raise ValueError(f'expected an MLP such as "m5"; got {str(mlp)!r}')
    if readers is None:
        circuit = Circuit(graph, graph.exists)
    elif isinstance(readers, Circuit):
        circuit = readers
    else:
        each = [readers] if isinstance(readers, str) else readers
        circuit = Circuit.of(graph, [f"{node}->{reader}" for reader in each])
    site, kept = circuit.site, torch.zeros_like(circuit.mask, device="cpu")
    if (site.graph if isinstance(site, PositionedGraph) else site) != graph:
        raise ValueError(f"expected a circuit of the model's own {graph!r}; got {circuit!r}")
    kept[..., row, :] = circuit.mask[..., row, :]
    if not bool(kept.any()):
        raise ValueError(f"expected readers of {node}; none in {readers!r}")
    positions = positions_of(site, pairs) if isinstance(site, PositionedGraph) else None
    names = [name.partition("->")[2] for name in site.names(kept.nonzero())]
    directions = neuron_directions(adapter, node.layer).detach()
    return _Source(adapter, node, kept[..., row, :], tuple(names), positions, directions)


@dataclass(frozen=True)
class _Peaks:
    """For each pair and neuron, the token with the largest ``|score|``."""

    score: Float[Tensor, "pair neuron"]
    place: Int[Tensor, "pair neuron"]
    clean: Float[Tensor, "pair neuron"]
    corrupted: Float[Tensor, "pair neuron"]

    def at(self, model: HookedModel, pairs: PromptPairs, neuron: int) -> tuple[DrivingToken, ...]:
        """The tokens at which a neuron acts most."""
        scores = self.score[:, neuron]
        order = scores.abs().argsort(descending=True, stable=True)[:LISTED]
        found = list[DrivingToken]()
        for pair in order[scores[order] != 0].tolist():
            place, end = int(self.place[pair, neuron]), int(pairs.positions[pair])
            text = text_around(model, pairs.clean[pair, : end + 1], place)
            values = (
                each[pair, neuron].item() for each in (self.clean, self.corrupted, self.score)
            )
            found.append(DrivingToken(pair, place, *text, *values))
        return tuple(found)


def _rank(
    source: _Source, runs: PairRuns, metric: Metric, progress: bool
) -> tuple[Float[Tensor, " neuron"], _Peaks]:
    """The first-order score of every neuron, and where it comes from."""
    plan = AttributionPlan(metric, "eap", 1, runs)
    total, found = torch.zeros(len(source.directions), dtype=torch.float64), list[list[Tensor]]()
    with tracked("ranking neurons", len(runs), progress) as step:
        for index, batch in enumerate(runs.batches):
            clean, corrupted = source.run(batch.clean), source.run(batch.corrupted)
            back = ReadGradients(source.adapter)
            for one in plan.passes(index):
                back.add(one)
            slope = back.summed(source.at(batch)) @ source.directions.T
            scores = (corrupted[1] - clean[1]) * slope
            total += scores.sum(dim=(0, 1)).cpu().double()
            size, place = scores.abs().max(dim=1)
            # Where nothing changes, the last token stands for the pair.
            place = place.where(size > 0, batch.positions[:, None])[:, None]
            peaks = (scores, clean[0], corrupted[0])
            score, *activations = (each.gather(1, place)[:, 0].cpu() for each in peaks)
            found.append([score, place[:, 0].cpu(), *activations])
            step()
    plan.check_effect()
    return total / sum(map(len, runs.batches)), _Peaks(*map(torch.cat, zip(*found, strict=True)))


@autograd(False)
def _patch(
    source: _Source,
    runs: PairRuns,
    metric: Metric,
    neurons: Int[Tensor, " some"],
    rows: int,
    progress: bool,
) -> Float[Tensor, " some"]:
    """The exact effects of some neurons."""
    adapter, layer = source.adapter, source.mlp.layer
    row, effects = adapter.graph.source_index(source.mlp), torch.zeros(len(neurons)).double()
    with tracked("patching neurons", len(neurons) * len(runs), progress) as step:
        for batch in runs.batches:
            moved = source.run(batch.clean)[1] - source.run(batch.corrupted)[1]
            patch = NeuronPatch(adapter, layer, moved, source.directions)
            site = EdgesOfNeurons(batch.spans if source.positions else None, layer)
            run = GatedRun(runs.model, site, batch.clean, read_mask(batch), patch)
            clean = measure(metric, run.start_from(None), batch)
            changes = list[Tensor]()
            for some in neurons.split(max(1, rows // len(batch))):
                patch.neurons = some
                gates = torch.ones(len(some), *site.shape(adapter))
                gates[..., row, :] = (~source.reads).to(gates)
                for logits in run.logits(gates):
                    changes.append((measure(metric, logits, batch) - clean).sum().cpu())
                    step()
            effects += torch.stack(changes).double()
    return effects / sum(map(len, runs.batches))


@autograd(False)
def _added_logits(source: _Source, neurons: Int[Tensor, " some"]) -> Float[Tensor, "some vocab"]:
    """What the directions of neurons add to the logits, up to the scale of the final norm."""
    weight, _ = source.adapter.unembedding()
    norm = source.adapter.norms().get("ln_final", Norm(None, None, None, 0.0))
    shown = norm.centred(source.directions[neurons.to(weight.device)])
    shown = shown if norm.weight is None else shown * norm.weight
    return (shown @ weight).cpu().double()


def _largest(model: HookedModel, values: Float[Tensor, "some vocab"]) -> list[tuple[str, ...]]:
    """The outputs of the largest values of each row, as text."""
    alone = torch.zeros(0, dtype=torch.long)
    best = values.topk(min(LISTED, values.shape[1])).indices.tolist()
    return [tuple(output_text(model, output, alone) for output in row) for row in best]

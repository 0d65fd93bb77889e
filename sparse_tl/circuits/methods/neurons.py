"""The neurons of one MLP, ranked by their direct effect through the readers of the MLP.

    effect[n] = m(readers read the MLP with the output of neuron n patched) - m(clean)

The output of a neuron is its activation times its output direction
(`sparse_tl.backend.neurons`). Patches act on circuit edges, as in `patch_exactly`. First-order
scores take one backward pass per batch,

    score[n] = sum_pos (corrupted_n - clean_n) W_out[n] . sum_readers d m / d input,

and add up to the "eap" scores of the edges, except for the bias of the MLP, which belongs to no
neuron and changes if the MLP has a gate or is followed by a norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import (
    Adapter,
    HookedModel,
    adapt,
    in_evaluation_mode,
    neuron_coefficients,
    neuron_directions,
    record,
)
from sparse_tl.circuits.circuit import Circuit, check_grid
from sparse_tl.circuits.evaluation import positions_of
from sparse_tl.circuits.methods.attribution import AttributionPasses, ReadGradients
from sparse_tl.circuits.pair_runs import PairRuns, settings_at_once
from sparse_tl.circuits.prompt.tokens import LISTED, read_out, text_around
from sparse_tl.data import PromptPairs
from sparse_tl.gates import CircuitEdges, EdgesOfNeurons, GatedRun, NeuronPatch
from sparse_tl.graph import CircuitGraph, Node, PositionedGraph
from sparse_tl.metrics import Metric, check_changed, measure
from sparse_tl.progress import tracked
from sparse_tl.results import OfPrompts

_SHOWN = 24
"""Maximum number of characters that a table shows before a token."""


@dataclass(frozen=True)
class DrivingToken:
    """A token of a clean prompt at which a neuron acts: its pair, column, and text in its context.

    Args:
        clean: activation of the neuron at the token.
        corrupted: activation at that position of the corrupted prompt.
        score: first-order effect of patching it there, on this pair, in units of the metric; with
            answers of several tokens, in the row of one answer.
    """

    pair: int
    position: int
    before: str
    token: str
    after: str
    clean: float
    corrupted: float
    score: float

    def __str__(self) -> str:
        """The token in brackets, after the end of the text before it."""
        start = "\N{HORIZONTAL ELLIPSIS}" if len(self.before) > _SHOWN else ""
        return f"{start}{self.before[-_SHOWN:]}[{self.token}]"


@dataclass(frozen=True, eq=False)
class NeuronEffects(OfPrompts):
    """Direct effects of an MLP's neurons, from `neuron_effects`; negative: the neuron helps.

    Args:
        mlp: name of the MLP.
        readers: names of the destinations that read the patched neurons.
        n_pairs: number of prompt pairs.
        effect: exact change of the metric, mean over pairs; NaN for neurons that were only scored.
        score: first-order estimate of the effect, mean over pairs.
        clean: activation at the token with the largest ``|score|`` of a pair, mean over pairs; with
            answers of several tokens, of the row of each answer.
        corrupted: activation there in the corrupted prompts, likewise.
        tokens: tokens at which each exactly patched neuron acts most, by name of the neuron.
        promotes: tokens whose logits the output of the neuron raises most, given the sign of its
            clean activation.
        suppresses: tokens whose logits it lowers most.
    """

    finite = False
    mlp: str
    readers: Sequence[str]
    n_pairs: int
    effect: Float[Tensor, " neuron"]
    score: Float[Tensor, " neuron"]
    clean: Float[Tensor, " neuron"]
    corrupted: Float[Tensor, " neuron"]
    tokens: Mapping[str, Sequence[DrivingToken]]
    promotes: Mapping[str, Sequence[str]]
    suppresses: Mapping[str, Sequence[str]]

    def to_pandas(self) -> pd.DataFrame:
        """One row per neuron: first those patched exactly, by ``|effect|``, then by ``|score|``.

        Lists of tokens are empty where the effect is NaN.
        """
        by_score = self.score.abs().argsort(descending=True, stable=True)
        by_effect = self.effect.abs().nan_to_num(nan=-1.0)[by_score]
        order = by_score[by_effect.argsort(descending=True, stable=True)]
        names = [f"{self.mlp}.n{neuron}" for neuron in order.tolist()]
        columns = ("effect", "score", "clean", "corrupted")
        values = {name: getattr(self, name)[order].tolist() for name in columns}
        table = pd.DataFrame({"neuron": names, **values})
        tokens = {name: [*map(str, listed)] for name, listed in self.tokens.items()}
        lists = {"tokens": tokens, "promotes": self.promotes, "suppresses": self.suppresses}
        for column, by_name in lists.items():
            table[column] = [", ".join(map(repr, dict.fromkeys(by_name.get(n, ())))) for n in names]
        return table

    def _summary(self) -> pd.DataFrame:
        return self.to_pandas().head(len(self.tokens))

    def __repr__(self) -> str:
        best = self.to_pandas().head(3)
        rows = zip(best["neuron"], best["effect"], strict=True)
        listed = ", ".join(f"{name} {effect:+.3g}" for name, effect in rows)
        return (
            f"NeuronEffects({self.mlp} on {len(self.readers):,} readers, {self.n_pairs:,} pairs: "
            f"{len(self.tokens):,} of {len(self.score):,} neurons exactly: {listed}, ...)"
        )


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
    progress: bool = True,
) -> NeuronEffects:
    """The direct effects of an MLP's neurons: of patching one neuron's output for chosen readers.

    All neurons are scored to first order; the `n` strongest are patched exactly, with the neuron's
    output on the corrupted prompt. Other arguments are those of `attribute_circuit_edges`.

    Args:
        mlp: the MLP, such as "m5".
        readers: destinations that read the patched neuron, such as "m7", "a9.h3<v>" or "logits"; or
            a circuit of circuit edges, with or without positions, in which case they are those that
            read the MLP in the circuit. All readers by default.
        n: number of neurons to patch exactly.

    Raises:
        ValueError: the model has no such MLP, or the MLP is not the sum of its neurons; a reader
            does not exist or does not read the MLP, or the pairs lack the positions of the circuit.
        NoEffectError: patching everything changes the metric of no pair.
    """
    adapter, node = adapt(model), Node.parse(str(mlp))
    row, layer = adapter.graph.source_index(node), node.layer
    if node.kind != "mlp":
        raise ValueError(f'{str(mlp)!r} is not an MLP, such as "m5"')
    edges = _edges_from(adapter.graph, node, row, readers)
    grid, reads = edges.grid, edges.mask[..., row, :]
    at = positions_of(grid, pairs)
    directions = neuron_directions(adapter, layer).detach()
    runs = PairRuns(model, CircuitEdges(), pairs, "corrupted", batch_size, positions=at)
    score, peaks = _rank(runs, metric, layer, reads, directions, progress)
    chosen = score.abs().argsort(descending=True, stable=True)[:n]
    patched = _patch(runs, metric, node, reads, directions, chosen, progress)
    effect = torch.full_like(score, torch.nan).index_copy(0, chosen, patched)
    clean, corrupted = (each.double().mean(dim=0) for each in peaks[2:])
    written = directions[chosen.to(directions.device)] * clean[chosen, None].sign().to(directions)
    promoted, suppressed = read_out(model, written, written)  # any scale has the same order
    names = {neuron: f"{node}.n{neuron}" for neuron in chosen.tolist()}
    tokens = {
        name: _tokens(model, pairs, *(each[:, neuron] for each in peaks))
        for neuron, name in names.items()
    }
    return NeuronEffects(
        mlp=str(node),
        readers=tuple(name.partition("->")[2] for name in grid.names(edges.mask.nonzero())),
        n_pairs=len(pairs),
        effect=effect,
        score=score,
        clean=clean,
        corrupted=corrupted,
        tokens=tokens,
        promotes=dict(zip(names.values(), promoted, strict=True)),
        suppresses=dict(zip(names.values(), suppressed, strict=True)),
        prompt_start=pairs.start,
    )


def _edges_from(
    graph: CircuitGraph, mlp: Node, row: int, readers: Circuit | Sequence[str] | str | None
) -> Circuit:
    """The edges from an MLP, a row of the graph, to its readers."""
    if readers is None:
        circuit = Circuit(graph, graph.exists)
    elif isinstance(readers, Circuit):
        circuit = readers
    else:
        names = [readers] if isinstance(readers, str) else readers
        circuit = Circuit.of(graph, [f"{mlp}->{name}" for name in names])
    check_grid(graph, circuit.grid, CircuitGraph, PositionedGraph)
    mask = torch.zeros_like(circuit.mask, device="cpu")
    mask[..., row, :] = circuit.mask[..., row, :]
    if not bool(mask.any()):
        raise ValueError(f"there is no reader of {mlp} in {readers!r}")
    return Circuit(circuit.grid, mask)


@torch.no_grad()
def _activations(
    adapter: Adapter, layer: int, tokens: Int[Tensor, "batch pos"]
) -> tuple[Float[Tensor, "batch pos neuron"], Float[Tensor, "batch pos neuron"]]:
    """Each neuron's activation, and the coefficient of the direction that it writes."""
    names = [f"blocks.{layer}.mlp.hook_post", f"blocks.{layer}.hook_mlp_out"]
    kept, _ = record(adapter, tokens, names)
    post, out = (kept[name] for name in names)
    written = neuron_coefficients(adapter, layer, post, out)
    return post.view(written.shape), written


def _tokens(
    model: HookedModel, pairs: PromptPairs, scores: Tensor, positions: Tensor, *activations: Tensor
) -> tuple[DrivingToken, ...]:
    """The tokens at which a neuron acts most, over all pairs."""
    order = scores.abs().argsort(descending=True, stable=True)[:LISTED]
    tokens, rows = list[DrivingToken](), pairs.forced
    for row in order[scores[order] != 0].tolist():
        position, end = int(positions[row]), int(rows.ends[row])
        texts = text_around(model, rows.clean[row, : end + 1], position)
        values = (each[row].item() for each in (*activations, scores))
        tokens.append(DrivingToken(int(rows.pair[row]), position, *texts, *values))
    return tuple(tokens)


def _rank(
    runs: PairRuns,
    metric: Metric,
    layer: int,
    reads: Bool[Tensor, "*span destination"],
    directions: Float[Tensor, "neuron d_model"],
    progress: bool,
) -> tuple[Float[Tensor, " neuron"], list[Tensor]]:
    """The first-order score of every neuron, and what it comes from.

    That is, for each row (see `Forced`) and neuron, ``[row, neuron]``: the largest ``|score|`` of a
    token, the token's position, and the neuron's activation there in the clean and the corrupted
    prompt.
    """
    adapter, plan = runs.adapter, AttributionPasses.of_edges(runs, metric, "eap", 1)
    total, by_batch = torch.zeros(len(directions), dtype=torch.float64), list[list[Tensor]]()
    reads = reads.to(adapter.device)
    with tracked("ranking neurons", len(runs), progress) as step:
        for index, rows in enumerate(batch.forced for batch in runs.batches):
            clean, corrupted = (
                _activations(adapter, layer, tokens) for tokens in (rows.clean, rows.corrupted)
            )
            back = ReadGradients(adapter)
            for one in plan.batch(index, step)[1]:
                back.add(one)
            if reads.ndim > 1 and rows.spans is not None:
                at = reads[rows.spans.at]
            else:
                at = reads.expand(*rows.clean.shape, -1)
            scores = (corrupted[1] - clean[1]) * (back.summed(at) @ directions.T)
            total += scores.sum(dim=(0, 1)).cpu().double()
            size, position = scores.abs().max(dim=1)
            # Without any change, take the last position that is read.
            position = position.where(size > 0, rows.ends[:, None])[:, None]
            values = (scores, clean[0], corrupted[0])
            score, *activations = (each.gather(1, position)[:, 0].cpu() for each in values)
            by_batch.append([score, position[:, 0].cpu(), *activations])
    check_changed(plan.changed)
    peaks = [torch.cat(each) for each in zip(*by_batch, strict=True)]
    return total / sum(map(len, runs.batches)), peaks


@torch.no_grad()
def _patch(
    runs: PairRuns,
    metric: Metric,
    mlp: Node,
    reads: Bool[Tensor, "*span destination"],
    directions: Float[Tensor, "neuron d_model"],
    neurons: Int[Tensor, " chosen"],
    progress: bool,
) -> Float[Tensor, " chosen"]:
    """The exact effects of the chosen neurons."""
    adapter, layer = runs.adapter, mlp.layer
    row, effects = adapter.graph.source_index(mlp), torch.zeros(len(neurons)).double()
    with tracked("patching neurons", len(neurons) * len(runs), progress) as step:
        for batch in runs.batches:
            rows = batch.forced
            (_, clean), (_, corrupted) = (
                _activations(adapter, layer, tokens) for tokens in (rows.clean, rows.corrupted)
            )
            patch = NeuronPatch(adapter, layer, corrupted - clean, directions)
            site = EdgesOfNeurons(rows.spans if reads.ndim > 1 else None, layer)
            run = GatedRun(runs.model, site, rows.clean, rows.read, patch)
            unpatched = measure(metric, run.start_from(None), batch)
            changes = list[Tensor]()
            for patched in neurons.split(settings_at_once(len(batch))):
                patch.neurons = patched
                gates = torch.ones(len(patched), *site.shape(adapter))
                gates[..., row, :] = (~reads).to(gates)
                for logits in run.logits(gates):
                    changes.append((measure(metric, logits, batch) - unpatched).sum().cpu())
                    step()
            effects += torch.stack(changes).double()
    return effects / sum(map(len, runs.batches))

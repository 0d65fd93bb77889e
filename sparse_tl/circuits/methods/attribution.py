"""Attribution patching: the first-order effect of patching an edge or head.

For a circuit edge from source u to destination v,

    score(u -> v) = sum_pos (patch_u - clean_u) . d m / d input_v

A negative score means that patching lowers the metric m: the edge helps. `AttributionPasses`
records what every source writes, and differentiates the metric. `ReadGradients` pulls the gradient
g at a head's q, k or v back through its projection W and the normalisation with weight w, scale s
and standardised input x (an RMS norm does not centre, and under "relp" the term with x is absent):

    back(g) = (V g - x mean(x . V g)) / s,     V = w W, centred over d_model

V depends only on weights, so ``g / s`` and the coefficients of x are summed over passes, and the
product with V is computed once; ``x V`` is q, k or v without its biases. `contract` multiplies the
changes of all sources with the gradients of the destinations of a few layers at a time, since
reading the sources' writes from memory for every layer would take most of the time.

Reference: EAP, Syed et al., arXiv 2310.10348; EAP-IG, Hanna et al., arXiv 2403.17806, equation 4;
RelP, Rezaei Jafari et al., arXiv 2508.21258; PEAP, Haklay et al., arXiv 2502.04577.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import vecdot

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import (
    EMBEDDED,
    Adapter,
    AttentionMask,
    HookedModel,
    adapt,
    attached,
    check_sums_under_hooks,
    frozen,
    gate_hooks,
    hooks_besides,
    in_evaluation_mode,
    mask_hooks,
    record,
    relevance_rules,
    repeated,
    source_outputs,
)
from sparse_tl.circuits.circuit import Scores
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.contexts import autograd
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.devices import SizeByDevice
from sparse_tl.gates import AttentionEdges, CircuitEdges, Heads, Patch, PatchValues
from sparse_tl.graph import AttentionGrid, Node, PositionedGraph
from sparse_tl.metrics import Metric, check_changed, is_changed, measure
from sparse_tl.progress import tracked

Method = Literal["eap", "eap-ig", "relp"]
Places = Int[Tensor, " place"]
"""Positions of a batch of prompts, as flat indices."""

TOKENS_AT_ONCE = SizeByDevice(cpu=768, elsewhere=2**13)
"""Maximum number of tokens in a pass of several steps; a CPU keeps their activations in caches."""
VALUES_AT_ONCE = SizeByDevice(cpu=2**23, elsewhere=2**26)
"""Maximum number of values that all sources write, or all destinations of a layer read, in d_model
dimensions, held at one time. On a CPU this is 32 MB in float32: C libraries return larger blocks to
the system, and allocating these again takes longer than computing their contents."""
DESTINATIONS_AT_ONCE = 128
"""Maximum number of destinations in one matrix product, if they belong to several layers."""


@checked
@in_evaluation_mode
def attribute_circuit_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Method = "eap-ig",
    steps: AtLeastOne = 5,
    patch: Patch = "corrupted",
    by_pair: bool = False,
    positions: Positions | None = None,
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of patching each circuit edge, mean over pairs, in units of the metric.

    With `positions`, scores are kept per position (PEAP): they are the terms of the sum over
    positions, ``[position, source, destination]``. For what heads move between positions, see
    `attribute_attention_edges`.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        metric: metric function with one value per pair.
        method: "eap": gradient at the clean prompt; "eap-ig": mean gradient over embeddings
            ``corrupted + k / steps (clean - corrupted)``, k = 1..steps; "relp": as "eap",
            with the rules of relevance propagation for norms and MLPs in place of their gradients.
        steps: number of interpolation steps of "eap-ig".
        patch: what replaces the clean value, and the far end of the interpolation: "corrupted", the
            corrupted prompt's value; "mean", the mean over clean prompts at each position;
            "resample", the value of another clean prompt of the same length, drawn at random with
            a fixed seed; "zero", zeros; or tensors by hook point.
        by_pair: keep scores per pair, on a leading axis ``[pair, source, destination]``. Costs no
            extra passes: the gradient of the metric's sum over pairs separates by row.
        positions: keep scores per position: "tokens", for prompts of one length; or "spans", those
            of `PromptPairs.with_spans`, over whose tokens scores are summed. None: sum over all.
            Memory grows with their number.
        batch_size: prompt pairs per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the metric is not one finite number per pair, parts do not write directly to the
            residual stream, or the pairs lack the positions.
        NoEffectError: patching everything changes the metric of no pair.
    """
    spans = None if positions is None else pairs.spans_of(positions)
    pairs, adapter = replace(pairs, spans=spans), adapt(model)
    graph = adapter.graph
    patched = PairRuns(model, CircuitEdges(), pairs, patch, batch_size)
    check_sums_under_hooks(adapter, patched.batches[0].clean)
    grid = graph if spans is None else PositionedGraph(graph, spans.names)
    n_kept, n_positions = len(pairs) if by_pair else 1, 1 if spans is None else len(spans.names)
    scores = torch.zeros(n_kept * n_positions, *graph.exists.shape, dtype=torch.float64)
    plan = AttributionPasses.of_edges(patched, metric, method, steps)
    tracking = tracked("scoring circuit edges", plan.count, progress)
    with tracking as step, frozen(adapter.core):
        for index, batch in enumerate(patched.batches):
            change, passes = plan.batch(index, step)
            back, rows = ReadGradients(adapter), batch.forced
            for one in passes:
                back.add(one)
            # The pair and position to which each token contributes.
            groups = torch.zeros_like(rows.clean) if rows.spans is None else rows.spans.at
            if by_pair:
                groups = groups + n_positions * (index * batch_size + rows.pair)[:, None]
            contract(scores, back, change, groups)
    check_changed(plan.changed)
    shape = [n_kept] * by_pair + list(grid.exists.shape)
    scores = scores.where(graph.exists, 0.0).view(shape)
    return Scores(
        grid, scores if by_pair else scores / len(pairs), method, prompt_start=pairs.start
    )


@checked
@in_evaluation_mode
def attribute_heads(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Method = "eap-ig",
    steps: AtLeastOne = 5,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of patching each head's output, ``sum (patch_z - z) . d m / d z``.

    Arguments and errors are those that `attribute_circuit_edges` has too.
    """
    adapter = adapt(model)
    graph, names = adapter.graph, Heads().points(adapter)
    patched = PairRuns(model, Heads(), pairs, patch, batch_size, also=[EMBEDDED])
    scores = torch.zeros(graph.n_layers, graph.n_heads, dtype=torch.float64)
    plan = AttributionPasses(patched, metric, method, steps, names, first=patched.points)
    with tracked("scoring heads", plan.count, progress) as step, frozen(adapter.core):
        for index in range(len(patched)):
            scores += _effects(plan, index, step).sum(dim=(1, 2, 4)).cpu().double()
    check_changed(plan.changed)
    return Scores(graph.heads, scores / len(pairs), method, prompt_start=pairs.start)


@checked
@in_evaluation_mode
def attribute_attention_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    method: Literal["eap", "eap-ig"] = "eap",
    steps: AtLeastOne = 5,
    patch: Literal["zero", "corrupted"] = "zero",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Scores:
    """First-order effect of closing each attention edge of each head, per prompt pair.

        score[layer, head, q, k] = (patch - A[q, k]) . d m / d A[q, k]

    with A the attention pattern that multiplies the values (gated, in a sparse model). Edges at
    padding score 0. The patch is 0, as at a closed gate, or the corrupted prompt's pattern. "eap"
    takes the derivative at the clean prompt; "eap-ig" its mean over embeddings from the corrupted
    prompt's on, which suits the patch "corrupted", and under "zero" is further from the exact
    effects. Other arguments and errors are those that `attribute_circuit_edges` has too.
    """
    adapter, length = adapt(model), pairs.forced.clean.shape[1]
    names = AttentionEdges().points(adapter)
    patched = PairRuns(model, CircuitEdges(), pairs, "corrupted", batch_size)
    plan = AttributionPasses(patched, metric, method, steps, names)
    masks: dict[int, AttentionMask] = {}
    found = []
    with (
        tracked("scoring attention edges", plan.count, progress) as step,
        attached(adapter, mask_hooks(adapter, masks)),
        frozen(adapter.core),
    ):
        for index in range(len(patched)):
            rows = patched.batches[index].forced
            reference = rows.corrupted if patch == "corrupted" else None
            patches = PatchValues(adapter, names, patch, reference)
            # The gradient of the sum over pairs separates into each pair's gradient by row.
            effects = _effects(plan, index, step, patches).transpose(0, 1).cpu().double()
            of_pairs = effects.new_zeros(len(patched.batches[index]), *effects.shape[1:])
            found.append(of_pairs.index_add_(0, rows.pair.cpu(), effects))
    if patch == "corrupted":
        check_changed(plan.changed)
    allowed = torch.stack([masks[layer].pairs(length) for layer in range(len(masks))])
    grid = AttentionGrid(adapter.n_layers, adapter.n_heads, length, adapter.causal, allowed)
    return Scores(grid, torch.cat(found), method, prompt_start=pairs.start)


def _effects(
    plan: AttributionPasses,
    index: int,
    step: Callable[[], object],
    patches: PatchValues | None = None,
) -> Float[Tensor, "layer pair ..."]:
    """Change times gradient at the plan's hook points, summed over a batch's passes."""
    gradients: dict[str, Tensor] = {}
    change, passes = plan.batch(index, step, patches)
    for one in passes:
        for name, gradient in one.gradients.items():
            gradients[name] = gradients.get(name, 0) + one.over_copies(gradient)
    return torch.stack([change[name] * gradients[name] for name in plan.wanted])


@dataclass(frozen=True)
class GradientPass:
    """Activations of a pass, the metric of each pair, and the gradients of the metric's sum.

    With several `copies`, rows are those of one interpolation step after the other.
    """

    copies: int
    by_relevance: bool
    kept: dict[str, Tensor]
    values: Float[Tensor, " pairs"]
    gradients: dict[str, Tensor]

    def over_copies(self, value: Float[Tensor, "rows ..."]) -> Float[Tensor, "row ..."]:
        return value if self.copies == 1 else value.unflatten(0, (self.copies, -1)).sum(dim=0)


class AttributionPasses:
    """The passes that an attribution method takes, batch by batch.

    `wanted` are the hook points of the gradients, where "final" is the final residual stream,
    `first` those recorded where gates act, before other hooks, and `also` further ones to record.
    `changed` says whether patching everything changed the metric of any pair so far.
    """

    def __init__(
        self,
        patched: PairRuns,
        metric: Metric,
        method: Method,
        steps: int,
        wanted: Sequence[str],
        *,
        first: Sequence[str] = (),
        also: Sequence[str] = (),
    ) -> None:
        self.patched, self.adapter = patched, patched.adapter
        self.metric, self.method, self.steps = metric, method, steps if method == "eap-ig" else 1
        self.wanted, self._first = wanted, first
        recorded = dict.fromkeys([*patched.points, *wanted, *first, *also])
        self._names = [name for name in recorded if name != "final"]
        self._share = 1 / self.steps
        self.changed = False

    @classmethod
    def of_edges(
        cls, patched: PairRuns, metric: Metric, method: Method, steps: int
    ) -> AttributionPasses:
        """Passes with all that `ReadGradients` needs."""
        adapter = patched.adapter
        layers = range(adapter.n_layers)
        heads = [name for layer in layers for name in adapter.destination_points(layer)[:3]]
        residuals = [adapter.residual_points(layer) for layer in layers]
        wanted = [*heads, *(name for names in residuals for name in names[1:]), "final"]
        also = [name for names in residuals for name in names]
        return cls(patched, metric, method, steps, wanted, first=heads, also=also)

    @property
    def count(self) -> int:
        """Number of interpolation steps over all batches."""
        return len(self.patched) * self.steps

    def batch(
        self, index: int, step: Callable[[], object], patches: PatchValues | None = None
    ) -> tuple[dict[str, Tensor], Iterator[GradientPass]]:
        """The change of a batch by hook point, patch minus clean activation, and its passes.

        `step` is called after each interpolation step. With `patches` of the `wanted` hook points,
        their changes are given as well.
        """
        batch, patch = self.patched.batches[index], self.patched.record_patch(index)
        one = self._pass(batch)
        points = self.patched.points
        clean = {name: one.kept[name] for name in (*points, *(self.wanted if patches else ()))}
        change = {name: patch.change(name, clean[name]) for name in points}
        if patch.final is not None:
            with torch.no_grad():
                self.changed |= is_changed(one.values, self._measured(patch.final, batch))
        else:  # whether any write changes: the metric would take another pass
            self.changed |= any(
                is_changed(clean[name], clean[name] + change[name]) for name in points
            )
        if patches is not None:
            change |= {name: patches.change(name, clean[name]) for name in self.wanted}
        return change, self._passes(batch, one, change[EMBEDDED], step)

    def _passes(
        self,
        batch: PromptPairs,
        one: GradientPass,
        change: Float[Tensor, "row pos d_model"],
        step: Callable[[], object],
    ) -> Iterator[GradientPass]:
        """The pass of the clean prompts, and those with some of the change of their embeddings."""
        # Hooks may fit one copy of the prompts only.
        most = TOKENS_AT_ONCE.on(self.adapter.device)
        hooked = hooks_besides(self.adapter, gate_hooks(self.adapter))
        n = 1 if hooked else max(1, most // batch.forced.clean.numel())
        clean = one.kept[EMBEDDED]
        yield from _lent(one, step)
        for last in range(self.steps - 1, 0, -n):
            some = range(last, max(last - n, 0), -1)
            values = [clean + (1 - k / self.steps) * change for k in some]
            yield from _lent(self._pass(batch, {EMBEDDED: torch.cat(values)}, len(some)), step)

    def _pass(
        self,
        batch: PromptPairs,
        replaced: Mapping[str, Tensor] | None = None,
        copies: int = 1,
    ) -> GradientPass:
        """Run copies of the prompts with replaced activations, and differentiate the metric."""
        replaced, by_relevance = dict(replaced or {}), self.method == "relp"
        rows = batch.forced.clean
        run = partial(record, self.adapter, rows, first=self._first, copies=copies)
        # Attached before all other hooks: what is recorded after a norm gets the rules' gradient.
        with relevance_rules(self.adapter) if by_relevance else nullcontext():
            kept, final = run(self._names, replaced=replaced, differentiable=True)
            kept["final"] = final
            with autograd(True):
                values = self._measured(final, batch)
                value = self._share * values.sum()
        if not value.requires_grad:
            raise ValueError(
                "the metric has no gradient: what it returns does not depend on the logits "
                "differentiably. Use one that does, such as a difference of logits"
            )
        traced = [name for name in self.wanted if kept[name].requires_grad]
        inputs = [kept[name] for name in traced]
        computed = torch.autograd.grad(value, inputs, allow_unused=True) if traced else ()
        found = dict(zip(traced, computed, strict=True))
        kept = {name: activation.detach() for name, activation in kept.items()}
        values = values.detach()
        gradients = dict[str, Tensor]()
        for name in self.wanted:
            gradient = found.get(name)
            if gradient is None:
                gradient = torch.zeros_like(kept[name])
                # The metric must not depend on an activation whose gradient is missing.
                noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))
                final = noisy = kept[name] + noise.to(gradient)
                with torch.no_grad():
                    if name != "final":
                        _, final = run((), replaced={**replaced, name: noisy})
                    shift = self._share * self._measured(final, batch).sum() - value
                if bool(shift.abs() > 1e-4 * (1 + value.abs())):  # two passes round apart
                    raise ValueError(
                        f"the metric has no gradient at {name}, although it moves by "
                        f"{shift.item():.3g} with the value there. A hook on the model replaces it "
                        "by a tensor without gradients: remove the hook, or let it compute with "
                        "what it is given"
                    )
            gradients[name] = gradient
        return GradientPass(copies, by_relevance, kept, values, gradients)

    def _measured(
        self, final: Float[Tensor, "rows pos d_model"], batch: PromptPairs
    ) -> Float[Tensor, " pairs"]:
        """The metric of each pair, given the final residual stream of copies of the rows."""
        read = batch.forced.read
        copies = len(final) // len(read)
        logits = self.adapter.logits_at(final, repeated(read, copies))
        return torch.cat([measure(self.metric, one, batch) for one in logits.chunk(copies)])


def _lent(one: GradientPass, step: Callable[[], object]) -> Iterator[GradientPass]:
    """Yield a pass, and free its tensors when the next one is requested."""
    yield one
    one.kept.clear()
    one.gradients.clear()
    for _ in range(one.copies):
        step()


def at_places(value: Float[Tensor, "batch pos ..."], places: Places) -> Float[Tensor, "place ..."]:
    """The values at some positions of the prompts."""
    return value.flatten(0, 1).index_select(0, places)


class ReadGradients:
    """Gradients of all destinations, summed over the passes of `AttributionPasses.of_edges`."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._sums: dict[str, Tensor] = {}
        self._constants: dict[tuple[int, str], Tensor] = {}
        self._along: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(adapter.n_layers)]

    @property
    def final(self) -> Float[Tensor, "batch pos d_model"]:
        """The gradient with respect to the final residual stream, which the logits read."""
        return self._sums["final"]

    @torch.no_grad()
    def add(self, one: GradientPass) -> None:
        """Add a pass's gradients at every destination."""
        gradients = dict(one.gradients)
        for layer in range(self.adapter.n_layers):
            norm, names = self.adapter.norm(layer, "attn"), self.adapter.destination_points(layer)
            if norm.kind is None:
                continue
            x, scale = norm.standardised(one.kept[self.adapter.residual_points(layer)[0]])
            along = []
            for slot, name in zip("qkv", names[:3], strict=True):
                gradients[name] = gradients[name] / scale[..., None]
                if not one.by_relevance:
                    value = one.kept[name] - self._constant(layer, slot)
                    along.append(vecdot(value, gradients[name]))
            if along:
                coefficients = torch.cat(along, dim=-1) / x.shape[-1]
                steps = zip(coefficients.chunk(one.copies), x.chunk(one.copies), strict=True)
                self._along[layer] += steps
        for name, gradient in gradients.items():
            more = one.over_copies(gradient)
            self._sums[name] = self._sums[name] + more if name in self._sums else more

    @torch.no_grad()
    def layer(
        self, layer: int, places: Places, out: Float[Tensor, "destination place d_model"]
    ) -> Float[Tensor, "some place d_model"]:
        """Gradients of one layer's destinations at some places, written into `out` in the graph's
        order: q of every head, k and v of every key-value head, then the MLP."""
        done, norm = 0, self.adapter.norm(layer, "attn")
        for slot, name in zip("qkv", self.adapter.destination_points(layer)[:3], strict=True):
            read = at_places(self._sums[name], places).transpose(0, 1)
            weight, _ = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
            torch.bmm(read, weight.to(read.dtype).mT, out=out[done : done + len(read)])
            done += len(read)
        if norm.weight is not None:
            out[:done] *= norm.weight
        if norm.kind == "layer":
            out[:done] -= out[:done].mean(dim=-1, keepdim=True)
        for along, x in self._along[layer]:
            heads = at_places(along, places).T[..., None]
            out[:done].addcmul_(heads, at_places(x, places), value=-1)
        for name in self.adapter.residual_points(layer)[1:]:
            out[done] = at_places(self._sums[name], places)
            done += 1
        return out[:done]

    @torch.no_grad()
    def summed(
        self, readers: Bool[Tensor, "batch pos destination"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The sum of the gradients of chosen destinations, at each place."""
        graph, d_model = self.adapter.graph, self.adapter.d_model
        total = (readers[..., -1:] * self.final).flatten(0, 1)
        size = graph.n_reads
        chosen = readers[..., :-1].unflatten(-1, (graph.n_layers, size))
        at_once = max(1, VALUES_AT_ONCE.on(total.device) // (size * d_model))
        for layer in range(graph.n_layers):
            weights = chosen[:, :, layer].flatten(0, 1)
            for places in weights.any(dim=-1).nonzero()[:, 0].split(at_once):
                read = self.layer(layer, places, total.new_empty(size, len(places), d_model))
                weight = weights[places].to(read.dtype)
                total[places] += einsum(weight, read, "place to, to place d -> place d")
        return total.view_as(self.final)

    def _constant(self, layer: int, slot: str) -> Float[Tensor, "head d_head"]:
        """The value of q, k or v for a normalised input of 0; computed in the first pass."""
        if (layer, slot) not in self._constants:
            weight, bias = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
            shift = self.adapter.norm(layer, "attn").bias
            if shift is not None:
                bias = bias + einsum(weight, shift, "head d e, d -> head e")
            self._constants[layer, slot] = bias
        return self._constants[layer, slot]


def contract(
    scores: Float[Tensor, "group source destination"],
    back: ReadGradients,
    change: Mapping[str, Tensor],
    groups: Int[Tensor, "batch pos"],
) -> None:
    """Add the contraction of sources with all destinations to the scores, on the CPU in float64.

    `groups` is the group that each prompt position is summed into; positions without any change,
    such as those before the first token that differs, are skipped. Entries without an edge are
    filled as well; the caller clears them. A few places are contracted at a time, since what every
    source writes in d_model dimensions is by far the largest tensor.
    """
    adapter = back.adapter
    points, n_sources = adapter.source_points(), len(adapter.graph.sources)
    changed = [(change[name] != 0).flatten(2).any(dim=2).flatten() for name in points]
    groups = groups.flatten().where(torch.stack(changed).any(dim=0), -1)
    in_order = groups.argsort(stable=True)[int((groups < 0).sum()) :]
    at_once = max(1, VALUES_AT_ONCE.on(groups.device) // (n_sources * adapter.d_model))
    for places in in_order.split(at_once) if len(in_order) else ():
        own = {name: at_places(change[name], places)[None] for name in points}
        difference = source_outputs(adapter, own)[:, 0]
        _contract_few(scores, back, difference, places, groups[places])


def _contract_few(
    scores: Float[Tensor, "group source destination"],
    back: ReadGradients,
    difference: Float[Tensor, "source place d_model"],
    places: Places,
    groups: Int[Tensor, " place"],
) -> None:
    """Add the contributions of a few places, sorted by group, to the scores."""
    graph, n_layers = back.adapter.graph, back.adapter.n_layers
    found, counts = (some.tolist() for some in groups.unique_consecutive(return_counts=True))
    written = [part.flatten(1) for part in difference.split(counts, dim=1)]
    most = graph.n_reads
    together = max(1, DESTINATIONS_AT_ONCE // most)
    buffer = difference.new_empty(together * most, *difference.shape[1:])
    for layer in range(0, n_layers, together):
        layers = range(layer, min(layer + together, n_layers))
        end = graph.n_sources_before(Node("mlp", layers[-1]))
        for index, one in enumerate(layers):
            back.layer(one, places, buffer[index * most : (index + 1) * most])
        reading, start = buffer[: len(layers) * most], layer * most
        for group, flat, read in zip(found, written, reading.split(counts, dim=1), strict=True):
            product = flat[:end] @ read.flatten(1).T
            scores[group, :end, start : start + len(reading)] += product.cpu().double()
    for group, flat, read in zip(
        found, written, at_places(back.final, places).split(counts), strict=True
    ):
        scores[group, :, -1] += (flat @ read.flatten()).cpu().double()

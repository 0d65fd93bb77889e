"""Run a model under given gates: inside a block, many settings on the same prompts, or by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import Seed, checked
from sparse_tl.backend import (
    EMBEDDED,
    OWN,
    Adapter,
    HeadOrName,
    Hook,
    HookedModel,
    Order,
    adapt,
    attached,
    check_padding,
    check_same_alone,
    check_tokens,
    check_whole,
    enters,
    evaluation_mode,
    heads_of,
    hooks_besides,
    record,
    source_outputs,
)
from sparse_tl.contexts import scope
from sparse_tl.gates.patches import Patch, PatchValues, ReferencePrompts, reference_prompts
from sparse_tl.gates.sites import (
    AttentionEdges,
    ClosedAttentionEdges,
    ClosedByRule,
    ClosedEdges,
    Columns,
    GatedPass,
    Heads,
    Site,
    SiteGates,
)
from sparse_tl.graph import AttentionGrid

Logits = Float[Tensor, "*stack label vocab"]
Final = Float[Tensor, "*stack label d_model"]


@checked
@scope
def gated(
    model: HookedModel,
    site: Site,
    gates: SiteGates,
    patch: Patch = "zero",
    *,
    reference: ReferencePrompts | None = None,
    seed: Seed = 0,
) -> Iterator[None]:
    """Inside the block the model runs with ``gate * clean + (1 - gate) * patch`` at every gate.

    Args:
        model: dense or sparse model; gates are removed when the block ends. In the block, it is in
            evaluation mode.
        site: where the gates sit: `Heads`, `AttentionEdges`, `CircuitEdges`, `HookPoints`.
        gates: gates in [0, 1] of the site's shape; 1 keeps, 0 patches. With a leading stack axis,
            call the model on as many stacked copies of the prompts.
        patch: value at a closed gate: "zero"; "mean", the mean over the reference prompts at each
            position; "corrupted", the reference prompt of the same row; "resample", a randomly
            drawn reference prompt for every prompt; or tensors by hook point.
        reference: reference prompts for all named patches except "zero", at least as long as the
            prompts that are run. For "mean" and "resample", they have one length: a tensor without
            padding, or pairs (`PromptPairs.by_length`), whose clean prompts are used.
        seed: random seed for "resample".

    Raises:
        ValueError: the gates have the wrong shape or are NaN, the model lacks a hook point, the
            patch is unknown, the reference is missing, not needed, too short, or padded, or
            circuits are not defined under the hooks on the model; when the block ends, the model
            was run and never called a hook point.
    """
    adapter = adapt(model)
    stack, shape = _stacked(adapter, site, gates)
    prompts = reference_prompts(adapter, patch, reference)
    site.check(adapter, prompts)
    with evaluation_mode(model):
        points = site.points(adapter, stack)
        values = PatchValues(adapter, points, patch, prompts, seed, order=site.order)
        with all_firing(adapter, site.hooks(adapter, stack, values, GatedPass(math.prod(shape)))):
            yield


@contextmanager
def all_firing(adapter: Adapter, hooks: Sequence[Hook]) -> Iterator[None]:
    """Attach hooks; raise a ValueError at the end if the model was run and never called one.

    A pass that starts or stops at a layer need not call all of them.
    """
    silent, ran = {name for name, *_ in hooks}, set[bool]()

    def run(name: str, function: Callable[[Any], Any], value: Any) -> Any:
        silent.discard(name)
        return function(value)

    def note(_core: Any, _args: Any, options: dict[str, Any], _output: Any) -> None:
        ends = options.get("start_at_layer"), options.get("stop_at_layer")
        ran.add(ends == (None, None))

    noting: list[Hook] = [(name, order, partial(run, name, act)) for name, order, act in hooks]
    end = adapter.core.register_forward_hook(note, with_kwargs=True)
    OWN.add(end.id)
    try:
        with attached(adapter, noting):
            yield
    finally:
        end.remove()
        OWN.discard(end.id)
    if True in ran and silent:
        raise ValueError(
            f"{sorted(silent)[0]} of {adapter.name!r} never fired, so nothing changed there: "
            f"choose a hook point that the model calls, such as {EMBEDDED} in the residual stream"
        )


@checked
class GatedRun:
    """A batch of prompts to run under any number of gate settings at one site.

    Stacked settings share a forward pass, and each pass starts at the first layer in which a gate
    differs from the state of `start_from`, if there is one. A user's hooks must not use other
    rows or earlier layers; if there are any, passes include the setting that they start from, to
    verify this.

    Args:
        model: dense or sparse model; left unchanged.
        site: where the gates sit.
        tokens: clean prompts.
        read: positions whose logits are read.
        patch: patch at closed gates, as in `gated`, like `reference` and `seed`; or `PatchValues`
            shared by several runs, which have their own reference and seed.
        attention_mask: 0 at padding.

    Raises:
        ValueError: no position is read, the patch is unknown, the reference is missing, not needed,
            or padded, or circuits are not defined under the hooks on the model.
    """

    def __init__(
        self,
        model: HookedModel,
        site: Site,
        tokens: Int[Tensor, "batch pos"],
        read: Bool[Tensor, "batch pos"],
        patch: Patch | PatchValues = "zero",
        *,
        reference: ReferencePrompts | None = None,
        seed: Seed = 0,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> None:
        self.adapter, self.site, self.tokens, self.read = adapt(model), site, tokens, read
        self.attention_mask = attention_mask
        check_tokens(self.adapter, tokens)
        check_padding(self.adapter, attention_mask)
        if not read.any():
            raise ValueError("`read` is false everywhere: there is no position to read")
        if patch == "resample":
            # Drawn once, so that all settings are compared under the same patch.
            prompts = reference_prompts(self.adapter, patch, reference)
            assert prompts is not None
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(len(prompts), (len(tokens),), generator=generator)
            patch, reference = "corrupted", prompts[drawn]
        if not isinstance(patch, PatchValues):
            points = site.points(self.adapter)
            patch = PatchValues(self.adapter, points, patch, reference, order=site.order)
        self.patch = patch
        site.check(self.adapter, tokens)
        self._base: Tensor | None = None
        self._expected: Tensor | None = None
        self._entering: list[Tensor] = []
        self.changes: Float[Tensor, "source batch pos d_model"] | None = None
        """What the patch changes at every source, under the setting of `start_from`."""

    @property
    def clean_logits(self) -> Float[Tensor, "label vocab"]:
        """Logits of the whole model."""
        return self._clean[1]

    @cached_property
    def _clean(self) -> tuple[Float[Tensor, "label d_model"], Float[Tensor, "label vocab"]]:
        return clean_outputs(self.adapter, self.tokens, self.read, self.attention_mask)

    @torch.no_grad()
    def start_from(self, gates: SiteGates | None) -> Float[Tensor, "label vocab"]:
        """Logits under one setting (None: the whole model); later passes start from its state.

        For circuit edges, the state holds what every source writes in d_model dimensions.
        """
        adapter, site = self.adapter, self.site
        if gates is None:
            gates = torch.ones([max(size, 1) for size in site.shape(adapter)])
        stack, _ = _stacked(adapter, site, gates)
        points = site.points(adapter) if site.keeps_changes else []
        entering: list[Tensor] = []

        def keep(value: Tensor) -> None:
            entering.append(value.clone())  # hooks may edit in place

        # Hooks of the setting come first, so that the recording is of gated activations.
        hooks = site.hooks(adapter, site.of_stream(stack), self.patch, GatedPass(1))
        layers = range(adapter.n_layers)
        hooks += [(f"blocks.{layer}.entering", Order.FIRST, keep) for layer in layers]
        with attached(adapter, hooks), evaluation_mode(adapter.model):
            kept, final = record(adapter, self.tokens, points, attention_mask=self.attention_mask)
        self._entering, self._base = [*entering, final], stack
        changes = {name: self.patch.change(name, kept[name]) for name in points}
        self.changes = source_outputs(adapter, changes) if points else None
        self._expected = None
        final = self.final(gates)
        self._expected = final if hooks_besides(adapter, OWN) else None
        return self._logits(final)

    def logits(self, gates: SiteGates) -> Logits:
        """Logits at the read positions, one row per label, for one gate setting or a stack of them.

        Differentiable in the gates if gradients are enabled.
        """
        return self._logits(self.final(gates))

    def _logits(self, final: Final) -> Logits:
        return self.adapter.unembed(final.flatten(0, -2)).view(*final.shape[:-1], -1)

    def final(self, gates: SiteGates) -> Final:
        """The final residual stream at the read positions, one row per label."""
        stack, shape = _stacked(self.adapter, self.site, gates)
        n_stack, base = math.prod(shape), self._base
        if self._expected is None or base is None or not isinstance(stack, Tensor):
            found = self._final(stack, n_stack)
        else:
            stack = torch.cat([stack, base.to(stack).expand(1, *stack.shape[1:])])
            *_, again = found = self._final(stack, n_stack + 1)
            check_same_alone(again, self._expected)
        return found[:n_stack].view(*shape, *found.shape[1:])

    def _final(self, stack: Any, n_stack: int) -> Float[Tensor, "stack label d_model"]:
        adapter, first = self.adapter, self._first_layer(stack)
        now = GatedPass(n_stack, first, changes=self.changes if first else None)
        hooks = self.site.hooks(adapter, stack, self.patch, now)
        acting = any(name != "cached_columns" for name, *_ in hooks)
        if n_stack == 1 and not first and not acting and not torch.is_grad_enabled():
            return self._clean[0][None]
        if first == adapter.n_layers:
            final = self._entering[first].repeat(n_stack, 1, 1)
            for name, _, change in hooks:
                if name == f"blocks.{first - 1}.hook_resid_post":
                    final = change(final)
        else:
            with attached(adapter, hooks), evaluation_mode(adapter.model):
                final = adapter.final(
                    self._entering[first].clone() if first else self.tokens,
                    from_layer=first,
                    read=self.read,
                    copies=n_stack,
                    attention_mask=self.attention_mask,
                )
        chosen = final[self.read.repeat(n_stack, 1)]
        return chosen.view(n_stack, -1, chosen.shape[-1])

    def _first_layer(self, stack: SiteGates) -> int:
        """First layer to run: all layers before it match the cached state."""
        if self._base is None or getattr(stack, "requires_grad", False) or not enters(self.adapter):
            return 0
        if isinstance(stack, ClosedEdges):
            return min(stack.layers)
        return self.site.first_layer(self.adapter, stack != self._base.to(stack))


@torch.no_grad()
def clean_outputs(
    adapter: Adapter,
    tokens: Int[Tensor, "batch pos"],
    read: Bool[Tensor, "batch pos"],
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> tuple[Float[Tensor, "label d_model"], Float[Tensor, "label vocab"]]:
    """The final residual stream of the whole model at the read positions, and its logits."""
    with evaluation_mode(adapter.model):
        final = adapter.final(tokens, read=read, attention_mask=attention_mask)
        return final[read], adapter.logits_at(final, read)


def _stacked(adapter: Adapter, site: Site, gates: SiteGates) -> tuple[Any, tuple[int, ...]]:
    """Gates with a stack axis, and the shape of their own stack, if any."""
    check_whole(adapter)
    if isinstance(gates, ClosedEdges):
        return gates, gates.stack_shape
    if not gates.is_floating_point():
        gates = gates.to(adapter.gate_dtype)
    gates = gates.to(adapter.device)
    shape, found = site.shape(adapter), tuple(gates.shape)
    stack, inner = found[: -len(shape)], found[-len(shape) :]
    fits = len(inner) == len(shape) and all(s in (-1, f) for s, f in zip(shape, inner, strict=True))
    if not fits or len(stack) > 1 or 0 in found:
        said = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise ValueError(
            f"gates at {site} need the shape [{said}], or a stack axis before it, not {list(found)}"
        )
    if not bool(gates.isfinite().all()):
        raise ValueError("some gates are NaN or infinite, not from 0 to 1")
    return gates if stack else gates[None], stack


AttentionEdgeOrName = tuple[int, int, int, int] | str
"""An attention edge: (layer, head, query, key), or its name, such as "a3.h2:5->8"."""


@checked
def ablate_heads(
    model: HookedModel,
    heads: Sequence[HeadOrName],
    patch: Patch = "zero",
    *,
    reference: ReferencePrompts | None = None,
    seed: Seed = 0,
) -> AbstractContextManager[None]:
    """Inside the block, patch the output of these heads at ``hook_z``.

    Other arguments are those of `gated`.

    Args:
        heads: heads to ablate, as (layer, head) pairs or by name: ``["a3.h2"]``.

    Raises:
        ValueError: no head is given, the model lacks a head, or as in `gated`.
    """
    adapter = adapt(model)
    if not heads:
        raise ValueError("there is no head to ablate")
    gates = torch.ones(adapter.n_layers, adapter.n_heads, device=adapter.device)
    for layer, head in heads_of(adapter, heads):
        gates[layer, head] = 0
    return gated(model, Heads(), gates, patch, reference=reference, seed=seed)


@checked
def ablate_attention_edges(
    model: HookedModel,
    edges: Sequence[AttentionEdgeOrName] | None = None,
    *,
    heads: Sequence[HeadOrName] | None = None,
    query: Columns | None = None,
    key: Columns | None = None,
) -> AbstractContextManager[None]:
    """Inside the block, a model's attention is 0 at these edges, whatever its learned gates are.

    Edges are listed, or chosen by a rule: ``query=slice(15, None), key=[2, 3]`` cuts attention from
    column 15 on, including tokens still to be generated, to columns 2 and 3. As with a closed gate,
    nothing is renormalised: the weights of other keys do not change.

    Args:
        edges: (layer, head, query, key) tuples, with query and key as columns from 0; or names,
            from key to query: ``["a3.h2:5->8"]``.
        heads: in place of `edges`: heads in which the rule holds, as in `ablate_heads`; all by
            default.
        query: columns of the queries: one, a list, a slice, or a function that says whether a
            column is selected; all by default. Negative columns count from the end of the tokens
            that are run.
        key: columns of the keys, likewise.

    Raises:
        ValueError: no edge is given, both edges and a rule are, the model lacks a head or an edge,
            or a causal model's key follows its query; when the model is run, an edge or a listed
            column lies beyond the end of the prompts, or a column counts from the end in a run with
            a key-value cache.

    Reference: Geva et al., arXiv 2304.14767 (attention knockout), which renormalises.
    """
    adapter = adapt(model)
    ruled = query is not None or key is not None
    if ruled == (edges is not None) or not ruled and heads is not None:
        raise ValueError("give either attention edges, or a rule: query, key or both, and heads")
    if edges is None:
        if heads is None:
            heads = [(i, j) for i in range(adapter.n_layers) for j in range(adapter.n_heads)]
        if not len(heads):
            raise ValueError("there is no head in which to cut attention")
        every = slice(None)
        rule = (every if columns is None else columns for columns in (query, key))
        return gated(model, AttentionEdges(), ClosedByRule(heads_of(adapter, heads), *rule))
    if not len(edges):
        raise ValueError("there is no attention edge to ablate")
    places = [AttentionGrid.parse(edge) if isinstance(edge, str) else edge for edge in edges]
    heads_of(adapter, [(layer, head) for layer, head, _, _ in places])
    for edge, (_, _, at, to) in zip(edges, places, strict=True):
        inside = 0 <= at < adapter.n_ctx and 0 <= to < adapter.n_ctx
        if not inside or (adapter.causal and to > at):
            raise ValueError(
                f"{edge} is no attention edge (layer, head, query, key) of this model, whose "
                f"columns are 0..{adapter.n_ctx - 1}"
                + (" and whose keys are at or before their query" if adapter.causal else "")
            )
    return gated(model, AttentionEdges(), ClosedAttentionEdges(torch.tensor(places)))

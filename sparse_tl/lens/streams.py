"""The residual stream taken apart: what every source writes, and gradients where it is read.

No flag of TransformerLens is switched on for this. Per-head outputs are rebuilt from ``hook_z`` and
``W_O``; the gradient at one head's input is rebuilt from that at ``hook_q`` (before rotary
embeddings) through ``W_Q`` and the Jacobian of the layer's own normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from sparse_tl.graph import CircuitGraph
from sparse_tl.lens.attaching import HookFunction, Order, attached
from sparse_tl.lens.points import HookedModel, layer_points

EMBEDDED = "blocks.0.hook_resid_pre"
"""Where the input node writes: token and learned positional embeddings together."""


def graph_of(model: HookedModel) -> CircuitGraph:
    """The circuit graph of a model.

    Raises:
        ValueError: a model whose heads do not write to the residual stream as they are.
    """
    cfg = model.cfg
    odd = {
        "positional_embedding_type": cfg.positional_embedding_type == "shortformer",
        "attention_dir": cfg.attention_dir != "causal",
        "ungroup_grouped_query_attention": cfg.ungroup_grouped_query_attention,
    }
    for name, unsupported in odd.items():
        if unsupported:
            raise ValueError(
                f"expected a causal model whose inputs are the residual stream alone; circuits do "
                f"not support cfg.{name}={getattr(cfg, name)!r} of {cfg.model_name!r}"
            )
    if (
        cfg.use_normalization_before_and_after
        or cfg.original_architecture in POST_NORM_ARCHITECTURES
    ):
        raise ValueError(
            f"expected a model whose heads and MLPs write to the residual stream directly; "
            f"{cfg.model_name!r} normalises what they write, so that a sum over its parts is not "
            "what reaches later layers"
        )
    return CircuitGraph(
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_key_value_heads or cfg.n_heads,
        has_mlps=not cfg.attn_only,
        parallel=cfg.parallel_attn_mlp,
    )


@dataclass
class Streams:
    """What the sources wrote in one forward pass; heads as z, before ``W_O``."""

    embedded: Float[Tensor, "batch pos d_model"]
    z: list[Float[Tensor, "batch pos head d_head"]] = field(default_factory=list)
    mlp: list[Float[Tensor, "batch pos d_model"]] = field(default_factory=list)

    def each(self, function: Callable[..., Tensor], *others: Streams) -> Streams:
        """A function of every part, and of the same part of other streams."""
        return Streams(
            function(self.embedded, *(other.embedded for other in others)),
            [function(*some) for some in zip(self.z, *(o.z for o in others), strict=True)],
            [function(*some) for some in zip(self.mlp, *(o.mlp for o in others), strict=True)],
        )

    def change_to(self, patched: Streams | None) -> Streams:
        """What a patch writes minus what is written here; None is a patch that writes nothing."""
        return self.each(torch.neg) if patched is None else patched.each(torch.sub, self)

    @torch.no_grad()
    def outputs(
        self, model: HookedModel, graph: CircuitGraph
    ) -> Float[Tensor, "source batch pos d_model"]:
        """Every source's own contribution to the residual stream, in the graph's order.

        Biases of ``W_O`` belong to no head and cancel in differences of streams; MLPs' do too.
        """
        batch, pos, d_model = self.embedded.shape
        out = self.embedded.new_empty(len(graph.sources), batch, pos, d_model)
        out[0] = self.embedded
        for layer, z in enumerate(self.z):
            first = graph.source_index(f"a{layer}.h0")
            weight = model.blocks[layer].attn.W_O
            torch.bmm(
                rearrange(z, "batch pos head d_head -> head (batch pos) d_head"),
                weight.to(z.dtype),
                out=out[first : first + graph.n_heads].view(graph.n_heads, -1, d_model),
            )
            if graph.has_mlps:
                out[graph.source_index(f"m{layer}")] = self.mlp[layer]
        return out


@dataclass
class LayerReads:
    """What one layer read: tensors of one forward pass, still in its autograd graph."""

    attention_residual: Tensor
    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv_head d_head"]
    v: Float[Tensor, "batch pos kv_head d_head"]
    mlp_residual: Tensor | None = None
    mlp_normed: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those whose gradients are needed."""
        return [self.q, self.k, self.v, *([] if self.mlp_normed is None else [self.mlp_normed])]


class Tape:
    """Records one forward pass: what the sources wrote, and what the destinations read.

    Args:
        model: the model, dense or sparse.
        graph: its graph.
        replaced: hook points whose values are replaced, with the values.
        differentiable: keep the autograd graph, from the input node on.
        also: further hook points whose values are kept.
    """

    def __init__(
        self,
        model: HookedModel,
        graph: CircuitGraph,
        *,
        replaced: Mapping[str, Tensor] | None = None,
        differentiable: bool = False,
        also: Sequence[str] = (),
    ) -> None:
        self.model, self.graph, self.also = model, graph, also
        self.replaced = dict(replaced or {})
        self.differentiable = differentiable
        self._kept: dict[str, Tensor] = {}

    def run(
        self, tokens: Int[Tensor, "batch pos"], positions: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch vocab"]:
        """The logits at one position of each prompt; what was recorded is replaced."""
        self._kept = {}
        with (
            attached(self.model, self._hooks()),
            self._norms_watched(),
            torch.set_grad_enabled(self.differentiable),
        ):
            final = self.model(tokens, stop_at_layer=self.graph.n_layers)
            self._kept["final"] = final
            return logits_at(self.model, final, positions)

    @property
    def streams(self) -> Streams:
        """What the sources wrote, detached."""
        layers = range(self.graph.n_layers)
        return Streams(
            self._kept[EMBEDDED].detach(),
            [self._kept[f"blocks.{layer}.attn.hook_z"].detach() for layer in layers],
            [self._kept[f"blocks.{layer}.hook_mlp_out"].detach() for layer in layers]
            if self.graph.has_mlps
            else [],
        )

    @property
    def layers(self) -> list[LayerReads]:
        """What each layer read."""
        reads = []
        for layer in range(self.graph.n_layers):
            block = f"blocks.{layer}"
            q, k, v = (self._kept[f"{block}.attn.hook_{slot}"] for slot in "qkv")
            residual = self._kept[f"{block}.hook_resid_pre"]
            if self.graph.has_mlps:
                into, out = self._kept[f"{block}.ln2.in"], self._kept[f"{block}.ln2.out"]
                reads.append(LayerReads(residual, q, k, v, into, out))
            else:
                reads.append(LayerReads(residual, q, k, v))
        return reads

    @property
    def final(self) -> Float[Tensor, "batch pos d_model"]:
        """What the logits read."""
        return self._kept["final"]

    def kept(self, name: str) -> Tensor:
        """The value at a recorded hook point."""
        return self._kept[name]

    def _hooks(self) -> list[tuple[str, Order, HookFunction]]:
        suffixes = ["hook_resid_pre", *(f"attn.hook_{name}" for name in "qkvz")]
        suffixes += ["hook_mlp_out"] if self.graph.has_mlps else []
        names = [name for suffix in suffixes for name in layer_points(self.model, suffix)]
        names += self.also
        return [(name, Order.LAST, partial(self._keep, name)) for name in names]

    def _keep(self, name: str, value: Tensor) -> Tensor | None:
        changed = self.replaced.get(name)
        if changed is None and not (name == EMBEDDED and self.differentiable):
            self._kept[name] = value
            return None
        value = value if changed is None else changed
        if self.differentiable:
            # A leaf: weights may be frozen, and nothing before it needs a gradient.
            value = value.detach().requires_grad_()
        self._kept[name] = value
        return value

    @contextmanager
    def _norms_watched(self) -> Iterator[None]:
        """Input and output of every MLP's normalisation, where not every kind has a hook point."""
        handles = []
        for layer in range(self.graph.n_layers if self.graph.has_mlps else 0):

            def keep(module: nn.Module, args: Any, output: Tensor, name: str) -> Tensor:
                # Without normalisation the output is the input itself: a view of it has the
                # MLP as its only reader, and a gradient of its own.
                output = output.view_as(output)
                self._kept[f"{name}.in"], self._kept[f"{name}.out"] = args[0], output
                return output

            name = f"blocks.{layer}.ln2"
            norm = self.model.blocks[layer].ln2
            handles.append(norm.register_forward_hook(partial(keep, name=name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def logits_at(
    model: HookedModel, final: Float[Tensor, "batch pos d_model"], positions: Int[Tensor, " batch"]
) -> Float[Tensor, "batch vocab"]:
    """Logits at one position of each prompt alone: no ``[batch, pos, vocab]`` is ever made."""
    rows = torch.arange(len(final), device=final.device)
    return unembedded(model, final[rows, positions][:, None])[:, 0]


def unembedded(
    model: HookedModel, final: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch pos vocab"]:
    """Logits of whatever stands in the residual stream after the last layer."""
    if model.cfg.normalization_type is not None:
        final = getattr(model, "ln_final")(final)  # noqa: B009 - absent without normalisation
    # The model's own unembedding copies its whole matrix anew in every pass.
    unembed = model.unembed
    logits = unembed.hook_out(F.linear(unembed.hook_in(final), unembed.W_U.T, unembed.b_U))
    cap = model.cfg.output_logits_soft_cap
    return cap * torch.tanh(logits / cap) if cap > 0 else logits

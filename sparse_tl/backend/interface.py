"""The interface to TransformerLens: everything that the package needs from a model.

Only adapters read parameters, start passes or copy models. Each kind of model has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from sparse_tl.backend.hook_points import (
    EMBEDDED,
    SLOTS,
    Model,
    Place,
    Viewed,
    after,
    before,
    hook_point,
    hooked,
    read_call,
    selecting,
)
from sparse_tl.backend.numerics import Norm, precise
from sparse_tl.graph import CircuitGraph, Slot

NormPlace = Literal["attn", "mlp", "after_attn", "after_mlp"]
"""Where in a layer a norm is: before attention or MLP, or after."""

Analysis = Literal["circuits", "relp"]
"""Analyses that a kind of model may not support; for others, running the model is the check."""

_INSTEAD: dict[Analysis, str] = {
    "circuits": "circuits, since {}. Gates on attention edges and heads, post-training, activation "
    "patching and attribution of attention edges need no circuits",
    "relp": "the method 'relp', since {}. The other methods, such as 'eap-ig', take the model's "
    "own gradient",
}
"""What an analysis is called, and what still works without it."""

_MOSTLY = 0.7
"""Share of read positions above which selecting them costs more than it saves."""


class Adapter(ABC):
    """Uniform access to a model. An adapter has no state besides the model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        cfg: Any = model.cfg
        self.name: str = cfg.model_name
        self.n_layers: int = cfg.n_layers
        self.n_heads: int = cfg.n_heads
        self.n_kv_heads: int = cfg.n_key_value_heads or cfg.n_heads
        self.n_ctx: int = cfg.n_ctx
        self.d_model: int = cfg.d_model
        self.d_query: int = cfg.d_head  # size of a head's query vector
        self.d_vocab: int = cfg.d_vocab
        self.d_vocab_out: int = cfg.d_vocab_out if cfg.d_vocab_out > 0 else cfg.d_vocab
        self.causal: bool = cfg.attention_dir == "causal"
        self.has_mlps: bool = getattr(model.blocks[0], "mlp", None) is not None
        self.coupled = False  # whether a norm of attention output couples a layer's heads

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.model.embed.W_E.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed.W_E.dtype

    @property
    def gate_dtype(self) -> torch.dtype:
        """The precision of gates: float64 for float64 models, float32 for all others."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    @abstractmethod
    def graph(self) -> CircuitGraph:
        """The circuit graph, after checking that the model is the sum of its parts."""

    @property
    def parallel(self) -> bool:
        """Whether an MLP reads the same input as its layer's heads, not their output."""
        return bool(self.model.cfg.parallel_attn_mlp)

    @property
    def activations_per_token(self) -> int:
        """Approximate number of activations per token and layer, without attention patterns."""
        return 4 * self.d_model + (self.model.cfg.d_mlp or 0)

    @property
    def core(self) -> nn.Module:
        """The module that all wrappers around the same model share."""
        return self.model

    @property
    def random(self) -> bool:
        """Whether every pass differs, by dropout, which HookedTransformer does not have."""
        return False

    def unsupported(self, analysis: Analysis) -> str | None:
        """The reason why an analysis is refused for this kind of model; None if it is supported."""
        return None if self.causal or analysis == "relp" else "its attention is not causal"

    def check_supported(self, analysis: Analysis) -> None:
        """Raise a ValueError if an analysis is refused for this kind of model, and say why."""
        why = self.unsupported(analysis)
        if why is not None:
            raise ValueError(f"{self.name!r} cannot be used for {_INSTEAD[analysis].format(why)}.")

    # ---- hook points -----------------------------------------------------------------------------

    def place(self, name: str) -> HookPoint | Viewed | Place:
        """Where to attach a function, by name.

        A name is that of a TransformerLens hook point; or ``cached_columns``, the number of columns
        in the key-value cache, shown when a pass starts, read-only; or one of these in a layer
        ``blocks.{layer}.``: ``entering``, the residual stream that enters the layer, before all
        hooks at ``hook_resid_pre``; ``mlp_input``, the input of the norm before the MLP;
        ``mlp_normalized``, the MLP's input; ``mlp_read``, the same after all edits, read-only;
        `heads_point`, the value that heads write from; `read_point`, what a head's q, k or v is
        computed from; ``attn.mask``, the layer's `AttentionMask`, shown when attention is called,
        read-only. ``attn.hook_q`` to ``hook_z`` are ``[batch, pos, head, d_head]`` in every model.
        """
        if name == "cached_columns":
            return partial(read_call, self._given_cache, self._cached_columns)
        layer, _, what = name.removeprefix("blocks.").partition(".")
        if what == "entering":
            return partial(before, hook_point(self.model, f"blocks.{layer}.hook_resid_pre"))
        if what in ("mlp_input", "mlp_normalized"):
            norm, first = self.norm_module(int(layer), "mlp"), what == "mlp_input"
            if norm is not None:
                return partial(before if first else after, norm)
            # Without a norm, both names mean the MLP's input; functions at mlp_input run first.
            return partial(before, self.model.blocks[int(layer)].mlp, first=first)
        known = layer.isdigit() and int(layer) < self.n_layers
        found = self._own_place(int(layer), what) if known else None
        return hook_point(self.model, name) if found is None else found

    @abstractmethod
    def _own_place(self, layer: int, what: str) -> HookPoint | Viewed | Place | None:
        """The place of this name in a layer; None if it is a hook point of the model or unknown."""

    @property
    def _given_cache(self) -> list[nn.Module]:
        """The modules that are called with the key-value cache when a pass starts."""
        return [self.core]

    @abstractmethod
    def _cached_columns(self, kwargs: dict[str, Any]) -> int:
        """The number of columns in the key-value cache with which the model is called."""

    def layer_points(self, suffix: str) -> list[str]:
        """Names ``blocks.{layer}.{suffix}`` of a hook point that every layer has."""
        names = [f"blocks.{layer}.{suffix}" for layer in range(self.n_layers)]
        for name in names:
            hook_point(self.model, name)
        return names

    def heads_point(self, layer: int) -> str:
        """The name of the value that a layer's heads write from; their output is linear in it."""
        return f"blocks.{layer}.attn.hook_z"

    def read_point(self, layer: int, slot: Slot) -> str:
        """The name of the value that `qkv` projects to: q, k or v before rotary, in most models."""
        return f"blocks.{layer}.attn.hook_{slot}"

    def source_points(self) -> list[str]:
        """The hook points of a circuit graph's sources; for heads, before ``W_O``."""
        names = [EMBEDDED]
        for layer in range(self.n_layers):
            names += [self.heads_point(layer), *[f"blocks.{layer}.hook_mlp_out"] * self.has_mlps]
        return names

    def destination_points(self, layer: int) -> list[str]:
        """Hook points of a layer's destinations: `read_point` of q, k, v, and the MLP's input."""
        names = [self.read_point(layer, slot) for slot in SLOTS]
        return names + [f"blocks.{layer}.mlp_normalized"] * self.has_mlps

    def residual_points(self, layer: int) -> list[str]:
        """The hook points at which a layer reads the residual stream."""
        return [f"blocks.{layer}.hook_resid_pre"] + [f"blocks.{layer}.mlp_input"] * self.has_mlps

    # ---- running ---------------------------------------------------------------------------------

    def final(
        self,
        inputs: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_model"],
        *,
        from_layer: int = 0,
        read: Bool[Tensor, "batch pos"] | None = None,
        copies: int = 1,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "rows pos d_model"]:
        """The residual stream after the last layer.

        Args:
            inputs: tokens, or the residual stream that enters `from_layer`, as at ``entering``.
            from_layer: first layer to run. Hooks of earlier layers do not run; others run once.
            read: positions that are needed; at others the last MLP is skipped, unless it is hooked.
            copies: number of copies of the prompts, one after the other.
            attention_mask: 0 at padding.
        """
        rows = repeated(inputs, copies)
        mask = None if attention_mask is None else repeated(attention_mask, copies)
        with ExitStack() as until:
            if read is not None:
                until.enter_context(self._last_mlp_at(repeated(read, copies)))
            if inputs.is_floating_point():  # in place of what enters the layer, before all hooks
                border = hook_point(self.model, f"blocks.{from_layer}.hook_resid_pre")
                until.enter_context(before(border, lambda _: rows)[0])
            return self._final(rows, from_layer, mask)

    @contextmanager
    def only_at(
        self, read: Bool[Tensor, "batch pos"]
    ) -> Iterator[Callable[[Tensor], Float[Tensor, "label vocab"]]]:
        """Inside the block, passes over prompts of this shape compute only the logits at `read`.

        Only the last MLP and the unembedding are restricted. Parts with hooks on them are computed
        in full, so hooks see the same as in a plain pass. Yields a function from the model's output
        to the logits at these positions, in row-major order.
        """
        with self._last_mlp_at(read):
            if any(map(hooked, self.model.unembed.modules())):
                yield lambda logits: logits[read]
                return
            with selecting(self.model.unembed, read) as restricted:
                yield lambda logits: logits[0] if restricted() else logits[read]

    @contextmanager
    def _last_mlp_at(self, read: Bool[Tensor, "batch pos"]) -> Iterator[None]:
        """Inside the block, the last MLP writes zeros elsewhere, unless a hook would see them.

        Post-training of a model of four layers, on a task of few answer tokens, is 10 % faster.
        """
        if not self.has_mlps:
            yield
            return
        model: Any = self.model
        block = model.blocks[-1]
        parts = [block.mlp, block.hook_mlp_out, self.norm_module(-1, "after_mlp")]
        parts += [block.hook_resid_post, getattr(model, "ln_final", None), model.unembed]
        behind = [module for part in parts if part is not None for module in part.modules()]
        own = {handle.id for handle in getattr(block, "_capture_hook_handles", ())}
        seen = any(hooked(module, own) for module in [block, *behind])
        if seen or read.float().mean() > _MOSTLY:
            yield
            return

        def scatter(_module: nn.Module, _args: Any, output: Any) -> Any:
            if not restricted():
                return None
            # Experts may also return their router's scores, which nothing reads.
            written, *rest = output if isinstance(output, tuple) else (output,)
            everywhere = written.new_zeros(*read.shape, written.shape[-1])
            everywhere[read] = written.view(-1, written.shape[-1])
            return (everywhere, *rest) if isinstance(output, tuple) else everywhere

        with selecting(block.mlp, read) as restricted, block.mlp.register_forward_hook(scatter):
            yield

    @abstractmethod
    def _final(self, rows: Tensor, from_layer: int, attention_mask: Tensor | None) -> Tensor:
        """The final residual stream, from tokens or from a layer's input."""

    @abstractmethod
    def empty_cache(self, n_prompts: int, n_columns: int) -> dict[str, Any]:
        """An empty key-value cache, as keyword arguments of calls that read one column each, of
        `n_columns` at most."""

    @abstractmethod
    def logits(self, final: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        """Logits for a final residual stream."""

    def unembed(self, final: Float[Tensor, "label d_model"]) -> Float[Tensor, "label vocab"]:
        """Logits for the final residual stream at some positions, one row each."""
        return self.logits(final[:, None])[:, 0]

    def logits_at(
        self, final: Float[Tensor, "batch pos d_model"], read: Bool[Tensor, "batch pos"]
    ) -> Float[Tensor, "label vocab"]:
        """Logits at some positions only, one row each; never allocates ``[batch, pos, vocab]``."""
        return self.unembed(final[read])

    # ---- weights ---------------------------------------------------------------------------------

    @abstractmethod
    def norm_names(self, layer: int) -> dict[NormPlace, str]:
        """The names of a layer's norms by their place; two places may share a norm."""

    @abstractmethod
    def norm_of(self, module: nn.Module | None) -> Norm:
        """The normalisation that a module performs; the identity without a module."""

    def norm_module(self, layer: int, which: NormPlace) -> Any:
        """The module of a norm in a layer; None if there is none."""
        name = self.norm_names(layer).get(which)
        return None if name is None else getattr(self.model.blocks[layer], name)

    def norm(self, layer: int, which: NormPlace) -> Norm:
        """A normalisation in a layer: before its attention or MLP, or of what they write."""
        return self.norm_of(self.norm_module(layer, which))

    def norms(self) -> dict[str, Norm]:
        """All normalisations of the residual stream and of what is added to it, by module name."""
        found = {"ln_final": self.norm_of(getattr(self.model, "ln_final", None))}
        for layer, block in enumerate(self.model.blocks):
            for name in self.norm_names(layer).values():
                found[f"blocks.{layer}.{name}"] = self.norm_of(getattr(block, name))
        return {name: norm for name, norm in found.items() if norm.kind is not None}

    @property
    def final_norm(self) -> Norm:
        """The normalisation before the unembedding; the identity if there is none."""
        return self.norm_of(getattr(self.model, "ln_final", None))

    @abstractmethod
    def qkv(
        self, layer: int, slot: Slot
    ) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"]]:
        """Matrix and bias from the normalised stream to `read_point`; k and v by key-value head."""

    @abstractmethod
    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """The matrix from `heads_point` to the residual stream."""

    @abstractmethod
    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        """What a layer's attention adds besides its heads; zeros where the model has no bias."""

    @abstractmethod
    def unembedding(self) -> tuple[Float[Tensor, "d_model vocab"], Float[Tensor, " vocab"]]:
        """Weight and bias from the normalised final residual stream to logits before a soft cap."""

    def heads_written(
        self,
        layer: int,
        z: Float[Tensor, "batch pos head d_head"],
        *,
        heads: Sequence[int] | None = None,
        out: Float[Tensor, "some batch pos d_model"] | None = None,
    ) -> Float[Tensor, "some batch pos d_model"]:
        """What all or some heads of a layer add to the residual stream, without the bias.

        `z` is the value at `heads_point`, or the difference of two such values. The result is
        written to `out`, contiguous and without gradients, if it is given.
        """
        weight = self.W_O(layer).to(z.dtype)
        if heads is not None and len(heads) < len(weight):
            weight, z = weight[list(heads)], z[:, :, list(heads)]
        flat = rearrange(z, "batch pos head d_head -> head (batch pos) d_head")
        out = None if out is None else out.view(len(weight), flat.shape[1], -1)
        return torch.bmm(flat, weight, out=out).view(len(weight), *z.shape[:2], -1)

    def values_by_head(
        self, v: Float[Tensor, "*batch kv_head d_head"]
    ) -> Float[Tensor, "*batch head d_head"]:
        """The value that each head moves, from those at ``hook_v``; several heads may share one."""
        return v.repeat_interleave(self.n_heads // v.shape[-2], dim=-2)

    def attention_scale(
        self, layer: int, values: Mapping[str, Tensor]
    ) -> Float[Tensor, "batch query"]:
        """What the heads' output, at ``hook_z``, is multiplied by to give the value at
        `heads_point`: 1 but in models that normalise what attention writes."""
        names = f"blocks.{layer}.attn.hook_z", self.heads_point(layer)
        z, written = (precise(values[name].detach()).flatten(-2) for name in names)
        scale = (z * written).sum(dim=-1) / z.square().sum(dim=-1).clamp(min=1e-30)
        return scale.to(values[names[0]].dtype)

    # ---- as a whole ------------------------------------------------------------------------------

    @abstractmethod
    def copy(self) -> Model:
        """A copy of the model that shares no parameter with it."""

    @abstractmethod
    def parameters(self, group: Literal["qk", "all"]) -> list[nn.Parameter]:
        """The parameters of queries and keys, or all parameters that a pass reads."""

    def sync_config(self) -> None:
        """Update the configuration with the weights' current device and dtype."""
        self.model.cfg.device = str(self.device)
        self.model.cfg.dtype = self.dtype


def repeated(rows: Tensor, copies: int) -> Tensor:
    """`copies` copies of the rows, one after the other."""
    return rows if copies == 1 else rows.repeat(copies, *[1] * (rows.ndim - 1))

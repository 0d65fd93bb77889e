"""The adapter of a TransformerBridge: a `transformers` model under hooks.

It uses hook points, under the names of a HookedTransformer; the weights of the wrapped modules; and
the norms before and after attention and MLP. Norms are identified in a forward pass rather than by
name, since names differ between versions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import astuple
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformers import DynamicCache

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens.checks import circuit_graph
from sparse_tl.lens.core import places
from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.architecture import HALVES
from sparse_tl.lens.core.attaching import without_user_hooks
from sparse_tl.lens.core.devices import precision_of, shard
from sparse_tl.lens.core.lora import effective_weight
from sparse_tl.lens.core.norms import Norm, bridge_norm
from sparse_tl.lens.core.points import Analysis, NormPlace, hook_point
from sparse_tl.lens.loading.bridges import (
    boot,
    check_alone,
    plain_copy,
    unread_parameters,
)
from sparse_tl.lens.models.bridge_passes import (
    cached_columns,
    check_left_padded,
    mask_place,
    plain_norms,
    skipped,
    stopped,
)
from sparse_tl.lens.models.latent import latent_attention
from sparse_tl.lens.models.layouts import BlockNorms, block_norms
from sparse_tl.parts.nodes import Slot

_NORMS: dict[NormPlace, str] = {
    "attn": "before_attention",
    "mlp": "before_mlp",
    "after_attn": "after_attention",
    "after_mlp": "after_mlp",
}
_PARTS = ("embed", "blocks", "ln_final", "unembed")


class BridgeAdapter(Adapter):
    """The adapter of a TransformerBridge."""

    model: TransformerBridge
    graph = cached_property(circuit_graph)

    def __init__(self, model: TransformerBridge) -> None:
        missing = [part for part in _PARTS if not isinstance(getattr(model, part, None), nn.Module)]
        if missing:
            raise ValueError(
                f"expected a language model with one stack of blocks; {model.cfg.model_name!r} "
                f"has no {missing}"
            )
        check_alone(model)
        super().__init__(model)
        self.block_norms: list[BlockNorms] = block_norms(model)
        self.coupled = any(norms.after_attention is not None for norms in self.block_norms)
        self._latents = latent_attention(model, self.n_heads)
        if self._latents:
            self.n_kv_heads = self.n_heads  # keys and values of each are projected from the latent

    @property
    def core(self) -> nn.Module:
        """The wrapped model, possibly shared by several bridges."""
        return self.model.original_model

    def unsupported(self, analysis: Analysis) -> str | None:
        """See `Adapter`."""
        if analysis == "relp":
            if self._latents:
                return "there is no rule for the norms inside its attention"
            mlps = [getattr(block, "mlp", None) for block in self.model.blocks]
            if any(
                mlp is not None and getattr(mlp, "hook_pre", None) is mlp.hook_in for mlp in mlps
            ):
                return "its experts have no hook points around their activation functions"
        elif any(here.before_mlp == here.before_attention is not None for here in self.block_norms):
            return "its MLPs read what a normalisation makes for attention"
        elif any(here.indexed for here in self._latents.values()):
            return "an index of its own, which no edge enters, chooses what its heads attend to"
        return super().unsupported(analysis)

    # ---- hook points -----------------------------------------------------------------------------

    def place(self, name: str) -> HookPoint | places.Viewed | places.Place:
        """See `Adapter`."""
        if name == "cached_columns":
            return partial(places.read_call, [self.core], cached_columns)
        layer, _, what = name.removeprefix("blocks.").partition(".")
        if what == "entering":
            return partial(places.before, hook_point(self.model, f"blocks.{layer}.hook_resid_pre"))
        if what == "attn.mask":
            return mask_place(self.model.blocks[int(layer)].attn, self.causal)
        latent = self._latents.get(int(layer)) if layer.isdigit() else None
        if latent is not None and (found := latent.place(what)) is not None:
            return found
        if what == "mlp_read":
            return hook_point(self.model, f"blocks.{layer}.mlp.hook_in")
        if what == "attn.z_written":
            return self._written(int(layer))
        if what not in ("mlp_input", "mlp_normalized"):
            point = hook_point(self.model, name)
            if what != "hook_resid_mid" or what in self.model.blocks[int(layer)]._modules:
                return point
            # Here the name means the MLP's input alone; the residual stream bypasses that point.
            end = hook_point(self.model, f"blocks.{layer}.hook_resid_post")
            return partial(places.before_branch, point, end)
        norm = self._module(int(layer), "before_mlp")
        if norm is None:
            # Without a norm, both names mean the MLP's input; functions at mlp_input run first.
            return partial(
                places.before, self.model.blocks[int(layer)].mlp, first=what == "mlp_input"
            )
        return partial(places.before if what == "mlp_input" else places.after, norm)

    def read_point(self, layer: int, slot: Slot) -> str:
        """See `Adapter`; under latent attention, what q, k or v reads (see `LatentAttention`)."""
        at = f"blocks.{layer}.attn"
        return f"{at}.read_{slot}" if self._latents.get(layer) else super().read_point(layer, slot)

    def heads_point(self, layer: int) -> str:
        """See `Adapter`; ``z_written`` is z divided by the scale of a norm of attention output."""
        if self.block_norms[layer].after_attention is None:
            return super().heads_point(layer)
        return f"blocks.{layer}.attn.z_written"

    def _written(self, layer: int) -> places.Place:
        """The place of z divided by the scale, from which heads write if their sum is normalised.

        With W_h and the norm's weight w, ``norm(sum z_h W_h) = sum (z_h / scale) W_h w``. The scale
        is taken from the run itself, so the write is linear in this value, as in z without a norm.
        """
        attention, post = self.model.blocks[layer].attn, self.norm(layer, "after_attn")
        norm = self._module(layer, "after_attention")
        assert norm is not None
        if post.kind != "rms" or attention.b_O is not None:
            raise ValueError(
                f"expected what the heads of layer {layer} of {self.name!r} write to be normalised "
                "without being centred, and without a bias; otherwise their parts do not add up"
            )

        def scaled(z: Tensor, written: Tensor) -> Tensor:
            z = z.unflatten(-1, (self.n_heads, -1))
            return (z / post.scale(written)[..., None]).to(z.dtype)

        def write(changed: Tensor) -> Tensor:
            return self.heads_written(layer, changed).sum(dim=0)

        return partial(places.between, attention.o.original_component, norm, scaled, write)

    # ---- running ---------------------------------------------------------------------------------

    @autograd(False)
    def check_mask(self, attention_mask: Int[Tensor, "batch pos"] | None) -> None:
        """See `Adapter`."""
        if self._left_padded_float64(attention_mask):
            tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            mask = torch.tensor([[0, 1]], device=self.device)
            with without_user_hooks(self.model):
                check_left_padded(self.model(tokens, attention_mask=mask), self.name)

    def _left_padded_float64(self, attention_mask: Tensor | None) -> bool:
        if attention_mask is None or self.dtype != torch.float64:
            return False
        return not bool(attention_mask[:, 0].all())

    def logits(self, final: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        """See `Adapter`."""
        model: Any = self.model
        return model.adapter.apply_output_logits_transform(model.unembed(model.ln_final(final)))

    def _final(self, rows: Tensor, from_layer: int, attention_mask: Tensor | None) -> Tensor:
        # A key-value cache costs a copy. Some half-precision models only run with one: it casts v
        # to k's dtype, which rotary tables have made float32.
        options: dict[str, Any] = {} if self.dtype in HALVES else {"use_cache": False}
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            options |= {"attention_mask": attention_mask, "position_ids": positions}
        with stopped(self.model), skipped(self.model, from_layer):
            final = self.model(rows, **options)
        # Not via `check_mask`: hooks of this pass would see its prompt.
        if self._left_padded_float64(attention_mask):
            check_left_padded(final, self.name)
        return final

    def _fused(self) -> AbstractContextManager[None]:
        """See `Adapter`."""
        norms = {attrgetter(name)(self.model): norm for name, norm in self.norms().items()}
        return plain_norms({some: norms[some] for some in norms if hasattr(some, "hook_scale")})

    def empty_cache(self, n_prompts: int) -> dict[str, Any]:
        """See `Adapter`."""
        config: Any = self.core.config
        return {"past_key_values": DynamicCache(config=config), "use_cache": True}

    def _after_last_mlp(self) -> list[Any]:
        norms = [self._module(-1, "after_mlp"), self.model.ln_final]
        return [self.model.blocks[-1].hook_out, *norms, self.model.unembed]

    # ---- weights ---------------------------------------------------------------------------------

    def norm(self, layer: int, which: NormPlace) -> Norm:
        """See `Adapter`."""
        return bridge_norm(self.model.cfg, self._module(layer, _NORMS[which]))

    def norms(self) -> dict[str, Norm]:
        """All normalisations of the residual stream and of what is added to it, by module name."""
        found = {"ln_final": bridge_norm(self.model.cfg, self.model.ln_final)}
        for layer, norms in enumerate(self.block_norms):
            for name in filter(None, astuple(norms)):
                norm = bridge_norm(self.model.cfg, getattr(self.model.blocks[layer], name))
                found[f"blocks.{layer}.{name}"] = norm
        return {name: norm for name, norm in found.items() if norm.kind is not None}

    def _module(self, layer: int, where: str) -> Any:
        name = getattr(self.block_norms[layer], where)
        return None if name is None else getattr(self.model.blocks[layer], name)

    def qkv(
        self, layer: int, slot: Slot
    ) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"]]:
        """See `Adapter`."""
        latent = self._latents.get(layer)
        if latent is not None:
            return latent.linear(slot)
        attention, upper = self.model.blocks[layer].attn, slot.upper()
        with effective_weight(getattr(attention, slot)):
            weight, bias = getattr(attention, f"W_{upper}"), getattr(attention, f"b_{upper}")
        return weight, weight.new_zeros(len(weight), weight.shape[2]) if bias is None else bias

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """The matrix from `heads_point` to the residual stream."""
        block, latent = self.model.blocks[layer], self._latents.get(layer)
        if latent is not None:
            return latent.W_O()
        with effective_weight(block.attn.o):
            weight = block.attn.W_O
        scale = getattr(block, "residual_contribution_scale", 1.0)
        post = self.norm(layer, "after_attn").weight
        weight = weight if scale == 1.0 else weight * scale
        return weight if post is None else weight * post

    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        """See `Adapter`."""
        block, latent = self.model.blocks[layer], self._latents.get(layer)
        bias = block.attn.b_O if latent is None else latent.b_O()
        scale = getattr(block, "residual_contribution_scale", 1.0)
        return self.W_O(layer).new_zeros(self.d_model) if bias is None else bias * scale

    def unembedding(self) -> tuple[Float[Tensor, "d_model vocab"], Float[Tensor, " vocab"]]:
        """See `Adapter`."""
        model: Any = self.model
        with autograd(True):  # a soft cap has slope 1 at 0, so this is the factor before it
            zero = torch.zeros(1, device=self.device, dtype=self.dtype, requires_grad=True)
            after = model.adapter.apply_output_logits_transform(zero)
            scale = torch.autograd.grad(after, zero)[0]
        return model.unembed.W_U * scale, model.unembed.b_U * scale

    # ---- as a whole ------------------------------------------------------------------------------

    def copy(self) -> TransformerBridge:
        """A copy without hooks that shares no parameter; adapters are merged.

        It is sharded if the model is.
        """
        model, precision = self.model, precision_of(self.core)
        copy = boot(plain_copy(model), model.tokenizer, name=self.name).train(model.training)
        copy.cfg.default_prepend_bos = model.cfg.default_prepend_bos
        if precision is not None:
            shard(copy.original_model, copy.blocks, precision)
        return copy

    def parameters(self, group: Literal["qk", "all"]) -> list[nn.Parameter]:
        """The parameters of queries and keys, or all parameters that a pass reads."""
        if group == "all":
            unread = {id(parameter) for parameter in unread_parameters(self.model)}
            return [p for p in self.model.parameters() if id(p) not in unread]
        sides = list[Any]()
        for layer, block in enumerate(self.model.blocks):
            latent = self._latents.get(layer)
            for slot in "qk":
                sides += [getattr(block.attn, slot)] if latent is None else latent.projections(slot)
        return [p for side in sides for p in side.original_component.parameters()]

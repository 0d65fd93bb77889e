"""The adapter of a TransformerBridge: a `transformers` model under hooks.

It uses three kinds of handle: hook points, under the names of a HookedTransformer; weights of the
wrapped modules; and the norms before and after attention and MLP, identified in a forward pass and
not by name, since names differ between versions.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import cached_property, partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from sparse_tl import shards
from sparse_tl.lens.adapter import Adapter, Slot
from sparse_tl.lens.architecture import HALVES
from sparse_tl.lens.attaching import others_off
from sparse_tl.lens.booting import boot, check_alone
from sparse_tl.lens.bridge_passes import cached_columns, mask_place, skipped, stopped
from sparse_tl.lens.checks import circuit_graph
from sparse_tl.lens.layouts import Layout, layouts
from sparse_tl.lens.lora import effective_weight
from sparse_tl.lens.norms import Norm
from sparse_tl.lens.places import HookFunction, Place, after, before, read_call
from sparse_tl.lens.plain import plain_copy, unread_parameters
from sparse_tl.lens.points import hook_point
from sparse_tl.scopes import autograd

_PARTS = ("embed", "blocks", "ln_final", "unembed")


class BridgeAdapter(Adapter):
    """The adapter of a TransformerBridge."""

    model: TransformerBridge
    graph = cached_property(circuit_graph)

    def __init__(self, model: TransformerBridge) -> None:
        missing = [name for name in _PARTS if not isinstance(getattr(model, name, None), nn.Module)]
        if missing:
            raise ValueError(
                f"expected a language model with one stack of blocks; {model.cfg.model_name!r} "
                f"has no {missing}"
            )
        check_alone(model)
        super().__init__(model)
        self.layouts: list[Layout] = layouts(model)
        self.coupled = any(layout.after_attention is not None for layout in self.layouts)

    @property
    def core(self) -> nn.Module:
        """The wrapped model, possibly shared by several bridges."""
        return self.model.original_model

    def unsupported(self) -> str | None:
        """Why circuits are not defined for the model as configured; None if they are."""
        if any(here.before_mlp == here.before_attention is not None for here in self.layouts):
            return "its MLPs read what a normalisation makes for attention"
        return super().unsupported()

    # ---- hook points -----------------------------------------------------------------------------

    def place(self, name: str) -> HookPoint | Place:
        """See `Adapter`."""
        if name == "cached_columns":
            return partial(read_call, [self.core], cached_columns)
        layer, _, what = name.removeprefix("blocks.").partition(".")
        if what == "entering":
            return partial(before, hook_point(self.model, f"blocks.{layer}.hook_resid_pre"))
        if what == "attn.mask":
            return mask_place(self.model.blocks[int(layer)].attn, self.causal)
        if what == "mlp_read":
            return hook_point(self.model, f"blocks.{layer}.mlp.hook_in")
        if what == "attn.z_written":
            return self._written(int(layer))
        if what not in ("mlp_input", "mlp_normalized"):
            return hook_point(self.model, name)
        norm = self._module(int(layer), "before_mlp")
        if norm is None:
            # The norm's output would be the MLP's own input: run one function after the other.
            return partial(before, self.model.blocks[int(layer)].mlp, first=what == "mlp_input")
        return partial(before if what == "mlp_input" else after, norm)

    def heads_point(self, layer: int) -> str:
        """See `Adapter`; ``z_written`` is z divided by the scale of a norm of attention output."""
        if self.layouts[layer].after_attention is None:
            return super().heads_point(layer)
        return f"blocks.{layer}.attn.z_written"

    def _written(self, layer: int) -> Place:
        """What heads write from if the sum of their outputs is normalised: z over the scale.

        With W_h and the norm's weight w, ``norm(sum z_h W_h) = sum (z_h / scale) W_h w``. The scale
        is taken from the run itself, so the write is linear in this value, as in z without a norm.
        """
        attention, post = self.model.blocks[layer].attn, self.post_norm(layer)
        norm = self._module(layer, "after_attention")
        assert norm is not None
        if post.kind != "rms" or attention.b_O is not None:
            raise ValueError(
                f"expected what the heads of layer {layer} of {self.name!r} write to be normalised "
                "without being centred, and without a bias: else their parts do not add up"
            )

        def attach(function: HookFunction) -> list[RemovableHandle]:
            kept: list[Tensor] = []

            def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
                kept.append(args[0])

            def replaced(_module: nn.Module, args: tuple[Any, ...], _: Tensor) -> Tensor | None:
                z = kept.pop().unflatten(-1, (self.n_heads, -1))
                shown = (z / post.scale(args[0])[..., None]).to(z.dtype)
                changed = function(shown)
                if changed is None or changed is shown:
                    return None
                return self.heads_written(layer, changed).sum(dim=0)

            joined = attention.o.original_component  # reads z of all heads
            return [joined.register_forward_pre_hook(keep), norm.register_forward_hook(replaced)]

        return attach

    # ---- running ---------------------------------------------------------------------------------

    @autograd(False)
    def check_mask(self, attention_mask: Int[Tensor, "batch pos"] | None) -> None:
        """See `Adapter`."""
        if self._pads_in_float64(attention_mask):
            tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            mask = torch.tensor([[0, 1]], device=self.device)
            with others_off(self.model):
                self._check_padded(self.model(tokens, attention_mask=mask))

    def _pads_in_float64(self, attention_mask: Tensor | None) -> bool:
        """Whether prompts are padded on the left of a float64 model, which may return NaN."""
        return (
            attention_mask is not None
            and self.dtype == torch.float64
            and not bool(attention_mask[:, 0].all())
        )

    def _check_padded(self, found: Tensor) -> None:
        if found.isnan().any():
            raise ValueError(
                f"expected prompts of one length, or padded on the right; {self.name!r} in float64 "
                "returns NaN for prompts that are padded on the left, by itself: transformers "
                "computes softmax in float32, where the scores of padding are infinite"
            )

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
        if self._pads_in_float64(attention_mask):
            self._check_padded(final)
        return final

    def _after_last_mlp(self) -> list[Any]:
        norms = [self._module(-1, "after_mlp"), self.model.ln_final]
        return [self.model.blocks[-1].hook_out, *norms, self.model.unembed]

    # ---- weights ---------------------------------------------------------------------------------

    def norm(self, layer: int, which: Literal["attn", "mlp"]) -> Norm:
        """The normalisation before a layer's attention or MLP."""
        return self._norm(
            self._module(layer, "before_attention" if which == "attn" else "before_mlp")
        )

    def post_norm(self, layer: int) -> Norm:
        """The normalisation of a layer's attention output."""
        return self._norm(self._module(layer, "after_attention"))

    def norms(self) -> dict[str, Norm]:
        """All normalisations of the residual stream and of what is added to it, by module name."""
        found = {"ln_final": self._norm(self.model.ln_final)}
        for layer, layout in enumerate(self.layouts):
            for name in filter(None, astuple(layout)):
                norm = self._norm(getattr(self.model.blocks[layer], name))
                found[f"blocks.{layer}.{name}"] = norm
        return {name: norm for name, norm in found.items() if norm.kind is not None}

    def _module(self, layer: int, where: str) -> Any:
        name = getattr(self.layouts[layer], where)
        return None if name is None else getattr(self.model.blocks[layer], name)

    def _norm(self, module: Any) -> Norm:
        inner = None if module is None else module.original_component
        if module is None or isinstance(inner, nn.Identity):
            return Norm(None, None, None, 0.0)
        if not hasattr(module, "uses_rms_norm"):
            raise ValueError(
                f"expected normalisations that TransformerLens describes; {self.name!r} has a "
                f"{type(inner).__name__} as one of them"
            )
        cfg: Any = self.model.cfg
        rms = bool(module.uses_rms_norm)
        weight, bias = getattr(inner, "weight", None), getattr(inner, "bias", None)
        offset = getattr(module, "uses_weight_offset", None)
        if offset is None:  # TransformerLens before 4.1
            offset = rms and bool(getattr(cfg, "rmsnorm_uses_offset", False))
        if offset and weight is not None:
            weight = 1.0 + weight
        known = [getattr(inner, name, None) for name in ("eps", "variance_epsilon")]
        eps = next((value for value in known if value is not None), cfg.eps)
        return Norm("rms" if rms else "layer", weight, None if rms else bias, float(eps))

    def qkv(
        self, layer: int, slot: Slot
    ) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"]]:
        """A projection and its bias; k and v of key-value heads."""
        attention, upper = self.model.blocks[layer].attn, slot.upper()
        with effective_weight(getattr(attention, slot)):
            weight, bias = getattr(attention, f"W_{upper}"), getattr(attention, f"b_{upper}")
        return weight, weight.new_zeros(len(weight), weight.shape[2]) if bias is None else bias

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """The matrix from `heads_point` to the residual stream."""
        block = self.model.blocks[layer]
        with effective_weight(block.attn.o):
            weight = block.attn.W_O
        scale = getattr(block, "residual_contribution_scale", 1.0)
        post = self.post_norm(layer).weight
        weight = weight if scale == 1.0 else weight * scale
        return weight if post is None else weight * post

    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        """See `Adapter`."""
        block = self.model.blocks[layer]
        bias, scale = block.attn.b_O, getattr(block, "residual_contribution_scale", 1.0)
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

        It is dealt to ranks if the model is.
        """
        model, precision = self.model, shards.precision_of(self.core)
        copy = boot(plain_copy(model), model.tokenizer, name=self.name).train(model.training)
        copy.cfg.default_prepend_bos = model.cfg.default_prepend_bos
        if precision is not None:
            shards.deal(copy.original_model, copy.blocks, precision)
        return copy

    def parameters(self, group: Literal["qk", "all"]) -> list[nn.Parameter]:
        """The parameters of queries and keys, or all parameters that a pass reads."""
        if group == "all":
            unread = {id(parameter) for parameter in unread_parameters(self.model)}
            return [p for p in self.model.parameters() if id(p) not in unread]
        sides = [getattr(block.attn, slot) for block in self.model.blocks for slot in "qk"]
        return [p for side in sides for p in side.original_component.parameters()]

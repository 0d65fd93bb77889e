"""The adapters of TransformerBridge and HookedTransformer, and what they say of parameters.

A bridge is a `transformers` model under hooks. Its adapter uses hook points, under the names of a
HookedTransformer; the weights of the wrapped modules; and the norms before and after attention and
MLP. Names do not tell which norm is which: those after OLMo-2's attention and MLP are ``ln1`` and
``ln2`` in some versions of TransformerLens, ``ln1_post`` and ``ln2_post`` in others. A pass over
one token does: a norm whose input is the very tensor that attention returned comes after attention.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.exceptions import StopAtLayerException
from transformer_lens.model_bridge.generalized_components.mpt_alibi_attention import (
    MPTALiBiAttentionBridge,
)
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sparse_tl.backend.attention import AttentionMask
from sparse_tl.backend.bridges import boot, check_alone, plain_model, unread_parameters
from sparse_tl.backend.checks import circuit_graph
from sparse_tl.backend.devices import precision_of, shard, whole
from sparse_tl.backend.hook_points import (
    HookedModel,
    HookedTransformer,
    HookFunction,
    Model,
    Place,
    TransformerBridge,
    Viewed,
    before_branch,
    between,
    hook_point,
    hooks_on,
    read_call,
    read_input,
    stand_in,
)
from sparse_tl.backend.hooks import without_user_hooks
from sparse_tl.backend.interface import Adapter, Analysis, NormPlace
from sparse_tl.backend.latent import latent_attention
from sparse_tl.backend.lora import effective_weight
from sparse_tl.backend.numerics import HALVES, Norm
from sparse_tl.contexts import autograd
from sparse_tl.graph import Slot


def adapt(model: HookedModel) -> Adapter:
    """The adapter of a model, by its class; for a SparseTransformer, that of the wrapped model."""
    under_gates = getattr(model, "model_under_gates", None)
    inner = model if under_gates is None else under_gates()
    if isinstance(inner, TransformerBridge):
        return BridgeAdapter(inner)
    if isinstance(inner, HookedTransformer):
        return HookedAdapter(inner)
    raise TypeError(
        f"a {type(model).__name__} is not a TransformerBridge or HookedTransformer, nor a "
        "SparseTransformer around one"
    )


def read_parameters(module: nn.Module | HookedModel) -> dict[str, nn.Parameter]:
    """The parameters of a module, by name, that forward passes read.

    Bridges also have others: joint parameters that were split and are no longer read.
    """
    assert isinstance(module, nn.Module)
    models = [part for part in module.modules() if isinstance(part, Model)]
    known = {id(p) for model in models for p in model.parameters()}
    read = {id(p) for model in models for p in adapt(model).parameters("all")}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if id(parameter) in read or id(parameter) not in known
    }


def weights_digest(model: nn.Module | HookedModel) -> str:
    """A hash of the parameters that forward passes read, for telling models apart."""
    digest = hashlib.sha256()
    for name, parameter in read_parameters(model).items():
        flat = whole(parameter.detach()).flatten()
        # Strided samples suffice to distinguish models, and are cheap for billions of weights.
        samples = flat[:: max(1, flat.numel() // 1024)]
        digest.update(name.encode() + samples.double().cpu().numpy().tobytes())
    return digest.hexdigest()


# ---- bridges -------------------------------------------------------------------------------------

_PARTS = ("embed", "blocks", "ln_final", "unembed")
_NORM_NAMES = ("ln1", "ln2", "ln1_post", "ln2_post")


class BridgeAdapter(Adapter):
    """The adapter of a TransformerBridge."""

    model: TransformerBridge
    graph = cached_property(circuit_graph)

    def __init__(self, model: TransformerBridge) -> None:
        missing = [part for part in _PARTS if not isinstance(getattr(model, part, None), nn.Module)]
        if missing:
            raise ValueError(
                f"{model.cfg.model_name!r} is not a language model with one stack of blocks: it "
                f"has no {missing}"
            )
        check_alone(model)
        super().__init__(model)
        self.block_norms: list[dict[NormPlace, str]] = _block_norms(model)
        self.coupled = any("after_attn" in norms for norms in self.block_norms)
        self._latents = latent_attention(model, self.n_heads)
        if self._latents:
            self.n_kv_heads = self.n_heads  # keys and values of each are projected from the latent
            self.d_query = next(iter(self._latents.values())).d_query

    @property
    def core(self) -> nn.Module:
        """The wrapped model, possibly shared by several bridges."""
        return self.model.original_model

    @property
    def random(self) -> bool:
        return self.core.training

    def unsupported(self, analysis: Analysis) -> str | None:
        if analysis == "relp":
            if self._latents:
                return "there is no rule for the norms inside its attention"
            mlps = filter(None, (getattr(block, "mlp", None) for block in self.model.blocks))
            if any(getattr(mlp, "hook_pre", None) is mlp.hook_in for mlp in mlps):
                return "its experts have no hook points around their activation functions"
        elif any("attn" in n and n["attn"] == n.get("mlp") for n in self.block_norms):
            return "its MLPs read what a normalisation makes for attention"
        elif any(here.indexed for here in self._latents.values()):
            return "an index of its own, which no edge enters, chooses what its heads attend to"
        return super().unsupported(analysis)

    # ---- hook points -----------------------------------------------------------------------------

    def _own_place(self, layer: int, what: str) -> HookPoint | Viewed | Place | None:
        block, latent = self.model.blocks[layer], self._latents.get(layer)
        if what == "attn.mask":
            return _mask_place(block.attn, self.causal)
        if what == "attn.z_written":
            return self._written(layer)
        if what == "mlp_read":
            return hook_point(self.model, f"blocks.{layer}.mlp.hook_in")
        if what == "hook_resid_mid" and what not in block._modules:
            # Here the name means the MLP's input alone; the residual stream bypasses that point.
            point = hook_point(self.model, f"blocks.{layer}.{what}")
            end = hook_point(self.model, f"blocks.{layer}.hook_resid_post")
            return partial(before_branch, point, end)
        return None if latent is None else latent.place(what)

    def _cached_columns(self, kwargs: dict[str, Any]) -> int:
        # Can exceed the keys of a layer with a sliding window, which are the last of these columns.
        cache = kwargs.get("past_key_values")
        return 0 if cache is None else int(cache.get_seq_length())

    def read_point(self, layer: int, slot: Slot) -> str:
        """See `Adapter`; under latent attention, what q, k or v reads (see `LatentAttention`)."""
        at = f"blocks.{layer}.attn"
        return f"{at}.read_{slot}" if self._latents.get(layer) else super().read_point(layer, slot)

    def heads_point(self, layer: int) -> str:
        """See `Adapter`; ``z_written`` is z divided by the scale of a norm of attention output."""
        if "after_attn" not in self.block_norms[layer]:
            return super().heads_point(layer)
        return f"blocks.{layer}.attn.z_written"

    def _written(self, layer: int) -> Place:
        """The place of z divided by the scale, from which heads write if their sum is normalised.

        With W_h and the norm's weight w, ``norm(sum z_h W_h) = sum (z_h / scale) W_h w``. The scale
        is taken from the run itself, so the write is linear in this value, as in z without a norm.
        """
        attention, post = self.model.blocks[layer].attn, self.norm(layer, "after_attn")
        norm = self.norm_module(layer, "after_attn")
        if post.kind != "rms" or attention.b_O is not None:
            raise ValueError(
                f"what the heads of layer {layer} of {self.name!r} write has a bias or is centred "
                "before it is normalised: their parts do not add up"
            )

        def scaled(z: Tensor, written: Tensor) -> Tensor:
            z = z.unflatten(-1, (self.n_heads, -1))
            return (z / post.scale(written)[..., None]).to(z.dtype)

        def write(changed: Tensor) -> Tensor:
            return self.heads_written(layer, changed).sum(dim=0)

        return partial(between, attention.o.original_component, norm, scaled, write)

    # ---- running ---------------------------------------------------------------------------------

    def logits(self, final: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        model: Any = self.model
        return model.adapter.apply_output_logits_transform(model.unembed(model.ln_final(final)))

    def _final(self, rows: Tensor, from_layer: int, attention_mask: Tensor | None) -> Tensor:
        # A key-value cache costs a copy. Some half-precision models only run with one: it casts v
        # to k's dtype, which rotary tables have made float32.
        options: dict[str, Any] = {} if self.dtype in HALVES else {"use_cache": False}
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            options |= {"attention_mask": attention_mask, "position_ids": positions}
        with ExitStack() as until:
            until.enter_context(_stopped(self.model))
            for block in self.model.blocks[:from_layer]:
                until.callback(stand_in(block, lambda _: _handed_on))
            return self.model(rows, **options)

    def empty_cache(self, n_prompts: int, n_columns: int) -> dict[str, Any]:
        config: Any = self.core.config
        cache = DynamicCache(config=config)
        cache.layers = [
            _Allocated(n_columns) if type(layer) is DynamicLayer else layer
            for layer in cache.layers
        ]
        return {"past_key_values": cache, "use_cache": True}

    # ---- weights ---------------------------------------------------------------------------------

    def norm_names(self, layer: int) -> dict[NormPlace, str]:
        return self.block_norms[layer]

    def norm_of(self, module: Any) -> Norm:
        inner = None if module is None else module.original_component
        if module is None or isinstance(inner, nn.Identity):
            return Norm(None, None, None, 0.0)
        cfg: Any = self.model.cfg
        if not hasattr(module, "uses_rms_norm"):
            raise ValueError(
                f"a norm of {self.name!r}, {type(inner).__name__}, is none that TransformerLens "
                "describes"
            )
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

    def qkv(self, layer: int, slot: Slot) -> tuple[Tensor, Tensor]:
        latent = self._latents.get(layer)
        if latent is not None:
            return latent.linear(slot)
        attention, upper = self.model.blocks[layer].attn, slot.upper()
        with effective_weight(getattr(attention, slot)):
            weight, bias = getattr(attention, f"W_{upper}"), getattr(attention, f"b_{upper}")
        return weight, weight.new_zeros(len(weight), weight.shape[2]) if bias is None else bias

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
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
        block = self.model.blocks[layer]
        bias = block.attn.o.original_component.bias
        scale = getattr(block, "residual_contribution_scale", 1.0)
        return self.W_O(layer).new_zeros(self.d_model) if bias is None else bias * scale

    def unembedding(self) -> tuple[Float[Tensor, "d_model vocab"], Float[Tensor, " vocab"]]:
        model: Any = self.model
        with autograd(True):  # a soft cap has slope 1 at 0, so this is the factor before it
            zero = torch.zeros(1, device=self.device, dtype=self.dtype, requires_grad=True)
            after = model.adapter.apply_output_logits_transform(zero)
            scale = torch.autograd.grad(after, zero)[0].item()
        weight, bias = model.unembed.W_U, model.unembed.b_U
        return (weight, bias) if scale == 1 else (weight * scale, bias * scale)

    # ---- as a whole ------------------------------------------------------------------------------

    def copy(self) -> TransformerBridge:
        """See `Adapter`; the copy has no hooks, and adapters are merged."""
        model, precision = self.model, precision_of(self.core)
        plain = copy.deepcopy(plain_model(model))
        made = boot(plain, model.tokenizer, name=self.name).train(model.training)
        made.cfg.default_prepend_bos = model.cfg.default_prepend_bos
        if precision is not None:
            shard(made.original_model, made.blocks, precision)
        return made

    def parameters(self, group: Literal["qk", "all"]) -> list[nn.Parameter]:
        if group == "all":
            unread = {id(parameter) for parameter in unread_parameters(self.model)}
            return [p for p in self.model.parameters() if id(p) not in unread]
        sides = list[Any]()
        for layer, block in enumerate(self.model.blocks):
            latent = self._latents.get(layer)
            for slot in "qk":
                sides += [getattr(block.attn, slot)] if latent is None else latent.projections(slot)
        return [p for side in sides for p in side.original_component.parameters()]


_found: WeakKeyDictionary[nn.Module, list[dict[NormPlace, str]]] = WeakKeyDictionary()


class _Allocated(DynamicLayer):
    """A cache layer with room for all columns: concatenation would copy it for each new one."""

    def __init__(self, n_columns: int) -> None:
        super().__init__()
        self.n_columns = n_columns

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        new, start = (key_states, value_states), self.get_seq_length()
        end = start + key_states.shape[-2]
        if not start:
            self.room = [x.new_empty(*x.shape[:-2], self.n_columns, x.shape[-1]) for x in new]
            self.is_initialized = True
        for whole_layer, columns in zip(self.room, new, strict=True):
            whole_layer[..., start:end, :] = columns
        self.keys, self.values = (whole_layer[..., :end, :] for whole_layer in self.room)
        return self.keys, self.values


def _block_norms(model: TransformerBridge) -> list[dict[NormPlace, str]]:
    """The names of each block's norms by their place, determined when a model is first seen.

    The norm before attention may be the same as the norm before the MLP.
    """
    if model not in _found:
        _found[model] = [_by_place(given, written) for given, written in _calls(model)]
    return _found[model]


@torch.no_grad()
def _calls(model: TransformerBridge) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """What the parts of each block are given and what they write, by name."""
    calls = [(dict[str, Tensor](), dict[str, Tensor]()) for _ in model.blocks]

    def note(layer: int, name: str, _part: Any, args: Any, kwargs: Any, output: Any) -> None:
        given, written = calls[layer]
        given[name] = args[0] if args else kwargs["hidden_states"]
        written[name] = output[0] if isinstance(output, tuple) else output

    hooks = [
        (part, partial(note, layer, name))
        for layer, block in enumerate(model.blocks)
        for name in ("attn", "mlp", *_NORM_NAMES)
        if isinstance(part := getattr(block, name, None), nn.Module)
    ]
    with without_user_hooks(model), hooks_on(hooks), _stopped(model):
        model(torch.zeros(1, 1, dtype=torch.long, device=model.embed.W_E.device))
    return calls


def _by_place(given: dict[str, Tensor], written: dict[str, Tensor]) -> dict[NormPlace, str]:
    found: dict[NormPlace, str] = {}
    for name in filter(given.__contains__, _NORM_NAMES):
        if given.get("attn") is written[name]:
            found["attn"] = name
        if given.get("mlp") is written[name]:
            found["mlp"] = name
        elif given[name] is written.get("attn"):
            found["after_attn"] = name
        elif given[name] is written.get("mlp"):
            found["after_mlp"] = name
    return found


def _mask_place(attention: nn.Module, causal: bool) -> Place:
    """The place of a layer's mask: at the call of attention, or once it has made its own mask."""
    read = partial(_mask, attention, causal)
    own: Any = getattr(attention, "hook_dsa_mask", None)
    if own is None:
        return partial(read_call, [attention], read)

    def attach(function: HookFunction) -> list[RemovableHandle]:
        called: dict[str, AttentionMask] = {}

        def add(_module: nn.Module, _args: Any, chosen: Float[Tensor, "prompt query key"]) -> None:
            mask = called.pop("mask")
            both = chosen[:, None] if mask.given is None else mask.given + chosen[:, None]
            function(AttentionMask(mask.causal, given=both))

        handles = read_call([attention], read, partial(called.__setitem__, "mask"))
        return [*handles, own.register_forward_hook(add)]

    return attach


def _mask(attention: nn.Module, causal: bool, kwargs: dict[str, Any]) -> AttentionMask:
    """The mask that attention applies when it is called with these arguments."""
    given = kwargs.get("attention_mask")
    if given is None:
        return AttentionMask(causal)
    if isinstance(attention, MPTALiBiAttentionBridge):
        given = ~given  # MPT's masks are true where a pair is masked
    # A mask of four axes includes the causal order, windows and chunks; attention adds nothing.
    return AttentionMask(causal and given.ndim < 4, given=given)


def _stopped(model: TransformerBridge) -> RemovableHandle:
    """Inside the block, calls of the model return the input of the final normalisation."""

    def stop(_module: nn.Module, args: tuple[Any, ...]) -> None:
        raise StopAtLayerException(args[0])

    return model.ln_final.register_forward_pre_hook(stop)


def _handed_on(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """In place of a layer: the model still builds masks and position embeddings."""
    return hidden_states


# ---- HookedTransformers -------------------------------------------------------------------------

_NORMS: dict[NormPlace, str] = {
    "attn": "ln1",
    "mlp": "ln2",
    "after_attn": "ln1_post",
    "after_mlp": "ln2_post",
}
_QK = ("W_Q", "W_K", "b_Q", "b_K")


class HookedAdapter(Adapter):
    """The adapter of a HookedTransformer."""

    model: HookedTransformer
    graph = cached_property(circuit_graph)

    def unsupported(self, analysis: Analysis) -> str | None:
        cfg = self.model.cfg
        if analysis == "circuits" and cfg.positional_embedding_type == "shortformer":
            return "its keys and queries read position embeddings besides the residual stream"
        if analysis == "circuits" and cfg.ungroup_grouped_query_attention:
            return "cfg.ungroup_grouped_query_attention is on"
        return super().unsupported(analysis)

    def _own_place(self, layer: int, what: str) -> Place | None:
        block = self.model.blocks[layer]
        if what == "mlp_read":
            return partial(read_input, block.mlp)
        if what == "attn.mask":
            return partial(read_call, [block.attn], partial(self._mask, block.attn))
        return None

    @property
    def _given_cache(self) -> list[nn.Module]:
        # `generate` calls `forward` itself, which skips hooks on the model itself.
        return [self.core, self.model.blocks[0]]

    def _cached_columns(self, kwargs: dict[str, Any]) -> int:
        cache = kwargs.get("past_kv_cache")
        entry = kwargs.get("past_kv_cache_entry") if cache is None else cache[0]
        return 0 if entry is None else entry.past_keys.shape[1]

    def _mask(self, attention: Any, kwargs: dict[str, Any]) -> AttentionMask:
        """The mask of a layer's attention when it is called with these arguments."""
        if not self.causal:  # all masks are ignored, even for padding
            return AttentionMask(causal=False)
        window = self.model.cfg.window_size if attention.attn_type == "local" else None
        real = kwargs.get("attention_mask")
        given = None if real is None else real[:, None, None, :]
        return AttentionMask(causal=True, window=window, given=given)

    def logits(self, final: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        model = self.model
        if model.cfg.normalization_type is not None:
            final = getattr(model, "ln_final")(final)  # noqa: B009 - absent without normalisation
        # The model's own unembedding copies its whole matrix in every pass.
        unembed = model.unembed
        logits = unembed.hook_out(F.linear(unembed.hook_in(final), unembed.W_U.T, unembed.b_U))
        cap = model.cfg.output_logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    def norm_names(self, layer: int) -> dict[NormPlace, str]:
        block = self.model.blocks[layer]
        return {which: name for which, name in _NORMS.items() if hasattr(block, name)}

    def norm_of(self, module: Any) -> Norm:
        cfg = self.model.cfg
        if module is None or cfg.normalization_type is None:
            return Norm(None, None, None, cfg.eps)
        kind = "layer" if cfg.normalization_type.startswith("LN") else "rms"
        return Norm(kind, getattr(module, "w", None), getattr(module, "b", None), cfg.eps)

    def qkv(self, layer: int, slot: Slot) -> tuple[Tensor, Tensor]:
        attention, upper = self.model.blocks[layer].attn, slot.upper()
        grouped = getattr(attention, f"_W_{upper}", None)  # not repeated for each query head
        if grouped is not None:
            return grouped, getattr(attention, f"_b_{upper}")
        return getattr(attention, f"W_{upper}"), getattr(attention, f"b_{upper}")

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        return self.model.blocks[layer].attn.W_O

    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        return self.model.blocks[layer].attn.b_O

    def unembedding(self) -> tuple[Float[Tensor, "d_model vocab"], Float[Tensor, " vocab"]]:
        return self.model.unembed.W_U, self.model.unembed.b_U

    def copy(self) -> HookedTransformer:
        made = copy.deepcopy(self.model)
        for module in made.modules():  # what stands in for a `forward` would run the original's
            module.__dict__.pop("forward", None)
        return made

    def parameters(self, group: Literal["qk", "all"]) -> list[nn.Parameter]:
        if group == "all":
            return list(self.model.parameters())
        return [
            parameter
            for block in self.model.blocks
            for name, parameter in block.attn.named_parameters(recurse=False)
            if name.lstrip("_") in _QK
        ]

    def _final(self, rows: Tensor, from_layer: int, attention_mask: Tensor | None) -> Tensor:
        options: dict[str, Any] = {"stop_at_layer": self.n_layers}
        if attention_mask is not None:
            options["attention_mask"] = attention_mask
        if rows.is_floating_point():
            options["start_at_layer"] = from_layer
        return self.model(rows, **options)

    def empty_cache(self, n_prompts: int, n_columns: int) -> dict[str, Any]:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        # Without a mask, the model would mistake tokens that also serve as padding for padding.
        real = torch.ones(n_prompts, 1, dtype=torch.long, device=self.device)
        cache = TransformerLensKeyValueCache.init_cache(self.model.cfg, self.device, n_prompts)
        return {"past_kv_cache": cache, "attention_mask": real}

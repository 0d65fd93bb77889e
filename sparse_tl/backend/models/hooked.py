"""The adapter of a HookedTransformer, a class that TransformerLens 4 removed."""

from __future__ import annotations

import copy
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from sparse_tl.backend.checks import circuit_graph
from sparse_tl.backend.core.adapter import Adapter
from sparse_tl.backend.core.attention import AttentionMask
from sparse_tl.backend.core.numerics import Norm
from sparse_tl.backend.core.places import (
    Place,
    after,
    before,
    read_call,
    read_input,
)
from sparse_tl.backend.core.points import Analysis, HookedTransformer, NormPlace, hook_point
from sparse_tl.graph import Slot

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
        """See `Adapter`."""
        cfg = self.model.cfg
        if analysis == "circuits" and cfg.positional_embedding_type == "shortformer":
            return "its keys and queries read position embeddings besides the residual stream"
        if analysis == "circuits" and cfg.ungroup_grouped_query_attention:
            return "cfg.ungroup_grouped_query_attention is on"
        return super().unsupported(analysis)

    def place(self, name: str) -> HookPoint | Place:
        """See `Adapter`."""
        if name == "cached_columns":
            # `generate` calls `forward` itself, which skips hooks on the model itself.
            return partial(read_call, [self.model, self.model.blocks[0]], _cached)
        layer, _, what = name.removeprefix("blocks.").partition(".")
        if what == "entering":
            return partial(before, hook_point(self.model, f"blocks.{layer}.hook_resid_pre"))
        if what in ("mlp_input", "mlp_normalized"):
            norm = self.model.blocks[int(layer)].ln2
            return partial(before if what == "mlp_input" else after, norm)
        if what == "mlp_read":
            return partial(read_input, self.model.blocks[int(layer)].mlp)
        if what == "attn.mask":
            attention = self.model.blocks[int(layer)].attn
            return partial(read_call, [attention], partial(self._mask, attention))
        return hook_point(self.model, name)

    def _mask(self, attention: Any, kwargs: dict[str, Any]) -> AttentionMask:
        """The mask of a layer's attention when it is called with these arguments."""
        if not self.causal:  # all masks are ignored, even for padding
            return AttentionMask(causal=False)
        window = self.model.cfg.window_size if attention.attn_type == "local" else None
        real = kwargs.get("attention_mask")
        given = None if real is None else real[:, None, None, :]
        return AttentionMask(causal=True, window=window, given=given)

    def logits(self, final: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        """See `Adapter`."""
        model = self.model
        if model.cfg.normalization_type is not None:
            final = getattr(model, "ln_final")(final)  # noqa: B009 - absent without normalisation
        # The model's own unembedding copies its whole matrix in every pass.
        unembed = model.unembed
        logits = unembed.hook_out(F.linear(unembed.hook_in(final), unembed.W_U.T, unembed.b_U))
        cap = model.cfg.output_logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    def norm(self, layer: int, which: NormPlace) -> Norm:
        """See `Adapter`."""
        return self._norm(getattr(self.model.blocks[layer], _NORMS[which], None))

    def norms(self) -> dict[str, Norm]:
        """See `Adapter`."""
        if self.model.cfg.normalization_type is None:
            return {}
        found = {
            f"blocks.{layer}.{name}": getattr(block, name, None)
            for layer, block in enumerate(self.model.blocks)
            for name in _NORMS.values()
        }
        found["ln_final"] = getattr(self.model, "ln_final", None)
        return {name: self._norm(norm) for name, norm in found.items() if norm is not None}

    def _norm(self, module: nn.Module | None) -> Norm:
        cfg = self.model.cfg
        name = cfg.normalization_type
        kind = (
            None if name is None or module is None else "layer" if name.startswith("LN") else "rms"
        )
        return Norm(kind, getattr(module, "w", None), getattr(module, "b", None), cfg.eps)

    def qkv(
        self, layer: int, slot: Slot
    ) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"]]:
        """See `Adapter`."""
        attention, upper = self.model.blocks[layer].attn, slot.upper()
        grouped = getattr(attention, f"_W_{upper}", None)  # not repeated for each query head
        if grouped is not None:
            return grouped, getattr(attention, f"_b_{upper}")
        return getattr(attention, f"W_{upper}"), getattr(attention, f"b_{upper}")

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """See `Adapter`."""
        return self.model.blocks[layer].attn.W_O

    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        """See `Adapter`."""
        return self.model.blocks[layer].attn.b_O

    def unembedding(self) -> tuple[Float[Tensor, "d_model vocab"], Float[Tensor, " vocab"]]:
        """See `Adapter`."""
        return self.model.unembed.W_U, self.model.unembed.b_U

    def copy(self) -> HookedTransformer:
        """See `Adapter`."""
        made = copy.deepcopy(self.model)
        for module in made.modules():  # what stands in for a `forward` would run the original's
            module.__dict__.pop("forward", None)
        return made

    def parameters(self, group: Literal["qk", "all"]) -> list[nn.Parameter]:
        """See `Adapter`."""
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

    def empty_cache(self, n_prompts: int) -> dict[str, Any]:
        """See `Adapter`."""
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        # Without a mask, the model would mistake tokens that also serve as padding for padding.
        real = torch.ones(n_prompts, 1, dtype=torch.long, device=self.device)
        cache = TransformerLensKeyValueCache.init_cache(self.model.cfg, self.device, n_prompts)
        return {"past_kv_cache": cache, "attention_mask": real}

    def _after_last_mlp(self) -> list[Any]:
        block = self.model.blocks[-1]
        norms = [getattr(block, "ln2_post", None), getattr(self.model, "ln_final", None)]
        return [block.hook_resid_post, *norms, self.model.unembed]


def _cached(kwargs: dict[str, Any]) -> Int[Tensor, ""]:
    cache = kwargs.get("past_kv_cache")
    entry = kwargs.get("past_kv_cache_entry") if cache is None else cache[0]
    return torch.tensor(0 if entry is None else entry.past_keys.shape[1])

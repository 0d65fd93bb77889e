"""Latent attention (DeepSeek): queries, keys and values computed from a small vector, the latent.

With x the normalised residual stream and R the rotation of a position:

    a = A x,            q_h = [W_h norm(a), R W'_h norm(a)]
    [c, r] = C x,       k_h = [U_h norm(c), R r],    v_h = V_h norm(c)

The norms make q, k and v nonlinear in x, but q is a function of a, k of [c, r] and v of c, which
are linear in x. This is what q, k and v *read*. (Without a latent for queries, q reads itself
before the rotation.) Every head gets its own copy, even of r, which all heads share. If a copy is
replaced, or a gradient is needed, q, k and v are computed from the copies.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.mla_attention import MLAAttentionBridge

from sparse_tl.backend.hook_points import HookFunction, Place, Viewed, hooked
from sparse_tl.backend.lora import effective

Read = Float[Tensor, "rows pos head d_read"]

_running: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""During a call of attention: its rotation, and replacements for what q, k and v read."""


class LatentAttention:
    """One layer's latent attention."""

    def __init__(self, attention: Any, n_heads: int) -> None:
        self.attention, self.n_heads = attention, n_heads
        inner = attention.original_component
        self._d_latent: int = inner.kv_lora_rank
        self._d_plain: int = inner.qk_nope_head_dim  # entries of q and k without rotation
        self.d_query: int = self._d_plain + inner.qk_rope_head_dim

    @property
    def indexed(self) -> bool:
        """Whether an index, besides queries and keys, chooses the keys that a query attends to."""
        return type(self.attention).forward is not MLAAttentionBridge.forward

    def _names(self, slot: str) -> tuple[str, str, str]:
        """Module names for q, k or v: first projection, norm of the latent, second projection."""
        if slot != "q":
            return "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
        direct = getattr(self.attention.original_component, "q_lora_rank", None) is None
        return ("q_proj", "", "") if direct else ("q_a_proj", "q_a_layernorm", "q_b_proj")

    def projections(self, slot: str) -> list[Any]:
        """The modules that project to q, k or v; keys and values share theirs."""
        first, _, second = self._names(slot)
        return [getattr(self.attention, name) for name in (first, second) if name]

    def linear(
        self, slot: str
    ) -> tuple[Float[Tensor, "head d_model d_read"], Float[Tensor, "head d_read"]]:
        """The matrix and the bias from the normalised residual stream to what q, k or v reads."""
        inner: Any = effective(self.projections(slot)[0].original_component)
        bias = inner.weight.new_zeros(len(inner.weight)) if inner.bias is None else inner.bias
        return self._shown(slot, inner.weight.mT).transpose(0, 1), self._shown(slot, bias)

    def _shown(
        self, slot: str, value: Float[Tensor, "*rows d"]
    ) -> Float[Tensor, "*rows head d_read"]:
        """Each head's copy of what its q, k or v reads, from the output of the first projection."""
        if self._names(slot)[0] == "q_proj":
            return value.unflatten(-1, (self.n_heads, -1))
        value = value[..., : self._d_latent] if slot == "v" else value
        return value.unsqueeze(-2).expand(*value.shape[:-1], self.n_heads, -1)

    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """The matrix from z to the residual stream."""
        inner: Any = effective(self.attention.o.original_component)
        return inner.weight.mT.unflatten(0, (self.n_heads, -1))

    # ---- attaching -------------------------------------------------------------------------------

    def place(self, name: str) -> Viewed | Place | None:
        """The place with this name; None if it is simply a hook point.

        ``attn.hook_q`` to ``hook_z`` are seen as ``[batch, pos, head, d_head]``, ``attn.read_q``
        to ``read_v`` as ``[batch, pos, head, d_read]``.
        """
        kind, _, slot = name.rpartition("_")
        if kind == "attn.hook" and slot in ("q", "k", "v", "z"):
            view = partial(_by_head, self.n_heads) if slot == "z" else _swapped
            return Viewed(getattr(self.attention, f"hook_{slot}"), view)
        return self._reading(slot) if kind == "attn.read" else None

    def _reading(self, slot: str) -> Place:
        """Where to attach to what q, k or v reads, if replaced copies would bypass no hook."""
        names = [*self._names(slot)[1:], f"hook_{'q' if slot == 'q' else 'kv'}_latent"]
        names += [] if slot == "v" else [f"hook_rot_{slot}", "hook_cos", "hook_sin"]
        for name in filter(None, names):
            for within, part in getattr(self.attention, name).named_modules(prefix=name):
                if isinstance(part, HookPoint) and hooked(part):
                    raise ValueError(
                        f"a hook on attn.{within} would not act on heads that are run on their "
                        f"own; remove it, or use attn.hook_{slot} instead"
                    )
        return partial(self._attach, slot)

    def _attach(self, slot: str, function: HookFunction) -> list[RemovableHandle]:
        running = _running.setdefault(self.attention, {})

        def begin(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            running.clear()
            running["rotation"] = kwargs.get("position_embeddings")

        def read(_module: nn.Module, _args: Any, output: Tensor) -> None:
            shown = running[slot] if slot in running else self._shown(slot, output)
            found = function(shown)
            differentiable = torch.is_grad_enabled() and shown.requires_grad
            if found is not None and (found is not shown or differentiable):
                running[slot] = found

        def write(_module: nn.Module, _args: Any, value: Tensor) -> Tensor | None:
            if slot not in running:
                return None
            made = self._made(slot, running.pop(slot), running["rotation"])
            return made.transpose(1, 2).to(value.dtype)

        point: Any = getattr(self.attention, f"hook_{slot}")
        return [
            self.attention.register_forward_pre_hook(begin, with_kwargs=True),
            self.projections(slot)[0].register_forward_hook(read),
            point.register_forward_hook(write, prepend=True),
        ]

    def _made(self, slot: str, read: Read, rotation: Any) -> Float[Tensor, "rows pos head d_head"]:
        """q, k or v of each head from what it reads."""
        _, norm, second = self._names(slot)
        shared = read.new_empty(*read.shape[:-1], 0)
        if slot == "k":
            read, shared = read[..., : self._d_latent], read[..., self._d_latent :]
        if second:
            inner: Any = effective(getattr(self.attention, second).original_component)
            weight = inner.weight.unflatten(0, (self.n_heads, -1))
            if slot != "q":
                keys = slice(None, self._d_plain), slice(self._d_plain, None)
                weight = weight[:, keys[slot == "v"]]
            latent = getattr(self.attention, norm)(read)
            read = torch.einsum("rphe,hde->rphd", latent, weight)
        if slot == "v":
            return read
        read = torch.cat([read, shared], dim=-1)
        plain, rotated = read[..., : self._d_plain], read[..., self._d_plain :]
        return torch.cat([plain, self._rotated(rotated, rotation)], dim=-1)

    def _rotated(self, value: Read, rotation: Any) -> Read:
        """Rotate pairs of entries by angles that grow with the position."""
        n_rows = len(value)  # attention may see only the first rows
        if isinstance(rotation, Tensor):  # complex numbers, in DeepSeek-V2
            first, second = value.float().unflatten(-1, (-1, 2)).unbind(dim=-1)
            turned = torch.complex(first, second) * rotation[:n_rows, :, None]
            return torch.view_as_real(turned).flatten(-2).to(value.dtype)
        half = value.shape[-1] // 2
        cos, sin = (some[:n_rows, :, None, :half] for some in rotation)
        alternate = getattr(self.attention, "_rope_interleave", False)
        pairs = (value[..., ::2], value[..., 1::2]) if alternate else value.split(half, dim=-1)
        first, second = pairs
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def latent_attention(model: Any, n_heads: int) -> dict[int, LatentAttention]:
    """The latent attention of a bridge, by layer."""
    return {
        layer: LatentAttention(block.attn, n_heads)
        for layer, block in enumerate(model.blocks)
        if isinstance(getattr(block, "attn", None), MLAAttentionBridge)
    }


def _swapped(function: HookFunction) -> HookFunction:
    """Adapt a function of ``[batch, pos, head, d]`` to q, k or v as ``[batch, head, pos, d]``."""

    def on_value(value: Tensor) -> Tensor | None:
        changed = function(value.transpose(1, 2))
        return None if changed is None else changed.transpose(1, 2)

    return on_value


def _by_head(n_heads: int, function: HookFunction) -> HookFunction:
    """Adapt a function of z by head to z in the shape in which a hook point shows it."""

    def on_value(value: Tensor) -> Tensor | None:
        changed = function(value.reshape(*value.shape[:2], n_heads, -1))
        return None if changed is None else changed.reshape(*changed.shape[:2], *value.shape[2:])

    return on_value

"""The seam to TransformerLens: all that the package asks of a model, in the model's own terms.

Everything else asks an `Adapter` and never reads a parameter, starts at a layer or copies a model
by itself. There is one for HookedTransformer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sparse_tl.graph import CircuitGraph
from sparse_tl.lens.checks import check_circuits
from sparse_tl.lens.norms import Norm
from sparse_tl.lens.points import HookedModel, Model
from sparse_tl.lens.shortcuts import only_at

Slot = Literal["q", "k", "v"]


def adapt(model: HookedModel) -> Adapter:
    """The adapter of a model, by its class; a SparseTransformer's is that of the model inside.

    Raises:
        TypeError: a model of a kind that is not supported.
    """
    under_gates = getattr(model, "model_under_gates", None)
    inner = model if under_gates is None else under_gates()
    if not isinstance(inner, Model):
        raise TypeError(
            f"expected a HookedTransformer, or a SparseTransformer around one; got "
            f"{type(model).__name__}"
        )
    return Adapter(inner)


class Adapter:
    """A HookedTransformer as the package sees it. It holds no state beside the model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        cfg = model.cfg
        self.name: str = cfg.model_name
        self.n_layers: int = cfg.n_layers
        self.n_heads: int = cfg.n_heads
        self.n_kv_heads: int = cfg.n_key_value_heads or cfg.n_heads
        self.n_ctx: int = cfg.n_ctx
        self.d_vocab: int = cfg.d_vocab
        self.d_vocab_out: int = cfg.d_vocab_out
        self.causal: bool = cfg.attention_dir == "causal"

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.model.embed.W_E.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed.W_E.dtype

    @property
    def gate_dtype(self) -> torch.dtype:
        """What gates are computed in: float64 for float64 models, float32 for all others."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def graph(self) -> CircuitGraph:
        """The circuit graph, once the model is known to be the sum of its parts.

        Raises:
            ValueError: a model whose parts do not read and write the residual stream as they are.
        """
        check_circuits(self)
        cfg = self.model.cfg
        return CircuitGraph(
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            has_mlps=not cfg.attn_only,
            parallel=cfg.parallel_attn_mlp,
        )

    @property
    def activations_per_token(self) -> int:
        """Numbers that one layer keeps of a token, without its attention; a rough size."""
        cfg = self.model.cfg
        return 4 * cfg.d_model + (cfg.d_mlp or 0)

    def check_head(self, layer: int, head: int) -> None:
        """Make sure that there is such a head.

        Raises:
            ValueError: there is not.
        """
        if not (0 <= layer < self.n_layers and 0 <= head < self.n_heads):
            raise ValueError(
                f"expected heads (layer, head) of {self.n_layers} layers of {self.n_heads} heads; "
                f"got ({layer}, {head})"
            )

    def check_tokens(self, tokens: Int[Tensor, "*batch pos"]) -> None:
        """Make sure that the model can read these tokens.

        Raises:
            ValueError: too many for the context, or outside the vocabulary.
        """
        if tokens.shape[-1] > self.n_ctx:
            raise ValueError(
                f"expected a prompt of at most {self.n_ctx} tokens, the model's context; got "
                f"{tokens.shape[-1]}"
            )
        outside = tokens[(tokens < 0) | (tokens >= self.d_vocab)]
        if len(outside):
            raise ValueError(f"expected tokens in 0..{self.d_vocab - 1}; got {int(outside[0])}")

    # ---- running ---------------------------------------------------------------------------------

    def final(
        self,
        inputs: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_model"],
        *,
        from_layer: int = 0,
        read: Bool[Tensor, "batch pos"] | None = None,
        copies: int = 1,
        attend_once: bool = False,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "rows pos d_model"]:
        """The residual stream after the last layer.

        Args:
            inputs: tokens, or the residual stream that enters `from_layer`.
            from_layer: the first layer that is run; above 0 with a residual stream.
            read: the positions that matter; the last MLP is left out elsewhere, where nobody looks.
            copies: how often the prompts are repeated, one copy after the other.
            attend_once: the first layer's attention sees the prompts once, all copies being alike
                there: a hook at its ``hook_z`` makes the copies.
            attention_mask: 0 at padding.
        """
        options: dict[str, Any] = {"stop_at_layer": self.n_layers}
        if attention_mask is not None:
            options["attention_mask"] = _repeated(attention_mask, copies)
        if inputs.is_floating_point():
            options["start_at_layer"] = from_layer
        elif from_layer:
            raise ValueError("expected the residual stream to start from a layer above 0")
        n_rows = len(inputs)
        everywhere = inputs.new_ones(inputs.shape[:2], dtype=torch.bool) if read is None else read
        with only_at(self.model, _repeated(everywhere, copies)):
            attention = self.model.blocks[from_layer].attn
            with _sees_first(attention, n_rows if attend_once and copies > 1 else None):
                return self.model(_repeated(inputs, copies), **options)

    def logits(self, final: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        """Logits of whatever stands in the residual stream after the last layer."""
        model = self.model
        if model.cfg.normalization_type is not None:
            final = getattr(model, "ln_final")(final)  # noqa: B009 - absent without normalisation
        # The model's own unembedding copies its whole matrix anew in every pass.
        unembed = model.unembed
        logits = unembed.hook_out(F.linear(unembed.hook_in(final), unembed.W_U.T, unembed.b_U))
        cap = model.cfg.output_logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    def logits_at(
        self, final: Float[Tensor, "batch pos d_model"], read: Bool[Tensor, "batch pos"]
    ) -> Float[Tensor, "label vocab"]:
        """Logits at some positions alone, row by row: no ``[batch, pos, vocab]`` is ever made."""
        return self.logits(final[read][:, None])[:, 0]

    # ---- weights ---------------------------------------------------------------------------------

    def norm(self, layer: int, which: Literal["attn", "mlp"]) -> Norm:
        """The normalisation before a layer's attention or MLP."""
        module = getattr(self.model.blocks[layer], "ln1" if which == "attn" else "ln2", None)
        return Norm.of(self.model.cfg, module)

    def qkv(
        self, layer: int, slot: Slot
    ) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"]]:
        """A projection and its bias; k and v of key-value heads."""
        attention, upper = self.model.blocks[layer].attn, slot.upper()
        grouped = getattr(attention, f"_W_{upper}", None)  # without the copies for each query head
        if grouped is not None:
            return grouped, getattr(attention, f"_b_{upper}")
        return getattr(attention, f"W_{upper}"), getattr(attention, f"b_{upper}")

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """What takes each head's z to the residual stream."""
        return self.model.blocks[layer].attn.W_O

    # ---- as a whole ------------------------------------------------------------------------------

    def copy(self) -> Model:
        """A copy of the model, with no parameter in common."""
        return copy.deepcopy(self.model)

    def parameter_groups(self, name: Literal["qk", "all"]) -> tuple[str, ...]:
        """Patterns of the model's parameter names: those of queries and keys, or all."""
        return (
            ("*.attn.*W_Q", "*.attn.*W_K", "*.attn.*b_Q", "*.attn.*b_K") if name == "qk" else ("*",)
        )

    def sync_config(self) -> None:
        """Let the configuration say where the weights are now, and in which dtype."""
        self.model.cfg.device = str(self.device)
        self.model.cfg.dtype = self.dtype


def _repeated(rows: Tensor, copies: int) -> Tensor:
    return rows if copies == 1 else rows.repeat(copies, *[1] * (rows.ndim - 1))


@contextmanager
def _sees_first(attention: nn.Module, n_rows: int | None) -> Iterator[None]:
    """The attention layer sees the first `n_rows` rows of what it is called with."""
    if n_rows is None:
        yield
        return

    def first(value: Any) -> Any:
        return value[:n_rows] if isinstance(value, Tensor) else value

    def shorten(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}

    handle = attention.register_forward_pre_hook(shorten, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()

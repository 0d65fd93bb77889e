"""The seam to TransformerLens: all that the package asks of a model, in the model's own terms.

Everything else asks an `Adapter` and never reads a parameter, starts at a layer or copies a model
by itself. There is one for each kind of model; what does not depend on the kind is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from sparse_tl.graph import CircuitGraph
from sparse_tl.lens.checks import check_circuits
from sparse_tl.lens.norms import Norm
from sparse_tl.lens.places import Place
from sparse_tl.lens.points import Model, hook_point
from sparse_tl.lens.recording import EMBEDDED
from sparse_tl.lens.shortcuts import mlp_only_at, repeated, sees_first

Slot = Literal["q", "k", "v"]


class Adapter(ABC):
    """A model as the package sees it. It holds no state beside the model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        cfg: Any = model.cfg
        self.name: str = cfg.model_name
        self.n_layers: int = cfg.n_layers
        self.n_heads: int = cfg.n_heads
        self.n_kv_heads: int = cfg.n_key_value_heads or cfg.n_heads
        self.n_ctx: int = cfg.n_ctx
        self.d_model: int = cfg.d_model
        self.d_vocab: int = cfg.d_vocab
        self.d_vocab_out: int = cfg.d_vocab_out if cfg.d_vocab_out > 0 else cfg.d_vocab
        self.causal: bool = cfg.attention_dir == "causal"
        self.has_mlps: bool = getattr(model.blocks[0], "mlp", None) is not None
        self.coupled = False  # by a normalisation of what a layer's heads write

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
        return CircuitGraph(
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            has_mlps=self.has_mlps,
            parallel=self.parallel,
            coupled=self.coupled,
        )

    @property
    def parallel(self) -> bool:
        """Whether an MLP reads beside its layer's heads, not after them."""
        return bool(self.model.cfg.parallel_attn_mlp)

    @property
    def activations_per_token(self) -> int:
        """Numbers that one layer keeps of a token, without its attention; a rough size."""
        cfg = self.model.cfg
        return 4 * cfg.d_model + (cfg.d_mlp or 0)

    @property
    def core(self) -> nn.Module:
        """What is one and the same for all objects that run this very model."""
        return self.model

    def unsupported(self) -> str | None:
        """Why circuits are not defined on the model as it is configured, if they are not."""
        return None if self.causal else "its attention is not causal"

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

    def check_mask(self, attention_mask: Int[Tensor, "batch pos"] | None) -> None:  # noqa: B027
        """Raise a ValueError where the model returns NaN for prompts that are padded so."""

    # ---- hook points -----------------------------------------------------------------------------

    @abstractmethod
    def place(self, name: str) -> HookPoint | Place:
        """Where a function goes that is attached by this name.

        That of a hook point of TransformerLens, or in a layer ``blocks.{layer}.``: ``mlp_input``,
        what the normalisation before its MLP reads; ``mlp_normalized``, what the MLP reads;
        ``mlp_read``, the same after all edits, for a function that only looks;
        `heads_point`, what its heads write with; ``attn.cached_columns``, how many columns of the
        prompts a key-value cache holds when attention is called, for a function that only looks.

        Raises:
            ValueError: the model lacks the hook point, or it is switched off and never fires.
        """

    def layer_points(self, suffix: str) -> list[str]:
        """Names ``blocks.{layer}.{suffix}`` of one hook point in every layer.

        Raises:
            ValueError: a layer lacks that hook point.
        """
        names = [f"blocks.{layer}.{suffix}" for layer in range(self.n_layers)]
        for name in names:
            hook_point(self.model, name)
        return names

    def heads_point(self, layer: int) -> str:
        """The name of what the heads of a layer write with: their write is linear in it."""
        return f"blocks.{layer}.attn.hook_z"

    def source_points(self) -> list[str]:
        """The hook points at which the sources of a circuit graph write; heads before ``W_O``."""
        names = [EMBEDDED]
        for layer in range(self.n_layers):
            names.append(self.heads_point(layer))
            names += [f"blocks.{layer}.hook_mlp_out"] * self.has_mlps
        return names

    def destination_points(self, layer: int) -> list[str]:
        """What the destinations of a layer read: q, k, v before rotary embeddings, and the MLP."""
        names = [f"blocks.{layer}.attn.hook_{slot}" for slot in "qkv"]
        return names + [f"blocks.{layer}.mlp_normalized"] * self.has_mlps

    def residual_points(self, layer: int) -> list[str]:
        """The residual stream at the places where a layer reads it."""
        return [f"blocks.{layer}.hook_resid_pre"] + [f"blocks.{layer}.mlp_input"] * self.has_mlps

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
        if from_layer and not inputs.is_floating_point():
            raise ValueError("expected the residual stream to start from a layer above 0")
        mask = None if attention_mask is None else repeated(attention_mask, copies)
        everywhere = inputs.new_ones(inputs.shape[:2], dtype=torch.bool) if read is None else read
        once = len(inputs) if attend_once and copies > 1 else None
        with (
            self.only_at(repeated(everywhere, copies)),
            sees_first(self.model.blocks[from_layer].attn, once),
        ):
            return self._final(repeated(inputs, copies), from_layer, mask)

    @contextmanager
    def only_at(self, read: Bool[Tensor, "batch pos"]) -> Iterator[None]:
        """Inside the block, passes over prompts of this shape compute what `read` needs, no more.

        Logits at the other positions are meaningless. Everything before the last MLP, the attention
        of all layers among it, is computed everywhere. Where somebody hooks what would be left out,
        it is computed too: hooks see what a plain pass shows them.

        Args:
            read: the positions whose logits or final residual stream are read.
        """
        last = mlp_only_at(*self._last_mlp(), read) if self.has_mlps else nullcontext()
        with last, self._fused():
            yield

    @abstractmethod
    def _final(self, rows: Tensor, from_layer: int, attention_mask: Tensor | None) -> Tensor:
        """The final residual stream, from tokens or from what enters a layer."""

    @abstractmethod
    def _last_mlp(self) -> tuple[nn.Module, Sequence[nn.Module], set[int]]:
        """What `mlp_only_at` asks."""

    def _fused(self) -> AbstractContextManager[None]:
        """Inside the block, what the model computes in many small operations is done in fewer."""
        return nullcontext()

    @abstractmethod
    def logits(self, final: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        """Logits of whatever stands in the residual stream after the last layer."""

    def logits_at(
        self, final: Float[Tensor, "batch pos d_model"], read: Bool[Tensor, "batch pos"]
    ) -> Float[Tensor, "label vocab"]:
        """Logits at some positions alone, row by row: no ``[batch, pos, vocab]`` is ever made."""
        return self.logits(final[read][:, None])[:, 0]

    # ---- weights ---------------------------------------------------------------------------------

    @abstractmethod
    def norm(self, layer: int, which: Literal["attn", "mlp"]) -> Norm:
        """The normalisation before a layer's attention or MLP."""

    @abstractmethod
    def qkv(
        self, layer: int, slot: Slot
    ) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"]]:
        """A projection and its bias; k and v of key-value heads."""

    @abstractmethod
    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """What takes what stands at `heads_point` to the residual stream."""

    def heads_written(
        self,
        layer: int,
        z: Float[Tensor, "batch pos head d_head"],
        *,
        heads: Sequence[int] | None = None,
    ) -> Float[Tensor, "some batch pos d_model"]:
        """What all heads of a layer, or some, add to the residual stream, without the bias.

        Args:
            layer: theirs.
            z: what stood at `heads_point`, or the difference of two such values.
            heads: which; all when left out.
        """
        weight = self.W_O(layer).to(z.dtype)
        if heads is not None and len(heads) < len(weight):
            weight, z = weight[list(heads)], z[:, :, list(heads)]
        flat = rearrange(z, "batch pos head d_head -> head (batch pos) d_head")
        return torch.bmm(flat, weight).view(len(weight), *z.shape[:2], -1)

    # ---- as a whole ------------------------------------------------------------------------------

    @abstractmethod
    def copy(self) -> Model:
        """A copy of the model, with no parameter in common."""

    @abstractmethod
    def parameters(self, group: Literal["qk", "all"]) -> list[nn.Parameter]:
        """The parameters of queries and keys, or all that a pass reads."""

    def sync_config(self) -> None:
        """Let the configuration say where the weights are now, and in which dtype."""
        self.model.cfg.device = str(self.device)
        self.model.cfg.dtype = self.dtype

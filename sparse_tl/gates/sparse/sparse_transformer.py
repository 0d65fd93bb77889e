"""A model with learnable gates on attention edges and MLPs, used exactly like the wrapped model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sparse_tl.arguments import AtLeastOne, Logit, NotNegative, Share, checked
from sparse_tl.backend import (
    AttachedHooks,
    Model,
    adapt,
    check_padding,
    defer_scores,
    in_evaluation_mode,
    in_use,
    load_model,
)
from sparse_tl.contexts import scope
from sparse_tl.data import PromptPairs
from sparse_tl.gates.distributions import GateDistribution
from sparse_tl.gates.sparse.counting import AttentionEdgeCounts, Counted
from sparse_tl.gates.sparse.learned_gates import (
    AttentionGates,
    GateKind,
    MLPGates,
    as_now,
    attention_gates,
    using,
)
from sparse_tl.gates.sparse.saving import is_sparse_folder, load_sparse, save_sparse

Prompts = Int[Tensor, "*prompt pos"] | PromptPairs


@checked
class SparseTransformer(nn.Module):
    """Wrap a model so that its attention edges, and optionally MLP outputs, pass learnable gates.

    The wrapper has the model's whole interface, under the same names: calling it, `generate`,
    `run_with_cache`, `hooks`, `to_tokens`, `cfg`. Gates are deterministic except inside a `sampled`
    or `opened` block. A user's hook on ``hook_pattern`` sees the gated pattern; an edit to
    ``hook_attn_scores`` changes the gate too. The same holds for ``hook_mlp_out`` and MLP inputs.

    Gates sit on the model itself; `unwrap` removes them and keeps any training of the weights.

    Args:
        model: model to wrap, a TransformerBridge or a HookedTransformer.
        gates: existing gates, or the kind of new ones: "share" (`ShareGates`), the default, or
            "score" (`ScoreGates`), the default where `initial_bias` is given.
        initial_threshold: initial threshold of share gates, a share of attention; 0.005 by default.
        initial_bias: initial bias of score gates, in logits, 4.0 by default; larger is denser.
        distribution: how gates are sampled and evaluated; straight-through Bernoulli by default.
        mlps: whether to gate every MLP at every position; see `MLPGates`.
        mlp_gates: existing gates on MLPs to use instead of new ones, of the same distribution.

    Raises:
        TypeError: `model` is not a TransformerLens model.
        ValueError: the model is wrapped already, or its attention or MLPs cannot be gated; existing
            gates do not fit it; or an argument belongs to the other kind of gate, or to new gates
            where existing ones are given.

    Reference: arXiv 2512.05865; MLP gates are an addition of this package.
    """

    model: Model
    gates: AttentionGates
    mlp_gates: MLPGates | None
    hook_dict: dict[str, Any]  # looked up on the model

    def __init__(
        self,
        model: Model,
        *,
        gates: GateKind | AttentionGates | None = None,
        initial_threshold: Share | None = None,
        initial_bias: Logit | None = None,
        distribution: GateDistribution | None = None,
        mlps: bool = False,
        mlp_gates: MLPGates | None = None,
    ) -> None:
        super().__init__()
        adapter = adapt(model)
        if getattr(adapter.core, "_sparse_tl_wrapped", False):
            raise ValueError(
                "this model is wrapped already: use its SparseTransformer, or .unwrap() it first"
            )
        starts = {"initial_bias": initial_bias, "initial_threshold": initial_threshold}
        gates = attention_gates(adapter, gates, starts, distribution)
        if mlps or mlp_gates is not None:
            mlp_gates = mlp_gates or MLPGates.of(adapter, gates.distribution)
            mlp_gates.check(adapter)
        self.model, self.gates, self.mlp_gates = model, gates, mlp_gates
        self._hooks_on: AttachedHooks | None = None
        self._attach()

    # From Python 3.12 on, `isinstance` with a protocol ignores what `__getattr__` provides.
    cfg = property(lambda self: self.model.cfg, doc="The model's configuration.")
    tokenizer = property(lambda self: self.model.tokenizer, doc="The model's tokenizer.")

    def to_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `to_tokens`."""
        return self.model.to_tokens(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under its gates; takes and returns what the model does."""
        model = self.model_under_gates()
        args, kwargs = _as_rows(args, kwargs)
        check_padding(adapt(model), kwargs.get("attention_mask"))
        with in_use(model):
            return model(*args, **kwargs)

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `run_with_cache`; the cache holds gated patterns."""
        with in_use(self.model):
            return self.model_under_gates().run_with_cache(*args, **kwargs)

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `run_with_hooks`; hooks see gated patterns."""
        with in_use(self.model):
            return self.model_under_gates().run_with_hooks(*args, **kwargs)

    def run_with_counts(
        self,
        *args: Any,
        keep_gates: bool = False,
        pressure: NotNegative = 0.0,
        edge_cost: Float[Tensor, "*#edge"] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, AttentionEdgeCounts]:
        """The model's output, and the counts of this pass; expected counts are differentiable.

        Args:
            *args: positional arguments of the model.
            keep_gates: also return every deterministic gate, as `gates` and `mlp_gates`.
            pressure: extra gradient of the expected count for confidently open gates.
            edge_cost: cost of each edge, broadcastable to ``[layer, head, query, key]``.
            **kwargs: keyword arguments of the model; only ``attention_mask`` says what is padding.
        """
        args, kwargs = _as_rows(args, kwargs)
        layers: list[Counted] = []
        settings = {"keep_gates": keep_gates, "pressure": pressure, "edge_cost": edge_cost}
        with self._set(counts=layers, real=kwargs.get("attention_mask"), **settings):
            output = self(*args, **kwargs)
        return output, AttentionEdgeCounts.of_pass(layers)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate`, under the gates; a single prompt may have one dimension."""
        args, kwargs = _as_rows(args, kwargs)
        with in_use(self.model):
            return self.model_under_gates().generate(*args, **kwargs)

    def sampled(
        self, generator: torch.Generator | None = None, noise: NotNegative = 1.0
    ) -> AbstractContextManager[None]:
        """Inside the block, gates are sampled, as in training; `noise` scales their noise."""
        return self._set(mode="sampled", generator=generator, noise=noise)

    def opened(self) -> AbstractContextManager[None]:
        """Inside the block, all gates are open: bit for bit the plain model, unless counting."""
        return self._set(mode="open")

    @scope
    def _set(self, **settings: Any) -> Iterator[None]:
        """Inside the block, override settings of all gates."""
        with in_use(self.model), using(self._all_gates(), **settings):
            yield

    @in_evaluation_mode
    @torch.no_grad()
    def count_attention_edges(
        self, tokens: Prompts, *, batch_size: AtLeastOne = 64, **kwargs: Any
    ) -> AttentionEdgeCounts:
        """Count active, expected and possible attention edges, and MLP outputs, of some prompts.

        Args:
            tokens: prompts with ``attention_mask=`` if padded, or pairs, whose clean ones count.
            batch_size: prompts per forward pass.
            **kwargs: keyword arguments of the model; tensors are split along the prompts.
        """
        return AttentionEdgeCounts.concatenate([*self._counted(tokens, batch_size, kwargs)])

    @in_evaluation_mode
    @torch.no_grad()
    def open_attention_edges(
        self, tokens: Prompts, *, batch_size: AtLeastOne = 64, **kwargs: Any
    ) -> pd.DataFrame:
        """The attention edges that are open in at least one prompt, most common first.

        Arguments are those of `count_attention_edges`, for prompts of one length.

        Returns:
            One row per edge: layer, head, query and key (columns of the prompt), and the fraction
            of prompts in which its gate is open, above 0 and up to 1.
        """
        n_prompts, opened = 0, []
        for part in self._counted(tokens, batch_size, {**kwargs, "keep_gates": True}):
            assert part.gates is not None
            n_prompts += part.gates.shape[1]
            opened.append(part.gates.sum(dim=1))
        share = torch.stack(opened).sum(dim=0) / n_prompts
        found = pd.DataFrame(share.nonzero().tolist(), columns=["layer", "head", "query", "key"])
        found["share"] = share[share > 0].tolist()
        return found.sort_values("share", ascending=False, kind="stable").reset_index(drop=True)

    def _counted(
        self, tokens: Prompts, size: int, kwargs: dict[str, Any]
    ) -> Iterator[AttentionEdgeCounts]:
        """The counts of `size` prompts at a time."""
        if isinstance(tokens, PromptPairs):
            pairs = tokens.to(adapt(self.model).device)
            tokens, kwargs = pairs.clean, {**kwargs, "attention_mask": pairs.attention_mask}
        if not len(tokens):
            raise ValueError("give at least one prompt to count attention edges on")
        (prompts,), kwargs = _as_rows((tokens,), kwargs)
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            some: dict[str, Any] = {
                name: value[rows] if isinstance(value, Tensor) else value
                for name, value in kwargs.items()
            }
            yield self.run_with_counts(prompts[rows], return_type=None, **some)[1]

    def _all_gates(self) -> list[AttentionGates | MLPGates]:
        return [self.gates] if self.mlp_gates is None else [self.gates, self.mlp_gates]

    def unwrap(self) -> Model:
        """Remove the gates and return the model, with no trace of the wrapper on it."""
        if self._hooks_on is not None:
            self._deferred.close()
            self._hooks_on.remove()
            self._hooks_on = None
            core = adapt(self.model).core
            del core._sparse_tl_wrapped, core._sparse_tl_again
        return self.model

    def model_under_gates(self) -> Model:
        """The wrapped model, if its gates are attached."""
        if self._hooks_on is None:
            raise RuntimeError("this wrapper was unwrapped; wrap the model again to use its gates")
        if not self._hooks_on.in_place:
            raise RuntimeError("the gates' hooks were removed; unwrap and wrap the model again")
        return adapt(self.model).model  # fails if another bridge took over its modules

    def dense_copy(self) -> Model:
        """A frozen copy of the model in its current state, without gates."""
        with self._detached():
            return adapt(self.model).copy().requires_grad_(False)

    def save_pretrained(self, folder: str | Path, *, adapters_only: bool = False) -> Path:
        """Write model, gates and tokenizer as safetensors and JSON, completely or not at all.

        `adapters_only` writes the low-rank adapters in place of the model: a small folder.
        """
        return save_sparse(self.model, self.gates, self.mlp_gates, folder, adapters_only)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        base: str | Path | Model | None = None,
        device: str | None = None,
    ) -> SparseTransformer:
        """Load a folder written by `save_pretrained`.

        Args:
            folder: the folder.
            base: the model on which a folder of adapters was trained, or what `load_model` takes;
                a model gets the adapters in place.
            device: device of the model, unless `base` is one; a GPU by default if there is one.

        Raises:
            ValueError: the folder is of another kind or damaged, its gates do not fit the model, or
                the base has other weights than the one that the adapters were trained on.
        """
        model, gates, mlp_gates = load_sparse(folder, device, base)
        return cls(model, gates=gates, mlp_gates=mlp_gates)

    def __getattr__(self, name: str) -> Any:
        # Only reached if neither the module nor its class has the name: look it up on the model.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in {"model", "gates", "mlp_gates"} or name.startswith("__"):
                raise
        return getattr(super().__getattr__("model"), name)

    def _apply(self, fn: Any, recurse: bool = True) -> SparseTransformer:
        super()._apply(fn, recurse)  # for `to`, `cuda`, `half`...; the model's `to` is not called
        adapt(self.model).sync_config()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseTransformer:
        with self._detached():  # hooks are closures over these gates
            model, gates = adapt(self.model).copy(), copy.deepcopy(self.gates, memo)
            mlp_gates = copy.deepcopy(self.mlp_gates, memo)
        return SparseTransformer(model, gates=gates, mlp_gates=mlp_gates)

    def __repr__(self) -> str:
        gates = "; MLPs of ".join(gates.extra_repr() for gates in self._all_gates())
        return f"SparseTransformer({adapt(self.model).name}: {gates})"

    def _attach(self) -> None:
        adapter = adapt(self.model)
        hooks = [hook for gates in self._all_gates() for hook in gates.hooks(adapter)]
        self._hooks_on = AttachedHooks(adapter, hooks)
        self._deferred = defer_scores(adapter, self._hooks_on)
        core: Any = adapter.core
        core._sparse_tl_wrapped = frozenset(self._hooks_on.ids)
        core._sparse_tl_again = partial(as_now, self._all_gates())

    @contextmanager
    def _detached(self) -> Iterator[None]:
        was_on = self._hooks_on is not None
        self.unwrap()
        try:
            yield
        finally:
            if was_on:
                self._attach()


def _as_rows(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's arguments: a single prompt and its mask as a batch of one, tokens as int64."""

    def row(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value if value.is_floating_point() else value.long()
        return value[None] if value.ndim == 1 else value

    named = {
        name: row(value) if name in ("input", "attention_mask") else value
        for name, value in kwargs.items()
    }
    return (*map(row, args[:1]), *args[1:]), named


def load_dense_or_sparse(
    source: str | Path, *, device: str | None = None
) -> Model | SparseTransformer:
    """Load a model by name or folder, with its gates if the folder holds any."""
    load = SparseTransformer.from_pretrained if is_sparse_folder(source) else load_model
    return load(source, device=device)

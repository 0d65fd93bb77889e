"""A model with a gate on every attention edge, and on MLPs, used exactly like what it wraps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sparse_tl.gates.attention import AttentionGates
from sparse_tl.gates.counting import AttentionEdgeCounts, counted_by_batch, open_shares
from sparse_tl.gates.distributions import GateDistribution, GateMode
from sparse_tl.gates.mlps import MLPGates
from sparse_tl.gates.passes import Counted
from sparse_tl.lens import AttachedHooks, Model, adapt, check_gates


class SparseTransformer(nn.Module):
    """A model whose attention edges, and MLP outputs if asked for, pass through learnable gates.

    Everything that the model can do it can still do, by the same names: calling it, `generate`,
    `run_with_cache`, `run_with_hooks`, `hooks`, `to_tokens`, `cfg`, `tokenizer`. Gates are
    deterministic unless a `sampled` or `opened` block says otherwise. A user's hook on
    ``hook_pattern`` sees the gated pattern; an edit to ``hook_attn_scores`` moves the gate too.
    So it is at ``hook_mlp_out``, and with edits to what an MLP reads.

    The gates sit on the given model itself, not on a copy: `unwrap` takes them off again. Weights
    that were trained meanwhile stay trained.

    Args:
        model: the model to wrap: a TransformerBridge or a HookedTransformer.
        initial_bias: the gates' bias b at the start, in logits; larger is denser. 4.0 leaves a
            language model's loss nearly as it was.
        distribution: how gates are sampled and evaluated; straight-through Bernoulli by default.
        gates: gates on attention edges to use instead of new ones.
        mlps: whether each layer's MLP has a gate at every position; see `MLPGates`.
        mlp_gates: gates on MLPs to use instead of new ones.

    Raises:
        TypeError: `model` is no model of TransformerLens.
        ValueError: the model is wrapped already, lacks a hook point, or drops edits to its
            attention; gates of another model's shape; gates on MLPs that the model has not.

    Reference: arXiv 2512.05865; gates on MLPs are ours.
    """

    model: Model
    gates: AttentionGates
    mlp_gates: MLPGates | None
    # Asked of the model by __getattr__; named here for type checkers.
    cfg: Any
    hook_dict: dict[str, Any]
    tokenizer: Any
    blocks: Any

    def __init__(
        self,
        model: Model,
        *,
        initial_bias: float = 4.0,
        distribution: GateDistribution | None = None,
        gates: AttentionGates | None = None,
        mlps: bool = False,
        mlp_gates: MLPGates | None = None,
    ) -> None:
        super().__init__()
        adapter = adapt(model)
        if getattr(adapter.core, "_sparse_tl_wrapped", False):
            raise ValueError("this model is wrapped already; call .unwrap() on its wrapper first")
        if gates is not None:
            gates.check(adapter)
        if not isinstance(mlps, bool):
            raise ValueError(f"expected mlps to be True or False; got {mlps!r}")
        check_gates(adapter)
        gates = gates or AttentionGates.of(adapter, initial_bias, distribution)
        if mlps or mlp_gates is not None:
            mlp_gates = mlp_gates or MLPGates.of(adapter, gates.distribution)
            mlp_gates.check(adapter, gates.distribution)
        self.model, self.gates, self.mlp_gates = model, gates, mlp_gates
        self._hooks_on: AttachedHooks | None = None
        self._attach()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under its gates; arguments and result are the model's."""
        model = self.model_under_gates()
        adapt(model).check_mask(kwargs.get("attention_mask"))
        return model(*args, **kwargs)

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """`run_with_cache` of the model; the cache holds gated patterns."""
        return self.model_under_gates().run_with_cache(*args, **kwargs)

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """`run_with_hooks` of the model; hooks see gated patterns."""
        return self.model_under_gates().run_with_hooks(*args, **kwargs)

    def run_with_counts(
        self,
        *args: Any,
        keep_gates: bool = False,
        pressure: float = 0.0,
        edge_cost: Float[Tensor, "*#edge"] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, AttentionEdgeCounts]:
        """Call the model, and count the attention edges, and MLP outputs, of this very pass.

        Args:
            *args: as of the model.
            keep_gates: also return every deterministic gate, as `AttentionEdgeCounts.gates` and
                `AttentionEdgeCounts.mlp_gates`.
            pressure: gradient that the expected count puts on confidently open gates.
            edge_cost: what an edge counts in `AttentionEdgeCounts.cost`, broadcastable to
                ``[layer, head, query, key]``.
            **kwargs: as of the model. What ``attention_mask`` marks as padding counts for nothing.

        Returns:
            What the model returns, and the counts; the expected ones are differentiable.
        """
        layers: list[Counted] = []
        settings = {"keep_gates": keep_gates, "pressure": pressure, "edge_cost": edge_cost}
        with self._using(counts=layers, real=kwargs.get("attention_mask"), **settings):
            output = self(*args, **kwargs)
        return output, AttentionEdgeCounts.of_pass(layers)

    def to_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """`to_tokens` of the model."""
        return self.model.to_tokens(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the model, under its gates."""
        return self.model_under_gates().generate(*args, **kwargs)

    @contextmanager
    def sampled(
        self, generator: torch.Generator | None = None, noise: float = 1.0
    ) -> Iterator[None]:
        """Gates are drawn at random inside the block, as in training.

        Args:
            generator: of the draws.
            noise: scales that of the gates.
        """
        with self._using(mode=GateMode.SAMPLED, generator=generator, noise=noise):
            yield

    @contextmanager
    def opened(self) -> Iterator[None]:
        """All gates are open inside the block: the wrapped model, bit for bit."""
        with self._using(mode=GateMode.OPEN):
            yield

    @torch.no_grad()
    def count_attention_edges(
        self, tokens: Int[Tensor, "*prompt pos"], *, batch_size: int = 64, **kwargs: Any
    ) -> AttentionEdgeCounts:
        """Active, expected and possible attention edges, and MLP outputs, of these prompts.

        Args:
            tokens: prompts, or one; mark padding by ``attention_mask=``, as for the model.
            batch_size: prompts per forward pass.
            **kwargs: passed to the model; tensors are split along the prompts.

        Raises:
            ValueError: there is no prompt.
        """
        counts = counted_by_batch(self.run_with_counts, tokens, batch_size, kwargs)
        return AttentionEdgeCounts.concatenate(list(counts))

    @torch.no_grad()
    def open_attention_edges(
        self, tokens: Int[Tensor, "*prompt pos"], *, batch_size: int = 64, **kwargs: Any
    ) -> pd.DataFrame:
        """The attention edges that are open in some of these prompts, the most common first.

        Args:
            tokens: prompts of one length, or one prompt.
            batch_size: prompts per forward pass.
            **kwargs: passed to the model; tensors are split along the prompts.

        Returns:
            One row per edge: layer, head, query and key (columns of the prompt), and the share of
            the prompts, above 0 and up to 1, in which its gate is open.

        Raises:
            ValueError: there is no prompt.
        """
        if not len(tokens):
            raise ValueError("expected at least one prompt to count attention edges on; got none")
        kwargs["keep_gates"] = True
        return open_shares(counted_by_batch(self.run_with_counts, tokens, batch_size, kwargs))

    @contextmanager
    def _using(self, **settings: Any) -> Iterator[None]:
        """Other settings of all gates for the length of a block."""
        with ExitStack() as stack:
            for gates in self._all_gates():
                stack.enter_context(gates.using(**settings))
            yield

    def _all_gates(self) -> list[AttentionGates | MLPGates]:
        return [self.gates] if self.mlp_gates is None else [self.gates, self.mlp_gates]

    def unwrap(self) -> Model:
        """Take the gates off and give the model back; nothing of the wrapper is left on it."""
        if self._hooks_on is not None:
            self._hooks_on.remove()
            self._hooks_on = None
            del adapt(self.model).core._sparse_tl_wrapped
        return self.model

    def model_under_gates(self) -> Model:
        """The wrapped model, with the gates on it.

        Raises:
            RuntimeError: they were taken off, by `unwrap` or behind the wrapper's back.
            ValueError: another bridge has taken the model's parts.
        """
        if self._hooks_on is None:
            raise RuntimeError("this wrapper was unwrapped; wrap the model again to use its gates")
        if not self._hooks_on.in_place:
            raise RuntimeError(
                "the gates' hooks were removed from the model (by "
                "reset_hooks(including_permanent=True)?); unwrap and wrap the model again"
            )
        return adapt(self.model).model  # refuses one whose parts another bridge has taken

    def dense_copy(self) -> Model:
        """A frozen copy of the model as it is now, without gates."""
        with self._detached():
            return adapt(self.model).copy().requires_grad_(False)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write model, gates and tokenizer as safetensors and JSON; whole or not at all."""
        from sparse_tl.gates.saving import save_sparse

        return save_sparse(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: str | None = None) -> SparseTransformer:
        """Read what `save_pretrained` wrote.

        Raises:
            ValueError: the folder is not one of ours, is damaged, or holds gates of another model.
        """
        from sparse_tl.gates.saving import load_sparse

        return load_sparse(folder, device=device)

    def __getattr__(self, name: str) -> Any:
        # Only reached when neither the module nor its class has the name: ask the model.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in {"model", "gates", "mlp_gates"} or name.startswith("__"):
                raise
        return getattr(super().__getattr__("model"), name)

    def _apply(self, fn: Any, recurse: bool = True) -> SparseTransformer:
        # What `to`, `cuda`, `half` and the others come to; the model's own `to` is not called.
        super()._apply(fn, recurse)
        adapt(self.model).sync_config()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseTransformer:
        # Hooks are closures over these very gates: copy without them, then attach to the copy.
        with self._detached():
            model, gates = adapt(self.model).copy(), copy.deepcopy(self.gates, memo)
            mlp_gates = copy.deepcopy(self.mlp_gates, memo)
        return SparseTransformer(model, gates=gates, mlp_gates=mlp_gates)

    def __repr__(self) -> str:
        mlps = "" if self.mlp_gates is None else f"; MLPs of {self.mlp_gates.extra_repr()}"
        return f"SparseTransformer({adapt(self.model).name}: {self.gates.extra_repr()}{mlps})"

    def _attach(self) -> None:
        adapter = adapt(self.model)
        hooks = [hook for gates in self._all_gates() for hook in gates.hooks(adapter)]
        self._hooks_on = AttachedHooks(adapter, hooks)
        adapter.core._sparse_tl_wrapped = True  # type: ignore[assignment]

    @contextmanager
    def _detached(self) -> Iterator[None]:
        was_on = self._hooks_on is not None
        self.unwrap()
        for gates in self._all_gates():
            gates.forget()
        try:
            yield
        finally:
            if was_on:
                self._attach()

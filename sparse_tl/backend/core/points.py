"""The kinds of models, and their hook points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import transformer_lens
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from sparse_tl.graph import Slot

if TYPE_CHECKING or "HookedTransformer" not in vars(transformer_lens):

    class HookedTransformer(nn.Module):
        """Stands for the class that TransformerLens 4 removed; no model is an instance of it."""

        cfg: Any
        tokenizer: Any
        hook_dict: dict[str, Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def to_tokens(self, *args: Any, **kwargs: Any) -> Any: ...

        def __getattr__(self, name: str) -> Any: ...
else:
    from transformer_lens import HookedTransformer

Model = HookedTransformer | TransformerBridge
"""A dense model that can be wrapped, trained and saved."""

EMBEDDED = "blocks.0.hook_resid_pre"
"""Where the input node writes: token plus learned positional embeddings."""

SLOTS: tuple[Slot, ...] = ("q", "k", "v")

NormPlace = Literal["attn", "mlp", "after_attn", "after_mlp"]
"""Where in a layer a norm is: before attention or MLP, or after."""

Analysis = Literal["circuits", "relp"]
"""Analyses that a kind of model may not support; for others, running the model is the check."""

_SWITCHES = {
    "hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_attn_in": "use_attn_in",
}
"""For each hook point with a switch, the flag without which TransformerLens silently skips it."""


@runtime_checkable
class HookedModel(Protocol):
    """What analyses need from a model; TransformerLens models and SparseTransformer provide it."""

    # Not declared at run time: `isinstance` on a protocol of methods is cached per class, whereas
    # attributes are looked up on the model every time.
    if TYPE_CHECKING:

        @property
        def cfg(self) -> Any: ...

        @property
        def tokenizer(self) -> Any: ...

        @property
        def hook_dict(self) -> dict[str, Any]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def to_tokens(self, *args: Any, **kwargs: Any) -> Any: ...

    def state_dict(self) -> Any: ...


def hook_point(model: HookedModel, name: str) -> HookPoint:
    """The hook point with this name.

    Raises:
        ValueError: the model lacks the hook point, or it is switched off and never fires.
    """
    point: Any = model  # a bridge rebuilds its `hook_dict` each time
    for part in name.split("."):
        point = None if point is None else getattr(point, part, None)
    if not isinstance(point, HookPoint):
        tail = name.rsplit(".", 1)[-1]
        alike = [known for known in model.hook_dict if known.endswith(tail)][:5]
        raise ValueError(
            f"{model.cfg.model_name!r}, {model.cfg.n_layers} layers, has no hook point {name!r}. "
            + (f"Did you mean one of {alike}?" if alike else "See `model.hook_dict` for all names.")
        )
    switch = _SWITCHES.get(name.rsplit(".", 1)[-1])
    if switch is not None and not getattr(model.cfg, switch):
        raise ValueError(
            f"hook point {name!r} never fires while `cfg.{switch}` is off; "
            f"switch it on with `model.set_{switch}(True)`"
        )
    return point

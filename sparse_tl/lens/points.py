"""What kinds of models there are, and which hook points they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

if TYPE_CHECKING:

    class HookedTransformer(nn.Module):
        """What type checkers see: the version that they read has none any more."""

        cfg: Any
        tokenizer: Any
        hook_dict: dict[str, Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def to_tokens(self, *args: Any, **kwargs: Any) -> Any: ...

        def __getattr__(self, name: str) -> Any: ...
else:
    try:
        from transformer_lens import HookedTransformer
    except ImportError:  # there is none from version 4 on

        class HookedTransformer(nn.Module):
            """In the place of the class that is not there: no model is one."""


Model = HookedTransformer | TransformerBridge
"""A dense model: what can be wrapped, trained and saved."""

_SWITCHES = {
    "hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_attn_in": "use_attn_in",
}
"""The configuration flags without which TransformerLens skips a hook point silently."""


@runtime_checkable
class HookedModel(Protocol):
    """What analyses ask of a model: those of TransformerLens have it, and a SparseTransformer."""

    # Not there at run time: a check against a protocol of methods alone is made once per class,
    # one with attributes asks every model for all of them, every time.
    if TYPE_CHECKING:
        cfg: Any
        tokenizer: Any

        @property
        def hook_dict(self) -> dict[str, Any]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def to_tokens(self, *args: Any, **kwargs: Any) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...


def hook_point(model: HookedModel, name: str) -> HookPoint:
    """The hook point of that name.

    Raises:
        ValueError: the model has no such hook point, or it is switched off and would never fire.
    """
    point: Any = model  # a bridge makes its `hook_dict` anew each time
    for part in name.split("."):
        point = None if point is None else getattr(point, part, None)
    if not isinstance(point, HookPoint):
        tail = name.rsplit(".", 1)[-1]
        alike = [known for known in model.hook_dict if known.endswith(tail)][:5]
        raise ValueError(
            f"expected the name of a hook point; got {name!r}, which {model.cfg.model_name!r} "
            f"({model.cfg.n_layers} layers) lacks. "
            + (f"Did you mean one of {alike}?" if alike else "See `model.hook_dict` for all names.")
        )
    switch = _SWITCHES.get(name.rsplit(".", 1)[-1])
    if switch is not None and not getattr(model.cfg, switch):
        raise ValueError(
            f"hook point {name!r} never fires while `cfg.{switch}` is off; "
            f"switch it on with `model.set_{switch}(True)`"
        )
    return point

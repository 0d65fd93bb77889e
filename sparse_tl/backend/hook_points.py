"""The kinds of models, their hook points, and functions attached where there is no hook point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import transformer_lens
from jaxtyping import Bool
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
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


# ---- where there is no hook point ----------------------------------------------------------------

Forward = Callable[..., Any]
"""The `forward` of a module."""
HookFunction = Callable[[Any], Any]
"""Function from an activation, or another value, to its replacement, or None to keep it."""
Place = Callable[[HookFunction], list[RemovableHandle]]
"""Attaches a function to an activation of every pass, until the returned handles are removed."""


@dataclass(frozen=True)
class Viewed:
    """A hook point where functions see the activation in another shape.

    `view` turns a function of the activation in that shape into one of the activation itself.
    """

    point: HookPoint
    view: Callable[[HookFunction], HookFunction]


def before(
    module: nn.Module, function: HookFunction, *, first: bool = False
) -> list[RemovableHandle]:
    """Attach to the input of a module; if `first`, before its existing pre-hooks."""

    def replaced(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # Only this module reads the view, so the view has its own gradient.
        shown = args[0].view_as(args[0])
        changed = function(shown)
        return (shown if changed is None else changed, *args[1:])

    return [module.register_forward_pre_hook(replaced, prepend=first)]


def after(module: nn.Module, function: HookFunction) -> list[RemovableHandle]:
    """Attach to the output of a module, for all its readers."""

    def replaced(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        # Without normalisation the output is the input tensor itself.
        shown = output.view_as(output)
        changed = function(shown)
        return shown if changed is None else changed

    return [module.register_forward_hook(replaced)]


def between(
    first: nn.Module,
    last: nn.Module,
    shown: Callable[[Tensor, Tensor], Tensor],
    write: Callable[[Tensor], Tensor],
    function: HookFunction,
) -> list[RemovableHandle]:
    """Attach to a value that is made from two modules' inputs and determines the last one's output.

    `shown` makes the value from both inputs; `write` makes the output from a changed value.
    """
    kept: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
        kept.append(args[0])

    def replaced(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> Tensor | None:
        value = shown(kept.pop(), args[0])
        changed = function(value)
        return None if changed is None or changed is value else write(changed)

    return [first.register_forward_pre_hook(keep), last.register_forward_hook(replaced)]


def before_branch(
    point: nn.Module, end: nn.Module, function: HookFunction
) -> list[RemovableHandle]:
    """Attach to the residual stream at a hook point that feeds only one of its branches.

    A change of the stream is also added at `end`, where the branch has been added to the stream.
    The function runs before all other hooks.
    """
    change: Tensor | None = None

    def edit(_module: nn.Module, _args: tuple[Any, ...], value: Tensor) -> Tensor | None:
        nonlocal change
        changed = function(value)
        change = None if changed is None or changed is value else changed - value
        return changed

    def add(_module: nn.Module, _args: tuple[Any, ...], stream: Tensor) -> Tensor | None:
        nonlocal change
        added, change = change, None
        return None if added is None else stream + added

    hooks = (point, edit), (end, add)
    return [place.register_forward_hook(hook, prepend=True) for place, hook in hooks]


def read_input(module: nn.Module, function: HookFunction) -> list[RemovableHandle]:
    """Show a module's input after all edits, once the module has returned."""

    def show(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> None:
        function(args[0])

    return [module.register_forward_hook(show)]


def read_call(
    modules: Sequence[nn.Module], read: Callable[[dict[str, Any]], Any], function: HookFunction
) -> list[RemovableHandle]:
    """Show what `read` derives from the keyword arguments with which these modules are called."""

    def show(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        function(read(kwargs))

    return [module.register_forward_pre_hook(show, with_kwargs=True) for module in modules]


@contextmanager
def hooks_on(hooks: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside the block, torch calls these functions after these modules, with their kwargs."""
    with ExitStack() as handles:
        for module, hook in hooks:
            handles.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield


def hooked(module: nn.Module, own: Set[int] = frozenset()) -> bool:
    """Whether a module has hooks other than those in `own`."""
    kinds = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks.keys() - own for hooks in kinds if hooks)


def stand_in(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replace a module's `forward` by what `make` makes of it, until the result is called."""
    before = module.__dict__.get("forward")

    def remove() -> None:
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before

    module.__dict__["forward"] = make(module.forward)  # bridges set attributes on what they wrap
    return remove


@contextmanager
def selecting(module: nn.Module, read: Bool[Tensor, "batch pos"]) -> Iterator[Callable[[], bool]]:
    """Inside the block, a module runs at some positions only, as a single row of them.

    Passes over prompts of another shape are left alone. Yields a function that says whether the
    last pass was restricted.
    """
    selected = False

    def select(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal selected
        selected = args[0].shape[:2] == read.shape
        # Bloom's MLPs also take the residual stream, to add to it.
        here = (arg[read][None] if isinstance(arg, Tensor) else arg for arg in args)
        return tuple(here) if selected else None

    with module.register_forward_pre_hook(select):
        yield lambda: selected

"""TransformerBridges around models of `transformers`, and the way back to a plain model.

TransformerLens has its own attention and ignores some configuration settings, such as GPT-2's
``scale_attn_weights=False``. No list of these is complete, so a few logits are compared: when a
bridge is made here, or else on first use; and when its plain model is first needed.

A bridge cannot be copied or saved: its copies depend on the original, and its parameter names mix
those of the wrapped model with TransformerLens's. If it has split a joint projection (GPT-2's q, k
and v), passes read the parts, and the joint weights keep their initial values. In the plain model,
parts are joined again, low-rank adapters are merged, and sharded weights are gathered on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import (
    build_bridge_from_module,
    detect_tokenizer_bos_eos,
)
from transformers import PreTrainedModel

from sparse_tl.backend.devices import has_sharded_weights, whole
from sparse_tl.backend.hook_points import Model
from sparse_tl.backend.hooks import evaluation_mode, without_user_hooks
from sparse_tl.backend.hugging_face import check_tokenizer
from sparse_tl.backend.lora import BASE, effective, has_adapters, lora_layers

_LENGTH = 8
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_HALVES = 0.1  # rounding alone gives 2 % in bfloat16
_WRAPPED = "_original_component"

_faithful: WeakSet[TransformerBridge] = WeakSet()
"""Bridges that were found to compute what `transformers` does."""
_reversible: WeakKeyDictionary[TransformerBridge, Any] = WeakKeyDictionary()
"""Bridges whose plain model was found to be the same, and their `_changes` at that time."""
_unset: WeakKeyDictionary[TransformerBridge, bool] = WeakKeyDictionary()


def boot(model: Any, tokenizer: Any = None, *, name: str = "model") -> TransformerBridge:
    """Wrap a causal language model of `transformers` in a bridge, ready for analysis.

    The model itself gets the hooks; nothing is copied or downloaded. It is switched to evaluation
    mode and eager attention, since fused attention exposes no intermediate values. Prompts begin
    with BOS if the tokenizer adds one by itself; messages and figures call the model by `name`.
    """
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} is not a causal language model: it has an encoder and a decoder")
    if any(isinstance(module, GeneralizedComponent) for module in model.modules()):
        raise ValueError(
            f"this {kind} has a TransformerBridge around it already. Use that bridge, or load the "
            "model again"
        )
    if has_adapters(model):
        raise ValueError(
            f"this {kind} has adapters of peft, which a bridge may not call; merge them first "
            "(merge_and_unload), and put new ones on the bridge: add_lora"
        )
    model.set_attn_implementation("eager")
    tokens, expected = _few_logits(model.eval())
    try:
        with torch.random.fork_rng(devices=[]):  # initialises split parts at random
            bridge = build_bridge_from_module(model, kind, hf_config=model.config, model_name=name)
    except Exception as error:  # TransformerLens can raise anything
        raise ValueError(
            f"TransformerLens cannot wrap a {kind}: {type(error).__name__}: {error}"
        ) from error
    if tokenizer is not None:
        check_tokenizer(tokenizer, bridge.cfg.d_vocab)
        pad = tokenizer.pad_token_id
        if pad is None or pad >= bridge.cfg.d_vocab:  # needed to pad texts of different lengths
            tokenizer.pad_token = tokenizer.eos_token
        bridge.tokenizer = tokenizer
        found = detect_tokenizer_bos_eos(tokenizer)
        bridge.cfg.tokenizer_prepends_bos, bridge.cfg.tokenizer_appends_eos = found
        # TransformerLens's default follows the architecture, and may differ from the tokenizer.
        bridge.cfg.default_prepend_bos = found[0]
    _check_same(bridge.eval(), tokens, expected)
    return bridge


# ---- the same as transformers --------------------------------------------------------------------


@torch.no_grad()
def _few_logits(model: Any) -> tuple[Int[Tensor, "1 pos"], Float[Tensor, "1 pos vocab"]]:
    """A fixed random prompt, and a `transformers` model's logits on it."""
    kind = type(model).__name__
    if model.main_input_name != "input_ids":
        raise ValueError(f"{kind} is not a causal language model: it reads {model.main_input_name}")
    generator, config = torch.Generator().manual_seed(0), model.config.get_text_config()
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    tokens = torch.randint(config.vocab_size, (1, length), generator=generator)
    tokens = tokens.to(model.get_input_embeddings().weight.device)
    try:
        logits = getattr(model(tokens), "logits", None)
    except Exception as error:  # the model's own code can raise anything
        raise ValueError(
            f"this {kind} fails on a prompt of {length} tokens: {type(error).__name__}: {error}"
        ) from error
    if logits is None:
        raise ValueError(f"{kind} is not a causal language model: it predicts no tokens")
    if logits.isnan().any():
        raise ValueError(
            f"the logits of this {kind} are NaN: its weights are damaged, or too large for "
            f"{logits.dtype}"
        )
    return tokens, logits


@torch.no_grad()
def _check_same(bridge: TransformerBridge, tokens: Tensor, expected: Tensor) -> None:
    """Check that a bridge without hooks gives these logits.

    Half of the positions may differ, since rounding can change the choice of experts.
    """
    try:
        with without_user_hooks(bridge), evaluation_mode(bridge):
            found = bridge(tokens)
    except Exception as error:  # TransformerLens can raise anything
        why = f"it fails with {type(error).__name__}: {str(error).rstrip('.')}"
        raise ValueError(_difference(bridge, why)) from error
    largest = expected.abs().max().clamp(min=1e-30)
    off = ((found - expected).abs().amax(dim=-1).median() / largest).item()
    if not off <= _TOLERANCE.get(expected.dtype, _HALVES):  # NaN too
        raise ValueError(_difference(bridge, f"its logits are off by {off:.2g} of the largest"))
    _faithful.add(bridge)


def _difference(bridge: TransformerBridge, off: str) -> str:
    if bridge.compatibility_mode:
        return (
            f"{bridge.cfg.model_name!r} cannot be copied, trained or saved: without its raw "
            f"weights, {off}, since enable_compatibility_mode() has folded some into others. Load "
            "it again, or pass no_processing=True to that call"
        )
    return (
        f"TransformerLens does not compute what transformers does; around the "
        f"{type(bridge.original_model).__name__} of {bridge.cfg.model_name!r} {off}. This version "
        "of TransformerLens leaves out something that its configuration asks for. Use a model "
        "without such a setting"
    )


def check_wrapped(model: Model) -> None:
    """Check, if nobody has yet, that a bridge computes the same as its wrapped model.

    Processed weights are compared only when they are read, since passes with them are correct.
    """
    if not isinstance(model, TransformerBridge) or model in _faithful or model.compatibility_mode:
        return
    if isinstance(model.original_model, PreTrainedModel):
        plain_model(model)


def check_alone(model: TransformerBridge) -> None:
    """Check that this bridge is the only one around its model of `transformers`.

    A bridge puts its components into the model. A later bridge replaces them and runs them inside
    its own components, so that hooks on the first bridge have no effect.
    """
    where: Any = model.adapter.component_mapping
    inside: Any = model.original_model.get_submodule(where["blocks"].name)
    first: Any = model.blocks[0]
    if inside[0] is not first or isinstance(first.original_component, GeneralizedComponent):
        raise ValueError(
            f"{model.cfg.model_name!r} shares its {type(model.original_model).__name__} with "
            "another TransformerBridge, and hooks on the earlier one do nothing. Load the model "
            "again, and build one bridge from it"
        )


# ---- the way back --------------------------------------------------------------------------------


def plain_model(model: TransformerBridge) -> Any:
    """A hook-free `transformers` model that shares all weights except joint and adapted ones.

    If the weights are sharded, it has copies on the CPU instead, and all processes have to
    call this. Refused if it computes something other than the bridge, as with processed weights.
    """
    if not isinstance(model.original_model, PreTrainedModel):
        raise ValueError(
            f"{model.cfg.model_name!r} cannot be copied, trained or saved: it is a bridge around a "
            f"{type(model.original_model).__name__}, which is no model of transformers"
        )
    plain = _assembled(model)
    known, changes = _reversible.get(model), _changes(model)
    if known != changes and not has_sharded_weights(model):  # else it was checked before
        _check_same(model, *_few_logits(plain.eval()))
        _reversible[model] = changes
    return plain.train(model.original_model.training)


def _changes(model: TransformerBridge) -> tuple[bool, int, int]:
    """How a bridge differs from a new one: whether and how far processed, number of adapters."""
    flags = [getattr(part, "_use_processed_weights", False) for part in model.modules()]
    return model.compatibility_mode, sum(map(bool, flags)), len(lora_layers(model))


def _assembled(model: TransformerBridge) -> Any:
    wrapped: Any = model.original_model
    sharded = has_sharded_weights(model)
    tensors: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and discarded
        joined = {split.joint: _joined(split) for split in _splits(model)}
        with torch.device("meta"):
            plain: Any = type(wrapped)(copy.deepcopy(wrapped.config))
    adapted = {layer.base_layer: layer for layer in lora_layers(wrapped)}
    for name, module in wrapped.named_modules(remove_duplicate=False):
        merged = effective(adapted[module]) if module in adapted else module
        own = {**merged._parameters, **merged._buffers, **joined.get(module, {})}
        path = [part for part in name.split(".") if part not in ("", _WRAPPED, BASE)]
        for kind, tensor in own.items():
            if tensor is not None:
                tensor = whole(tensor.detach())
                tensors[".".join([*path, kind])] = tensor.cpu() if sharded else tensor
    missing = [name for name in plain.state_dict() if name not in tensors]
    if missing:
        raise _unnamed(wrapped, missing)
    plain.load_state_dict({name: tensors[name] for name in plain.state_dict()}, assign=True)
    for name, _ in list(plain.named_buffers(remove_duplicate=False)):  # a state dict may lack some
        path, _, kind = name.rpartition(".")
        setattr(plain.get_submodule(path), kind, tensors[name])
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(getattr(wrapped, "generation_config", None))
    return plain


def check_raw(model: Model) -> None:
    """Check that the weights of a model can be copied and saved, and so trained."""
    if isinstance(model, TransformerBridge) and not has_sharded_weights(model):
        plain_model(model)


def unread_parameters(model: TransformerBridge) -> list[nn.Parameter]:
    """The parameters that no pass reads, or that the wrapped model lacks."""
    found = [p for split in _splits(model) for p in split.joint.parameters()]
    bias = getattr(model.unembed.original_component, "bias", None)
    # TransformerLens 3.9 to 4.0 adds one, which is 0 when first seen.
    if isinstance(bias, nn.Parameter) and _unset.setdefault(model, not bool(bias.any())):
        found.append(bias)
    return found


def _unnamed(whole: nn.Module, parts: Sequence[str]) -> ValueError:
    return ValueError(
        f"this {type(whole).__name__} cannot be copied, trained or saved: its bridge does not say "
        f"where the weights of {list(parts)[:5]} belong"
    )


class _Split(NamedTuple):
    """A joint projection in a module of transformers, which a bridge has split into parts."""

    make_parts: Callable[[nn.Module], Sequence[nn.Module]]
    whole: nn.Module
    joint: nn.Module
    parts: list[nn.Module]


@torch.no_grad()
def _joined(split: _Split) -> dict[str, Tensor]:
    """The weights of the joint projection, reassembled from the parts, whatever its layout.

    Splitting a tensor of indices reveals where each entry of a part belongs.
    """
    kept, found = dict(split.joint.named_parameters()), dict[str, Tensor]()
    numbers = {
        kind: torch.arange(some.numel(), dtype=torch.float64, device=some.device).view(some.shape)
        for kind, some in kept.items()
    }
    own = dict(split.joint._parameters)
    try:
        split.joint._parameters |= {
            kind: nn.Parameter(some, requires_grad=False) for kind, some in numbers.items()
        }
        made = split.make_parts(split.whole)
        where = {kind: [getattr(part, kind).detach().long() for part in made] for kind in kept}
    finally:
        split.joint._parameters |= own
    for kind, tensor in kept.items():
        parts = [whole(getattr(effective(part), kind).detach()) for part in split.parts]
        flat = parts[0].new_empty(tensor.numel())
        for index, values in zip(where[kind], parts, strict=True):
            flat[index.flatten().to(flat.device)] = values.flatten()
        found[kind] = flat.view(tensor.shape)
    return found


def _splits(model: TransformerBridge) -> list[_Split]:
    """The joint projections in a bridge's blocks, as its components describe them."""
    found: list[_Split] = []
    for part in [part for block in model.blocks for part in block.modules()]:
        kinds = list[tuple[Any, str | None, tuple[str, ...]]]()
        if hasattr(part, "split_qkv_matrix"):
            joint = getattr(part.submodules.get("qkv"), "name", None)
            kinds.append((part.split_qkv_matrix, joint, ("q", "k", "v")))
        if hasattr(part, "split_gate_up_matrix"):
            kinds.append((part.split_gate_up_matrix, part.fused_attr, ("gate", "in")))
        for make_parts, joint, names in kinds:
            inner = None if joint is None else getattr(part.original_component, joint, None)
            if inner is None:
                raise _unnamed(part.original_component, names)
            parts = [getattr(part, name).original_component for name in names]
            joint_map = getattr(inner, "original_component", inner)
            found.append(_Split(make_parts, part.original_component, joint_map, parts))
    return found

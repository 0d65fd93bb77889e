"""Check that a bridge computes the same as the `transformers` model that it wraps.

TransformerLens has its own attention and ignores some configuration settings, such as GPT-2's
``scale_attn_weights=False``. No list of these is complete, so a few logits are compared.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens.core.hooks import without_user_hooks
from sparse_tl.lens.core.modes import evaluation_mode

_LENGTH = 8
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_HALVES = 0.1  # rounding alone gives 2 % in bfloat16
_known: WeakSet[TransformerBridge] = WeakSet()


@autograd(False)
def few_logits(model: Any) -> tuple[Int[Tensor, "1 pos"], Float[Tensor, "1 pos vocab"]]:
    """A fixed random prompt, and a `transformers` model's logits on it.

    Raises:
        ValueError: the model does not read or predict tokens, fails on the prompt, or returns NaN.
    """
    kind = type(model).__name__
    if model.main_input_name != "input_ids":
        raise ValueError(f"expected a causal language model; {kind} reads {model.main_input_name}")
    generator, config = torch.Generator().manual_seed(0), model.config.get_text_config()
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    try:
        tokens = torch.randint(config.vocab_size, (1, length), generator=generator)
        tokens = tokens.to(model.get_input_embeddings().weight.device)
        logits = getattr(model(tokens), "logits", None)
    except Exception as error:  # the model's own code can raise anything
        raise ValueError(
            f"expected a {kind} that runs; on a prompt of {length} tokens it fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    if logits is None:
        raise ValueError(f"expected a causal language model; {kind} predicts no tokens")
    if logits.isnan().any():
        raise ValueError(
            f"expected a {kind} that returns numbers; its logits are NaN. Its weights are damaged, "
            f"or too large for {logits.dtype}"
        )
    return tokens, logits


@autograd(False)
def check_same(
    bridge: TransformerBridge,
    tokens: Int[Tensor, "1 pos"],
    expected: Float[Tensor, "1 pos vocab"],
) -> None:
    """Check that a bridge without hooks gives these logits.

    Half of the positions may differ, since rounding can change the choice of experts.

    Raises:
        ValueError: the logits differ, or the bridge fails.
    """
    try:
        with without_user_hooks(bridge), evaluation_mode(bridge):
            found = bridge(tokens)
    except Exception as error:  # TransformerLens can raise anything
        why = f"it fails with {type(error).__name__}: {str(error).rstrip('.')}"
        raise ValueError(_said(bridge, why)) from error
    largest = expected.abs().max().clamp(min=1e-30)
    off = ((found - expected).abs().amax(dim=-1).median() / largest).item()
    if off > _TOLERANCE.get(expected.dtype, _HALVES):
        raise ValueError(_said(bridge, f"its logits are off by {off:.2g} of the largest"))
    _known.add(bridge)


def is_known(bridge: TransformerBridge) -> bool:
    """Whether the bridge matched its wrapped model when last compared."""
    return bridge in _known


def _said(bridge: TransformerBridge, off: str) -> str:
    if bridge.compatibility_mode:
        return (
            f"expected raw weights in {bridge.cfg.model_name!r}, to copy, train or save it; read "
            f"as weights of a model of transformers {off}, since enable_compatibility_mode() has "
            "folded some into others. Load it again, or pass no_processing=True to that call"
        )
    config = bridge.original_model.config
    advice = "Use a model without such a setting"
    if getattr(config, "scale_attn_weights", True) is False:
        advice = (
            "scale_attn_weights=False is one: multiply weights and biases of q by the square root "
            "of a head's size, and leave it out"
        )
    return (
        f"expected a TransformerBridge that computes what transformers does; around the "
        f"{type(bridge.original_model).__name__} of {bridge.cfg.model_name!r} {off}. This version "
        f"of TransformerLens leaves out something that its configuration asks for. {advice}"
    )

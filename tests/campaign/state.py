"""Everything of a model, of torch and of Python that a call must leave as it found it."""

from __future__ import annotations

import signal
import warnings
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from transformer_lens.hook_points import HookPoint

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def state_of(model: Any, *, weights: bool = True) -> dict[str, Any]:
    """Facts by name, to be compared with those of another moment.

    Args:
        model: the model that is called.
        weights: whether parameters belong to it too, and thereby every logit.
    """
    facts: dict[str, Any] = {
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "function modes": len(_get_current_function_mode_stack()),
        "warnings": len(warnings.filters),
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    }
    for name, module in model.named_modules():
        for kind in _HOOKS:
            facts[f"{name} {kind}"] = len(getattr(module, kind))
        facts[f"{name} training"] = module.training
        facts[f"{name} forward"] = "forward" in module.__dict__
        if isinstance(module, HookPoint):
            facts[f"{name} TransformerLens"] = len(module.fwd_hooks + module.bwd_hooks)
    for name, parameter in model.named_parameters():
        facts[f"{name} requires_grad"] = parameter.requires_grad
        facts[f"{name} grad"] = parameter.grad is not None
        if weights:
            facts[f"{name} values"] = parameter.detach().double().sum().item(), parameter.data_ptr()
    for gates in (getattr(model, "gates", None), getattr(model, "mlp_gates", None)):
        facts[f"settings of {type(gates).__name__}"] = repr(getattr(gates, "settings", None))
    return facts


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the facts that differ."""
    return [name for name in before | after if before.get(name) != after.get(name)]

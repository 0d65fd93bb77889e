"""The script behind docs/architectures.md: its checks pass (slow ones: on Llama), and can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architecture_checks import CHECKS, Subject
from architectures import ARCHITECTURES, N_HEADS

from sparse_tl.backend.adapters import BridgeAdapter

SLOW = ("exact patching", "ACDC", "head gating", "post-training")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quick_checks_pass(name: str) -> None:
    subject = Subject(name)
    for title, check in CHECKS.items():
        if title not in SLOW:
            check(subject)


@pytest.mark.long
@pytest.mark.parametrize("title", SLOW)
def test_slow_checks_pass(title: str) -> None:
    CHECKS[title](Subject("llama"))


@pytest.mark.long
@pytest.mark.parametrize("title", ["EAP", "exact patching", "evaluation"])
def test_checks_of_circuits_see_a_tenth_of_a_thousandth(
    monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    """So little that the model's own checks let it pass."""
    honest = BridgeAdapter.W_O
    monkeypatch.setattr(BridgeAdapter, "W_O", lambda self, layer: 1.0001 * honest(self, layer))
    with pytest.raises(ValueError, match="differs by"):
        CHECKS[title](Subject("llama"))


class Other(Subject):
    """A model that is not what the oracle takes it for."""

    def build(self, dtype: str = "float32") -> Any:
        model = super().build(dtype)
        with torch.no_grad():
            for parameter in BridgeAdapter(model).parameters("qk"):
                parameter[: parameter.shape[0] // N_HEADS] *= 1.01
        return model


@pytest.mark.parametrize("title", ["gates by hand", "gradients"])
def test_checks_of_gates_see_a_hundredth_in_one_head(title: str) -> None:
    with pytest.raises(ValueError, match="differs by"):
        CHECKS[title](Other("llama"))

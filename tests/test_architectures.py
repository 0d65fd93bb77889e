"""The script behind docs/architectures.md: its checks pass on one architecture, and can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architecture_checks import CHECKS, Subject
from architectures import N_HEADS

from sparse_tl.backend.adapters import BridgeAdapter


@pytest.fixture(scope="module")
def llama() -> Subject:
    return Subject("llama")


@pytest.mark.long
@pytest.mark.parametrize("title", CHECKS)
def test_checks_pass(llama: Subject, title: str) -> None:
    CHECKS[title](llama)


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

"""A HookedTransformer's folder where TransformerLens has no such class: a GPT-2, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import hooked_alone, tiny_model
from transformer_lens.model_bridge import TransformerBridge

from sparse_tl.backend import Model, hooked_folder, load_model, save_model
from sparse_tl.gates import SparseTransformer
from sparse_tl.tasks.addition import addition_tokenizer

pytestmark = hooked_alone

EXACT: dict[str, dict[str, Any]] = {
    "default": {},
    "relu": {"act_fn": "relu", "eps": 1e-3},
    "float64": {"dtype": "float64"},
    "more words than d_model": {"d_vocab": 40},
    "norms without weights": {"normalization_type": "LNPre"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another scale": ({"attn_scale": 3.0}, "represent {'attn_scale': 3.0}"),
    "soft cap": ({"output_logits_soft_cap": 5.0}, "represent {'output_logits_soft_cap': 5.0}"),
    "no norms": ({"normalization_type": None}, "'normalization_type': 'None'"),
    "rotary": ({"positional_embedding_type": "rotary", "rotary_dim": 6}, "'rotary'"),
    "activation": ({"act_fn": "solu_ln"}, "'act_fn': 'solu_ln'"),
}


def _model(fields: dict[str, Any]) -> Any:
    """Every weight random."""
    model = tiny_model(**fields)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(float(name.endswith(".w")) + 0.3 * noise)
    return model


def _saved(model: Model, folder: Path) -> Path:
    folder.mkdir()
    save_model(model, folder)
    return folder


@pytest.fixture
def without_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooked_folder, "HookedTransformerConfig", None)


@pytest.mark.usefixtures("without_hooked")
@pytest.mark.parametrize("case", EXACT)
def test_a_folder_gives_a_bridge_that_computes_the_same(tmp_path: Path, case: str) -> None:
    original = _model(EXACT[case])
    state = torch.get_rng_state()
    model = load_model(_saved(original, tmp_path / "model"), device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(model, TransformerBridge)
    assert model.cfg.model_name == "tiny"
    tokens = torch.randint(13, (3, 9), generator=torch.Generator().manual_seed(1))
    expected = original(tokens)
    rounding = 1e-13 if case == "float64" else 2e-6
    assert (model(tokens) - expected).abs().max() < rounding * expected.abs().max()
    again = load_model(_saved(model, tmp_path / "again"), device="cpu")
    torch.testing.assert_close(again(tokens), model(tokens))


@pytest.mark.usefixtures("without_hooked")
def test_texts_give_the_same_tokens(tmp_path: Path) -> None:
    original = tiny_model(tokenizer=addition_tokenizer(), default_prepend_bos=False)
    model = load_model(_saved(original, tmp_path / "model"), device="cpu")
    assert not model.cfg.default_prepend_bos
    assert model.to_tokens("36+28=").tolist() == original.to_tokens("36+28=").tolist()


@pytest.mark.usefixtures("without_hooked")
def test_gates_come_along(tmp_path: Path) -> None:
    sparse = SparseTransformer(tiny_model(), initial_bias=0.3)
    with torch.no_grad():
        sparse.gates.bias.normal_()
    tokens = torch.randint(13, (3, 9), generator=torch.Generator().manual_seed(1))
    counts = sparse.count_attention_edges(tokens)
    logits = sparse(tokens)
    sparse.save_pretrained(tmp_path / "sparse")
    loaded = SparseTransformer.from_pretrained(tmp_path / "sparse", device="cpu")
    assert isinstance(loaded.model, TransformerBridge)
    torch.testing.assert_close(loaded(tokens), logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(loaded.count_attention_edges(tokens).active, counts.active)


@pytest.mark.usefixtures("without_hooked")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_gpt2_is_refused(tmp_path: Path, case: str) -> None:
    fields, message = REFUSED[case]
    folder = _saved(_model(fields), tmp_path / "model")
    with pytest.raises(ValueError, match=rf"cannot load .*{re.escape(message)}") as caught:
        load_model(folder, device="cpu")
    assert str(folder) in str(caught.value)

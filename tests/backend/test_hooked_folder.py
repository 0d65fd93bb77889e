"""HookedTransformers as folders: every weight comes back, if need be in a GPT-2 or Llama."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import hooked_alone, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_tl.backend import Model, hooked_folder, load_model, model_config, save_model
from sparse_tl.gates import SparseTransformer
from sparse_tl.tasks.addition import addition_tokenizer

pytestmark = hooked_alone

Build = Callable[..., Model]


def _save(model: Model, folder: Path) -> Path:
    folder.mkdir()
    save_model(model, folder)
    return folder


def _tokens(vocabulary: int = 13, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocabulary, (3, 9), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in ("plain", "float64", "grouped", "attention_only")),
        ("plain", {"normalization_type": None}),
    ],
)
def test_own_folder_round_trip_is_exact(
    build_tiny: Build, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    model = build_tiny(kind, **fields)
    loaded = load_model(_save(model, tmp_path / "model"), device="cpu")
    assert loaded.embed.W_E.dtype == model.embed.W_E.dtype
    assert torch.equal(loaded(_tokens()), model(_tokens()))
    assert model_config(loaded) == model_config(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_tokenizer_comes_back_as_it_was(
    build_tiny: Build, tmp_path: Path, adds_bos: bool
) -> None:
    words = {word: i for i, word in enumerate(["<s>", "a", "b", "c"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<s>", pad_token="<s>"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = build_tiny(tokenizer=AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    loaded = load_model(_save(model, tmp_path / "model"), device="cpu")
    assert loaded.to_tokens("a b c").tolist() == model.to_tokens("a b c").tolist()
    assert loaded.to_tokens("a b c", prepend_bos=False).tolist() == [[1, 2, 3]]
    assert loaded.tokenizer.bos_token == "<s>"
    assert loaded.to_string(torch.tensor([1, 2])) == model.to_string(torch.tensor([1, 2]))


def test_the_addition_tokenizer_gets_no_bos(build_tiny: Build, tmp_path: Path) -> None:
    model = build_tiny(tokenizer=addition_tokenizer(), default_prepend_bos=False)
    loaded = load_model(_save(model, tmp_path / "model"), device="cpu")
    assert loaded.to_tokens("36+28=").tolist() == [[3, 6, 10, 2, 8, 11]]
    assert loaded.to_tokens("36+28=00064").shape == (1, 11)


def test_a_dtype_may_be_asked_for(build_tiny: Build, tmp_path: Path) -> None:
    folder = _save(build_tiny(), tmp_path / "model")
    loaded = load_model(folder, device="cpu", dtype="float64")
    assert loaded.embed.W_E.dtype == loaded.cfg.dtype == torch.float64
    with pytest.raises(ValueError, match="device_map cannot be chosen for a folder of a Hook"):
        load_model(folder, device_map="cpu")


# ---- where TransformerLens has no such class ----

EXACT: dict[str, tuple[str, dict[str, Any], str]] = {
    "learned positions": ("plain", {}, "GPT2LMHeadModel"),
    "relu": ("plain", {"act_fn": "relu", "eps": 1e-3}, "GPT2LMHeadModel"),
    "float64": ("float64", {}, "GPT2LMHeadModel"),
    "more words than d_model": ("plain", {"d_vocab": 40}, "GPT2LMHeadModel"),
    "norms without weights": ("plain", {"normalization_type": "LNPre"}, "GPT2LMHeadModel"),
    "grouped": ("grouped", {"rotary_base": 500}, "LlamaForCausalLM"),
    "grouped pairs": ("grouped", {"rotary_adjacent_pairs": True}, "LlamaForCausalLM"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another scale": ({"attn_scale": 3.0}, "represent {'attn_scale': 3.0}"),
    "soft cap": ({"output_logits_soft_cap": 5.0}, "represent {'output_logits_soft_cap': 5.0}"),
    "no norms": ({"normalization_type": None}, "'normalization_type': 'None'"),
    "rotary": (
        {"positional_embedding_type": "rotary", "rotary_dim": 6},
        "'normalization_type': 'LN'",
    ),
    "activation": ({"act_fn": "solu_ln"}, "'act_fn': 'solu_ln'"),
}


def _model(kind: str, fields: dict[str, Any]) -> Any:
    """Every weight random; no bias in the unembedding of a model with RMS norms."""
    model = tiny_model(kind, **fields)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(float(name.endswith(".w")) + 0.3 * noise)
        if kind == "grouped":
            model.unembed.b_U.zero_()
    return model


@pytest.fixture
def without_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooked_folder, "HookedTransformerConfig", None)


@pytest.mark.usefixtures("without_hooked")
@pytest.mark.parametrize("case", EXACT)
def test_a_folder_gives_a_bridge_that_computes_the_same(tmp_path: Path, case: str) -> None:
    kind, fields, family = EXACT[case]
    original = _model(kind, fields)
    state = torch.get_rng_state()
    model = load_model(_save(original, tmp_path / "model"), device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(model, TransformerBridge)
    assert type(model.original_model).__name__ == family
    assert model.cfg.model_name == "tiny"
    tokens = _tokens()
    expected = original(tokens)
    rounding = 1e-13 if case == "float64" else 2e-6
    assert (model(tokens) - expected).abs().max() < rounding * expected.abs().max()
    again = load_model(_save(model, tmp_path / "again"), device="cpu")
    torch.testing.assert_close(again(tokens), model(tokens))


@pytest.mark.usefixtures("without_hooked")
def test_texts_give_the_same_tokens(tmp_path: Path) -> None:
    original = tiny_model(tokenizer=addition_tokenizer(), default_prepend_bos=False)
    model = load_model(_save(original, tmp_path / "model"), device="cpu")
    assert not model.cfg.default_prepend_bos
    assert model.to_tokens("36+28=").tolist() == original.to_tokens("36+28=").tolist()


@pytest.mark.usefixtures("without_hooked")
def test_gates_come_along(tmp_path: Path) -> None:
    sparse = SparseTransformer(tiny_model(), initial_bias=0.3)
    with torch.no_grad():
        sparse.gates.bias.normal_()
    tokens = _tokens()
    counts = sparse.count_attention_edges(tokens)
    logits = sparse(tokens)
    sparse.save_pretrained(tmp_path / "sparse")
    loaded = SparseTransformer.from_pretrained(tmp_path / "sparse", device="cpu")
    assert isinstance(loaded.model, TransformerBridge)
    torch.testing.assert_close(loaded(tokens), logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(loaded.count_attention_edges(tokens).active, counts.active)


@pytest.mark.usefixtures("without_hooked")
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_family_says_is_refused(tmp_path: Path, case: str) -> None:
    fields, message = REFUSED[case]
    folder = _save(_model("plain", fields), tmp_path / "model")
    with pytest.raises(ValueError, match=rf"cannot load .*{re.escape(message)}") as caught:
        load_model(folder, device="cpu")
    assert str(folder) in str(caught.value)


@pytest.mark.usefixtures("without_hooked")
def test_a_bias_that_nothing_can_take_over_is_refused(tmp_path: Path) -> None:
    model = _model("grouped", {})
    with torch.no_grad():
        model.unembed.b_U.fill_(0.1)
    with pytest.raises(ValueError, match="cannot load .*RMS norms have no place for the bias b_U"):
        load_model(_save(model, tmp_path / "model"), device="cpu")

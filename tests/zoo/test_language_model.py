"""SmolLM2-135M-Instruct, a real language model, where `sparse-tl get smollm2` put it.

How its sparse version is shipped and read is tested with a tiny model of the same architecture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, plain_transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from sparse_tl import SparseTransformer, load_language_model, load_language_models
from sparse_tl.backend import adapt, add_lora, boot
from sparse_tl.backend.lora import has_adapters, lora_parameters
from sparse_tl.storage.files import read_json, read_tensors
from sparse_tl.zoo import language, shipping

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.mark.slow
def test_the_bridge_equals_transformers(smollm2: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
    )
    model = load_language_model(device="cpu")
    assert model.cfg.model_name == "SmolLM2-135M-Instruct.Q4_1"
    assert (adapt(model).graph.n_edges, model.cfg.n_layers, model.cfg.n_heads) == (70_651, 30, 9)
    tokens = model.to_tokens(PROMPT)
    assert tokens.shape == (1, 14)  # no BOS token before it
    with torch.no_grad():
        found, expected = model(tokens), plain.eval()(tokens).logits
        continued = plain.generate(tokens, max_new_tokens=3, do_sample=False)
    assert (found - expected).abs().max() < 1e-5
    assert model.tokenizer.decode(found[0, -1].argmax()) == " Mary"
    assert found[0, -1].softmax(-1).max().item() == pytest.approx(0.923, abs=0.001)
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), continued)
    assert model.tokenizer.tokenize("1732") == ["1", "7", "3", "2"]


def test_a_device_that_is_missing_is_refused_before_any_weights_are_read(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(language, "_of_file")
    with pytest.raises(ValueError, match="PyTorch cannot use 'cuda:99'"):
        load_language_model(device="cuda:99")


@pytest.mark.long
def test_texts_get_the_tokens_of_the_published_rule(smollm2: Path, shared_data: Path) -> None:
    model = load_language_model(device="cpu")
    tokenizer = model.tokenizer
    parts = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    published = Tokenizer(models.BPE(parts["vocab"], [tuple(pair) for pair in parts["merges"]]))
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    files = [
        shared_data / "text" / f"{name}.txt" for name in ("wikitext2_valid", "tinyshakespeare")
    ]
    texts = [line for file in files for line in file.read_text().split("\n")[:900]]
    texts += Path(__file__).read_text().split("\n\n")
    texts += [f"|  {n} |\n|---|\n\n{n}. one\n\n    {n}: two\t\t{n}" for n in range(200)]
    assert len(texts) > 2000
    for text in texts:
        assert tokenizer(text).input_ids == published.encode(text).ids, text
    assert tokenizer.tokenize("Steps:\n\n1. Mix") == ["Steps", ":", "ĊĊ", "1", ".", "ĠMix"]
    with torch.no_grad():
        written = model.generate(
            model.to_tokens("Steps:\n\n1. Mix"), max_new_tokens=40, do_sample=False
        )[0]
    text = tokenizer.decode(written)
    assert "\n\n2." in text
    assert tokenizer(text).input_ids == written.tolist()


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, SparseTransformer]:
    """A post-trained model, shipped from its folder as the sparse SmolLM2 is."""
    sparse = SparseTransformer(add_lora(boot(plain_transformer("llama"))))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*lora_parameters(sparse.model), *sparse.gates.parameters()]:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    sparse.save_pretrained(tmp_path / "trained", adapters_only=True)

    def load(**options: Any) -> Any:
        return boot(plain_transformer("llama"))

    for module in (language, shipping):
        monkeypatch.setattr(module, "SHIPPED", tmp_path / "shipped")
        monkeypatch.setattr(module, "load_language_model", load)
    monkeypatch.setattr(shipping, "measure_language_model", lambda model: {"ioi": 0.5})
    shipping.ship_language_model(tmp_path / "trained")
    return tmp_path / "shipped" / "smollm2", sparse


@pytest.mark.long
def test_the_sparse_model_comes_back_on_the_dense_one(
    shipped: tuple[Path, SparseTransformer],
) -> None:
    folder, trained = shipped
    assert read_json(folder / "claims.json") == {"dense": {"ioi": 0.5}, "sparse": {"ioi": 0.5}}
    assert not (folder / "sparse" / "model.safetensors").exists()
    stored = read_tensors(folder / "sparse" / "adapters.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    dense, sparse = load_language_models()
    assert not has_adapters(sparse.model), "merged, so that all of its weights can be read"
    tokens = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(sparse(tokens), trained(tokens), rtol=1e-3, atol=1e-3)
        assert torch.equal(dense(tokens), boot(plain_transformer("llama"))(tokens))


def test_other_weights_than_those_of_its_base(
    shipped: tuple[Path, SparseTransformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = boot(plain_transformer("llama"))
    with torch.no_grad():
        other.blocks[0].mlp.gate.original_component.weight[0, 0] += 1e-3
    monkeypatch.setattr(language, "load_language_model", lambda **_: other)
    with pytest.raises(ValueError, match="on which the adapters in .* were trained"):
        load_language_models()


@pytest.mark.slow
def test_the_shipped_models_do_what_they_claim(smollm2: Path) -> None:
    claimed = read_json(language.SHIPPED / "smollm2" / "claims.json")
    pair = zip(("dense", "sparse"), load_language_models(device="cpu"), strict=True)
    for side, model in pair:
        measured = shipping.measure_language_model(model)
        assert measured == pytest.approx(claimed[side], abs=0.02)

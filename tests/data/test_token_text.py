"""A character of several tokens is shown as a whole, over each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_tokenizers import byte_level, sentencepiece
from transformers import PreTrainedTokenizerFast

from sparse_tl import logit_difference, logit_lens, patch_activations, trace_attention
from sparse_tl.backend import Model
from sparse_tl.circuits.prompt.tokens import token_texts
from sparse_tl.data import PromptPairs
from sparse_tl.data.prompts import next_text
from sparse_tl.explorer.exploration import Exploration

Build = Callable[..., Model]
FACE = "\N{GRINNING FACE}"


def _shown(tokenizer: Any, text: str, build_tiny: Build) -> list[str]:
    model = build_tiny(d_vocab=len(tokenizer), tokenizer=tokenizer, n_ctx=64)
    return token_texts(model, torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]))


def test_bytes_show_the_character_that_they_make(build_tiny: Build) -> None:
    found = _shown(byte_level(), f"é{FACE}x 日本", build_tiny)
    assert found == ["é"] * 2 + [FACE] * 4 + ["x", " "] + ["日"] * 3 + ["本"] * 3
    found = _shown(sentencepiece(" hi"), f"hi{FACE}é", build_tiny)
    assert found == [" hi", *[FACE] * 4, "é", "é"]


def test_a_word_shows_its_space(build_tiny: Build) -> None:
    tokenizer = sentencepiece(" he", "he")
    assert _shown(tokenizer, "he  hehe", build_tiny) == [" he", " ", " he", "he"]
    assert next_text(tokenizer, [], tokenizer.convert_tokens_to_ids("▁he")) == " he"
    assert next_text(tokenizer, [], tokenizer.convert_tokens_to_ids("he")) == "he"
    assert next_text(tokenizer, [], len(tokenizer)) == ""  # an output of a padded unembedding
    assert _shown(byte_level("▁"), "▁a", build_tiny) == ["▁", "a"]


def test_what_is_no_whole_character_stays_unknown(build_tiny: Build) -> None:
    tokenizer = byte_level()
    model = build_tiny(d_vocab=len(tokenizer), tokenizer=tokenizer)
    face, end = tokenizer(FACE)["input_ids"], tokenizer("x")["input_ids"]
    unknown = "\N{REPLACEMENT CHARACTER}"
    some = torch.tensor([*face[:3], *end, *face[1:], *face, *end])
    assert token_texts(model, some) == [*unknown * 3, "x", *unknown * 3, *[FACE] * 4, "x"]
    assert _shown(byte_level(unknown), f"{unknown}a{FACE}", build_tiny) == [
        unknown,
        "a",
        *[FACE] * 4,
    ]


@pytest.mark.parametrize("name", ["gpt2", "olmo"])
def test_published_tokenizers(shared_data: Path, name: str, build_tiny: Build) -> None:
    path = shared_data / "tokenizers" / name / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    text = f"I {FACE} 日本語, 한글"
    found = _shown(tokenizer, text, build_tiny)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in found)
    assert set("".join(found)) == set(text)


def test_every_figure_and_table_shows_it(build_tiny: Build) -> None:
    tokenizer = byte_level()
    model = build_tiny(d_vocab=len(tokenizer), tokenizer=tokenizer, default_prepend_bos=False)
    face = tokenizer(FACE)["input_ids"]
    assert trace_attention(model, f"a{FACE}").input_tokens == ("a", *[FACE] * 4, "?")
    assert logit_lens(model, f"a{FACE}").tokens == ["a", *[FACE] * 4]
    # What is predicted may complete a character.
    assert logit_lens(model, torch.tensor(face[:3]), answer=face[3]).answer == FACE
    prompt = torch.tensor([*face, *face[:3]])
    pairs = PromptPairs(
        prompt[None], prompt.roll(1)[None], prompt[:1, None], prompt[1:2, None], torch.tensor([6])
    )
    patched = patch_activations(model, pairs, logit_difference, progress=False)
    assert patched.columns[:4] == [FACE] * 4
    explored = Exploration({"m": model}, prompt).models["m"]
    assert explored.now.graph.input_tokens[:4] == (FACE,) * 4
    likely = explored.outputs(top=len(tokenizer)).set_index("logit")["token"]
    (completed,) = likely[likely == FACE].index  # by the one byte that is missing
    assert completed == pytest.approx(model(prompt[None])[0, -1, face[3]].item(), abs=1e-5)

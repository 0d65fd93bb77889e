"""Where prompt and answer meet: they are the tokens of one text, under every kind of tokenizer."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import byte_level, sentencepiece, whole_words
from reading import Reader
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from sparse_tl import PromptPairs, TargetDataset, load_model, logit_lens
from sparse_tl.backend import Model
from sparse_tl.data.prompts import Encoder, single_token

Build = Callable[..., Model]
WORDS = (" time", " upon", " a", " 19", " 1945", "45", "()", "Once", " the", " lived", " king")
BYTES, PIECES = byte_level(*WORDS), sentencepiece(*WORDS, " Once")
KINDS = {"bytes": BYTES, "pieces": PIECES, "words": whole_words("once", "a", "time", ".", "the")}


def _model(tokenizer: Any, bos: bool | None = None) -> Any:
    """What is asked of a model, which follows its tokenizer unless it is told otherwise."""
    own = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return Reader(tokenizer, bos=own if bos is None else bos)


def _pairs(tokenizer: Any, prompt: str, answer: str, corrupted: str | None = None) -> PromptPairs:
    row = {"clean": prompt, "corrupted": corrupted or prompt, "answer": answer}
    return PromptPairs.from_texts(_model(tokenizer), [row])


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _published(shared_data: Path, name: str) -> Any:
    folder = "models" if name == "stories260K" else "tokenizers"
    path = shared_data / folder / name / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(path))


# ---- prompt and answer ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every_case
def test_a_space_may_be_on_either_side(kind: str) -> None:
    tokenizer = KINDS[kind]
    found = [_pairs(tokenizer, *texts) for texts in (("a time.", " the"), ("a time. ", "the"))]
    before = tokenizer("a time.")["input_ids"]
    assert found[0].clean[0].tolist() == found[1].clean[0].tolist() == before
    assert found[0].answers.tolist() == found[1].answers.tolist()
    assert [*before, int(found[0].answers)] == tokenizer("a time. the")["input_ids"]
    assert found[0].to_records(tokenizer)[0]["answer"] == [" the"]
    assert single_token(Encoder(tokenizer), " the", "a time.") == int(found[0].answers)


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        (" 19", "45", r"' 19' and '45' together are \[' 1945'\], and .* \[' 19'\]"),
        (" 1", "9é", r"' 1' and '9é' together are \[' 19', 'Ã', '©'\], and .* \[' 1'\]"),
        ("(", ")", r"'\(' and '\)' together are \['\(\)'\], and .* ends in \['\('\]"),
    ],
)
@pytest.mark.parametrize("column", ["answer", "wrong"])
@pytest.mark.every_case
def test_what_merges_is_refused(prompt: str, answer: str, message: str, column: str) -> None:
    row = {"clean": prompt, "corrupted": prompt, "answer": " a", column: answer}
    with pytest.raises(ValueError, match=f"row 0: .*begins inside a token: {message}"):
        PromptPairs.from_texts(_model(BYTES), [row])


@pytest.mark.parametrize("name", ["bytes", "pieces", "gpt2", "olmo", "stories260K"])
@pytest.mark.every_case
def test_pairs_are_the_tokens_of_one_text_or_refused(name: str, request: Any) -> None:
    tokenizer = KINDS.get(name)
    if tokenizer is None:
        tokenizer = _published(request.getfixturevalue("shared_data"), name)
    n_read = 0
    for text in ("Once upon a time", "In 1945 the king lived", "print(print()) ", "a  cafe\u0301!"):
        for end in range(1, len(text)):
            prompt, answer = text[:end], text[end : end + 5]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of answers that continue a word
                try:
                    pairs = _pairs(tokenizer, prompt, answer)
                except ValueError:
                    continue
            n_read += 1
            after = pairs.tokens[0, 0].tolist()
            tokens = [*pairs.clean[0].tolist(), *after]
            start = len(tokenizer("")["input_ids"])
            assert tokens[start:] == _tokens(tokenizer, prompt + answer)
            assert tokens[start : -len(after)] in [
                _tokens(tokenizer, some) for some in (prompt, prompt[:-1])
            ]
    assert n_read > 4


def test_the_time_of_a_story(shared_data: Path) -> None:
    """P(answer) fell from 0.9993 to 0.0000 with the space at the end of the prompt."""
    model = load_model(shared_data / "models" / "stories260K", device="cpu")
    row = {"clean": "Once upon a ", "corrupted": "Once upon a ", "answer": "time"}
    pairs = PromptPairs.from_texts(model, [row])
    likely = pairs.read(model(pairs.clean)).softmax(dim=-1)[0, pairs.answers[0, 0]]
    assert likely > 0.999
    assert logit_lens(model, "Once upon a ", answer="time").probability[-1, -1] > 0.999
    assert logit_lens(model, "Once upon a", answer=" time").probability[-1, -1] > 0.999


def test_prompts_whose_answers_do_not_agree() -> None:
    row = {"clean": "Once ", "corrupted": "Once ", "answer": ["upon", "x"]}
    with pytest.raises(ValueError, match="a clean prompt that all answers continue; 'Once ' ends"):
        PromptPairs.from_texts(_model(BYTES), [row])
    row = {"clean": "x", "corrupted": "Once ", "answer": "x"}
    other = byte_level(" x", "Once")
    with pytest.raises(ValueError, match="the same tokens after both prompts; 'x' is others after"):
        PromptPairs.from_texts(_model(other), [row])


def test_an_answer_that_the_vocabulary_lacks() -> None:
    with pytest.raises(ValueError, match="row 0, answer: .*it has no token for 'duck'"):
        _pairs(KINDS["words"], "once a", "duck")


def test_the_lens_reads_the_answer_behind_the_prompt(build_tiny: Build) -> None:
    model = build_tiny(d_vocab=len(PIECES), tokenizer=PIECES)
    whole = model.to_tokens("Once upon a time")
    expected = model(whole)[0, -2].detach().softmax(-1)[whole[0, -1]]
    for prompt, answer in (("Once upon a ", "time"), ("Once upon a", " time")):
        found = logit_lens(model, prompt, answer=answer)
        assert found.tokens == ["<s>", " Once", " upon", " a"]
        assert found.probability[-1, -1].item() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(ValueError, match="begins inside a token"):
        logit_lens(build_tiny(d_vocab=len(BYTES), tokenizer=BYTES), " 19", answer="45")


# ---- accents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["cafe\u0301 time", "n\u0303o, u\u0308ber", "한글 과"])
@pytest.mark.parametrize("name", ["made", "olmo"])
@pytest.mark.every_case
def test_decomposed_accents_are_those_that_the_tokenizer_composes(
    text: str, name: str, request: Any
) -> None:
    tokenizer = byte_level(*WORDS, normalizer=normalizers.NFC())
    if name == "olmo":
        tokenizer = _published(request.getfixturevalue("shared_data"), name)
    parts, composed = (unicodedata.normalize(form, text) for form in ("NFD", "NFC"))
    assert parts != composed
    pairs = _pairs(tokenizer, parts, " a")
    assert pairs.clean[0].tolist() == _tokens(tokenizer, composed)
    assert _tokens(tokenizer, parts) == _tokens(tokenizer, composed)


def test_an_accent_that_is_dropped_is_still_refused() -> None:
    tokenizer = byte_level(normalizer=normalizers.Replace("\u0301", ""))
    with pytest.raises(ValueError, match="row 0, clean: .*no token for '\u0301'"):
        _pairs(tokenizer, "cafe\u0301", " a")


# ---- what every prompt starts with ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "behind", "start"),
    [(None, None, ""), ("<s>", None, "<s>"), ("<s>", "</s>", "<s>"), (None, "<s>", "")],
)
@pytest.mark.every_case
def test_rows_start_as_the_tokenizer_starts_texts(
    before: str | None, behind: str | None, start: str
) -> None:
    tokenizer = byte_level(*WORDS, before=before, behind=behind)
    bare, bos = _tokens(tokenizer, " a time"), [tokenizer.bos_token_id]
    for asked, expected in ((None, start), (True, "<s>"), (False, "")):
        found = TargetDataset.from_texts(tokenizer, [" a"], [" time"], prepend_bos=asked)
        assert found.rows.tokens[0].tolist() == (bos if expected else []) + bare
        assert found.start == found.select(slice(0, 1)).start == expected
        pairs = PromptPairs.from_texts(
            _model(tokenizer, bos=start == ""),  # the argument decides, where there is one
            [{"clean": " a", "corrupted": " a", "answer": " time"}],
            prepend_bos=bool(expected),
        )
        assert pairs.clean[0].tolist() == (bos if expected else []) + bare[:-1]
        assert pairs.start == pairs.split(1)[0].start == expected
    assert repr(found).endswith("without BOS)") and repr(pairs).endswith("without BOS)")


def test_a_tokenizer_may_start_texts_with_more_than_bos() -> None:
    """As GLM's, with [gMASK]<sop>, none of which is its BOS token."""
    tokenizer = byte_level(*WORDS, before="</s>")
    pairs = _pairs(tokenizer, " a", " time")
    assert pairs.clean[0].tolist() == tokenizer(" a")["input_ids"]
    assert repr(pairs) == "PromptPairs(1 pairs of up to 2 tokens, beginning with '</s>')"

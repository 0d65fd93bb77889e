"""Where one document follows another: separators, and what loss and attention make of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_tokenizers import word_level
from transformers import PreTrainedTokenizerFast

from sparse_tl import (
    SparseTransformer,
    TextStream,
    TokenBatch,
    read_documents,
    text_rows,
    token_windows,
)
from sparse_tl.backend import Model
from sparse_tl.data import documents
from sparse_tl.training import evaluate_held_out

WORDS = ["<s>", "</s>", *"abcdefghijk"]
DOCUMENTS = ["a b c", "d", "e f g h"]
EACH = ["predict", "skip", "split"]


def tokenizer(bos: bool = False, eos: bool = True) -> PreTrainedTokenizerFast:
    special = {"bos_token": "<s>"} if bos else {}
    special |= {"eos_token": "</s>"} if eos else {}
    return word_level(*WORDS, unknown="a", **special)


def some_texts(n: int = 60, longest: int = 30) -> list[str]:
    draw = random.Random(0)
    return [
        " ".join(draw.choice("abcdefghijk") for _ in range(draw.randrange(longest)))
        for _ in range(n)
    ]


def test_eos_separates_documents_where_there_is_no_bos() -> None:
    """As with the tokenizers of Qwen2 and Qwen3."""
    windows = token_windows(DOCUMENTS, tokenizer(), 4)
    # </s> a b c | </s> d </s> e | and three tokens that fill no window.
    assert windows.tolist() == [[1, 2, 3, 4], [1, 5, 1, 6]]
    stream = TextStream(DOCUMENTS, tokenizer(), 4, 2, shuffle=1)
    assert torch.equal(stream.batch(0).tokens, windows)


def test_bos_separates_documents_where_there_is_one() -> None:
    windows = token_windows(DOCUMENTS, tokenizer(bos=True), 4)
    assert windows.tolist() == [[0, 2, 3, 4], [0, 5, 0, 6]]


@pytest.mark.parametrize("boundaries", EACH[:2])
def test_documents_do_not_meet_without_a_separator(boundaries: Any) -> None:
    plain = tokenizer(eos=False)
    with pytest.raises(ValueError, match='BOS or EOS token.*boundaries="split"'):
        text_rows(DOCUMENTS, plain, 2, boundaries=boundaries)
    with pytest.raises(ValueError, match="BOS or EOS token"):
        TextStream(DOCUMENTS, plain, 2, 2, boundaries=boundaries).batch(0)
    # Documents that fill their windows do not meet.
    rows = text_rows(["a b", "c d e f", "g"], plain, 2, boundaries=boundaries)
    assert rows.tokens.tolist() == [[2, 3], [4, 5], [6, 7]]
    apart = text_rows(DOCUMENTS, plain, 3, boundaries="split")
    assert apart.tokens.tolist()[0] == [2, 3, 4] and len(apart) == 2


def test_the_loss_heeds_boundaries_as_asked() -> None:
    # </s> a b c | </s> d </s> e | f g h </s>
    given = tokenizer(), 4
    rows = text_rows([*DOCUMENTS, "i"], *given)
    plain = TokenBatch.next_token(token_windows([*DOCUMENTS, "i"], *given))
    for name in ("tokens", "labels", "loss_mask"):
        assert torch.equal(getattr(rows, name), getattr(plain, name))
    assert rows.attention_mask is None
    skipped = text_rows([*DOCUMENTS, "i"], *given, boundaries="skip")
    assert torch.equal(skipped.tokens, rows.tokens)
    assert skipped.loss_mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]]
    # </s> a </s> b | </s> c </s>: the separator is text as well, as at the end of a turn in a chat.
    chat = text_rows(["a </s> b", "c </s> </s> d"], *given, boundaries="skip")
    assert chat.tokens.tolist() == [[1, 2, 1, 3], [1, 4, 1, 1]]
    assert chat.loss_labels().tolist() == [2, 1, 3, 4, 1, 1]
    run = text_rows(["a </s>", "b </s>", "c d"], tokenizer(), 9, boundaries="skip")
    assert run.loss_labels().tolist() == [2, 1, 3, 1, 4, 5]
    # </s> a b c | </s> d . . | </s> e f g | (h) | </s> i . .
    split = text_rows([*DOCUMENTS, "i"], *given, boundaries="split")
    assert split.attention_mask is not None
    real = split.attention_mask.bool()
    found = [row[keep].tolist() for row, keep in zip(split.tokens, real, strict=True)]
    assert found == [[1, 2, 3, 4], [1, 5], [1, 6, 7, 8], [1, 10]]
    assert real.int().tolist() == [[1] * 4, [1, 1, 0, 0], [1] * 4, [1, 1, 0, 0]]
    assert split.loss_mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]] * 2
    assert split.loss_labels().tolist() == [2, 3, 4, 5, 6, 7, 8, 10]


def test_a_limit_counts_windows_of_documents() -> None:
    rows = text_rows(iter(DOCUMENTS), tokenizer(), 4, limit=2, boundaries="split")
    assert len(rows) == 2
    with pytest.raises(ValueError, match="a document of at least 2 tokens"):
        text_rows(["", ""], tokenizer(), 4, boundaries="split")


@pytest.mark.parametrize("boundaries", EACH)
@pytest.mark.parametrize("shuffle", [1, 7])
def test_a_stream_heeds_boundaries_at_any_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, boundaries: Any, shuffle: int
) -> None:
    monkeypatch.setattr(documents, "PIECE", 20)
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>".join(some_texts()))

    def stream() -> TextStream:
        return TextStream(
            read_documents(path), tokenizer(), 6, 5, shuffle=shuffle, boundaries=boundaries
        )

    rows = text_rows(read_documents(path), tokenizer(), 6, boundaries=boundaries)
    whole, n = stream(), len(rows)
    batches = [whole.batch(step) for step in range(2 * n // 5)]
    assert whole.n_windows == n > 50
    first = torch.cat([batch.tokens for batch in batches])[:n]
    masks = torch.cat([batch.loss_mask for batch in batches])[:n]
    if shuffle == 1:
        assert torch.equal(first, rows.tokens) and torch.equal(masks, rows.loss_mask)
    else:
        assert sorted(first.tolist()) == sorted(rows.tokens.tolist())
    for step in range(0, len(batches), 5):
        assert stream().batch(step).digest() == batches[step].digest()


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_documents_apart_are_measured_as_if_alone(
    build_tiny: Callable[..., Model], kind: str
) -> None:
    """Loss, possible edges and open gates of every document by itself, in a plain pass."""
    model, texts = build_tiny(kind), some_texts(12, 8)
    rows = text_rows(texts, tokenizer(), 8, boundaries="split")
    alone = [[1, *(WORDS.index(word) for word in document.split())] for document in texts]
    alone = [torch.tensor([tokens]) for tokens in alone if len(tokens) > 1]
    assert len({tokens.shape[1] for tokens in alone}) > 3
    losses = [
        torch.nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:], reduction="none")
        for tokens in alone
    ]
    dense = evaluate_held_out(model, rows)
    assert dense.loss == pytest.approx(torch.cat(losses).mean().item(), abs=1e-6)
    joined = evaluate_held_out(model, text_rows(texts, tokenizer(), 8))
    assert abs(joined.loss - dense.loss) > 1e-3
    lengths = [tokens.shape[1] for tokens in alone]
    n_heads = 2 * model.cfg.n_heads
    possible = sum(n_heads * length * (length + 1) // 2 for length in lengths)
    assert dense.possible_attention_edges * len(rows) == pytest.approx(possible)
    sparse = SparseTransformer(model, initial_bias=0.0)
    opened = [int(sparse.count_attention_edges(tokens).active.sum()) for tokens in alone]
    found = evaluate_held_out(sparse, rows)
    assert found.active_attention_edges * len(rows) == pytest.approx(sum(opened))

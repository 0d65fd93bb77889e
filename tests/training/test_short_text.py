"""Short rows: where they start, how long they are, and what precedes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_tokenizers import byte_level
from torch import Tensor

from sparse_tl.data import TokenBatch
from sparse_tl.training import short_rows
from sparse_tl.training.text import TOKENS

TEXT = "A b c d e. Fg hi jk! Lm no pq rs\nTu vw xy z"
STARTS = ["A b", "Fg hi", "Lm no", "Tu vw"]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture
def tokenizer() -> Any:
    made = byte_level(" hi", " no")
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return made


def windows(tokenizer: Any, *texts: str) -> Tensor:
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, rows))
    return torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in rows])


def texts(rows: TokenBatch, tokenizer: Any) -> list[str]:
    """What each row has of the text, with the label of its last position."""
    assert rows.attention_mask is not None
    found = []
    for tokens, labels, real in zip(rows.tokens, rows.labels, rows.attention_mask, strict=True):
        n = int(real.sum())
        assert real[:n].all()
        assert torch.equal(tokens[1:n], labels[: n - 1])
        found.append(tokenizer.decode([*tokens[:n].tolist(), int(labels[n - 1])]))
    return found


def test_rows_start_where_sentences_lines_and_documents_do(tokenizer: Any) -> None:
    found = short_rows(windows(tokenizer, TEXT, "Second " + TEXT), tokenizer)
    assert list(found) == ["short", "short after BOS"]
    for name, before in (("short", ""), ("short after BOS", "<s>")):
        of = texts(found[name], tokenizer)
        for start in (*STARTS, "Seco"):
            assert any(text.startswith(before + start) for text in of)
        assert all(text.removeprefix(before) in "Second " + TEXT for text in of)
        mask = found[name].attention_mask
        assert mask is not None and torch.equal(found[name].loss_mask, mask.bool())


def test_lengths_are_log_uniform(tokenizer: Any) -> None:
    text = ". ".join(["Ab cd ef gh ij"] * 60)
    (rows, _) = short_rows(windows(tokenizer, *[text] * 20), tokenizer).values()
    assert rows.attention_mask is not None
    lengths = rows.attention_mask.sum(dim=1).double()
    assert (int(lengths.min()), int(lengths.max())) == TOKENS
    assert lengths.log().mean().item() == pytest.approx(2.77, abs=0.15)  # of 16 tokens


def test_documents_are_not_joined(tokenizer: Any) -> None:
    text = "One two three.</s>Four five six seven"
    for row in texts(short_rows(windows(tokenizer, text), tokenizer)["short"], tokenizer):
        assert not ("three" in row and "Four" in row) and "</s>" not in row


def test_in_a_chat_the_text_alone_has_losses(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    rows = short_rows(windows(tokenizer, TEXT), tokenizer)["short in a chat"]
    for text, mask, labels in zip(texts(rows, tokenizer), rows.loss_mask, rows.labels, strict=True):
        before, said = text.split("<assistant>")
        assert before == "<user>Continue the text."
        assert tokenizer.decode(labels[mask].tolist()) == said


def test_the_seed_draws_the_lengths(tokenizer: Any) -> None:
    some = windows(tokenizer, TEXT * 3)
    first, again, other = (short_rows(some, tokenizer, seed=n)["short"] for n in (0, 0, 1))
    assert first.digest() == again.digest() != other.digest()

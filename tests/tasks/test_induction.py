"""Induction: what repeats, what is replaced, and in which vocabularies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from made_tokenizers import byte_level
from reading import Reader

from sparse_tl.backend import Model
from sparse_tl.data import PromptPairs
from sparse_tl.tasks import InductionTask


def _check(pairs: PromptPairs, length: int, start: list[int]) -> None:
    n = len(start)
    assert pairs.clean.shape[1] == n + 2 * length - 1
    assert (pairs.positions == pairs.clean.shape[1] - 1).all()
    assert (pairs.clean[:, :n] == torch.tensor(start)).all()
    for clean, corrupted, answer, wrong in zip(
        pairs.clean[:, n:].tolist(),
        pairs.corrupted[:, n:].tolist(),
        pairs.answers.tolist(),
        pairs.wrong.tolist(),
        strict=True,
    ):
        first, again = clean[:length], clean[length:]
        assert len(set(first)) == length
        assert again == first[:-1]
        assert answer == first[-1:]
        assert wrong == again
        (changed,) = (
            i for i, pair in enumerate(zip(clean, corrupted, strict=True)) if len({*pair}) > 1
        )
        assert changed == length - 2  # the first occurrence of the last token
        assert clean[changed] == clean[-1]
        assert corrupted[changed] not in clean


@pytest.mark.parametrize("length", [2, 5, 12])
def test_a_model_without_a_tokenizer(build_tiny: Callable[..., Model], length: int) -> None:
    pairs = InductionTask(length=length).pairs(build_tiny(), 40)
    _check(pairs, length, [])
    assert len(pairs.clean.unique(dim=0)) == 40
    assert set(pairs.clean.unique().tolist()) == set(range(13))


def test_special_tokens_are_not_drawn() -> None:
    tokenizer = byte_level(" word", before="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    pairs = InductionTask().pairs(Reader(tokenizer), 300, prepend_bos=True)
    _check(pairs, 16, [tokenizer.bos_token_id])
    drawn = {*pairs.clean[:, 1:].unique().tolist(), *pairs.corrupted[:, 1:].unique().tolist()}
    special = {tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "<|user|>")}
    assert drawn == set(range(len(tokenizer))) - special
    assert (pairs.start, InductionTask().pairs(Reader(tokenizer), 2).start) == ("<s>", "")

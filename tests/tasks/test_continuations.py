"""What models generate is what `transformers` and a loop by hand generate; counts are by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_tl import (
    PromptPairs,
    SparseTransformer,
    ablate_heads,
    compare_continuations,
    continuations,
    load_model,
    steer,
)
from sparse_tl.data.pairs import NO_TOKEN
from sparse_tl.tasks import Continuations
from sparse_tl.tasks.skill_battery import wilson_interval

PROMPTS = ["Once upon a time", "The big dog", "Lily and Tom went to the park. They saw a"]


@pytest.fixture(scope="module")
def model(shared_data: Path) -> Any:
    return load_model(shared_data / "models" / "stories260K", device="cpu")


def _by_hand(model: Any, text: str, n: int) -> list[int]:
    """One prompt at a time, without padding."""
    tokens = model.to_tokens(text)
    with torch.no_grad():
        for _ in range(n):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    return tokens[0, -n:].tolist()


@pytest.mark.long
def test_the_likeliest_token_again_and_again(model: Any) -> None:
    found = continuations(model, PROMPTS, 12, batch_size=2, progress=False)
    for row, text in enumerate(PROMPTS):
        tokens = _by_hand(model, text, 12)
        assert found.tokens[row].tolist() == tokens
        whole = model.tokenizer.decode([*model.to_tokens(text)[0].tolist(), *tokens])
        assert found.prompts[row] + found.texts[row] == whole
        options = {"max_new_tokens": 12, "do_sample": False, "verbose": False}
        generated = model.generate(model.to_tokens(text), stop_at_eos=False, **options)
        assert generated[0, -12:].tolist() == tokens
    rows = [{"clean": text, "corrupted": text, "answer": " x"} for text in PROMPTS]
    pairs = PromptPairs.from_texts(model, rows)
    again = continuations(model, pairs, 12, progress=False)
    assert torch.equal(again.tokens, found.tokens) and again.prompts == found.prompts


def test_under_ablation_and_in_a_sparse_model(model: Any) -> None:
    """What acts on the model acts on every pass, and is gone after the block."""
    plain = continuations(model, PROMPTS, 8, progress=False)
    vector = 5 * torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    for act in (
        lambda: ablate_heads(model, ["a0.h0", "a2.h3", "a4.h1"]),
        lambda: steer(model, "blocks.2.hook_resid_pre", vector),
    ):
        with act():
            found = continuations(model, PROMPTS, 8, progress=False)
            expected = [_by_hand(model, text, 8) for text in PROMPTS]
        assert found.tokens.tolist() == expected
        assert not torch.equal(found.tokens, plain.tokens)
    assert torch.equal(continuations(model, PROMPTS, 8, progress=False).tokens, plain.tokens)
    sparse = SparseTransformer(model, initial_bias=100.0)
    assert torch.equal(continuations(sparse, PROMPTS, 8, progress=False).tokens, plain.tokens)
    sparse.unwrap()


def test_a_text_ends_at_its_end(model: Any, request: pytest.FixtureRequest) -> None:
    """Any token may be that of the end: here one that no prompt has."""
    plain, tokenizer = continuations(model, PROMPTS, 6, progress=False), model.tokenizer
    begun = {token for text in PROMPTS for token in model.to_tokens(text)[0].tolist()}
    end = next(token for token in plain.tokens[1].tolist() if token not in begun)
    request.addfinalizer(lambda was=tokenizer.eos_token: setattr(tokenizer, "eos_token", was))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    found = continuations(model, PROMPTS, 6, progress=False)
    assert found.stops[1]
    for row in range(3):
        tokens = plain.tokens[row].tolist()
        kept = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert found.tokens[row].tolist() == kept + [NO_TOKEN] * (6 - len(kept))
        assert bool(found.stops[row]) == (end in tokens)


def _made(*rows: tuple[str, list[int]]) -> Continuations:
    texts, tokens = zip(*rows, strict=True)
    ended = torch.tensor([NO_TOKEN in row for row in tokens])
    return Continuations(("a", "b", "c", "d"), texts, torch.tensor(tokens), ended)


def test_shares_by_hand() -> None:
    n = NO_TOKEN
    dense = _made(("x y z", [1, 2, 3]), ("x y", [1, 2, n]), ("z z z", [3, 3, 3]), ("", [n, n, n]))
    other = _made(("x y x", [1, 2, 1]), ("x y", [1, 2, n]), ("y z z", [2, 3, 3]), ("z", [3, n, n]))
    assert dense.agreement(other).tolist() == [2, 3, 0, 0]
    assert other.contains(["y x", "z", "z z", "z"]).tolist() == [True, False, True, True]
    table = compare_continuations({"dense": dense, "other": other}, contains="z")
    assert table.loc["dense", ["contains", "stops", "agrees", "agreement"]].tolist() == [
        *(0.5, 0.5, 1, 3)
    ]
    assert table.loc["other", ["contains", "stops", "agrees"]].tolist() == [0.5, 0.5, 0.25]
    assert table.loc["other", "agreement"] == pytest.approx(5 / 4)
    ends = table.loc["other", ["agrees_low", "agrees_high"]]
    assert tuple(ends) == pytest.approx(wilson_interval(1, 4))
    assert "contains" not in compare_continuations({"dense": dense})


def test_what_cannot_be_compared(model: Any) -> None:
    found = continuations(model, PROMPTS[:1], 2, progress=False)
    longer = continuations(model, PROMPTS[:1], 3, progress=False)
    with pytest.raises(ValueError, match="on the same prompts, and as many tokens"):
        found.agreement(longer)
    with pytest.raises(ValueError, match="no prompt to continue"):
        continuations(model, [])
    with pytest.raises(ValueError, match="context"):
        continuations(model, PROMPTS, 10**4, progress=False)

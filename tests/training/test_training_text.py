"""Windows that a model writes itself, and short rows: distribution, what is given, and files."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCABULARY, plain_transformer
from made_tokenizers import byte_level
from safetensors.torch import load_file
from several_ranks import on_ranks
from short_runs import Killed
from tiny import SHAPES, tiny_model, tokenizer_of
from torch import Tensor

import sparse_tl
from sparse_tl import SparseTransformer, sampled_windows
from sparse_tl.backend import boot
from sparse_tl.data import TokenBatch
from sparse_tl.training import short_rows
from sparse_tl.training.text import TOKENS

QUIET: dict[str, Any] = {"progress": False}
WORDS = ["<s>", *"abcdefghijkl"]
BEGINNINGS = ["a b c", "d", "e f g h i j k l", "b a"]
STARTS = [(0, 1, 2, 3), (0, 4), (0, 5, 6, 7), (0, 2, 1)]
"""The same as tokens, behind BOS, cut to a quarter of a window of twelve."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_of(WORDS, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def model(tokenizer: Any) -> Any:
    """In float64, so that no rounding moves a token."""
    return sure(tiny_model(dtype="float64", tokenizer=tokenizer))


@torch.no_grad()
def sure(model: Any, factor: float = 3.0) -> Any:
    """The same model with predictions that are far from uniform."""
    for parameter in model.unembed.parameters():
        parameter.mul_(factor)
    return model


def by_whole_passes(
    model: Any, starts: list[tuple[int, ...]], window: int, seed: int = 0
) -> Tensor:
    """The windows, each token drawn after a pass over all tokens before it, without a cache."""
    rows = []
    for row, start in enumerate(starts):
        uniform = np.random.default_rng([seed, row]).random(window)
        tokens = list(start)
        while len(tokens) < window:
            with torch.no_grad():
                logits = model(torch.tensor([tokens]))[0, -1].double()
            cumulative = np.cumsum(logits.softmax(0).numpy())
            tokens.append(int((cumulative <= uniform[len(tokens)] * cumulative[-1]).sum()))
        rows.append(tokens)
    return torch.tensor(rows)


# ---- the model's distribution --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "score", "share"])
def test_windows_of_a_model_of_two_tokens_are_as_frequent_as_they_are_probable(
    tmp_path: Path, kind: str
) -> None:
    """All sixteen windows, by a test that a temperature of 0.9 does not pass."""
    model = sure(tiny_model(d_vocab=2, tokenizer=tokenizer_of(["<s>", "a"], tmp_path)), 2)
    if kind == "score":
        model = SparseTransformer(model, initial_bias=0.0)
    elif kind == "share":
        model = SparseTransformer(model, gates="share", initial_threshold=0.3)
    windows = torch.tensor([(0, *rest) for rest in product((0, 1), repeat=4)])
    with torch.no_grad():
        logits = model(windows)[:, :-1].double()
    n = 8000
    found = sampled_windows(model, n, 5, beginnings=[], batch_size=2000, **QUIET).tokens
    assert (found[:, 0] == 0).all()
    seen = (windows[:, None] == found).all(dim=2).sum(dim=1)
    assert seen.sum() == n

    def chi_squared(temperature: float) -> float:
        labels = windows[:, 1:, None]
        probable = (logits / temperature).softmax(-1).gather(2, labels).prod(dim=1)[:, 0]
        assert probable.sum().item() == pytest.approx(1)
        return ((seen - n * probable) ** 2 / (n * probable)).sum().item()

    limit = 37.7  # exceeded by chance once in a thousand, with 15 degrees of freedom
    assert chi_squared(1.0) < limit < min(chi_squared(0.9), chi_squared(1.1))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("gates", [None, "score", "share"])
def test_a_cache_changes_no_token(tokenizer: Any, kind: str, gates: Any) -> None:
    model: Any = sure(tiny_model(kind, dtype="float64", tokenizer=tokenizer))
    if gates is not None:
        dense = sampled_windows(model, 6, 12, beginnings=BEGINNINGS, **QUIET).tokens
        start = {"initial_bias": 0.0} if gates == "score" else {"initial_threshold": 0.3}
        model = SparseTransformer(model, gates=gates, **start)
    found = sampled_windows(model, 6, 12, beginnings=BEGINNINGS, **QUIET).tokens
    starts = [tuple(row[: 1 + 3 * (i % 2)]) for i, row in enumerate(found.tolist())]
    starts = [next((s for s in STARTS if s == start[: len(s)]), start) for start in starts]
    assert torch.equal(found, by_whole_passes(model, starts, 12))
    if gates is not None:
        assert not torch.equal(found, dense)
        with model.opened():
            opened = sampled_windows(model, 6, 12, beginnings=BEGINNINGS, **QUIET).tokens
        assert torch.equal(opened, dense)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_bridges_of_every_architecture(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of([f"w{number}" for number in range(VOCABULARY)], tmp_path)
    model = sure(boot(plain_transformer(name, "float64"), tokenizer, name=name), 5)
    found = sampled_windows(model, 3, 12, beginnings=[], **QUIET).tokens
    assert torch.equal(found, by_whole_passes(model, [(0,)] * 3, 12))


# ---- what is given, and what is not --------------------------------------------------------------


def test_given_tokens_have_no_loss(model: Any) -> None:
    rows = sampled_windows(model, 16, 12, beginnings=BEGINNINGS, **QUIET)
    assert rows.tokens.shape == (16, 12)
    assert rows.attention_mask is None and rows.groups is None
    begun = []
    for row, (tokens, mask) in enumerate(zip(rows.tokens.tolist(), rows.loss_mask, strict=True)):
        n_given = 12 - int(mask.sum())
        assert mask.tolist() == [n_given - 1 <= place < 11 for place in range(12)]
        if row % 2 == 0:
            assert tokens[0] == 0 and n_given == 1
        else:
            begun.append(tuple(tokens[:n_given]))
    assert torch.equal(rows.labels[:, :-1], rows.tokens[:, 1:])
    # In turn: each once before any comes again, in the same order.
    assert sorted(begun[:4]) == sorted(STARTS) and begun[4:] == begun[:4]
    orders = set()
    for seed in range(8):
        other = sampled_windows(model, 8, 12, beginnings=BEGINNINGS, seed=seed, **QUIET)
        orders.add(tuple(other.tokens[1::2, 1].tolist()))
    assert len(orders) > 1


def test_sampling_goes_on_after_a_separator(model: Any) -> None:
    tokens = sampled_windows(model, 64, 12, beginnings=[], **QUIET).tokens
    after = (tokens[:, 1:-1] == 0).any(dim=1)
    assert after.any() and (tokens[after][:, -1] != 0).any()


def test_the_packages_own_beginnings(model: Any) -> None:
    own, none = (
        sampled_windows(model, 300, 16, beginnings=some, batch_size=300, **QUIET)
        for some in (None, [])
    )
    assert (none.loss_mask.sum(dim=1) == 15).all()
    assert (own.loss_mask[::2].sum(dim=1) == 15).all()
    assert (own.loss_mask[1::2].sum(dim=1) < 15).all()
    n = 125
    assert torch.equal(own.loss_mask[1:50:2], own.loss_mask[1 + 2 * n : 50 + 2 * n : 2])


def test_windows_without_a_separator_continue_beginnings(tmp_path: Path) -> None:
    model = tiny_model(tokenizer=tokenizer_of(WORDS, tmp_path))
    tokenizer = model.tokenizer
    tokenizer.bos_token = None
    found = sampled_windows(model, 4, 12, beginnings=[], **QUIET)  # EOS
    assert (found.tokens[:, 0] == 0).all()
    tokenizer.eos_token = None
    found = sampled_windows(model, 8, 12, beginnings=BEGINNINGS, **QUIET)
    begun = [
        tuple(row[: 12 - mask.sum()].tolist())
        for row, mask in zip(found.tokens, found.loss_mask, strict=True)
    ]
    assert sorted(begun[:4]) == sorted(start[1:] for start in STARTS)
    for beginnings in (None, []):
        with pytest.raises(ValueError, match="BOS or EOS token"):
            sampled_windows(model, 4, 12, beginnings=beginnings, **QUIET)


# ---- seeds ---------------------------------------------------------------------------------------


def test_windows_depend_on_the_seed_and_their_place_alone(model: Any) -> None:
    how: dict[str, Any] = {"beginnings": BEGINNINGS, **QUIET}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rows = sampled_windows(model, 20, 12, seed=3, **how)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    for batch_size, n in ((1, 5), (7, 20), (64, 13)):
        again = sampled_windows(model, n, 12, seed=3, batch_size=batch_size, **how)
        assert again.digest() == rows.select(slice(0, n)).digest()
    other = sampled_windows(model, 20, 12, seed=4, **how)
    assert (other.tokens != rows.tokens).any(dim=1).sum() > 15
    assert len(set(map(tuple, rows.tokens.tolist()))) > 15


# ---- files ---------------------------------------------------------------------------------------


class Passes:
    """Counts the passes of a model, and kills the process at one of them."""

    def __init__(self, model: Any, kill_at: int | None = None) -> None:
        self.n, self.kill_at = 0, kill_at
        self.inside = model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", self.hook)])

    def hook(self, value: Tensor, hook: Any) -> None:
        if self.n == self.kill_at:
            raise Killed
        self.n += 1


def test_an_interrupted_call_continues(model: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"beginnings": BEGINNINGS, "batch_size": 4, **QUIET}
    expected = sampled_windows(model, 14, 12, **how)
    file = tmp_path / "new" / "own.safetensors"
    checks = 1  # a whole pass in the first batch of each call
    killed = Passes(model, kill_at=2 * 11 + checks + 5)
    with killed.inside, pytest.raises(Killed):
        sampled_windows(model, 14, 12, save_to=file, **how)
    kept = load_file(file)
    assert torch.equal(kept["tokens"], expected.tokens[:8])
    assert torch.equal(kept["loss_mask"], expected.loss_mask[:8])
    resumed = Passes(model)
    with resumed.inside:
        found = sampled_windows(model, 14, 12, save_to=file, **how)
    assert resumed.n == 2 * 11 + checks
    assert found.digest() == expected.digest()
    assert torch.equal(load_file(file)["tokens"], expected.tokens)
    before = file.read_bytes()
    read = Passes(model)
    with read.inside:
        assert sampled_windows(model, 14, 12, save_to=file, **how).digest() == expected.digest()
        fewer = sampled_windows(model, 3, 12, save_to=file, **how)
    assert read.n == 0 and file.read_bytes() == before
    assert fewer.digest() == expected.select(slice(0, 3)).digest()
    more = sampled_windows(model, 23, 12, save_to=file, **how)
    assert more.digest() == sampled_windows(model, 23, 12, **how).digest()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_files_of_other_runs_are_refused(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    how: dict[str, Any] = {"beginnings": BEGINNINGS, "save_to": file, **QUIET}
    sampled_windows(model, 4, 12, **how)
    before = file.read_bytes()
    other = sure(tiny_model(seed=1, dtype="float64", tokenizer=tokenizer))
    for one, window, changed, said in (
        (model, 12, {"seed": 1}, "seed 1, .* seed 0, "),
        (model, 11, {}, "window 11, .* window 12, "),
        (model, 12, {"beginnings": BEGINNINGS[::-1]}, "beginnings "),
        (other, 12, {}, "model "),
        (SparseTransformer(other, initial_bias=0.0), 12, {}, "model "),
    ):
        with pytest.raises(ValueError, match=f"does not hold sampled windows of .*{said}"):
            sampled_windows(one, 8, window, **{**how, **changed})
    assert file.read_bytes() == before
    sparse, how["save_to"] = SparseTransformer(model), tmp_path / "opened.safetensors"
    with sparse.opened():
        sampled_windows(sparse, 4, 12, **how)
    with pytest.raises(ValueError, match="does not hold sampled windows"):
        sampled_windows(sparse, 4, 12, **how)


# ---- refused before work -------------------------------------------------------------------------


def test_logits_that_are_no_numbers(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    sure(model, float("nan"))
    with pytest.raises(ValueError, match="predicts NaN"):
        sampled_windows(model, 4, 12, save_to=file, **QUIET)
    assert not file.exists()


def test_a_cache_that_the_model_does_not_read(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with versions of transformers and TransformerLens that do not fit each other."""
    model = sure(tiny_model("grouped", tokenizer=tokenizer))
    adapter = type(sparse_tl.backend.adapt(model))
    monkeypatch.setattr(adapter, "empty_cache", lambda self, *sizes: {})
    with pytest.raises(ValueError, match="the same with a key-value cache as without"):
        sampled_windows(model, 4, 12, beginnings=[], **QUIET)


# ---- ranks ---------------------------------------------------------------------------------------


def test_ranks_divide_the_windows(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    how: dict[str, Any] = {"beginnings": BEGINNINGS, "batch_size": 4, **QUIET}
    expected = sampled_windows(model, 9, 12, **how)

    def job(rank: int) -> tuple[str, int]:
        passes = Passes(model)
        with passes.inside:
            found = sampled_windows(model, 9, 12, save_to=file, **how)
        return found.digest(), passes.n

    assert on_ranks(2, job) == [(expected.digest(), 3 * 11 + 1)] * 2
    assert torch.equal(load_file(file)["tokens"], expected.tokens)


# ---- short rows ----------------------------------------------------------------------------------


TEXT = "A b c d e. Fg hi jk! Lm no pq rs\nTu vw xy z"
SENTENCES = ["A b", "Fg hi", "Lm no", "Tu vw"]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture
def by_byte() -> Any:
    made = byte_level(" hi", " no")
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return made


def windows(by_byte: Any, *texts: str) -> Tensor:
    rows = [by_byte(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, rows))
    return torch.tensor([row + [by_byte.eos_token_id] * (width - len(row)) for row in rows])


def texts(rows: TokenBatch, by_byte: Any) -> list[str]:
    """What each row has of the text, with the label of its last position."""
    assert rows.attention_mask is not None
    found = []
    for tokens, labels, real in zip(rows.tokens, rows.labels, rows.attention_mask, strict=True):
        n = int(real.sum())
        assert real[:n].all()
        assert torch.equal(tokens[1:n], labels[: n - 1])
        found.append(by_byte.decode([*tokens[:n].tolist(), int(labels[n - 1])]))
    return found


def test_rows_start_where_sentences_lines_and_documents_do(by_byte: Any) -> None:
    found = short_rows(windows(by_byte, TEXT, "Second " + TEXT), by_byte)
    assert list(found) == ["short", "short after BOS"]
    for name, before in (("short", ""), ("short after BOS", "<s>")):
        of = texts(found[name], by_byte)
        for start in (*SENTENCES, "Seco"):
            assert any(text.startswith(before + start) for text in of)
        assert all(text.removeprefix(before) in "Second " + TEXT for text in of)
        mask = found[name].attention_mask
        assert mask is not None and torch.equal(found[name].loss_mask, mask.bool())


def test_lengths_are_log_uniform(by_byte: Any) -> None:
    text = ". ".join(["Ab cd ef gh ij"] * 60)
    (rows, _) = short_rows(windows(by_byte, *[text] * 20), by_byte).values()
    assert rows.attention_mask is not None
    lengths = rows.attention_mask.sum(dim=1).double()
    assert (int(lengths.min()), int(lengths.max())) == TOKENS
    assert lengths.log().mean().item() == pytest.approx(2.77, abs=0.15)  # of 16 tokens


def test_documents_are_not_joined(by_byte: Any) -> None:
    text = "One two three.</s>Four five six seven"
    for row in texts(short_rows(windows(by_byte, text), by_byte)["short"], by_byte):
        assert not ("three" in row and "Four" in row) and "</s>" not in row


def test_in_a_chat_the_text_alone_has_losses(by_byte: Any) -> None:
    by_byte.chat_template = TEMPLATE
    rows = short_rows(windows(by_byte, TEXT), by_byte)["short in a chat"]
    for text, mask, labels in zip(texts(rows, by_byte), rows.loss_mask, rows.labels, strict=True):
        before, said = text.split("<assistant>")
        assert before == "<user>Continue the text."
        assert by_byte.decode(labels[mask].tolist()) == said


def test_the_seed_draws_the_lengths(by_byte: Any) -> None:
    some = windows(by_byte, TEXT * 3)
    first, again, other = (short_rows(some, by_byte, seed=n)["short"] for n in (0, 0, 1))
    assert first.digest() == again.digest() != other.digest()

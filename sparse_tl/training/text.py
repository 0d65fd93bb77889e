"""Training text: windows that a model writes itself, and short rows cut from windows.

Each token is drawn by inverting the cumulative distribution at a number drawn uniformly from
[0, 1). These numbers depend only on `seed` and the window's index, so an interrupted call continues
with the same windows, and a later call can add more.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, AtLeastTwo, Seed, checked
from sparse_tl.backend import (
    Adapter,
    Model,
    adapt,
    check_numbers,
    check_tokens,
    in_evaluation_mode,
    processes,
)
from sparse_tl.data import TokenBatch
from sparse_tl.data.batches import log_probabilities
from sparse_tl.data.documents import separator
from sparse_tl.data.pairs import padded
from sparse_tl.data.prompts import chat_start, check_known, check_tokenizer
from sparse_tl.devices import SizeByDevice
from sparse_tl.gates import SparseTransformer
from sparse_tl.progress import tracked
from sparse_tl.storage.files import check_writable, read_metadata, read_tensors, write_tensors
from sparse_tl.training.loop import run_identity
from sparse_tl.training.ranks import from_first, gathered

AT_ONCE = SizeByDevice(cpu=64, elsewhere=2048)
"""Largest number of windows that are sampled together by default."""
GIVEN = 1 / 4
"""Largest fraction of a window that a beginning may fill."""
N_CHECKED = 4
"""Number of windows whose last predictions are compared with those of passes without a cache."""
CACHE_ERROR = 0.1
"""Largest allowed difference between the two, in total variation; the median over windows."""
_BEGINNINGS = files("sparse_tl.training").joinpath("beginnings.json")
_UNKNOWN = -1
"""Placeholder for a token that is not sampled yet."""
_IDENTITY = "sampled_windows"
"""The entry of a file's metadata that says what its windows depend on."""
TOKENS = (4, 64)
"""Least and largest number of tokens of a short row, besides those that precede the text."""
_CHARACTERS = 16
"""Characters per token to tokenise; more than text has, so that a row's last token is whole."""
_STARTS = re.compile(r"""\A\s*|[.!?]["'”’)\]]*\s+|[。！？]|\n\s*""")
"""What precedes a sentence: the beginning of a document, the end of a sentence, or of a line."""


@checked
@in_evaluation_mode
@torch.no_grad()
def sampled_windows(
    model: Model | SparseTransformer,
    n: AtLeastOne,
    window: AtLeastTwo,
    *,
    beginnings: Sequence[str] | None = None,
    batch_size: AtLeastOne | None = None,
    seed: Seed = 0,
    save_to: str | Path | None = None,
    progress: bool = True,
) -> TokenBatch:
    """Sample windows of text from a model, as rows for language modelling.

    Tokens are drawn at temperature 1 from the full vocabulary: the text has exactly the model's
    distribution. Windows alternately start with the tokenizer's BOS token alone (EOS if there is no
    BOS), and with that token and a beginning. Given tokens have no loss. Sampling does not stop at
    EOS: all windows are full. Ranks divide the windows of a batch, and all return all windows.

    Args:
        model: a dense model or a SparseTransformer, whose gates are deterministic.
        n: number of windows.
        window: tokens per window.
        beginnings: texts that windows continue, in an order drawn with `seed`; each is cut to a
            quarter of a window. With an empty list, all windows start with BOS alone. The default
            is the package's own 125: the first words of stories, letters, proofs, tables and more.
        batch_size: number of windows that are sampled together; by default 64, and on a GPU as
            many as fit into a third of its free memory, at most 2,048.
        seed: random seed. PyTorch's random state is neither used nor changed.
        save_to: a safetensors file, written after every batch. The same call continues where the
            file ends; with another `n`, it takes the first windows or adds more.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the tokenizer has neither BOS nor EOS, and no beginnings are given, or lacks a
            part of one; the window is longer than the context; the model is not causal, predicts
            tokens other than those it reads, or predicts differently with a key-value cache; or the
            file is damaged or holds the windows of another run.
    """
    adapter = adapt(model)
    starts = _starts(adapter, window, beginnings, seed)
    path, identity = None if save_to is None else Path(save_to), ""
    tokens = torch.empty(0, window, dtype=torch.long)
    if path is not None:
        identity = _identity(model, starts, window, seed)
        if path.exists():
            tokens = _read(path, identity)
        else:
            check_writable(path.parent)
    # Ranks have to make equal passes of a sharded model.
    tokens, batch_size = from_first((tokens, batch_size or _fitting(adapter, window)))
    is_first = processes().is_main_process
    batches = [range(at, min(at + batch_size, n)) for at in range(len(tokens), n, batch_size)]
    shown = progress and is_first
    with tracked("sampling windows", len(batches) * (window - 1), shown) as step:
        for rows in batches:
            show = partial(step, f"windows {rows.start + 1:,} to {rows.stop:,} of {n:,}")
            more = sampled(adapter, starts, window, rows, seed, show, check=rows is batches[0])
            tokens = torch.cat([tokens, more])
            if path is not None and is_first:
                kept = {"tokens": tokens, "loss_mask": _as_rows(tokens, starts).loss_mask}
                write_tensors(path, kept, {_IDENTITY: identity})
    return _as_rows(tokens[:n], starts)


def _fitting(adapter: Adapter, window: int) -> int:
    """How many windows are sampled together by default: on a GPU, as memory allows."""
    if adapter.device.type != "cuda":
        return AT_ONCE.cpu
    # A window takes keys and values of all layers, and one column of logits several times.
    free, _ = torch.cuda.mem_get_info(adapter.device)
    per_layer = 2 * adapter.n_kv_heads * adapter.model.cfg.d_head * window
    bytes_each = adapter.n_layers * per_layer * adapter.dtype.itemsize + 32 * adapter.d_vocab
    return max(1, min(AT_ONCE.elsewhere, free // (3 * bytes_each)))


def _starts(
    adapter: Adapter, window: int, texts: Sequence[str] | None, seed: int
) -> list[list[int]]:
    """The given tokens of windows, in turn; checks that the model allows sampling."""
    tokenizer = adapter.model.tokenizer
    check_tokenizer(tokenizer)
    if window > adapter.n_ctx:
        raise ValueError(f"the model's context has {adapter.n_ctx} tokens, fewer than {window}")
    if not adapter.causal or adapter.d_vocab != adapter.d_vocab_out:
        raise ValueError(
            f"text can be sampled from a causal model that predicts the tokens that it reads; "
            f"{adapter.name!r} {'predicts other tokens' if adapter.causal else 'is not causal'}"
        )
    first = separator(tokenizer)
    if first is None and not texts:
        raise ValueError(
            "the tokenizer has no BOS or EOS token for windows to start with; give beginnings"
        )
    before = [] if first is None else [first]
    for text in texts or ():
        check_known(tokenizer, text, "beginnings: ")
    texts = json.loads(_BEGINNINGS.read_text("utf-8")) if texts is None else texts
    how, longest = {"add_special_tokens": False, "verbose": False}, int(GIVEN * window)
    begun = [before + list(tokenizer(text, **how)["input_ids"][:longest]) for text in texts]
    if not all(begun):
        raise ValueError(
            f"the beginning {texts[begun.index([])]!r} has no token within {longest}, a quarter of "
            "the window, and the tokenizer has neither BOS nor EOS"
        )
    for tokens in begun or [before]:
        check_tokens(adapter, torch.tensor(tokens))
    order = np.random.default_rng(seed).permutation(len(begun))
    return [start for i in order for start in (before, begun[i]) if start] or [before]


def _as_rows(tokens: Int[Tensor, "window pos"], starts: list[list[int]]) -> TokenBatch:
    """Rows with a loss on the tokens that the model wrote."""
    rows = TokenBatch.next_token(tokens)
    n_given = torch.tensor([[len(starts[row % len(starts)])] for row in range(len(tokens))])
    written = torch.arange(1, tokens.shape[1] + 1) >= n_given
    return replace(rows, loss_mask=rows.loss_mask & written)


def sampled(
    adapter: Adapter,
    starts: list[list[int]],
    window: int,
    rows: range,
    seed: int,
    show: Callable[[], None],
    check: bool,
) -> Int[Tensor, "row pos"]:
    """The windows with the numbers `rows`; every rank samples as many of them."""
    launched = processes()
    each = math.ceil(len(rows) / launched.num_processes)
    first = rows.start + launched.process_index * each
    own = range(first, first + each)  # some last windows are not asked for
    tokens = padded([starts[row % len(starts)] for row in own], _UNKNOWN)
    tokens = F.pad(tokens, (0, window - tokens.shape[1]), value=_UNKNOWN).to(adapter.device)
    drawn = [np.random.default_rng([seed, row]).random(window) for row in own]
    uniform = torch.from_numpy(np.stack(drawn)).to(adapter.device)
    model, cache = adapter.model, adapter.empty_cache(each, window)
    predicted = torch.empty(0)
    for column in range(1, window):
        logits = model(tokens[:, column - 1 : column], **cache)[:, -1]
        predicted = log_probabilities(logits)
        check_numbers(adapter, predicted)
        written = _drawn(predicted.exp(), uniform[:, column])
        tokens[:, column] = torch.where(tokens[:, column] < 0, written, tokens[:, column])
        show()
    if check:
        _check_cache(adapter, tokens[:N_CHECKED], predicted[:N_CHECKED])
    return torch.cat(gathered(tokens.cpu()))[: len(rows)]


def _drawn(
    probabilities: Float[Tensor, "row vocab"], uniform: Float[Tensor, " row"]
) -> Int[Tensor, " row"]:
    """The tokens at which the cumulative distribution exceeds numbers in [0, 1)."""
    cumulative = probabilities.cumsum(dim=1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return tokens.clamp(max=cumulative.shape[1] - 1)  # the product may round up to the total


def _check_cache(
    adapter: Adapter, tokens: Int[Tensor, "row pos"], last: Float[Tensor, "row vocab"]
) -> None:
    """Check that passes without a cache predict the last tokens as passes with a cache did."""
    read = torch.zeros_like(tokens[:, :-1], dtype=torch.bool)
    read[:, -1] = True
    uncached = adapter.logits_at(adapter.final(tokens[:, :-1]), read)
    difference = (log_probabilities(uncached).exp() - last.exp()).abs().sum(dim=1)
    error = difference.median().item() / 2
    if error > CACHE_ERROR:
        raise ValueError(
            f"{adapter.name!r} does not predict the same with a key-value cache as without: the "
            f"predictions differ by {error:.2f} in total variation"
        )


def _read(path: Path, identity: str) -> Int[Tensor, "window pos"]:
    """The windows in a file, which have to be of this run."""
    stored = read_metadata(path).get(_IDENTITY, "something else")
    if stored != identity:
        raise ValueError(
            f"{path} does not hold sampled windows of {identity}, but those of {stored:.200}. "
            "Choose another file, or use the same model and arguments."
        )
    return read_tensors(path)["tokens"]


def _identity(
    model: Model | SparseTransformer, starts: list[list[int]], window: int, seed: int
) -> str:
    """A text that names everything that the windows depend on."""
    mode = model.gates.settings.mode if isinstance(model, SparseTransformer) else None
    of_model, begun = (
        hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
        for content in (run_identity(model, {"gates": mode}), starts)
    )
    return f"model {of_model}, window {window}, seed {seed}, beginnings {begun}"


@checked
def short_rows(
    windows: Int[Tensor, "window pos"], tokenizer: Any, *, seed: Seed = 0
) -> dict[str, TokenBatch]:
    """The sentences of a text as rows of three kinds: alone, after BOS, and in a chat.

    A row starts where a sentence, a line or a document does, and goes on for 4 to 64 tokens (the
    logarithm is uniform), or to the end of its document or window. Each of its positions has a
    loss, including that before its first token.

    Args:
        windows: tokens of a text, as from `token_windows` or `sampled_windows`.
        tokenizer: a Hugging Face tokenizer.
        seed: random seed for the numbers of tokens.

    Returns:
        The rows of each kind by name, each of every sentence: "short"; "short after BOS", if the
        tokenizer has a BOS token; and "short in a chat", after a request to continue the text, if
        it has a chat template.

    Raises:
        ValueError: there is no tokenizer, or the windows hold no sentence of 4 tokens.
    """
    check_tokenizer(tokenizer)
    before = {"short": ""}
    if tokenizer.bos_token is not None:
        before["short after BOS"] = tokenizer.bos_token
    if getattr(tokenizer, "chat_template", None):
        before["short in a chat"] = chat_start(tokenizer)
    sentences = list(_sentences(windows, tokenizer))
    found = {
        name: _rows(sentences, tokenizer, text, np.random.default_rng([seed, number]))
        for number, (name, text) in enumerate(before.items())
    }
    if not all(found.values()):
        raise ValueError(
            f"expected windows with sentences of at least {TOKENS[0]} tokens; {len(windows)} "
            "windows have none. Use more or longer windows."
        )
    return {name: _as_batch(rows, tokenizer) for name, rows in found.items()}


def _sentences(windows: Int[Tensor, "window pos"], tokenizer: Any) -> Iterator[str]:
    """The text from each start of a sentence to the end of its document or window."""
    special = torch.tensor(tokenizer.all_special_ids)
    for window in windows:
        ends = torch.isin(window, special).nonzero()[:, 0].tolist()
        for start, stop in zip([0, *(end + 1 for end in ends)], [*ends, len(window)], strict=True):
            text = tokenizer.decode(window[start:stop].tolist(), clean_up_tokenization_spaces=False)
            text = text.rstrip("\ufffd")  # a character that the window cuts
            for match in _STARTS.finditer(text):
                yield text[match.end() : match.end() + _CHARACTERS * (TOKENS[1] + 1)]


def _rows(
    sentences: list[str], tokenizer: Any, before: str, random: np.random.Generator
) -> list[tuple[list[int], int]]:
    """Tokens of each long enough sentence, and how many of them precede it."""
    least, most = np.log([TOKENS[0], TOKENS[1] + 1])
    n_tokens = np.exp(random.uniform(least, most, len(sentences)))
    shorter = [
        before + text[: _CHARACTERS * (int(n) + 1)]
        for text, n in zip(sentences, n_tokens, strict=True)
    ]
    how = {"add_special_tokens": False, "verbose": False}
    start = tokenizer(before, **how)["input_ids"] if before else []
    rows = []
    for tokens, n in zip(tokenizer(shorter, **how)["input_ids"], n_tokens, strict=True):
        tokens = tokens[: len(start) + int(n) + 1]
        if len(tokens) > len(start) + TOKENS[0] and tokens[: len(start)] == start:
            rows.append((tokens, len(start)))
    return rows


def _as_batch(rows: list[tuple[list[int], int]], tokenizer: Any) -> TokenBatch:
    """Rows with a loss at every position from the one before the text on."""
    tokens = padded([tokens[:-1] for tokens, _ in rows], getattr(tokenizer, "pad_token_id", 0) or 0)
    labels = padded([tokens[1:] for tokens, _ in rows], 0)
    n_tokens = torch.tensor([[len(tokens) - 1] for tokens, _ in rows])
    n_before = torch.tensor([[max(before - 1, 0)] for _, before in rows])
    at = torch.arange(tokens.shape[1])
    real = at < n_tokens
    return TokenBatch(tokens, labels, real & (at >= n_before), real.long())

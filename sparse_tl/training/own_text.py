"""Training text that a model writes itself, for models whose own training text is unknown.

1. Every window starts with the tokenizer's separator; in every other window, the given tokens of a
   beginning follow.
2. The model writes all other tokens, column by column, with a key-value cache. Each is drawn from
   the full softmax at temperature 1, by inverting the cumulative distribution at a number drawn
   uniformly from [0, 1). Writing continues after the end of a document, as training text does.
3. These numbers depend only on `seed` and the window's index, so an interrupted call continues with
   the same windows, and a later call can add more.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_tl.backend import (
    Adapter,
    Model,
    adapt,
    check_numbers,
    check_tokens,
    in_evaluation_mode,
    processes,
)
from sparse_tl.calls.arguments import AtLeastOne, Seed, checked
from sparse_tl.calls.devices import SizeByDevice
from sparse_tl.data import TokenBatch
from sparse_tl.data.batches import log_probabilities
from sparse_tl.data.documents import separator
from sparse_tl.data.prompts import check_known
from sparse_tl.data.streams import check_window
from sparse_tl.gates import SparseTransformer
from sparse_tl.progress import tracked
from sparse_tl.storage.files import check_writable, read_metadata, read_tensors, write_tensors
from sparse_tl.training.checkpoints import run_identity
from sparse_tl.training.ranks import from_first, gathered

SAVE_AFTER = 30.0
"""Seconds after which the windows sampled so far are saved."""
AT_ONCE = SizeByDevice(cpu=64, elsewhere=2048)
"""Largest number of windows that are sampled together by default."""
GIVEN = 1 / 4
"""Largest share of a window that a beginning may fill."""
N_CHECKED = 4
"""Number of windows whose last predictions are compared with those of passes without a cache."""
CACHE_ERROR = 0.1
"""Largest allowed difference between the two, in total variation; the median over windows."""
_BEGINNINGS = files("sparse_tl.training").joinpath("beginnings.json")
_UNKNOWN = -1
"""Placeholder for a token that is not sampled yet."""
_IDENTITY = "sampled_windows"
"""The entry of a file's metadata that says what its windows depend on."""


@checked
@in_evaluation_mode
@torch.no_grad()
def sampled_windows(
    model: Model | SparseTransformer,
    n: AtLeastOne,
    window: AtLeastOne,
    *,
    beginnings: Sequence[str] | None = None,
    batch_size: AtLeastOne | None = None,
    seed: Seed = 0,
    save_to: str | Path | None = None,
    progress: bool = True,
) -> TokenBatch:
    """Sample windows of text from a model, as rows for language modelling.

    Tokens are drawn at temperature 1 from the model's full vocabulary, so the text has exactly the
    model's distribution. Windows alternately start with the tokenizer's BOS token alone (EOS if
    there is no BOS), and with that token and a beginning. Given tokens have no loss. Sampling does
    not stop at EOS: all windows are full.

    The ranks of a run divide the windows of a batch among themselves; all return all windows.

    Args:
        model: a dense model or a SparseTransformer, whose gates are deterministic.
        n: number of windows.
        window: tokens per window.
        beginnings: texts that windows continue, in an order drawn with `seed`; each is cut to a
            quarter of a window. With an empty list, all windows start with BOS alone. The default
            is the package's own 125: the first words of stories, articles, letters, proofs,
            dialogues, tables, programs and more.
        batch_size: number of windows that are sampled together; by default 64, and on a GPU as
            many as fit into a third of its free memory, at most 2,048.
        seed: random seed. PyTorch's random state is neither used nor changed.
        save_to: a safetensors file, written every half minute, at the end, and on Ctrl-C. The same
            call continues where the file ends; with another `n`, it takes the first windows or adds
            more.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the tokenizer has neither BOS nor EOS, and no beginnings are given, or lacks a
            part of one; the window is longer than the context; the model is not causal, predicts
            tokens other than those it reads, or predicts differently with a key-value cache; or the
            file is damaged or holds the windows of another run.
    """
    adapter = adapt(model)
    starts = Starts.of(adapter, window, beginnings, seed)
    tokens, file = torch.empty(0, window, dtype=torch.long), None
    if save_to is not None:
        file = _File(Path(save_to), starts, _identity(model, starts, seed))
        tokens = file.read()
    # Ranks have to make equal passes of a sharded model.
    tokens, batch_size = from_first((tokens, batch_size or _fitting(adapter, window)))
    parts, is_first = [tokens], processes().is_main_process
    batches = [range(at, min(at + batch_size, n)) for at in range(len(tokens), n, batch_size)]
    shown = progress and is_first
    with tracked("sampling windows", len(batches) * (window - 1), shown) as step:
        try:
            for rows in batches:
                show = partial(step, f"windows {rows.start + 1:,} to {rows.stop:,} of {n:,}")
                parts.append(sampled(adapter, starts, rows, seed, show, check=len(parts) == 1))
                if file is not None and is_first and time.monotonic() - file.written > SAVE_AFTER:
                    file.write(torch.cat(parts))
        finally:
            if file is not None and is_first:
                file.write(torch.cat(parts))
    return starts.as_rows(torch.cat(parts)[:n])


def _fitting(adapter: Adapter, window: int) -> int:
    """How many windows are sampled together by default: as memory allows, since a GPU is as fast.

    A window takes keys and values of all layers, and one column of logits several times.
    """
    if adapter.device.type != "cuda":
        return AT_ONCE.cpu
    free, _ = torch.cuda.mem_get_info(adapter.device)
    per_layer = 2 * adapter.n_kv_heads * adapter.model.cfg.d_head * window
    bytes_each = adapter.n_layers * per_layer * adapter.dtype.itemsize + 32 * adapter.d_vocab
    return max(1, min(AT_ONCE.elsewhere, free // (3 * bytes_each)))


@dataclass(frozen=True)
class Starts:
    """The given tokens of every window.

    Args:
        window: tokens per window.
        alone: the separator; empty if the tokenizer has none.
        continued: the separator and a beginning, in the order of the windows.
    """

    window: int
    alone: list[int]
    continued: list[list[int]]

    @staticmethod
    def of(adapter: Adapter, window: int, texts: Sequence[str] | None, seed: int) -> Starts:
        """Tokenise the beginnings; checks that model, tokenizer and window allow sampling."""
        tokenizer = adapter.model.tokenizer
        check_window(tokenizer, window)
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
                "the tokenizer has no BOS or EOS token for windows to start with. Set one "
                "(tokenizer.bos_token = ...), or give beginnings."
            )
        alone = [] if first is None else [first]
        for text in texts or ():
            check_known(tokenizer, text, "beginnings: ")
        texts = json.loads(_BEGINNINGS.read_text("utf-8")) if texts is None else texts
        longest = int(GIVEN * window)
        how = {"add_special_tokens": False, "verbose": False}
        continued = [alone + list(tokenizer(text, **how)["input_ids"][:longest]) for text in texts]
        if not all(continued):
            raise ValueError(
                f"the beginning {texts[continued.index([])]!r} has no token within {longest}, a "
                "quarter of the window, and the tokenizer has neither BOS nor EOS"
            )
        for tokens in continued or [alone]:
            check_tokens(adapter, torch.tensor(tokens))
        order = np.random.default_rng(seed).permutation(len(continued))
        return Starts(window, alone, [continued[i] for i in order])

    def __getitem__(self, row: int) -> list[int]:
        """The given tokens of a window."""
        if not self.continued or (self.alone and row % 2 == 0):
            return self.alone
        return self.continued[(row // 2 if self.alone else row) % len(self.continued)]

    def as_rows(self, tokens: Int[Tensor, "window pos"]) -> TokenBatch:
        """Rows with a loss on the tokens that the model wrote."""
        rows = TokenBatch.next_token(tokens)
        n_given = torch.tensor([[len(self[row])] for row in range(len(tokens))])
        written = torch.arange(1, self.window + 1) >= n_given
        return replace(rows, loss_mask=rows.loss_mask & written)


def sampled(
    adapter: Adapter,
    starts: Starts,
    rows: range,
    seed: int,
    show: Callable[[], None],
    check: bool,
) -> Int[Tensor, "row pos"]:
    """The windows with the given numbers; every rank samples as many of them."""
    launched = processes()
    each = math.ceil(len(rows) / launched.num_processes)
    own = rows.start + launched.process_index * each  # some last windows are not asked for
    tokens, last = _sampled(adapter, starts, range(own, own + each), seed, show)
    if check:
        _check_cache(adapter, tokens[:N_CHECKED], last[:N_CHECKED])
    return torch.cat(gathered(tokens.cpu()))[: len(rows)]


def _sampled(
    adapter: Adapter, starts: Starts, rows: Sequence[int], seed: int, show: Callable[[], None]
) -> tuple[Int[Tensor, "row pos"], Float[Tensor, "row vocab"]]:
    """Windows, and the log-probabilities that their last tokens were drawn from."""
    given = [torch.tensor(starts[row]) for row in rows]
    tokens = pad_sequence(given, batch_first=True, padding_value=_UNKNOWN)
    tokens = F.pad(tokens, (0, starts.window - tokens.shape[1]), value=_UNKNOWN).to(adapter.device)
    drawn = [np.random.default_rng([seed, row]).random(starts.window) for row in rows]
    uniform = torch.from_numpy(np.stack(drawn)).to(adapter.device)
    model, cache = adapter.model, adapter.empty_cache(len(rows))
    predicted = torch.empty(0)
    for column in range(1, starts.window):
        logits = model(tokens[:, column - 1 : column], **cache)[:, -1]
        predicted = log_probabilities(logits)
        check_numbers(adapter, predicted)
        written = _drawn(predicted.exp(), uniform[:, column])
        tokens[:, column] = torch.where(tokens[:, column] < 0, written, tokens[:, column])
        show()
    return tokens, predicted


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
    """Check that passes without a cache predict the last tokens as passes with a cache did.

    Otherwise, the text would not have the model's distribution.
    """
    read = torch.zeros_like(tokens[:, :-1], dtype=torch.bool)
    read[:, -1] = True
    uncached = adapter.logits_at(adapter.final(tokens[:, :-1]), read)
    difference = (log_probabilities(uncached).exp() - last.exp()).abs().sum(dim=1)
    error = difference.median().item() / 2
    if error > CACHE_ERROR:
        raise ValueError(
            f"{adapter.name!r} does not predict the same with a key-value cache as without: the "
            f"predictions differ by {error:.2f} in total variation. Does sparse_tl support the "
            "installed versions of transformers and TransformerLens?"
        )


class _File:
    """Sampled windows on disk, with the identity of their run."""

    def __init__(self, path: Path, starts: Starts, identity: str) -> None:
        self.path, self.starts, self.identity = path, starts, identity
        self.n_windows, self.written = 0, time.monotonic()

    def read(self) -> Int[Tensor, "window pos"]:
        """The windows sampled so far."""
        if not self.path.exists():
            check_writable(self.path.parent)
            return torch.empty(0, self.starts.window, dtype=torch.long)
        stored = read_metadata(self.path).get(_IDENTITY, "something else")
        if stored != self.identity:
            raise ValueError(
                f"{self.path} does not hold sampled windows of {self.identity}, but those of "
                f"{stored:.200}. Choose another file, remove this one, or use the model and the "
                "arguments that it was made with."
            )
        tokens = read_tensors(self.path)["tokens"]
        self.n_windows = len(tokens)
        return tokens

    def write(self, tokens: Int[Tensor, "window pos"]) -> None:
        """Replace the windows on disk if there are more now."""
        if len(tokens) > self.n_windows:
            rows = self.starts.as_rows(tokens)
            tensors = {"tokens": rows.tokens, "loss_mask": rows.loss_mask}
            write_tensors(self.path, tensors, {_IDENTITY: self.identity})
        self.n_windows, self.written = len(tokens), time.monotonic()


def _identity(model: Model | SparseTransformer, starts: Starts, seed: int) -> str:
    """A text that names everything that the windows depend on."""
    mode = model.gates.settings.mode.name if isinstance(model, SparseTransformer) else None
    identity = run_identity(model, {"gates": mode})
    return (
        f"model {_hash(identity)}, window {starts.window}, seed {seed}, "
        f"beginnings {_hash([starts.alone, starts.continued])}"
    )


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

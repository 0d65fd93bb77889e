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
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Seed, checked
from sparse_tl.calls.devices import SizeByDevice
from sparse_tl.calls.scopes import autograd
from sparse_tl.data import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Adapter, Model, adapt, in_evaluation_mode
from sparse_tl.parallel import ranks
from sparse_tl.parallel.progress import tracked
from sparse_tl.storage.files import check_writable, read_metadata, read_tensors, write_tensors
from sparse_tl.training.beginnings import Starts
from sparse_tl.training.checkpoints import run_identity
from sparse_tl.training.sampling import sampled

SAVE_AFTER = 30.0
"""Seconds after which the windows sampled so far are saved."""
AT_ONCE = SizeByDevice(cpu=64, elsewhere=2048)
"""Largest number of windows that are sampled together by default."""
_IDENTITY = "sampled_windows"
"""The entry of a file's metadata that says what its windows depend on."""


@checked
@in_evaluation_mode
@autograd(False)
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

    Several ranks divide the windows of a batch among themselves; all return all windows.

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
        tokens = ranks.on_first(file.read)
    parts = [tokens]
    batch_size = batch_size or _fitting(adapter, window)
    batches = [range(at, min(at + batch_size, n)) for at in range(len(tokens), n, batch_size)]
    with tracked("sampling windows", len(batches) * (window - 1), progress) as step:
        try:
            for rows in batches:
                show = partial(step, f"windows {rows.start + 1:,} to {rows.stop:,} of {n:,}")
                parts.append(sampled(adapter, starts, rows, seed, show, check=len(parts) == 1))
                if file is not None and time.monotonic() - file.written > SAVE_AFTER:
                    file.write(torch.cat(parts))
        finally:
            if file is not None:
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


class _File:
    """Sampled windows on disk, with the identity of their run."""

    def __init__(self, path: Path, starts: Starts, identity: str) -> None:
        self.path, self.starts, self.identity = path, starts, identity
        self.n_windows, self.written = 0, time.monotonic()

    def read(self) -> Int[Tensor, "window pos"]:
        """The windows sampled so far.

        Raises:
            ValueError: the file cannot be written, is damaged, or belongs to another run.
        """
        if not self.path.exists():
            check_writable(self.path.parent)
            return torch.empty(0, self.starts.window, dtype=torch.long)
        stored = read_metadata(self.path).get(_IDENTITY, "something else")
        if stored != self.identity:
            raise ValueError(
                f"expected sampled windows of {self.identity} in {self.path}; it holds those of "
                f"{stored:.200}. Choose another file, remove this one, or use the model and the "
                "arguments that it was made with."
            )
        tokens = read_tensors(self.path).get("tokens", torch.empty(0))
        if tokens.dtype != torch.long or tokens.shape[1:] != (self.starts.window,):
            raise ValueError(
                f"expected tokens of shape (n, {self.starts.window}) in {self.path}; got "
                f"{tokens.dtype} {tuple(tokens.shape)}"
            )
        self.n_windows = len(tokens)
        return tokens

    def write(self, tokens: Int[Tensor, "window pos"]) -> None:
        """Replace the windows on disk if there are more now; only the first rank writes."""
        if len(tokens) > self.n_windows and ranks.is_first():
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

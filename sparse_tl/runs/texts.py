"""The training data of a run: texts and tasks, each a group with its own loss constraint."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparse_tl.data import Documents, ShuffledStream, TextStream, read_documents
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.streams import TokenStream
from sparse_tl.data.windows import cut_windows, window_rows
from sparse_tl.gates import SparseTransformer
from sparse_tl.runs.jobs import OWN, PostTrainingJob
from sparse_tl.tasks import TASKS_BY_NAME
from sparse_tl.training import sampled_windows, short_rows

VALIDATION_WINDOWS = 200
"""Maximum number of windows for model selection; at most half of the held-out windows."""
TEST_WINDOWS = 800
"""Maximum number of windows to report on, from the other held-out windows."""
HELD_OUT_WINDOWS = VALIDATION_WINDOWS + TEST_WINDOWS
TASK_PROMPTS = 4096
"""Maximum number of prompts of a task to train on; an eighth as many are held out."""
WINDOW_TOKENS = 2**24
"""Maximum number of tokens of a text to keep in memory, 128 MB; longer runs stream the text."""


@dataclass(frozen=True)
class Group:
    """A text or task of a run.

    Args:
        name: name of the text or task.
        stream: training rows.
        validation: held-out rows for the loss constraint and model selection.
        test: other held-out rows, to report on.
    """

    name: str
    stream: TokenStream
    validation: TokenBatch
    test: TokenBatch


@dataclass(frozen=True)
class GroupReader:
    """Reads the texts and tasks of a run as groups of training and held-out rows.

    Args:
        model: the model before training.
        job: the settings of the run. Groups share the held-out windows evenly.
    """

    model: SparseTransformer
    job: PostTrainingJob

    def text(self, source: str) -> Group:
        """A text or dataset; the last tenth of the windows read before training is held out."""
        documents = read_documents(source)
        needed = self.job.steps * self.job.per_group + HELD_OUT_WINDOWS // self.job.n_groups
        limit = min(needed, WINDOW_TOKENS // self.job.window)
        windows = self._windows(documents, limit)
        train, held_out = self._split(windows)
        if len(windows) == limit < needed:
            stream = TextStream(
                documents,
                self.model.tokenizer,
                self.job.window,
                self.job.per_group,
                self.job.seed,
                left_out=range(len(train), len(windows)),
                boundaries=self.job.boundaries,
                accumulate=self.job.accumulate,
            )
        else:
            stream = self._shuffled(source, self._rows(train), self.job.per_group)
        return self._group(source, stream, self._rows(held_out))

    def own(self, save_to: Path, progress: bool) -> list[Group]:
        """Text that the model generates, of which a tenth is held out, as windows and `short_rows`.

        All kinds of short rows together have about as many tokens per step as the windows.
        """
        n, window = self.job.own_windows, self.job.window
        options = {"seed": self.job.seed, "save_to": save_to, "progress": progress}
        parts = self._split(torch.arange(n))
        with self.model.opened():
            rows = sampled_windows(self.model, n, window, **options)
        train, held_out = map(rows.select, parts)
        groups = [self._group(OWN, self._shuffled(OWN, train, self.job.per_group), held_out)]
        n_held_out = min(HELD_OUT_WINDOWS // self.job.n_groups, 2 * len(held_out))
        train, held_out = (
            short_rows(rows.tokens, self.model.tokenizer, seed=self.job.seed)
            for rows in (train, held_out)
        )
        for name, rows in train.items():
            n_tokens = int(rows.loss_mask.sum()) / len(rows) * len(train)
            per_step = max(1, round(self.job.per_group * window / n_tokens))
            stream = self._shuffled(name, rows, per_step)
            groups.append(self._group(name, stream, held_out[name].select(slice(n_held_out))))
        return groups

    def task(self, name: str) -> Group:
        """A task's prompts, with loss at the answer; about as many tokens per step as of a text."""
        task = TASKS_BY_NAME[name]
        pairs = task.pairs(self.model, TASK_PROMPTS + TASK_PROMPTS // 8, seed=self.job.seed)
        rows, n = pairs.answer_rows(), len(pairs.clean.unique(dim=0))  # repeats come last
        if n < 18:
            raise ValueError(f"expected at least 18 prompts of {name}, to hold out two; got {n}")
        train, held_out = rows.select(slice(n - n // 9)), rows.select(slice(n - n // 9, n))
        per_step = self.job.per_group * max(1, self.job.window // rows.tokens.shape[1])
        return self._group(name, self._shuffled(name, train, per_step), held_out)

    def held_out(self, source: str) -> TokenBatch:
        """Rows of a text that is only evaluated."""
        documents = read_documents(source, split="validation")
        return self._rows(self._windows(documents, TEST_WINDOWS // self.job.n_groups))

    def _windows(self, documents: Documents, limit: int) -> Tensor:
        tokenizer = self.model.tokenizer
        return cut_windows(documents, tokenizer, self.job.window, limit, self.job.boundaries)

    def _rows(self, windows: Tensor) -> TokenBatch:
        return window_rows(windows, self.model.tokenizer, self.job.boundaries)

    def _split(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """The windows to train on, and the held-out ones."""
        n_held_out = min(HELD_OUT_WINDOWS // self.job.n_groups, len(windows) // 10)
        if n_held_out < 2:
            raise ValueError(
                f"expected at least 20 windows of text, to hold out two; got {len(windows)}. Use "
                "more text or a smaller window."
            )
        # Cloned, so that the memory of the training windows can be freed.
        return windows[:-n_held_out], windows[-n_held_out:].clone()

    def _shuffled(self, name: str, rows: TokenBatch, per_step: int) -> ShuffledStream:
        warn_of_repeats(group_name(name), self.job.steps * per_step, len(rows))
        size = min(per_step, len(rows))
        return ShuffledStream(rows, size, self.job.seed, accumulate=self.job.accumulate)

    def _group(self, source: str, stream: TokenStream, held_out: TokenBatch) -> Group:
        half = min(VALIDATION_WINDOWS // self.job.n_groups, len(held_out) // 2)
        parts = (slice(half), slice(half, None))
        return Group(group_name(source), stream, *map(held_out.select, parts))


def group_name(source: str) -> str:
    """The name of a text in results: that of the file, without suffix, or of the dataset."""
    return Path(source).stem if Path(source).is_file() else source


def warn_of_repeats(name: str, used: int, n_rows: int) -> None:
    """Warn if a run sees rows more than once."""
    if used > n_rows:
        warnings.warn(
            f"the run uses {used:,} rows of {name}, which has {n_rows:,}: some are seen more than "
            "once, and training rows may meet a target that held-out rows miss. Use more text or "
            "fewer steps",
            stacklevel=3,
        )

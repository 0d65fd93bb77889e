"""A file of the user's prompt pairs, as a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparse_tl.backend import HookedModel
from sparse_tl.data import PromptPairs
from sparse_tl.data.documents import table_rows
from sparse_tl.data.pairs import read_records
from sparse_tl.data.targets import read_jsonl
from sparse_tl.metrics import log_probability, logit_difference
from sparse_tl.tasks import Task


@dataclass(frozen=True, kw_only=True)
class OwnPairs(Task):
    """A task whose prompt pairs are given, as rows of `PromptPairs.from_texts`."""

    rows: Sequence[Mapping[str, Any]]

    @staticmethod
    def read(file: str | Path) -> OwnPairs:
        """The pairs of a ``.csv``, ``.jsonl`` or ``.parquet`` file, named after it.

        The metric is the logit difference if all rows have a wrong answer, and the log probability
        of the answers if none has.
        """
        path = Path(file)
        rows = read_jsonl(path) if path.suffix.lower() == ".jsonl" else table_rows(path)
        rows = [
            {name: cell for name, cell in row.items() if cell not in (None, "")} for row in rows
        ]
        try:
            read = read_records(rows)  # names a wrong row before a model is loaded
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        metric = logit_difference if read[0].wrong else log_probability
        return OwnPairs(name=path.stem, title=path.stem, metric=metric, rows=rows)

    def pairs(self, model: HookedModel, n: int, *, seed: int = 0, **how: Any) -> PromptPairs:
        """The pairs in random order: all of them, or `n` if there are more."""
        made = PromptPairs.from_texts(model, self.rows, **how)
        order = torch.randperm(len(made), generator=torch.Generator().manual_seed(seed))
        return made.select(order[:n])

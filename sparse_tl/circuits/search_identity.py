"""What determines a circuit search, so that a checkpoint resumes no other search."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool
from torch import Tensor

from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data import PromptPairs
from sparse_tl.lens import weights_digest
from sparse_tl.metrics import Metric
from sparse_tl.parts.grids import PartGrid
from sparse_tl.storage.files import digest


def search_identity(
    runs: PairRuns,
    pairs: PromptPairs,
    grid: PartGrid,
    metric: Metric | Literal["kl"],
    start: Bool[Tensor, "*axes"],
    settings: str,
) -> str:
    """Parts, patch, metric, settings, prompts, initial circuit and weights of a search, as text."""
    patch = runs.patch if isinstance(runs.patch, str) else sorted(runs.patch)
    name = metric if isinstance(metric, str) else getattr(metric, "__qualname__", type(metric))
    inputs = f"{pairs.digest()} {digest({'start': start})}"
    return f"{grid!r} {patch} {name} {settings} {inputs} {weights_digest(runs.model)}"

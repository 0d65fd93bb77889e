"""Checkpoints of circuit searches: what determines a search, and resuming it from a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data import PromptPairs
from sparse_tl.files import digest, recover_folder
from sparse_tl.metrics import Metric
from sparse_tl.results import RESULT_FILE, Result
from sparse_tl.training.checkpoints import run_identity


@dataclass(kw_only=True)
class Resumable(Result):
    """The state of a search, as stored in a checkpoint.

    Args:
        asked: what determines the search, to match it with its checkpoint: parts, patch, metric,
            settings, prompts, start and the model's weights.
        measured: metric of the model on the prompts, for the same purpose.
    """

    asked: str = ""
    measured: tuple[float, ...] = ()


State = TypeVar("State", bound=Resumable)


def search_asked(
    runs: PairRuns,
    pairs: PromptPairs,
    site: object,
    metric: Metric | Literal["kl"],
    start: Bool[Tensor, "*axes"],
    settings: str,
) -> str:
    """What determines a search, as text: parts, patch, metric, settings, prompts, start, model."""
    patch = runs.patch if isinstance(runs.patch, str) else sorted(runs.patch)
    kind = metric if isinstance(metric, str) else getattr(metric, "__qualname__", type(metric))
    what = f"{pairs.digest()} {digest({'start': start})}"
    weights = run_identity(runs.model, {})["weights"]
    return f"{site!r} {patch} {kind} {settings} {what} {weights}"


def resumed(state: State, folder: Path) -> State:
    """The state of this search that a folder holds; or this state, saved there.

    Raises:
        ValueError: the folder holds other files, or a checkpoint of another search.
    """
    recover_folder(folder)
    if not (folder / RESULT_FILE).exists():
        state.save(folder)
        return state
    kind: type[State] = type(state)
    found = kind.load(folder)
    # Of a metric, the name is not enough: two may differ in what they were made with.
    alike = len(found.measured) == len(state.measured) and np.allclose(
        found.measured, state.measured, rtol=1e-3, atol=1e-4
    )
    if found.asked != state.asked or not alike:
        raise ValueError(
            f"{folder} holds a checkpoint of another search (model, prompts, metric, "
            "start, threshold or size differ). Remove it, or choose another folder."
        )
    return found

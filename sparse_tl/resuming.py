"""Checkpoints of unfinished computations, each resumed by the computation that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from sparse_tl.results import RESULT_FILE, Result
from sparse_tl.storage.files import recover_folder


@dataclass(kw_only=True)
class Resumable(Result):
    """The state of an unfinished computation, as stored in a checkpoint.

    Args:
        identity: text that determines the computation, such as its settings and the digests of its
            inputs; compared exactly.
        measured: values that the computation starts from, compared up to rounding. They tell apart
            what the text cannot, such as two metrics of the same name.
    """

    finite = False
    noun: ClassVar[str] = "computation"

    identity: str = ""
    measured: tuple[float, ...] = ()


State = TypeVar("State", bound=Resumable)


def resumed(state: State, folder: Path) -> State:
    """The state saved in a folder, if there is one; otherwise the given one, which is saved there.

    Raises:
        ValueError: the folder holds other files, or the checkpoint of another computation.
    """
    if not (recover_folder(folder) and (folder / RESULT_FILE).exists()):
        state.save(folder)
        return state
    kind: type[State] = type(state)
    saved = kind.load(folder)
    same_values = len(saved.measured) == len(state.measured) and np.allclose(
        saved.measured, state.measured, rtol=1e-3, atol=1e-4
    )
    if saved.identity != state.identity or not same_values:
        raise ValueError(
            f"{folder} holds a checkpoint of another {state.noun}: its model, prompts or settings "
            "differ. Remove it, or choose another folder."
        )
    return saved

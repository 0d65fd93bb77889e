"""Where a search for a circuit stands, kept in a folder, so that an interrupted one goes on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    read_tensors,
    recover_folder,
    write_json,
    write_tensors,
)

_SAID, _TENSORS = "acdc.json", "acdc.safetensors"


@dataclass
class SearchState:
    """Where a search stands; all that a checkpoint needs.

    Args:
        mask: the parts that are left.
        threshold: how far one part may move the metric.
        position: of the next part to be tested.
        value: the metric under the mask.
        tested: parts that were tested.
        layers_run: layers that ran for the tests.
        history: part, how far the metric moved, and whether it was kept.
    """

    mask: Bool[Tensor, ...]
    threshold: float
    position: int = 0
    value: float = math.nan
    tested: int = 0
    layers_run: int = 0
    history: list[tuple[str, float, bool]] = field(default_factory=list)


class SearchCheckpoint:
    """The checkpoint of one search.

    Args:
        folder: where it is kept; written whole or not at all.
        identity: what the search was asked.
        measured: what its model and metric give on its prompts.

    Raises:
        ValueError: the folder holds other files.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], measured: list[float]) -> None:
        self.folder, self.identity, self.measured = folder, identity, measured
        recover_folder(folder)
        check_replaceable(folder, _SAID, _TENSORS)

    def load_into(self, state: SearchState) -> None:
        """Go on from what is there; nothing happens if nothing is.

        Raises:
            ValueError: it belongs to another search.
        """
        if not (self.folder / _SAID).exists():
            return
        found = read_json(self.folder / _SAID)
        same = isinstance(found, dict) and found.get("identity") == self.identity
        if not same or not np.allclose(found["clean"], self.measured, rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"{self.folder} holds a checkpoint of another search (model, prompts, metric, "
                "start, threshold or size differ). Remove it, or choose another folder."
            )
        history = [tuple(row) for row in found["state"].pop("history")]
        mask = read_tensors(self.folder / _TENSORS)["mask"]
        for name, value in {**found["state"], "history": history, "mask": mask}.items():
            setattr(state, name, value)

    def save(self, state: SearchState) -> None:
        """Write where the search stands."""
        said = {name: value for name, value in asdict(state).items() if name != "mask"}
        with atomic_folder(self.folder) as temporary:
            write_tensors(temporary / _TENSORS, {"mask": state.mask})
            known = {"identity": self.identity, "clean": self.measured, "state": said}
            write_json(temporary / _SAID, known)

"""What determines a pair of models, dense and sparse: a `Recipe`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model
from sparse_tl.models.gpt2 import build_gpt2
from sparse_tl.training import PostTraining, post_train, pretrain


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """How a dense model is trained, and a sparse one made from it.

    Args:
        name: of the pair, and of its folder.
        architecture: fields of `transformers.GPT2Config`.
        tokenizer: makes the model's tokenizer.
        rows: those of a seed to train on, and to choose among evaluations by.
        sparse_rows: those of post-training, where they are others.
        measure: shares of right answers and active attention edges of a model, on examples that
            neither training nor selection saw.
        batch_size: rows per step.
        dense: settings of `pretrain`.
        sparse: settings of `post_train`.
        initial_bias: of the gates.
        mlps: whether the MLPs have gates too.
    """

    name: str
    architecture: Mapping[str, Any]
    tokenizer: Callable[[], Any]
    rows: Callable[[int], tuple[TokenBatch, TokenBatch]]
    measure: Callable[[Model | SparseTransformer], dict[str, float]]
    batch_size: int
    dense: Mapping[str, Any]
    sparse: Mapping[str, Any]
    initial_bias: float = 2.0
    mlps: bool = False
    sparse_rows: Callable[[int], tuple[TokenBatch, TokenBatch]] | None = None

    def changed(
        self,
        *,
        dense: Mapping[str, Any] | None = None,
        sparse: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Recipe:
        """The recipe with some settings of either training replaced, and other fields as given."""
        both = {
            "dense": {**self.dense, **(dense or {})},
            "sparse": {**self.sparse, **(sparse or {})},
        }
        return replace(self, **both, **fields)

    def settings(self, seed: int) -> dict[str, Any]:
        """What determines the weights beside the code, as JSON can hold it."""
        settings = {
            "name": self.name,
            "seed": seed,
            "architecture": dict(self.architecture),
            "batch_size": self.batch_size,
            "dense": dict(self.dense),
            "sparse": dict(self.sparse),
            "initial_bias": self.initial_bias,
            "mlps": self.mlps,
        }
        return json.loads(json.dumps(settings))

    def build(self, seed: int = 0, device: str | None = None) -> Model:
        """The dense model before its training."""
        return build_gpt2(
            self.architecture, self.tokenizer(), name=self.name, seed=seed, device=device
        )

    def train(
        self,
        seed: int = 0,
        *,
        checkpoint: str | Path | None = None,
        device: str | None = None,
        progress: bool = True,
    ) -> tuple[Model, pd.DataFrame]:
        """Train the dense model from scratch.

        Args:
            seed: of weights, rows and batches.
            checkpoint: folder of the run's checkpoint; found there, an interrupted run goes on.
            device: where to train; a GPU if there is one when left out.
            progress: whether to show it.

        Returns:
            The model with its best validation weights, and the history.
        """
        training, validation = self.rows(seed)
        model = self.build(seed, device)
        history = pretrain(
            model,
            ShuffledStream(training, self.batch_size, seed),
            validation=validation,
            checkpoint=checkpoint,
            progress=progress,
            **self.dense,
        )
        return model, history

    def sparsify(
        self,
        dense: Model,
        seed: int = 0,
        *,
        checkpoint: str | Path | None = None,
        progress: bool = True,
    ) -> tuple[SparseTransformer, PostTraining]:
        """Post-train a dense model in place until few attention edges are left.

        Args:
            dense: a trained model; it is wrapped and changed.
            seed: of gate noise, batches and rows: the dense model's own rows with its own seed.
            checkpoint: folder of the run's checkpoint; found there, an interrupted run goes on.
            progress: whether to show it.
        """
        training, validation = (self.sparse_rows or self.rows)(seed)
        sparse = SparseTransformer(dense, initial_bias=self.initial_bias, mlps=self.mlps)
        outcome = post_train(
            sparse,
            ShuffledStream(training, self.batch_size, seed + 1),
            validation=validation,
            seed=seed,
            checkpoint=checkpoint,
            progress=progress,
            **self.sparse,
        )
        return sparse, outcome

"""`Recipe`: everything that determines a dense model and the sparse model made from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model, boot, checked_device
from sparse_tl.training import PostTraining, post_train, pretrain


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """How a dense model is trained and sparsified.

    Args:
        name: name of the pair and of its folder.
        architecture: fields of `transformers.GPT2Config`.
        tokenizer: function that returns the model's tokenizer.
        rows: function from seed to training and validation rows.
        sparse_rows: the same for post-training, if different.
        measure: function from a model to its accuracies and active attention edges, on examples
            used neither for training nor for selection.
        batch_size: rows per step.
        dense: settings of `pretrain`.
        sparse: settings of `post_train`.
        gates: settings of `SparseTransformer`.
    """

    name: str
    architecture: Mapping[str, Any]
    tokenizer: Callable[[], Any]
    rows: Callable[[int], tuple[TokenBatch, TokenBatch]]
    measure: Callable[[Model | SparseTransformer], dict[str, float]]
    batch_size: int
    dense: Mapping[str, Any]
    sparse: Mapping[str, Any]
    gates: Mapping[str, Any] = field(default_factory=dict)
    sparse_rows: Callable[[int], tuple[TokenBatch, TokenBatch]] | None = None

    def changed(
        self,
        *,
        dense: Mapping[str, Any] | None = None,
        sparse: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Recipe:
        """The recipe with settings of either training phase, or other fields, replaced."""
        both = {
            "dense": {**self.dense, **(dense or {})},
            "sparse": {**self.sparse, **(sparse or {})},
        }
        return replace(self, **both, **fields)

    def settings(self, seed: int) -> dict[str, Any]:
        """Everything except the code that determines the weights, as JSON-serialisable values."""
        settings = {
            "name": self.name,
            "seed": seed,
            "architecture": dict(self.architecture),
            "batch_size": self.batch_size,
            "dense": dict(self.dense),
            "sparse": dict(self.sparse),
            "gates": dict(self.gates),
        }
        return json.loads(json.dumps(settings))

    def build(self, seed: int = 0, device: str | None = None) -> Model:
        """The dense model before training: untied unembedding, no dropout, random weights.

        It is a GPT-2, which all versions of TransformerLens support.
        """
        from transformers import GPT2Config, GPT2LMHeadModel

        tokenizer = self.tokenizer()
        fields: dict[str, Any] = {
            **self.architecture,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            # GPT-2's own 0.02 suits its width; with it, a model of width 128 learns more slowly.
            "initializer_range": 0.8 / math.sqrt(self.architecture["n_embd"]),
            "tie_word_embeddings": False,
        }
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            fields[name] = getattr(tokenizer, name, None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = GPT2LMHeadModel(GPT2Config(**fields))
        return boot(model.to(checked_device(device)), tokenizer, name=self.name)

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
            seed: random seed for weights, rows and batches.
            checkpoint: folder for checkpoints; a run interrupted there is resumed.
            device: device for training; a GPU by default if there is one.
            progress: whether to show a progress bar.

        Returns:
            The model with its best validation weights, and the training history.
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
        """Post-train a dense model in place until few attention edges are open.

        Args:
            dense: a trained model; it is wrapped and modified.
            seed: random seed for gate noise, batches and rows; the dense model's seed gives the
                rows that it was trained on.
            checkpoint: folder for checkpoints; a run interrupted there is resumed.
            progress: whether to show a progress bar.
        """
        training, validation = (self.sparse_rows or self.rows)(seed)
        sparse = SparseTransformer(dense, **self.gates)
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

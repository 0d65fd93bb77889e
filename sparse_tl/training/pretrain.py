"""Train a small dense model from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import HookedModel, Model, adapt, check_raw
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.data.streams import TokenStream
from sparse_tl.training import ranks
from sparse_tl.training.evaluation import evaluate_held_out
from sparse_tl.training.loop import (
    Metrics,
    Objective,
    Selection,
    TrainingConfig,
    choose_trained,
    train,
)


class PlainLoss(Objective):
    """Mean cross-entropy in nats over the loss positions: the objective of a dense model."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        losses = []
        for part in ranks.own_parts(batch, self.model):
            with adapt(self.model).only_at(part.loss_mask) as logits_at:
                logits = logits_at(self.model(part.tokens, **part.model_kwargs))
            losses.append(token_losses(logits, part.loss_labels()))
        loss = ranks.mean(torch.cat(losses))
        return loss, {"loss": loss.item()}


def pretrain(
    model: Model,
    stream: TokenStream,
    *,
    validation: TokenBatch,
    steps: int,
    learning_rate: float = 1e-3,
    good_enough: float = 0.0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **config: Any,
) -> pd.DataFrame:
    """Train all weights on the stream; on return, the model holds its best validation weights.

    Args:
        model: a newly initialised model.
        stream: training batches.
        validation: validation examples, for model selection.
        steps: maximum number of optimizer steps.
        learning_rate: peak learning rate.
        good_enough: validation loss in nats at which training stops, if all rows are predicted
            correctly.
        checkpoint: folder for checkpoints; a run interrupted there is resumed.
        progress: whether to show a progress bar.
        **config: further fields of `TrainingConfig`.

    Returns:
        The history, one row per step.

    Raises:
        ValueError: the weights were processed, so they cannot be saved.
    """
    check_raw(model)

    def evaluate() -> Metrics:
        measured = evaluate_held_out(model, validation)
        return {"loss": measured.loss, "accuracy": measured.accuracy}

    selection = Selection(
        evaluate,
        better=lambda new, old: new["loss"] < old["loss"],
        finished=lambda m: m["loss"] <= good_enough and m["accuracy"] == 1.0,
    )
    state = train(
        model,
        PlainLoss(model),
        stream,
        selection,
        TrainingConfig(steps=steps, learning_rate=learning_rate, **config),
        trained=choose_trained(model, {"all": 1.0}),
        settings={"good_enough": good_enough, "validation": validation.digest()},
        checkpoint=checkpoint,
        title="dense model",
        progress=progress,
    )
    return pd.DataFrame(state.history)

"""Tables of likely tokens: at a predicted column, and where a node would predict them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_tl.circuits.trace import output_text
from sparse_tl.explorer.ablated_model import AblatedModel

Row = Mapping[str, Any]
"""A token with its logit and probability, and what they were before the removals."""


def output_rows(model: AblatedModel, read_at: int, top: int) -> tuple[Row, ...]:
    """The likely tokens at a column before or after the removals, and both top predictions."""
    # Kept with the removals, as most requests change one model of several.
    if (read_at, top) not in model.output_rows:
        model.output_rows[read_at, top] = _output_rows(model, read_at, top)
    return model.output_rows[read_at, top]


def lens_rows(model: AblatedModel, level: int, column: int, top: int) -> tuple[Row, ...]:
    """The tokens that a node would predict."""
    logits = model.logit_lens(level)[column].double()
    return _rows(model, logits, logits.topk(min(top, len(logits))).indices)


def _output_rows(model: AblatedModel, read_at: int, top: int) -> tuple[Row, ...]:
    before = model.whole.logits[read_at].double()
    after = model.now.logits[read_at].double()
    largest = torch.maximum(before.softmax(dim=-1), after.softmax(dim=-1))
    largest[before.argmax()] = largest[after.argmax()] = 2.0
    tokens = largest.topk(min(top, len(largest))).indices
    tokens = tokens[after[tokens].argsort(descending=True, stable=True)]
    return tuple(
        {**row, "logit_before": old["logit"], "probability_before": old["probability"]}
        for row, old in zip(_rows(model, after, tokens), _rows(model, before, tokens), strict=True)
    )


def _rows(model: AblatedModel, logits: Tensor, tokens: Tensor) -> tuple[Row, ...]:
    texts = [output_text(model.model, token) for token in tokens.tolist()]
    probabilities = logits.softmax(dim=-1)[tokens].tolist()
    return tuple(
        {"token": text, "logit": logit, "probability": probability}
        for text, logit, probability in zip(
            texts, logits[tokens].tolist(), probabilities, strict=True
        )
    )

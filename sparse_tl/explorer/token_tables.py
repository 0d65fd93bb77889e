"""Tables of likely tokens: at a predicted column, and where a node would predict them."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from sparse_tl.circuits.trace import output_text
from sparse_tl.explorer.ablated_model import AblatedModel


def output_table(model: AblatedModel, read_at: int, top: int) -> pd.DataFrame:
    """The likely tokens at a column before or after the removals, and both top predictions."""
    before = model.whole.logits[read_at].double()
    after = model.now.logits[read_at].double()
    largest = torch.maximum(before.softmax(dim=-1), after.softmax(dim=-1))
    largest[before.argmax()] = largest[after.argmax()] = 2.0
    tokens = largest.topk(min(top, len(largest))).indices
    tokens = tokens[after[tokens].argsort(descending=True, stable=True)]
    old = _scores(model, before, tokens)
    return _scores(model, after, tokens).assign(
        logit_before=old["logit"], probability_before=old["probability"]
    )


def lens_table(model: AblatedModel, level: int, column: int, top: int) -> pd.DataFrame:
    """The tokens that a node would predict."""
    logits = model.logit_lens(level)[column].double()
    return _scores(model, logits, logits.topk(min(top, len(logits))).indices)


def _scores(model: AblatedModel, logits: Tensor, tokens: Tensor) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "token": [output_text(model.model, token) for token in tokens.tolist()],
            "logit": logits[tokens].tolist(),
            "probability": logits.softmax(dim=-1)[tokens].tolist(),
        }
    )

"""Examples from a model's own text: made once, kept, and made anew for other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_tokenizers import byte_level
from tiny import tiny_model

from sparse_tl.circuits import find_examples
from sparse_tl.training import sampled_windows
from sparse_tl.zoo import examples, load_examples


def test_examples_are_kept_until_the_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "N_WINDOWS", 6)
    monkeypatch.setattr(examples, "WINDOW", 8)
    read = list[Any]()
    monkeypatch.setattr(
        examples,
        "find_examples",
        lambda *given, **how: read.append(1) or find_examples(*given, **how),
    )
    tokenizer = byte_level(before="<s>")
    model: Any = tiny_model(d_vocab=len(tokenizer), tokenizer=tokenizer)
    first, again = (load_examples(model, cache=tmp_path / "c", progress=False) for _ in range(2))
    assert len(read) == 1
    windows = sampled_windows(model, 6, 8, progress=False).tokens
    assert torch.equal(torch.stack([*again.tokens]), windows)
    _, cache = model.run_with_cache(windows)
    for layer, (values, places) in enumerate(zip(again.values, again.places, strict=True)):
        assert torch.equal(values, first.values[layer])
        posts = cache[f"blocks.{layer}.mlp.hook_post"]
        for sign, factor in enumerate((1, -1)):
            by_text = (factor * posts).max(dim=1).values.sort(dim=0, descending=True).values
            assert torch.allclose(values[sign], by_text[:5].T, atol=1e-5)
            text, at = places[sign].long().unbind(-1)
            units = torch.arange(posts.shape[-1])[:, None]
            assert torch.allclose(factor * posts[text, at, units], values[sign], atol=1e-5)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)
    load_examples(model, cache=tmp_path / "c", progress=False)
    assert len(read) == 2

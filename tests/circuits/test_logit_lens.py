"""The logit lens ends at the model's own prediction; direct logit attribution adds up to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architecture_checks import Subject
from architecture_checks.subject import PAIRS
from random_models import random_pairs

from sparse_tl import (
    PromptPairs,
    SparseTransformer,
    attribute_logits,
    load_addition_models,
    logit_difference,
    logit_lens,
)
from sparse_tl.backend import Model

Build = Callable[..., Model]


def uncapped(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits before the soft cap, if there is one."""
    logits = model(tokens).detach().double()
    cap = getattr(model.cfg, "output_logits_soft_cap", None) or 0.0
    return cap * torch.atanh(logits / cap) if cap > 0 else logits


# ---- logit lens --------------------------------------------------------------------------------


def test_the_last_row_is_the_model_and_earlier_ones_its_streams(model: Model) -> None:
    prompt = random_pairs().clean[0]
    found = logit_lens(model, prompt, answer=7)
    whole = model(prompt[None])[0].detach().softmax(-1)
    torch.testing.assert_close(found.probability[-1].double(), whole[:, 7], rtol=1e-6, atol=1e-9)
    assert found.top[-1] == [str(token) for token in whole.argmax(-1).tolist()]
    _, cache = model.run_with_cache(prompt[None])

    def end_here(residual: torch.Tensor, hook: Any) -> torch.Tensor:
        return cache["blocks.1.hook_resid_pre"]

    # The last layer's output is exchanged for what entered it.
    logits = model.run_with_hooks(prompt[None], fwd_hooks=[("blocks.1.hook_resid_post", end_here)])
    expected = logits[0].detach().softmax(-1)
    torch.testing.assert_close(found.probability[1].double(), expected[:, 7], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        found.top_probability[1].double(), expected.amax(-1), rtol=1e-6, atol=1e-9
    )


def test_it_tracks_what_the_model_predicts_unless_it_is_told_otherwise() -> None:
    dense, sparse = load_addition_models()
    for model in (dense, sparse):
        found = logit_lens(model, "36+28=?????")
        assert (found.answer, found.top[-1][-1], found.rows[-1]) == ("4", "4", "final")
        assert found.probability[-1, -1] > 0.9 > 0.5 > found.probability[0, -1]
        assert logit_lens(model, "36+28=?????", answer="4").probability.equal(found.probability)
    table = found.to_pandas()
    assert table.shape == (5 * 11, 6)
    assert table.iloc[-1][["layer", "position", "token", "top"]].tolist() == ["final", 10, "?", "4"]
    assert "'4' after '?'" in repr(found)
    with pytest.raises(ValueError, match="single token; '44' has 2"):
        logit_lens(dense, "36+28=?????", answer="44")
    with pytest.raises(ValueError, match="answer -1 is not an output"):
        logit_lens(dense, "36+28=?????", answer=-1)


def test_a_model_without_a_tokenizer_has_numbers(build_tiny: Build, tmp_path: Any) -> None:
    found = logit_lens(build_tiny(), torch.tensor([3, 1, 4]))
    assert found.tokens == ["3", "1", "4"]
    with pytest.raises(ValueError, match="as a number"):
        logit_lens(build_tiny(), torch.tensor([3, 1, 4]), answer="4")


# ---- direct logit attribution ------------------------------------------------------------------


def test_attributions_add_up_to_the_logit_difference(model: Model) -> None:
    pairs = random_pairs()
    found = attribute_logits(model, pairs, batch_size=2, progress=False)
    expected = logit_difference(pairs.read(uncapped(model, pairs.clean)), pairs)
    torch.testing.assert_close(found.total, expected, rtol=1e-6, atol=1e-9)
    assert (found.values.abs().amax(dim=1) > 0).sum() > 5
    assert len(found.components) == len(set(found.components)) == len(found.values)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "olmo2", "gemma2", "gemma3", "granite", "deepseek_v2", "deepseek_v3"]
)
def test_also_with_post_norms_factors_and_soft_caps(name: str) -> None:
    model = Subject(name).exact
    alone = PromptPairs(
        PAIRS.clean, PAIRS.corrupted, PAIRS.answers, PAIRS.answers[:, :0], PAIRS.positions
    )
    for some in (PAIRS, alone):
        found = attribute_logits(model, some, progress=False)
        logits = some.read(uncapped(model, some.clean))
        expected = logits.gather(1, some.answers).mean(1)
        if some is PAIRS:
            expected = logit_difference(logits, some)
        torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=1e-5)
    lens = logit_lens(model, PAIRS.clean[0], answer=5)
    own = model(PAIRS.clean[:1])[0].detach().softmax(-1)
    torch.testing.assert_close(lens.probability[-1].double(), own[:, 5], rtol=1e-4, atol=1e-7)


def test_a_sparse_model_is_attributed_as_it_is_run(build_tiny: Build) -> None:
    sparse, pairs = SparseTransformer(build_tiny(dtype="float64"), initial_bias=0.0), random_pairs()
    found = attribute_logits(sparse, pairs, progress=False)
    expected = logit_difference(pairs.read(sparse(pairs.clean).detach()), pairs)
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-9)


def test_a_table_by_component(build_tiny: Build, tmp_path: Any) -> None:
    found = attribute_logits(build_tiny(), random_pairs(), progress=False)
    table = found.to_pandas()
    layer = ["a{0}.h0", "a{0}.h1", "a{0}.b", "m{0}"]
    names = [name.format(number) for number in (0, 1) for name in layer]
    assert table["component"].tolist() == ["input", *names, "bias"]
    assert table["logits"].sum() == pytest.approx(found.total.mean().item())
    assert found["m1"] == pytest.approx(table.set_index("component").loc["m1", "logits"])
    with pytest.raises(ValueError, match="no component 'm7'"):
        found["m7"]
    beyond = random_pairs()
    beyond.answers[0, 0] = 99
    with pytest.raises(ValueError, match="predicts tokens in 0..12, and 99"):
        attribute_logits(build_tiny(), beyond, progress=False)

"""Behaviour of heads, against attention patterns, values and finite differences by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_checks import Subject
from architecture_checks.subject import PAIRS
from planted import induction, inhibition
from random_models import random_pairs, shaken
from torch import Tensor

from sparse_tl import (
    InductionTask,
    PromptPairs,
    SparseTransformer,
    ablate_heads,
    attribute_logits,
    head_behaviour,
    load_language_model,
)
from sparse_tl.backend import Model
from sparse_tl.circuits import HeadBehaviour, accuracy

Build = Callable[..., Model]
BY_ATTENTION = ("previous token", "duplicate token", "induction", "sink")
LENGTH = 6


def measured(model: Any, pairs: PromptPairs | None = None, **given: Any) -> HeadBehaviour:
    return head_behaviour(model, pairs, length=LENGTH, progress=False, **given)


def tokens_of(model: Any, run: Callable[[], Any]) -> Tensor:
    """What a model is given inside a call."""
    seen: list[Tensor] = []
    handle = model.embed.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    run()
    handle.remove()
    return torch.cat([some for some in seen if some.shape[1] == 2 * LENGTH])


def watched(model: Any, tokens: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Patterns, and values of each head, by layer; and the final residual stream."""
    _, cache = model.run_with_cache(tokens)
    layers = range(model.cfg.n_layers)
    patterns = [cache[f"blocks.{layer}.attn.hook_pattern"].detach() for layer in layers]
    values = [cache[f"blocks.{layer}.attn.hook_v"].detach() for layer in layers]
    shared = model.cfg.n_heads // values[0].shape[2]
    values = [some.repeat_interleave(shared, dim=2) for some in values]
    return patterns, values, cache[f"blocks.{layers[-1]}.hook_resid_post"].detach()


def logits_of(model: Any, part: Tensor, stream: Tensor) -> Tensor:
    """What a part of the residual stream adds to the logits, at the scale that the stream has."""
    if model.cfg.normalization_type == "LN":
        part, stream = part - part.mean(), stream - stream.mean()
    part = part / (stream.square().mean() + 1e-5).sqrt() * model.ln_final.w.detach()
    return part @ model.unembed.W_U.detach()


# ---- against loops -----------------------------------------------------------------------------


@pytest.fixture(params=["plain", "grouped"])
def some_model(request: pytest.FixtureRequest, build_tiny: Build) -> Model:
    if request.param == "grouped":
        request.getfixturevalue("double_precision")
    return shaken(build_tiny(request.param, dtype="float64"))


@pytest.mark.every_case
def test_random_tokens_are_looked_at_and_copied_as_patterns_and_values_say(
    some_model: Model,
) -> None:
    model, found = some_model, []
    tokens = tokens_of(model, lambda: found.append(measured(model, n=5, batch_size=2, seed=3)))
    assert len(tokens) == 5
    for row in tokens.tolist():
        assert row[:LENGTH] == row[LENGTH:]
        assert len(set(row)) == LENGTH
    expected = {name: torch.zeros_like(found[0][name]) for name in (*BY_ATTENTION, "copying")}
    patterns, values, final = watched(model, tokens)
    for layer, (pattern, value) in enumerate(zip(patterns, values, strict=True)):
        for head in range(model.cfg.n_heads):
            seen, raised = torch.zeros(4, dtype=torch.float64), 0
            for row, prompt in enumerate(tokens.tolist()):
                for query in range(LENGTH + 1, 2 * LENGTH):
                    copy = prompt[:LENGTH].index(prompt[query])
                    at = pattern[row, head, query]
                    seen += at[[query - 1, copy, copy + 1, 0]] / (5 * (LENGTH - 1))
                for place in range(LENGTH):
                    written = value[row, place, head] @ model.blocks[layer].attn.W_O[head].detach()
                    logits = logits_of(model, written, final[row, place])
                    own = logits[prompt[place]]
                    others = [logits[t] for t in prompt[:LENGTH] if t != prompt[place]]
                    raised += sum(int(own > other) - int(own < other) for other in others)
            for name, share in zip(BY_ATTENTION, seen.tolist(), strict=True):
                expected[name][layer, head] = share
            expected["copying"][layer, head] = raised / (5 * LENGTH * (LENGTH - 1))
    for name, scores in expected.items():
        torch.testing.assert_close(found[0][name], scores, rtol=1e-9, atol=1e-12)
    assert sum(found[0][name] for name in BY_ATTENTION).max() <= 1


def answered(model: Any) -> PromptPairs:
    """Pairs whose answer stands in the prompt, twice in some, and which the model prefers."""
    pairs = random_pairs(6, length=7)
    pairs = replace(pairs, positions=torch.tensor([6, 5, 4, 6, 6, 5]))
    pairs.clean[::2, 3] = pairs.clean[::2, 1]
    pairs.clean[:, 2] += pairs.clean[:, 2] == pairs.clean[:, 1]
    answers, wrong = pairs.clean[:, 1:2].clone(), pairs.clean[:, 2:3].clone()
    with torch.no_grad():
        logits = pairs.read(model(pairs.clean))
    swap = logits.gather(1, answers) < logits.gather(1, wrong)
    return replace(
        pairs, answers=torch.where(swap, wrong, answers), wrong=torch.where(swap, answers, wrong)
    )


@pytest.mark.every_case
def test_movers_add_what_their_attention_to_answers_carries(some_model: Model) -> None:
    model, pairs = some_model, answered(some_model)
    found = measured(model, pairs, n=1, batch_size=4)
    patterns, values, final = watched(model, pairs.clean)
    logits = pairs.read(model(pairs.clean).detach())
    difference = (logits.gather(1, pairs.answers) - logits.gather(1, pairs.wrong)).mean()
    for layer, (pattern, value) in enumerate(zip(patterns, values, strict=True)):
        for head in range(model.cfg.n_heads):
            moved = {"mover": 0.0, "suppression": 0.0}
            for row, end in enumerate(pairs.positions.tolist()):
                right, wrong = int(pairs.answers[row]), int(pairs.wrong[row])
                for key in range(end + 1):
                    written = value[row, key, head] @ model.blocks[layer].attn.W_O[head].detach()
                    added = logits_of(model, written, final[row, end])
                    added = float(pattern[row, head, end, key] * (added[right] - added[wrong]))
                    token = int(pairs.clean[row, key])
                    moved["mover"] += added * (token == right)
                    moved["suppression"] += added * (token == wrong)
            for name, total in moved.items():
                share = total / len(pairs) / difference.item()
                assert found[name][layer, head].item() == pytest.approx(share, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2", "gemma2", "granite", "deepseek_v3"])
def test_where_all_tokens_are_answers_movers_add_what_heads_write(name: str) -> None:
    """With post-norms, factors, soft caps and latent attention, as direct logit attribution."""
    model, clean = Subject(name).exact, PAIRS.clean
    with torch.no_grad():
        least = PAIRS.read(model(clean)).scatter(1, clean, torch.inf).argmin(dim=1)
    end = torch.full((len(clean),), clean.shape[1] - 1)
    pairs = PromptPairs(clean, PAIRS.corrupted, clean, least[:, None], end)
    found = measured(model, pairs, n=1)
    written = attribute_logits(model, pairs, progress=False)
    expected = torch.tensor(
        [
            [written[f"a{layer}.h{head}"] for head in range(found.grid.n_heads)]
            for layer in range(found.grid.n_layers)
        ]
    )
    expected = expected / written.total.mean()
    torch.testing.assert_close(found["mover"], expected.double(), rtol=1e-4, atol=1e-5)
    assert not found["suppression"].any()


@pytest.mark.every_case
def test_inhibition_is_the_slope_of_the_movers_attention(some_model: Model) -> None:
    model, pairs = some_model, answered(some_model)
    found = measured(model, pairs, n=1, batch_size=4)
    weights = found["mover"].clamp(min=0) / found["mover"].clamp(min=0).sum()
    rows, ends = torch.arange(len(pairs)), pairs.positions
    _, corrupted = model.run_with_cache(pairs.corrupted)

    def preferred(layer: int, head: int, share: float) -> float:
        """The movers' attention with a share of one head's output from the corrupted prompt."""
        name, seen = f"blocks.{layer}.attn.hook_z", {}

        def edit(z: Tensor, hook: Any) -> Tensor:
            z, other = z.clone(), corrupted[name][rows, ends, head]
            z[rows, ends, head] += share * (other - z[rows, ends, head])
            return z

        def keep(at: int) -> Callable[..., None]:
            return lambda pattern, hook: seen.__setitem__(at, pattern)

        hooks = [(f"blocks.{at}.attn.hook_pattern", keep(at)) for at in range(model.cfg.n_layers)]
        with torch.no_grad():
            model.run_with_hooks(pairs.clean, fwd_hooks=[(name, edit), *hooks])
        total = 0.0
        for row, end in enumerate(ends.tolist()):
            for key, token in enumerate(pairs.clean[row, : end + 1].tolist()):
                sign = (token == int(pairs.answers[row])) - (token == int(pairs.wrong[row]))
                for at, pattern in seen.items():
                    total += sign * float((weights[at] * pattern[row, :, end, key]).sum())
        return total / len(pairs)

    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            step = 1e-5
            slope = (preferred(layer, head, step) - preferred(layer, head, -step)) / (2 * step)
            assert found["inhibition"][layer, head].item() == pytest.approx(-slope, abs=1e-8)
    assert found["inhibition"][0].abs().max() > 1e-4
    assert not found["inhibition"][-1].any()  # nothing attends after the last layer


def test_a_sparse_model_is_scored_by_its_gated_attention(build_tiny: Build) -> None:
    dense = build_tiny(dtype="float64")
    opened = SparseTransformer(build_tiny(dtype="float64"), initial_bias=99.0)
    plain, same = measured(dense), measured(opened)
    for name, scores in plain.scores.items():
        torch.testing.assert_close(same[name], scores)
    gated = measured(SparseTransformer(build_tiny(dtype="float64"), initial_bias=0.0))
    attention = sum(gated[name] for name in BY_ATTENTION)
    assert (attention <= sum(plain[name] for name in BY_ATTENTION)).all()
    closed = measured(SparseTransformer(build_tiny(dtype="float64"), initial_bias=-99.0))
    assert not any(closed[name].any() for name in BY_ATTENTION)


# ---- where the answer is known -----------------------------------------------------------------


def test_planted_heads_are_named() -> None:
    """Of finite sharpness: `a0.h0` looks one back, `a1.h0` continues and copies."""
    found = head_behaviour(induction().model, n=64, length=3, progress=False)
    assert found.top("previous token", 1) == [(0, 0)]
    assert found.top("induction", 1) == found.top("copying", 1) == [(1, 0)]
    assert found["copying"][1, 0] == 1  # whatever the token, its own logit is raised alone
    assert found.main["a0.h0"] == "previous token"
    assert found.labels["a1.h0"] == "ind+"


def test_planted_movers_and_who_steers_them_are_named() -> None:
    planted = inhibition(length=6)
    found = head_behaviour(planted.model, planted.pairs, n=8, length=3, progress=False)
    assert found.heads["mover"] == [(2, 0)]
    assert found.heads["inhibition"] == [(1, 0)]
    assert found["inhibition"].abs().flatten().sort().values[:-1].max() < 1e-6
    # The model does nothing but what the mover carries, mostly of the answer.
    assert found["mover"][2, 0] + found["suppression"][2, 0] == pytest.approx(1)


def test_a_head_that_writes_nothing_copies_nothing(build_tiny: Build) -> None:
    model: Any = build_tiny()
    found = measured(model)
    with torch.no_grad():
        for parameter in model.blocks[1].attn.parameters():
            parameter.zero_()
    assert not measured(model)["copying"][1].any()
    assert found["copying"][1].any()


# ---- the result --------------------------------------------------------------------------------


def made(**scores: list[list[float]]) -> HeadBehaviour:
    named = {name.replace("_", " "): torch.tensor(some) for name, some in scores.items()}
    none = torch.zeros(1, 4)
    every = dict.fromkeys((*BY_ATTENTION, "copying", "mover", "suppression", "inhibition"), none)
    return HeadBehaviour(every | named, prompt_start="<s>")


def test_kinds_are_by_task_first_then_by_attention() -> None:
    found = made(
        induction=[[0.5, 0.39, 0.0, 0.4]],
        sink=[[0.4, 0.6, 0.0, 0.0]],
        copying=[[-0.5, 0.9, 0.5, 0.49]],
        mover=[[0.0, 0.0, 0.05, -0.2]],
    )
    assert found.main == {
        "a0.h0": "induction",
        "a0.h1": "sink",
        "a0.h2": "copying",
        "a0.h3": "negative mover",
    }
    minus = "\N{MINUS SIGN}"
    labels = {"a0.h0": f"ind{minus}", "a0.h1": "+", "a0.h2": "+", "a0.h3": "neg"}
    assert found.labels == labels
    assert found.heads["induction"] == [(0, 0), (0, 3)]
    assert found.heads["copying"] == [(0, 1), (0, 2)]
    assert found.top("induction", 2) == [(0, 0), (0, 3)]
    table = found.to_pandas()
    assert table["kind"].tolist() == ["induction", "sink", "copying", "negative mover"]
    assert table.columns[:3].tolist() == ["head", "kind", "previous token"]
    assert "a0.h1 0.60" in found._repr_html_()
    assert repr(found).startswith("HeadBehaviour(1 layers x 4 heads; previous token a0.h0 0.00")


def test_what_cannot_be_scored(build_tiny: Build) -> None:
    model = build_tiny()
    pairs = answered(model)
    turned = replace(pairs, answers=pairs.wrong, wrong=pairs.answers)
    outside = replace(pairs, answers=torch.full_like(pairs.answers, 12), wrong=pairs.clean[:, :0])
    outside.clean[outside.clean == 12] = 11
    without = measured(model, outside)
    assert "mover" not in without.scores and "no movers" in repr(without)
    with pytest.raises(ValueError, match="does not prefer the answers: .* is -"):
        measured(model, turned)


# ---- a real language model ---------------------------------------------------------------------


@pytest.mark.slow
def test_ablating_induction_heads_ends_induction(smollm2: Path) -> None:
    """As many other heads of the same layers hardly matter."""
    model = load_language_model(device="cpu")
    found = head_behaviour(model, n=2, progress=False)
    best = found.top("induction", 6)
    others = list[tuple[int, int]]()
    for layer, _ in best:
        order = found["induction"][layer].argsort().tolist()
        others.append(next((layer, head) for head in order if (layer, head) not in others))
    assert not {*best} & {*others}
    pairs = InductionTask().pairs(model, 16, seed=1)
    whole = accuracy(model, pairs)
    with ablate_heads(model, best):
        without = accuracy(model, pairs)
    with ablate_heads(model, others):
        control = accuracy(model, pairs)
    assert whole > 0.6
    assert without < 0.15
    assert control > 0.5

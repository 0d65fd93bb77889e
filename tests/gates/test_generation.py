"""Gates while generating: with a key-value cache as by full passes, and as by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import PROMPT, WIDTH, check, generated, pieces
from torch import Tensor

from sparse_tl import (
    CircuitEdges,
    HookPoints,
    SparseTransformer,
    ablate_attention_edges,
    gated,
)
from sparse_tl.backend import Model, adapt

Build = Callable[..., Model]


@pytest.fixture
def column() -> Tensor:
    return torch.randint(13, (3, WIDTH), generator=torch.Generator().manual_seed(0))


# ---- attention that is cut -----------------------------------------------------------------------

LATE = list(range(PROMPT, WIDTH))


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("query", "key", "queries", "keys"),
    [
        (slice(PROMPT, None), [1, 3], LATE, [1, 3]),
        (lambda column: column >= PROMPT, slice(1, 4, 2), LATE, [1, 3]),
        (slice(PROMPT - 1, None, 2), 0, [4, 6], [0]),
        (range(2, PROMPT), 2, [2, 3, 4], [2]),
        (None, lambda column: column % 3 == 1, list(range(WIDTH)), [1, 4, 7]),
        (slice(PROMPT + 1, None), None, LATE[1:], list(range(WIDTH))),
    ],
)
@pytest.mark.parametrize("heads", [None, [(0, 1), (1, 0)]])
def test_attention_is_cut_by_a_rule(
    build_tiny: Build,
    column: Tensor,
    kind: str,
    sparse: bool,
    query: Any,
    key: Any,
    queries: list[int],
    keys: list[int],
    heads: Any,
) -> None:
    model: Any = build_tiny(kind)
    model = SparseTransformer(model, initial_bias=0.0) if sparse else model
    n_heads = model.cfg.n_heads
    cut = heads or [(layer, head) for layer in range(2) for head in range(n_heads)]

    def close(pattern: Tensor, hook: Any, layer: int) -> Tensor:
        pattern = pattern.clone()
        for head in [head for at, head in cut if at == layer]:
            for one in queries:
                for other in keys:
                    if max(one, other) < pattern.shape[2]:
                        pattern[:, head, one, other] = 0
        return pattern

    points = [(f"blocks.{i}.attn.hook_pattern", partial(close, layer=i)) for i in (0, 1)]
    check(
        model,
        column,
        lambda: ablate_attention_edges(model, heads=heads, query=query, key=key),
        lambda tokens: model.run_with_hooks(tokens, fwd_hooks=points),
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"edges": [(0, 0, 3, 1)], "key": 1}, "either attention edges, or a rule"),
        (
            {"query": [PROMPT, WIDTH]},
            f"position {PROMPT} lies outside the prompts.*slice",
        ),
        ({"key": slice(-2, None)}, "count from the start"),
    ],
)
def test_a_rule_that_means_nothing_or_two_things_is_refused(
    build_tiny: Build, column: Tensor, wrong: Any, said: str
) -> None:
    model = build_tiny()
    with pytest.raises(ValueError, match=said), ablate_attention_edges(model, **wrong):
        generated(model, column[:, :PROMPT])
    assert not model.hook_dict["blocks.0.attn.hook_pattern"].fwd_hooks


def test_columns_from_the_end_are_those_of_the_prompts(build_tiny: Build, column: Tensor) -> None:
    model = build_tiny()
    with ablate_attention_edges(model, query=-1, key=slice(-3, -1)):
        found = model(column)
    with ablate_attention_edges(model, query=WIDTH - 1, key=[WIDTH - 3, WIDTH - 2]):
        assert torch.equal(model(column), found)


# ---- gates ---------------------------------------------------------------------------------------

PATCHES = ["zero", "mean", "corrupted", "resample"]


def _gates_run_behind_a_cache(
    model: Any, site: Any, gates: Tensor, patch: Any, tokens: Tensor
) -> None:
    reference = tokens.flip(0, 1)
    options = {} if patch == "zero" else {"reference": reference}
    with gated(model, site, gates, patch, **options):
        whole = model(tokens)
        assert torch.equal(model(tokens), whole)
    with gated(model, site, gates, patch, **options):
        found = pieces(model, tokens)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole, model(tokens), atol=1e-3)


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@pytest.mark.parametrize("name", ["hook_embed", "blocks.0.hook_resid_pre", "blocks.1.hook_mlp_out"])
@pytest.mark.parametrize("patch", PATCHES)
def test_gates_before_the_first_attention_see_the_cached_columns(
    build_tiny: Build, column: Tensor, kind: str, name: str, patch: str
) -> None:
    model = build_tiny(kind)
    gates = (torch.arange(model.cfg.d_model) % 2)[None].float()
    site = HookPoints((name,), (2,))
    _gates_run_behind_a_cache(model, site, gates, patch, column)


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("open_share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("learned", [False, True])
def test_every_pass_under_gates_on_circuit_edges_starts_anew(
    build_tiny: Build, column: Tensor, kind: str, patch: str, open_share: float, learned: bool
) -> None:
    model = build_tiny(kind, dtype="float64")  # a residual stream near 0 is normalised
    generator = torch.Generator().manual_seed(0)
    gates = (torch.rand(adapt(model).graph.exists.shape, generator=generator) < open_share).float()
    site, gates = CircuitEdges(), gates.requires_grad_(learned)
    _gates_run_behind_a_cache(model, site, gates, patch, column)

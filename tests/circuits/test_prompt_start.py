"""Every analysis of prompts records what they started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from random_models import random_pairs

from sparse_tl import (
    TargetDataset,
    ablation_curve,
    acdc,
    attribute_attention_edges,
    attribute_circuit_edges,
    attribute_heads,
    attribute_logits,
    circuit_sizes_per_prompt,
    evaluate_circuit_edges,
    evaluate_heads,
    evaluate_mib,
    fit_head_gates,
    logit_difference,
    patch_activations,
    prune_circuit_edges,
)
from sparse_tl.backend import Model

QUIET: dict[str, Any] = {"progress": False}


@pytest.fixture(scope="module")
def found(build_tiny: Callable[..., Model]) -> dict[str, Any]:
    model = build_tiny()
    pairs = replace(random_pairs(), start="<s>")
    pairs = replace(pairs, positions=pairs.positions * 0 + 5)
    asked = model, pairs, logit_difference
    edges = attribute_circuit_edges(*asked, **QUIET)
    dataset, settings = TargetDataset.from_pairs(pairs), {"updates": 2, "batch_size": 2}
    roles = fit_head_gates(model, dataset, held_out=dataset, seeds=1, **settings, **QUIET)
    return {
        "edges": edges,
        "at positions": attribute_circuit_edges(*asked, positions="tokens", **QUIET).at(0),
        "heads": attribute_heads(*asked, **QUIET),
        "attention edges": attribute_attention_edges(*asked, **QUIET),
        "evaluated": evaluate_circuit_edges(*asked, edges, sizes=[1, 2], **QUIET),
        "evaluated heads": evaluate_heads(*asked, attribute_heads(*asked, **QUIET), **QUIET),
        "mib": evaluate_mib(*asked, edges, **QUIET).signed,
        "sizes": circuit_sizes_per_prompt(*asked, sizes=[1, 2], **QUIET),
        "patched": patch_activations(*asked, **QUIET),
        "logits": attribute_logits(model, pairs, **QUIET),
        "acdc": acdc(model, pairs, threshold=0.1, start="heads", **QUIET),
        "pruned": prune_circuit_edges(model, pairs, size=5, steps=2, **QUIET).scores,
        "roles": roles,
        "ablated": roles if not roles.fitted.any() else ablation_curve(model, roles, dataset),
    }


def test_every_result_says_what_its_prompts_started_with(found: dict[str, Any]) -> None:
    assert {name: result.prompt_start for name, result in found.items()} == dict.fromkeys(
        found, "<s>"
    )

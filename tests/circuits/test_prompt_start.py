"""Every analysis of prompts records what they started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from analyses import call, of_prompts
from random_models import random_pairs

from sparse_tl import attribute_circuit_edges, logit_difference
from sparse_tl.backend import Model

Build = Callable[..., Model]
ANALYSES = of_prompts()
WITHOUT = {"accuracy", "check_scores", "head_behaviour", "patch_exactly"}
"""They give numbers alone; the third, those of prompts that it draws."""


@pytest.mark.parametrize("name", sorted(set(ANALYSES) - WITHOUT))
def test_every_result_says_what_its_prompts_started_with(build_tiny: Build, name: str) -> None:
    pairs = replace(random_pairs(at=5), start="<s>")
    found = call(ANALYSES[name], build_tiny(), pairs)
    parts = [found, *vars(found).values()]
    said = [part.prompt_start for part in parts if hasattr(part, "prompt_start")]
    assert said and set(said) == {"<s>"}


def test_scores_at_a_position_say_it_too(build_tiny: Build) -> None:
    asked = build_tiny(), replace(random_pairs(at=5), start="<s>"), logit_difference
    assert attribute_circuit_edges(*asked, positions="tokens").at(0).prompt_start == "<s>"

"""``benchmarks/story_tasks.py``: its prompts, on the model that they were made for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparse_tl.backend import load_model
from sparse_tl.circuits import accuracy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import story_tasks  # noqa: E402

PROMPTS = ("clean", "corrupted")
STORIES = Path(__file__).parents[3] / "shared/data/models/stories260K"


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no model in {STORIES}")
def test_the_model_does_both_tasks_and_halves_share_no_prompt() -> None:
    model = load_model(STORIES, device="cpu")
    expected = {
        story_tasks.pronoun_stories: (
            {"he", "she"},
            "Once upon a time, there was Sue. Sue was tired because",
        ),
        story_tasks.name_stories: ({"i", "a", "ar", "u", "all", "p"}, "Mia was in the store. M"),
    }
    for stories, (answers, example) in expected.items():
        scored, others = story_tasks.halves(stories(model), 0)
        seen, held_out = (
            {record[side] for record in half.to_records(model.tokenizer) for side in PROMPTS}
            for half in (scored, others)
        )
        assert not seen & held_out
        assert any(text.endswith(example) for text in seen | held_out)
        assert {model.tokenizer.decode(token) for token in scored.answers} == answers
        assert (scored.answers != scored.wrong).all()
        assert accuracy(model, others) == 1.0

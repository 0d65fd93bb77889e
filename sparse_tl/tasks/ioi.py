"""Indirect object identification: ``Then, Mary and John went to the store. John gave a ring to``.

The answer is the indirect object (IO), Mary; the wrong answer is the subject (S), John, who appears
twice. The corrupted prompt replaces the three names with three others (ABC in the paper), so no
name repeats and neither answer appears. *IOI Long* has the same endings after longer beginnings.

Reference: Wang et al., arXiv 2211.00593.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparse_tl.arguments import checked
from sparse_tl.data import PromptPairs
from sparse_tl.data.pairs import PairTexts
from sparse_tl.tasks.task import Task, content, single_words

# Templates, names, places and objects of Redwood Research's Easy-Transformer
# (github.com/redwoodresearch/Easy-Transformer, MIT, (c) 2022 neelnanda-io).
NAMES = content("ioi", "names")
PLACES = content("ioi", "places")
OBJECTS = content("ioi", "objects")

GPT2_IOI_HEADS: dict[str, tuple[tuple[int, int], ...]] = {
    "name mover": ((9, 9), (10, 0), (9, 6)),
    "negative name mover": ((10, 7), (11, 10)),
    "S-inhibition": ((7, 3), (7, 9), (8, 6), (8, 10)),
    "induction": ((5, 5), (5, 8), (5, 9), (6, 9)),
    "duplicate token": ((0, 1), (0, 10), (3, 0)),
    "previous token": ((2, 2), (4, 11)),
    "backup name mover": (
        *((9, 0), (9, 7), (10, 1), (10, 2), (10, 6), (10, 10)),
        *((11, 2), (11, 9)),
    ),
}
"""The heads (layer, head) of GPT-2 small that perform IOI, by class.

Wang et al., arXiv 2211.00593, figure 2, by mean ablation over the ABC prompts and path patching.
They do not apply to other models.
"""


def in_both_orders(templates: tuple[str, ...]) -> tuple[str, ...]:
    """Templates that name the IO first (ABBA), and versions with the subject first (BABA)."""
    return templates + tuple(
        template.replace("[A] and [B]", "[B] and [A]", 1) for template in templates
    )


TEMPLATES = in_both_orders(content("ioi", "templates"))
"""15 ABBA and 15 BABA; [A] is the IO, [B] the subject."""
LONG_TEMPLATES = in_both_orders(content("ioi", "long_templates"))
"""The same with longer beginnings."""


@checked
@dataclass(frozen=True, kw_only=True)
class IOITask(Task):
    """Name the one of two people who receives something from the other.

    Args:
        templates: templates with [A] once and [B] twice, and " [A]", the answer, at the end.
        names: at least five names, since clean and corrupted prompts share none.
        places: words for [PLACE].
        objects: words for [OBJECT].

    Raises:
        ValueError: a template has another form.
    """

    name: str = "ioi"
    title: str = "IOI"
    templates: tuple[str, ...] = field(default=TEMPLATES, repr=False)
    names: tuple[str, ...] = field(default=NAMES, repr=False)
    places: tuple[str, ...] = field(default=PLACES, repr=False)
    objects: tuple[str, ...] = field(default=OBJECTS, repr=False)

    def __post_init__(self) -> None:
        for template in self.templates:
            slots = re.findall(r"\[[AB]\]", template)
            if sorted(slots[:-1]) != ["[A]", "[B]", "[B]"] or not template.endswith(" [A]"):
                raise ValueError(
                    f'a template has [A] once, [B] twice, and " [A]" at its end; got {template!r}'
                )

    def words(self, tokenizer: Any) -> dict[str, list[str]]:
        """The names, places and objects that are single tokens."""
        return {
            "names": single_words(tokenizer, self.names, 5, "names"),
            "places": single_words(tokenizer, self.places, 1, "places"),
            "objects": single_words(tokenizer, self.objects, 1, "objects"),
        }

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt; the answer is the IO, and the wrong one the subject."""
        names, places, objects = self.words(tokenizer).values()

        def draw() -> PairTexts:
            template = rng.choice(self.templates).removesuffix(" [A]")
            place, thing = rng.choice(places), rng.choice(objects)
            template = template.replace("[PLACE]", place).replace("[OBJECT]", thing)
            io, subject, *others = rng.sample(names, 5)
            return PairTexts(
                template.replace("[A]", io).replace("[B]", subject),
                re.sub(r"\[[AB]\]", lambda _: others.pop(0), template),
                answers=(f" {io}",),
                wrong=(f" {subject}",),
            )

        return draw

    def spans(self, pairs: PromptPairs) -> list[dict[str, int]]:
        """The columns of the names in each pair, for `PromptPairs.with_spans`.

        "IO", "S1", "S1+1" (the token after it), "S2" and "END", the last token: the positions of
        the paper's circuit.
        """
        spans = []
        names = zip(pairs.answers[:, 0].tolist(), pairs.wrong[:, 0].tolist(), strict=True)
        for row, (io, subject) in enumerate(names):
            tokens = pairs.clean[row, : int(pairs.positions[row]) + 1].tolist()
            first = tokens.index(subject)
            found = {"IO": tokens.index(io), "S1": first, "S1+1": first + 1}
            spans.append({**found, "S2": tokens.index(subject, first + 1), "END": len(tokens) - 1})
        return spans


@checked
@dataclass(frozen=True, kw_only=True)
class IOILongTask(IOITask):
    """IOI with longer beginnings."""

    name: str = "ioi_long"
    title: str = "IOI Long"
    templates: tuple[str, ...] = field(default=LONG_TEMPLATES, repr=False)

"""Circuits of a dense and a sparse story model, on two tasks of its own.

- *he / she*: "Sue was sad because" -> she, against "Max was sad because" -> he, and the reverse.
- *names*: "Mia went to the park. M" -> the rest of a name that was mentioned before, against a name
  that begins with the same token.

Half of the stories score (EAP-IG), the other half evaluates: both know all names, and no prompt
of the other.
Prints a row in Markdown for each model: how often the right answer is more likely than the wrong
one, the smallest circuits with an explained effect of 0.9 (of edges by `find_circuit`, of edges and
of heads by the ranking), and how many times smaller they are than the dense model's.

    sparse-tl post-train --model stories260K --text stories.txt --target-loss +0.05 --out runs/s05
    python benchmarks/story_tasks.py stories260K runs/s05/sparse

Made for https://huggingface.co/karpathy/tinyllamas; any model of TinyStories will do whose
tokenizer splits the names below after the same beginning.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator

import torch

from sparse_tl import (
    PromptPairs,
    attribute_circuit_edges,
    attribute_heads,
    evaluate_circuit_edges,
    evaluate_heads,
    find_circuit,
    load_model,
    logit_difference,
    measure_skill,
)
from sparse_tl.backend import HookedModel
from sparse_tl.data.pairs import padded
from sparse_tl.gates.sparse.sparse_transformer import load_dense_or_sparse

BOYS, GIRLS = ("Max", "Bob"), ("Sue", "Mia", "Sally")
FEELINGS = ("happy", "sad", "scared", "tired")
PRONOUN_TEMPLATES = (
    "{name} was {feeling} because",
    "One day, {name} was {feeling} because",
    "{name} had a toy. {name} was {feeling} because",
    "{name} saw a big dog. {name} was {feeling}, but",
    "Once upon a time, there was {name}. {name} was {feeling} because",
)
NAMES = (("Mia", "Max", "Mary"), ("Sue", "Sally", "Spot"))
"""Of one length and one first token each."""
PLACES = ("park", "garden", "store", "house")
NAME_TEMPLATES = (
    "{name} went to the {place}.",
    "{name} was in the {place}.",
    "One day, {name} saw a big {place}.",
    "There was a child named {name}. They had a {place}.",
)


Row = tuple[list[int], list[int], int, int]
"""Clean and corrupted tokens, the right answer and the wrong one."""


def pronoun_stories(model: HookedModel) -> Iterator[list[Row]]:
    """The rows of each story, with all names."""
    he, she = (_tokens(model, word)[-1] for word in ("he", "she"))
    for template, feeling in itertools.product(PRONOUN_TEMPLATES, FEELINGS):
        rows: list[Row] = []
        for names in itertools.product(BOYS, GIRLS):
            texts = [template.format(name=name, feeling=feeling) for name in names]
            boy, girl = (_tokens(model, text) for text in texts)
            rows += [(boy, girl, he, she), (girl, boy, she, he)]
        yield rows


def name_stories(model: HookedModel) -> Iterator[list[Row]]:
    """The same, read after the first token of the name's second mention."""
    for template, place, names in itertools.product(NAME_TEMPLATES, PLACES, NAMES):
        prompts = {}
        for name in names:
            story = template.format(name=name, place=place)
            before, whole = _tokens(model, story), _tokens(model, f"{story} {name}")
            begun = len(before) + 1
            if not model.tokenizer.decode(whole[begun - 1 : begun]).strip():
                begun += 1  # a space may be a token of its own
            prompts[name] = whole[:begun], whole[begun]
        pairs = itertools.permutations(prompts.values(), 2)
        yield [(clean, other, right, wrong) for (clean, right), (other, wrong) in pairs]


def _tokens(model: HookedModel, text: str) -> list[int]:
    return model.to_tokens(text)[0].tolist()


def halves(stories: Iterator[list[Row]], seed: int) -> list[PromptPairs]:
    """The pairs of one half of the stories, and of the other."""
    drawn = list(stories)
    random.Random(seed).shuffle(drawn)
    half = len(drawn) // 2
    return [_pairs([row for rows in some for row in rows]) for some in (drawn[:half], drawn[half:])]


def _pairs(rows: list[Row]) -> PromptPairs:
    clean, corrupted, right, wrong = zip(*rows, strict=True)
    if any(len(one) != len(other) for one, other in zip(clean, corrupted, strict=True)):
        raise ValueError("expected a tokenizer that splits the names of a pair into as many tokens")
    return PromptPairs(
        padded(clean, 0),
        padded(corrupted, 0),
        torch.tensor(right)[:, None],
        torch.tensor(wrong)[:, None],
        torch.tensor([len(one) - 1 for one in clean]),
    )


def main() -> None:
    """Measure every model on both tasks, the dense one first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense")
    parser.add_argument("sparse", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = {"batch_size": 32, "progress": False}
    dense = load_model(args.dense)
    print("| task | model | right above wrong | edges, found | edges, ranked | heads |")
    print("|---|---|---|---|---|---|")
    for task, stories in {"he / she": pronoun_stories, "names": name_stories}.items():
        scored, others = halves(stories(dense), args.seed)
        first: list[float] = []
        for name in [args.dense, *args.sparse]:
            model = dense if name == args.dense else load_dense_or_sparse(name)
            found = find_circuit(model, scored, logit_difference, held_out=others, **options)
            sizes: list[float | None] = [len(found.circuit)]
            for attribute, evaluate in (
                (attribute_circuit_edges, evaluate_circuit_edges),
                (attribute_heads, evaluate_heads),
            ):
                scores = attribute(model, scored, logit_difference, method="eap-ig", **options)
                ranked = evaluate(model, others, logit_difference, scores, **options)
                sizes.append(ranked.curve(name).size_at(0.9))
            first = first or [math.nan if size is None else size for size in sizes]
            cells = [
                "-" if size is None else f"{size:.1f}, {all_in / size:.2f}x"
                for size, all_in in zip(sizes, first, strict=True)
            ]
            right = measure_skill(model, others, logit_difference, progress=False).choice
            print(f"| {task} | {name} | {right:.1%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

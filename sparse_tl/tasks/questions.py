"""Prompts with targets from question sets and minimal pairs: syntax, common sense, mathematics.

Each builder reads the rows of one kind of set, in the format of its files or Hugging Face dataset:

- *Syntax* (BLiMP): the text up to where the grammatical and the ungrammatical sentence diverge; the
  target is the grammatical continuation.
- *Common sense* (CommonsenseQA): a question with lettered choices; the target is the letter.
- *Mathematics* (GSM8K): a question; the target is the worked solution.

Questions follow one answered example: the set's first row, which is not used as a question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from sparse_tl.backend import HookedModel
from sparse_tl.data.documents import dataset_rows
from sparse_tl.data.prompts import prepends_bos, prompt_start
from sparse_tl.data.targets import TargetDataset, read_jsonl

Record = Mapping[str, Any]
Question = tuple[str, str]
"""The text up to the answer, and the answer."""


@dataclass(frozen=True)
class QuestionSet:
    """A kind of prompts with targets, by default from a Hugging Face dataset.

    Args:
        build: function from rows to questions.
    """

    name: str
    title: str
    source: str
    split: str
    build: Callable[[Sequence[Record]], list[Question]]

    def load(
        self, model: HookedModel, n: int, *, source: str | Path | None = None
    ) -> TargetDataset:
        """The first `n` questions that fit the model's context, as prompts with targets.

        `source` is a file with one JSON object per line, a folder of such files, or a dataset name;
        the set's own dataset by default.
        """
        tokenizer, bos, n_ctx = model.tokenizer, prepends_bos(model), model.cfg.n_ctx
        n_start = len(prompt_start(tokenizer, bos))
        questions = [
            (text, answer)
            for text, answer in self.questions(source, 4 * n + 1)
            if n_start + len(tokenizer.encode(text + answer, add_special_tokens=False)) <= n_ctx
        ]
        if not questions:
            raise ValueError(f"{source or self.source} has no question of at most {n_ctx} tokens")
        texts, answers = zip(*questions[:n], strict=True)
        return TargetDataset.from_texts(tokenizer, texts, answers, prepend_bos=bos)

    def questions(self, source: str | Path | None, n_rows: int) -> list[Question]:
        """The questions in the first rows of a source, as in `load`."""
        source = source or self.source
        rows = read_rows(source, self.split, n_rows)
        try:
            return self.build(rows)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"expected rows of {self.title} like those of {self.source}; {source} has the "
                f"fields {[*rows[0]]!s:.200}: {error!r:.200}"
            ) from error


def read_rows(source: str | Path, split: str = "train", limit: int | None = None) -> list[Record]:
    """The rows of a file, of all such files in a folder in turn, or of a Hugging Face dataset."""
    path = Path(source)
    rows: Iterable[Record]
    if path.is_file():
        rows = read_jsonl(path)
    elif path.is_dir():
        files = [read_jsonl(file) for file in sorted(path.glob("*.jsonl"))]
        # Interleave the files, so that the first rows are of all kinds.
        rows = (row for some in zip_longest(*files) for row in some if row is not None)
    else:
        rows = dataset_rows(source, split)
    records = list(islice(rows, limit))
    if not records:
        raise ValueError(f"there are no rows in {source}")
    return records


def syntax_questions(rows: Sequence[Record]) -> list[Question]:
    """BLiMP's minimal pairs: the shared start of both sentences, and the grammatical continuation.

    The target is the critical word if the set names it, otherwise the rest of the sentence. Pairs
    that differ in their first word are skipped, since no text would precede the target.
    """
    questions = []
    for row in rows:
        good, bad = row["sentence_good"].split(" "), row["sentence_bad"].split(" ")
        if "one_prefix_word_good" in row:
            questions.append((row["one_prefix_prefix"], f" {row['one_prefix_word_good']}"))
            continue
        differing = (i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b)
        shared = next(differing, min(len(good), len(bad)))
        if 0 < shared < len(good):
            questions.append((" ".join(good[:shared]), " " + " ".join(good[shared:])))
    return questions


def common_sense_questions(rows: Sequence[Record]) -> list[Question]:
    """CommonsenseQA's questions with lettered choices, after an answered example."""

    def asked(row: Record) -> Question:
        choices = row["choices"]
        texts = choices["text"] if isinstance(choices, Mapping) else choices
        options = "\n".join(f"{'ABCDEFGH'[i]}. {text}" for i, text in enumerate(texts))
        letter = row["answerKey"] if "answerKey" in row else row["answer"]
        return f"Question: {row['question']}\n{options}\nAnswer:", f" {letter}"

    return _after_an_example([asked(row) for row in rows])


def mathematics_questions(rows: Sequence[Record]) -> list[Question]:
    """GSM8K's questions and worked solutions, without calculator annotations ``<<...>>``."""

    def asked(row: Record) -> Question:
        solution = re.sub(r"<<.*?>>", "", row["answer"]).strip()
        return f"Question: {row['question'].strip()}\nAnswer:", f" {solution}"

    return _after_an_example([asked(row) for row in rows])


def _after_an_example(questions: Sequence[Question]) -> list[Question]:
    if len(questions) < 2:
        raise ValueError("expected at least two questions: the first one is the answered example")
    (text, answer), *others = questions
    return [(f"{text}{answer}\n\n{asked}", target) for asked, target in others]


SYNTAX = QuestionSet(
    "syntax", "Syntax", "nyu-mll/blimp:anaphor_number_agreement", "train", syntax_questions
)
COMMON_SENSE = QuestionSet(
    "common_sense", "Common Sense", "tau/commonsense_qa", "validation", common_sense_questions
)
MATHEMATICS = QuestionSet("math", "Math", "openai/gsm8k:main", "test", mathematics_questions)
QUESTION_SETS = {questions.name: questions for questions in (SYNTAX, COMMON_SENSE, MATHEMATICS)}

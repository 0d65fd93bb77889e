"""Prompts that begin the assistant's answer in a chat."""

from __future__ import annotations

from typing import Any

import pytest
from made_tokenizers import byte_level, sentencepiece
from reading import Reader

from sparse_tl.data import PromptPairs
from sparse_tl.data.prompts import REQUEST, chat_start
from sparse_tl.tasks import GreaterThanTask, InductionTask

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
BEGUN = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nContinue the text.<|im_end|>\n<|im_start|>assistant\n"
)
# As Llama 2: BOS is the template's own, and a space stands before the answer.
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ROWS = [
    {"clean": "The cat sat", "corrupted": "The dog sat", "answer": " far", "wrong": " near"},
    {"clean": "The cat", "corrupted": "The dog", "answer": " sat", "wrong": [" far", " near"]},
]
WORDS = (" cat", " dog", " sat", " far", " near")


def _model(tokenizer: Any, template: str | None = SMOLLM2) -> Reader:
    tokenizer.chat_template = template
    return Reader(tokenizer, bos=True)


def _smollm2() -> Any:
    tokenizer = byte_level("The", *WORDS)
    names = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_prompt_begins_what_the_assistant_says(kind: str) -> None:
    tokenizer = _smollm2() if kind == "byte_level" else sentencepiece("The", *WORDS)
    model = _model(tokenizer, SMOLLM2 if kind == "byte_level" else LLAMA)
    begun = "<s>[INST] Continue the text. [/INST] " if kind == "sentencepiece" else BEGUN
    assert REQUEST == "Continue the text."
    pairs = PromptPairs.from_texts(model, ROWS, chat=True)
    assert pairs.start == begun == chat_start(tokenizer)
    for row, record in enumerate(ROWS):
        for side, tokens in (("clean", pairs.clean), ("corrupted", pairs.corrupted)):
            turns = [{"role": "user", "content": REQUEST}]
            turns += [{"role": "assistant", "content": record[side]}]
            asked = {"continue_final_message": True, "return_dict": False}
            expected = tokenizer.apply_chat_template(turns, tokenize=True, **asked)
            end = int(pairs.positions[row]) + 1
            assert tokens[row, :end].tolist() == expected
            text = tokenizer.apply_chat_template(turns, tokenize=False, **asked)
            assert text == begun + str(record[side])
        answer = tokenizer.encode(
            f"{begun}{record['clean']}{record['answer']}", add_special_tokens=False
        )
        assert pairs.answers[row].tolist() == answer[-1:]
        assert answer[:-1] == pairs.clean[row, : int(pairs.positions[row]) + 1].tolist()
    if kind != "sentencepiece":
        assert "beginning with '<|im_start|>system" in repr(pairs)
        assert len(repr(pairs)) < 120


def test_tasks_begin_the_answer_too() -> None:
    reader = _model(_smollm2())
    tokenizer = reader.tokenizer
    task = GreaterThanTask(nouns=("cat", "dog"))
    plain, chat = (task.pairs(reader, 6, chat=chat) for chat in (False, True))
    for one, other in zip(plain.to_records(tokenizer), chat.to_records(tokenizer), strict=True):
        text = one["clean"].removeprefix("<s>")
        assert other == {**one, "clean": BEGUN + text, "corrupted": other["corrupted"]}
        assert other["corrupted"] == BEGUN + one["corrupted"].removeprefix("<s>")
    assert chat.note == plain.note
    induction = InductionTask(length=4).pairs(reader, 3, chat=True)
    start = tokenizer.encode(BEGUN, add_special_tokens=False)
    assert (induction.clean[:, : len(start)].tolist()) == [start] * 3
    assert induction.clean.shape[1] == len(start) + 7
    assert induction.start == BEGUN


def test_a_prompt_that_begins_with_a_line_break_keeps_it() -> None:
    """What the assistant says is not trimmed, as templates do: the prompt is what it has said."""
    model = _model(sentencepiece("The", *WORDS, "\n"), LLAMA)
    rows = [{"clean": "\nThe cat", "corrupted": "\nThe dog", "answer": " sat", "wrong": " far"}]
    pairs = PromptPairs.from_texts(model, rows, chat=True)
    assert "[/INST] \nThe cat" in model.tokenizer.decode(pairs.clean[0].tolist())

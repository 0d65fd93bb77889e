"""Greater-Than, IOI, IOI Long and Docstring: what their prompts say, and under which tokenizers.

Most tests run under a small tokenizer of words that is made here, and under GPT-2's where the
shared test data is at hand. Prompts are read back from their tokens, without spaces.
"""

from __future__ import annotations

import csv
import json
import random
import re
from functools import cache

import pytest
import torch
from made_tokenizers import byte_level
from reading import Reader, check_pairs
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_tl.metrics import logit_difference, margin, probability_difference
from sparse_tl.tasks import DocstringTask, GreaterThanTask, IOILongTask, IOITask, docstring, ioi
from sparse_tl.tasks.greater_than import NOUNS
from sparse_tl.tasks.task import single_words

TASKS = [GreaterThanTask, IOITask, IOILongTask, DocstringTask]
FIXED = 'The lasted from the year to def self , ) : ( ): """ : param'
EVERYTHING = " ".join(
    [FIXED, *NOUNS, *ioi.TEMPLATES, *ioi.LONG_TEMPLATES, *ioi.NAMES, *ioi.PLACES, *ioi.OBJECTS]
    + [*docstring.ARGUMENTS, *docstring.NOUNS, *(f"{number:02d}" for number in range(100))]
)


def word_tokenizer(texts=EVERYTHING, digits=r"\d\d", **special):
    """Words, punctuation and what `digits` matches are tokens; all else is [UNK]."""
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex(digits), "isolated")]
    )
    words = [word for word, _ in split.pre_tokenize_str(texts)]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["[UNK]", *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module")
def words():
    return word_tokenizer()


@pytest.fixture(scope="module")
def gpt2(shared_data):
    path = shared_data / "tokenizers" / "gpt2" / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<|endoftext|>")


@pytest.fixture(scope="module", params=["words", "gpt2"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def squeeze(text):
    return "".join(text.split())


def read_back(pairs, tokenizer):
    """Records without spaces, and the answers without theirs."""
    return [
        {
            key: squeeze(value) if isinstance(value, str) else [text.strip() for text in value]
            for key, value in record.items()
        }
        for record in pairs.to_records(tokenizer)
    ]


@cache
def frame_pattern(template):
    pattern = re.escape(squeeze(template.removesuffix("[A]")))
    for slot, choices in (("PLACE", ioi.PLACES), ("OBJECT", ioi.OBJECTS)):
        marked = re.escape(f"[{slot}]")
        pattern = pattern.replace(marked, f"(?P<{slot}>{'|'.join(choices)})", 1)
        pattern = pattern.replace(marked, f"(?P={slot})")  # the same object both times
    for turn in range(3):
        name = f"(?P<name{turn}>{'|'.join(ioi.NAMES)})"
        pattern = re.sub(r"\\\[[AB]\\\]", name, pattern, count=1)
    return re.compile(pattern)


def parse_ioi(text, templates):
    """Which of the ABBA templates it is, but for the order, and the three names in turn."""
    matches = []
    for index, template in enumerate(templates[:15]):
        if found := frame_pattern(template).fullmatch(text):
            matches.append((index, found))
    ((index, found),) = matches
    return index, tuple(found[f"name{turn}"] for turn in range(3))


@pytest.mark.parametrize("kind", [IOITask, IOILongTask])
def test_ioi_names_are_distinct_and_the_answer_is_the_one_named_once(kind, tokenizer):
    task = kind()
    used = []
    for record in read_back(task.pairs(Reader(tokenizer), 300, seed=3), tokenizer):
        index, names = parse_ioi(record["clean"], task.templates)
        other_index, others = parse_ioi(record["corrupted"], task.templates)
        subject = names[2]
        (io,) = set(names) - {subject}
        assert names.count(subject) == 2
        assert (record["answer"], record["wrong"]) == ([io], [subject])
        assert len({io, subject, *others}) == 5
        assert index == other_index
        used.append((index, names[0] == io))
    assert set(used) == {(index, first) for index in range(15) for first in (True, False)}
    assert 100 < sum(first for _, first in used) < 200


def parse_docstring(text):
    found = re.fullmatch(
        r'def([a-z]+)\(self,([a-z,]+)\):"""([a-z]+):param([a-z]+):([a-z]+):param([a-z]+):([a-z]+)'
        ":param",
        text,
    )
    function, defined, summary, first, one, second, two = found.groups()
    return function, defined.split(","), [first, second], (summary, one, two)


def test_docstring_answers_the_third_matching_argument(tokenizer):
    for record in read_back(DocstringTask().pairs(Reader(tokenizer), 100, seed=2), tokenizer):
        function, defined, described, texts = parse_docstring(record["clean"])
        assert len(defined) == 6
        assert described == defined[2:4]
        assert record["answer"] == [defined[4]]
        other_function, other, other_described, other_texts = parse_docstring(record["corrupted"])
        assert (function, texts) == (other_function, other_texts)
        assert [*defined[:2], defined[5]] == [*other[:2], other[5]]
        replaced = [*other[2:5], *other_described]
        assert len({function, *defined, *replaced}) == 12  # nothing in the corrupted one matches
        assert sorted(record["wrong"]) == sorted({*defined, *replaced} - {defined[4]})


@pytest.mark.parametrize("kind", [IOITask, IOILongTask, DocstringTask])
def test_an_answer_is_the_token_that_follows_the_prompt(kind, tokenizer):
    check_pairs(kind().pairs(Reader(tokenizer), 40), tokenizer, 40)


@pytest.mark.parametrize("kind", TASKS)
def test_same_seed_same_pairs_whatever_the_global_state(kind, words):
    made = []
    for turn, seed in enumerate((5, 5, 6)):
        random.seed(turn)
        torch.manual_seed(turn)
        made.append(kind().pairs(Reader(words), 60, seed=seed))
    pairs, again, other = made
    for name in ("clean", "corrupted", "answers", "wrong", "positions"):
        assert torch.equal(getattr(pairs, name), getattr(again, name))
    texts = {record["clean"] for record in pairs.to_records(words)}
    assert len(texts) == 60
    assert len(texts - {record["clean"] for record in other.to_records(words)}) > 30


def test_a_small_task_gives_each_prompt_before_it_repeats_one(words):
    task = IOITask(
        names=ioi.NAMES[:6], places=("store",), objects=("ring",), templates=ioi.TEMPLATES[:1]
    )
    for n in (30, 45):
        texts = [record["clean"] for record in task.pairs(Reader(words), n).to_records(words)]
        assert len(texts) == n
        assert len(set(texts)) == 30  # 6 * 5 choices of two names


def test_only_the_words_of_the_task_are_used(words):
    names = ("Mary", "John", "Paul", "Lisa", "Mark")
    task = IOITask(names=names, places=("garden",), objects=("drink",))
    for record in read_back(task.pairs(Reader(words), 80), words):
        for text in (record["clean"], record["corrupted"]):
            assert set(parse_ioi(text, task.templates)[1]) <= set(names)
            assert not re.search("|".join({*ioi.PLACES} - {"garden"}), text)
    task = GreaterThanTask(nouns=("trial", "trip"), centuries=(14, 92))
    texts = {record["clean"] for record in read_back(task.pairs(Reader(words), 100), words)}
    heads = {re.sub(r"(?<=\d\d)\d\dto", "to", text) for text in texts}
    assert heads == {
        f"The{noun}lastedfromtheyear{century}totheyear{century}"
        for noun in ("trial", "trip")
        for century in (14, 92)
    }
    task = DocstringTask(arguments=docstring.ARGUMENTS[:12], nouns=("price", "cost", "age"))
    for record in read_back(task.pairs(Reader(words), 40), words):
        function, defined, _, texts = parse_docstring(record["clean"])
        assert {function, *defined} <= set(docstring.ARGUMENTS[:12])
        assert not re.sub("price|cost|age", "", "".join(texts))


def test_words_that_are_no_single_token_are_left_out(words):
    found = single_words(words, ["Mary", "Zebedee", "Mary-Ann", "John"], 2, "names")
    assert found == ["Mary", "John"]
    # The name of the unknown token is not told to the wrapper here, and one name is unknown.
    names = ("Mary", "John", "Zebedee", "Paul", "Lisa", "Mark")
    tokens = IOITask(names=names).pairs(Reader(words), 100)
    assert repr(tokens).endswith("without BOS; 1 of 6 names left out)")
    assert repr(IOITask().pairs(Reader(words), 2)).endswith("without BOS)")
    assert "[UNK]" not in " ".join(record["clean"] for record in tokens.to_records(words))
    assert len(tokens.answers.unique()) == 5


def test_years_that_are_one_token_are_not_used():
    whole = "1732 1450 1501"
    tokenizer = word_tokenizer(f"{EVERYTHING} {whole}", digits=r"1732|1450|1501|\d\d")
    years = GreaterThanTask(centuries=(14, 15, 17)).form_and_years(tokenizer)[1]
    everything = {(c, f"{start:02d}") for c in ("14", "17") for start in range(2, 99)}
    assert set(years) == everything - {("17", "32"), ("14", "50")}  # 1501 would be the corrupted
    with pytest.raises(ValueError, match=r"centuries \[15\] into two tokens"):
        GreaterThanTask(centuries=(15,)).pairs(Reader(tokenizer), 1)


def test_tokenizers_without_pairs_of_digits_are_refused():
    for known in (re.sub(r"\d", "", EVERYTHING), EVERYTHING.replace("37", "")):
        with pytest.raises(ValueError, match="a token for each of 00 to 99"):
            GreaterThanTask().pairs(Reader(word_tokenizer(known)), 1)


def test_prompts_begin_as_the_model_begins_them(build_tiny, tmp_path):
    """In Python the BOS token was missing, which the command line prepended."""
    word_tokenizer("<s> " + EVERYTHING, bos_token="<s>", pad_token="<s>").save_pretrained(tmp_path)
    with_bos = AutoTokenizer.from_pretrained(tmp_path)
    task, made = IOITask(), {}
    for bos in (False, True):
        model = build_tiny(
            d_vocab=len(with_bos), n_ctx=64, tokenizer=with_bos, default_prepend_bos=bos
        )
        made[bos] = pairs = task.pairs(model, 20)
        for row, position in enumerate(pairs.positions.tolist()):
            tokens = pairs.clean[row, : position + 1]
            text = with_bos.decode(tokens.tolist(), skip_special_tokens=True)
            assert torch.equal(model.to_tokens(text)[0], tokens)
    plain, begun = made[False], made[True]
    assert torch.equal(begun.clean[:, 1:], plain.clean)
    assert torch.equal(begun.corrupted[:, 1:], plain.corrupted)
    assert torch.equal(begun.positions, plain.positions + 1)
    assert torch.equal(begun.answers, plain.answers)


def test_a_name_that_the_tokenizer_joins_to_the_word_before_it():
    names = (" Mary", " John", " Paul", " Lisa", " Mark")
    frame = ("Then", " and", " ran", ".", " gave", " it", " to", " the", " store")
    task = IOITask(
        names=tuple(name.strip() for name in names),
        templates=("Then [A] and [B] ran. [B] gave it to [A]",),
        places=("store",),
        objects=("store",),
    )
    apart = task.pairs(Reader(byte_level(*frame, *names)), 40)
    assert len(apart.answers.unique()) == 5
    joined = byte_level(" to Mary", *frame, *names, words_alone=False)
    with pytest.raises(ValueError, match="an answer begins inside a token"):
        task.pairs(Reader(joined), 40)


def test_a_tokenizer_that_begins_with_a_space_gives_the_same_answers():
    names = ("Mary", "John", "Paul", "Lisa", "Mark")
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    known = [f"{space}{word}" for word in ("Then", "and", "ran.", "spoke", "to", *names)]
    vocabulary = {word: index for index, word in enumerate(["[UNK]", space, *known])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    inner.pre_tokenizer = pre_tokenizers.Split(space, "merged_with_next")
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert len(tokenizer.encode(" Mary")) == 2
    assert single_words(tokenizer, names, 5, "names") == list(names)
    task = IOITask(
        names=names,
        templates=("Then [A] and [B] ran. [B] spoke to [A]",),
        places=("Mary",),
        objects=("Mary",),
    )
    pairs = task.pairs(Reader(tokenizer), 20)
    assert torch.equal(pairs.answers[:, 0], pairs.clean[:, 1])
    assert torch.equal(pairs.wrong[:, 0], pairs.clean[:, 3])


def test_the_metric_is_the_tasks_own():
    metrics = [probability_difference, logit_difference, logit_difference, margin]
    assert [kind().metric for kind in TASKS] == metrics


def test_the_words_are_the_published_ones(shared_data):
    prompts = shared_data / "prompts"
    published = json.loads((prompts / "ioi" / "ioi_templates.json").read_text("utf-8"))
    assert list(ioi.TEMPLATES) == published["ABBA_TEMPLATES"] + published["BABA_TEMPLATES"]
    assert list(ioi.LONG_TEMPLATES) == (
        published["ABBA_LONG_TEMPLATES"] + published["BABA_LONG_TEMPLATES"]
    )
    assert list(ioi.NAMES) == published["NAMES"]
    assert list(ioi.PLACES) == published["PLACES"]
    assert list(ioi.OBJECTS) == published["OBJECTS"]
    known = json.loads((prompts / "known_circuits" / "known_circuits.json").read_text("utf-8"))
    known = known["ioi_gpt2_small_heads"]
    assert {frozenset(heads) for heads in ioi.GPT2_IOI_HEADS.values()} == {
        frozenset(map(tuple, heads)) for heads in known.values()
    }
    assert set(ioi.GPT2_IOI_HEADS["name mover"]) == set(map(tuple, known["name mover"]))
    words = json.loads((prompts / "docstring" / "docstring_words.json").read_text("utf-8"))
    assert list(docstring.ARGUMENTS) == words["variable_names"]
    assert list(docstring.NOUNS) == words["common_single_token_nouns"]


def published_greater_than(shared_data):
    path = shared_data / "prompts" / "greater_than" / "eap_ig_greater_than_data.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_greater_than_gives_the_published_prompts(shared_data, gpt2):
    rows = published_greater_than(shared_data)
    assert {row["clean"].split()[1] for row in rows} == set(NOUNS)
    for row in rows[::500]:
        noun, century = row["clean"].split()[1], int(row["clean"][-2:])
        task = GreaterThanTask(nouns=(noun,), centuries=(century,))
        pairs = task.pairs(Reader(gpt2), len(task.form_and_years(gpt2)[1]))  # all that there are
        records = {record["clean"]: record for record in pairs.to_records(gpt2)}
        record = records[row["clean"]]
        assert record["corrupted"] == row["corrupted"]
        assert record["wrong"][-1] == row["label"]


def test_docstring_prompts_read_as_published_under_gpt2(gpt2):
    pairs = DocstringTask().pairs(Reader(gpt2), 40)
    lines = (
        r"\ndef \w+\(self, \w+, \w+, \w+, \w+, \w+, \w+\):",
        r'    """\w+ \w+ \w+',
        "",
        r"    :param \w+: \w+ \w+",
        r"    :param \w+: \w+ \w+",
        r"    :param",
    )
    for record in pairs.to_records(gpt2):
        for text in (record["clean"], record["corrupted"]):
            assert re.fullmatch(r"\n".join(lines), text)
        assert all(re.fullmatch(r" \w+", text) for text in record["answer"] + record["wrong"])
    assert set(pairs.positions.tolist()) == {51}


def test_what_gpt2_knows(gpt2):
    for words in (NOUNS, ioi.NAMES, ioi.PLACES, ioi.OBJECTS, docstring.ARGUMENTS, docstring.NOUNS):
        assert single_words(gpt2, words, 1, "words") == list(words)
    assert len(GreaterThanTask().form_and_years(gpt2)[1]) == 618


@pytest.mark.parametrize("task", [IOITask(), IOILongTask()])
def test_spans_of_ioi_are_its_names(words, task):
    pairs = task.pairs(Reader(words), 40, seed=0)
    for row, spans in enumerate(task.spans(pairs)):
        text = words.convert_ids_to_tokens(pairs.clean[row].tolist())
        assert list(spans) == ["IO", "S1", "S1+1", "S2", "END"]
        assert text[spans["IO"]] == words.decode(pairs.answers[row])
        assert text[spans["S1"]] == text[spans["S2"]] == words.decode(pairs.wrong[row])
        assert spans["S1"] + 1 == spans["S1+1"] < spans["S2"] < spans["END"]
        assert spans["END"] == pairs.positions[row]
    assert pairs.with_spans(task.spans(pairs)).spans.names[-1] == "rest"

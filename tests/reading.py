"""What tasks need of a model, and what their prompts say, without spaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sparse_tl.data import PromptPairs


class Reader:
    """A model as far as tasks ask for one: a tokenizer, and whether prompts begin with BOS."""

    def __init__(self, tokenizer: Any, *, bos: bool = False) -> None:
        self.tokenizer = tokenizer
        self.cfg = SimpleNamespace(default_prepend_bos=bos)

    def to_tokens(self, text: str) -> Any:
        raise NotImplementedError

    __call__ = state_dict = to_tokens


def check_pairs(pairs: PromptPairs, tokenizer: Any, n: int) -> list[dict[str, Any]]:
    """The records of pairs; checked to be `n` different prompts, each as long as its other one.

    Every answer is a single token, and the one that follows the prompt when both are one text.
    """
    records = pairs.to_records(tokenizer)
    assert len(pairs) == len({record["clean"] for record in records}) == n
    for row, record in enumerate(records):
        end = int(pairs.positions[row]) + 1
        assert pairs.clean[row, :end].tolist() != pairs.corrupted[row, :end].tolist()
        for name in ("clean", "corrupted"):
            tokens = getattr(pairs, name)[row, :end].tolist()
            assert tokenizer.encode(record[name], add_special_tokens=False) == tokens
            for said, found in (("answer", pairs.answers), ("wrong", pairs.wrong)):
                given = [token for token in found[row].tolist() if token >= 0]
                for text, token in zip(record[said], given, strict=True):
                    whole = tokenizer.encode(record[name] + text, add_special_tokens=False)
                    assert whole == [*tokens, token]
        assert record["answer"] and record["wrong"]
        assert not {*record["answer"]} & {*record["wrong"]}
    return records

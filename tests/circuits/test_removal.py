"""Effects of removing parts, against ablating them one by one."""

import pytest
import torch

from sparse_tl import ablate_attention_edges, ablate_heads, load_addition_models
from sparse_tl.circuits import removal
from sparse_tl.circuits.removal import LeaveOneOut

HEADS = [(layer, head) for layer in range(4) for head in range(4)]
READ_AT = [8, 9, 10]


@pytest.fixture(scope="module")
def sparse():
    return load_addition_models()[1]


def test_effects_of_heads_are_those_of_ablating_them(sparse):
    tokens = sparse.to_tokens("36+28=?????")
    found = LeaveOneOut(sparse, tokens[0], READ_AT).effects(HEADS)
    with torch.no_grad():
        whole = sparse(tokens)[0, READ_AT].double()
    assert torch.equal(found.tokens, whole.argmax(dim=-1))
    rows = torch.arange(len(READ_AT))
    for part, head in enumerate(HEADS):
        with torch.no_grad(), ablate_heads(sparse, [head]):
            cut = sparse(tokens)[0, READ_AT].double()
        change = (cut - whole)[rows, found.tokens]
        torch.testing.assert_close(found.logits[:, part], change, rtol=0, atol=1e-4)
        share = (cut.softmax(-1) - whole.softmax(-1))[rows, found.tokens]
        torch.testing.assert_close(found.probabilities[:, part], share, rtol=0, atol=1e-5)
    assert found.logits.min() < -8


def test_parts_that_nothing_reads_have_no_effect_at_all(sparse):
    # The last layer's edges matter at their own query alone.
    edges = [[(3, head, 7, 2)] for head in range(4)]
    found = LeaveOneOut(sparse, sparse.to_tokens("36+28=?????")[0], [9]).effects(groups=edges)
    assert torch.equal(found.logits, torch.zeros(1, 4).double())


def test_effects_are_those_beside_what_is_removed_already(sparse):
    tokens = sparse.to_tokens("36+28=?????")
    with torch.no_grad(), ablate_heads(sparse, [(0, 2)]):
        found = LeaveOneOut(sparse, tokens[0], [9]).effects([(2, 1), (0, 2)])
        one = sparse(tokens)[0, 9]
        with ablate_attention_edges(sparse, [(2, 1, 9, key) for key in range(10)]):
            two = sparse(tokens)[0, 9]
    expected = (two - one)[one.argmax()].item()
    assert found.logits[0].tolist() == pytest.approx([expected, 0], abs=1e-4)


def test_several_passes_equal_one(sparse, monkeypatch):
    tokens = sparse.to_tokens("36+28=?????")[0]
    whole = LeaveOneOut(sparse, tokens, READ_AT).effects(HEADS)
    monkeypatch.setattr(removal, "MOST_NUMBERS", 3 * 12_700)
    parts = LeaveOneOut(sparse, tokens, READ_AT).effects(HEADS)
    torch.testing.assert_close(parts.logits, whole.logits, rtol=0, atol=1e-5)

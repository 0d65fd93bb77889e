"""Effects of removing parts, against ablating them one by one."""

import pytest
import torch

from sparse_tl import ablate_attention_edges, ablate_heads, load_addition_models
from sparse_tl.circuits.prompt import attention
from sparse_tl.circuits.prompt.attention import LeaveOneOut
from sparse_tl.circuits.prompt.tokens import Quantity
from sparse_tl.metrics import (
    answer_logit,
    log_probability,
    logit_difference,
    probability_difference,
)

HEADS = [(layer, head) for layer in range(4) for head in range(4)]
READ_AT = [8, 9, 10]


@pytest.fixture(scope="module")
def sparse():
    return load_addition_models()[1]


def leave_one_out(model, metric=answer_logit, read_at=READ_AT, **answers):
    tokens = model.to_tokens("36+28=?????")[0]
    with torch.no_grad():
        logits = model(tokens[None])[0, read_at]
    pairs = Quantity(metric, **answers).pairs(model, tokens, read_at, logits)
    return LeaveOneOut(model, pairs, metric)


def by_hand(metric, logits, answer, wrong):
    """The metric of logits ``[target, vocab]``."""
    rows = torch.arange(len(logits))
    if metric is answer_logit:
        return logits[rows, answer]
    if metric is logit_difference:
        return logits[rows, answer] - logits[rows, wrong]
    shares = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    if metric is probability_difference:
        return shares[rows, answer] - shares[rows, wrong]
    return shares[rows, answer].log()


@pytest.mark.parametrize(
    "metric", [answer_logit, logit_difference, log_probability, probability_difference]
)
def test_effects_of_heads_are_those_of_ablating_them(sparse, metric):
    tokens = sparse.to_tokens("36+28=?????")
    loo = leave_one_out(sparse, metric)
    effects, probabilities, predictions = loo.effects(HEADS)
    with torch.no_grad():
        whole = sparse(tokens)[0, READ_AT].double()
    best, second = whole.topk(2).indices.T
    assert torch.equal(loo.pairs.answers[:, 0], best)
    rows = torch.arange(len(READ_AT))
    before = by_hand(metric, whole, best, second)
    for part, head in enumerate(HEADS):
        with torch.no_grad(), ablate_heads(sparse, [head]):
            cut = sparse(tokens)[0, READ_AT].double()
        change = by_hand(metric, cut, best, second) - before
        torch.testing.assert_close(effects[part], change, rtol=0, atol=1e-4)
        assert torch.equal(predictions[part], cut.argmax(dim=-1))
        share = (cut.softmax(-1) - whole.softmax(-1))[rows, best]
        torch.testing.assert_close(probabilities[part], share, rtol=0, atol=1e-5)
    assert effects.min() < -0.9


def test_answers_can_be_chosen(sparse):
    """By text or number, for all targets or each; if both are the same, the runner-up is wrong."""
    tokens = sparse.to_tokens("36+28=?????")
    with torch.no_grad():
        whole = sparse(tokens)[0, READ_AT].double()
        with ablate_heads(sparse, [(1, 3)]):
            cut = sparse(tokens)[0, READ_AT].double()
    digits = [sparse.tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    for answer, wrong, numbers in (
        ("1", "2", ([1, 1, 1], [2, 2, 2])),
        (["1", digits[3], "5"], digits[2], ([1, 3, 5], [2, 2, 2])),
    ):
        each = [torch.tensor([digits[number] for number in some]) for some in numbers]
        loo = leave_one_out(sparse, logit_difference, answer=answer, wrong=wrong)
        expected = by_hand(logit_difference, cut, *each) - by_hand(logit_difference, whole, *each)
        torch.testing.assert_close(loo.effects([(1, 3)])[0][0], expected, rtol=0, atol=1e-4)
        assert torch.equal(loo.pairs.answers[:, 0], each[0])
    best = whole[1].argmax()
    second = whole[1].scatter(0, best, -torch.inf).argmax()
    loo = leave_one_out(sparse, logit_difference, wrong=int(best))
    assert loo.pairs.wrong[1] == second
    change = (cut - whole)[1, best] - (cut - whole)[1, second]
    assert loo.effects([(1, 3)])[0][0, 1].item() == pytest.approx(change.item(), abs=1e-4)


def test_parts_that_nothing_reads_have_no_effect_at_all(sparse):
    # The last layer's edges matter at their own query alone.
    edges = [[(3, head, 7, 2)] for head in range(4)]
    found, *_ = leave_one_out(sparse, read_at=[9]).effects(groups=edges)
    assert torch.equal(found, torch.zeros(4, 1).double())


def test_effects_are_those_beside_what_is_removed_already(sparse):
    tokens = sparse.to_tokens("36+28=?????")
    with torch.no_grad(), ablate_heads(sparse, [(0, 2)]):
        found, *_ = leave_one_out(sparse, read_at=[9]).effects([(2, 1), (0, 2)])
        one = sparse(tokens)[0, 9]
        with ablate_attention_edges(sparse, [(2, 1, 9, key) for key in range(10)]):
            two = sparse(tokens)[0, 9]
    expected = (two - one)[one.argmax()].item()
    assert found[:, 0].tolist() == pytest.approx([expected, 0], abs=1e-4)


def test_several_passes_equal_one(sparse, monkeypatch):
    whole, *_ = leave_one_out(sparse).effects(HEADS)
    monkeypatch.setattr(attention, "MOST_NUMBERS", 3 * 12_700)
    parts, *_ = leave_one_out(sparse).effects(HEADS)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)

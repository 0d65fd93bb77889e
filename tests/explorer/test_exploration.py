"""What the explorer computes, against hooks written by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny import SHAPES

from sparse_tl.circuits import patch_exactly, trace_attention
from sparse_tl.circuits.prompt.tokens import Quantity
from sparse_tl.data import PromptPairs
from sparse_tl.explorer.exploration import Exploration
from sparse_tl.gates import SparseTransformer
from sparse_tl.metrics import answer_logit, log_probability, logit_difference
from sparse_tl.tasks.addition import addition_tokenizer

PROMPT = "36+28=?????"
HEADS = [(0, 1)]
EDGES = [(1, 0, 10, 3), (1, 0, 10, 10), (1, 1, 9, 0)]


@pytest.fixture
def exploration(models):
    return Exploration(models, PROMPT)


softmax = partial(torch.softmax, dim=-1)


def hooks(heads: Any = (), edges: Any = ()) -> list[Any]:
    """Hooks that silence these heads at z and cut these edges at the pattern."""

    def silence(z, hook, head):
        z[:, :, head] = 0
        return z

    def cut(pattern, hook, index):
        pattern[:, *index] = 0
        return pattern

    found = [(f"blocks.{i}.attn.hook_z", partial(silence, head=head)) for i, head in heads]
    return found + [
        (f"blocks.{i}.attn.hook_pattern", partial(cut, index=index)) for i, *index in edges
    ]


def by_hand(model: Any, heads: Any = (), edges: Any = (), tokens: Any = None) -> torch.Tensor:
    """Logits without these heads and edges."""
    tokens = model.to_tokens(PROMPT) if tokens is None else tokens[None]
    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=hooks(heads, edges))[0]


METRICS = {
    log_probability: lambda logits, pairs: (
        logits.gather(1, pairs.answers)[:, 0] - logits.logsumexp(dim=1)
    ),
    logit_difference: lambda logits, pairs: (
        logits.gather(1, pairs.answers) - logits.gather(1, pairs.wrong)
    )[:, 0],
    answer_logit: lambda logits, pairs: logits.gather(1, pairs.answers)[:, 0],
}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("panel", ["Dense", "Sparse"])
def test_effects_of_heads_are_those_of_exact_patching_with_zero(models, panel, metric):
    model = models[panel]
    exploration = Exploration(models, PROMPT, quantity=Quantity(metric))
    found = exploration.models[panel].head_effects()
    names = [f"a{layer}.h{head}" for layer in range(2) for head in range(2)]
    for column, read_at in exploration.targets:
        tokens = model.to_tokens(PROMPT)
        answer, wrong = by_hand(model)[read_at].topk(2).indices.view(2, 1, 1)
        told = found[found["column"] == column].set_index("part")
        assert told.index.tolist() == names
        assert set(told["answer"]) == {model.tokenizer.decode(answer[0])}
        pairs = PromptPairs(tokens, tokens, answer, wrong, torch.tensor([read_at]))
        share = lambda logits, pairs: softmax(logits).gather(1, pairs.answers)[:, 0]  # noqa: E731
        for number, judged in (("effect", METRICS[metric]), ("probability", share)):
            changes = patch_exactly(model, pairs, judged, names, patch="zero", progress=False)
            assert told[number].tolist() == pytest.approx(changes[names].tolist(), abs=1e-9)
        for layer, head in ((0, 1), (1, 0)):
            without = by_hand(model, [(layer, head)])[read_at].argmax()
            assert told["prediction"][f"a{layer}.h{head}"] == model.tokenizer.decode(without)
    assert found["effect"].abs().max() > 0.01


def test_another_metric_beside_what_is_removed(exploration, models):
    """Its answers are those of the whole model, whatever is predicted without what is removed."""
    remove_some(exploration, "Dense")
    whole, cut = by_hand(models["Dense"]), by_hand(models["Dense"], HEADS, EDGES)
    without = by_hand(models["Dense"], [*HEADS, (1, 1)], EDGES)
    seven = models["Dense"].tokenizer.convert_tokens_to_ids("7")
    for quantity, choose in (
        (Quantity(log_probability), lambda logits, best, _: logits.log_softmax(0)[best]),
        (Quantity(logit_difference), lambda logits, best, second: logits[best] - logits[second]),
        (Quantity(answer_logit, answer="7"), lambda logits, *_: logits[seven]),
    ):
        exploration.measure(quantity)
        assert exploration.models["Dense"].removed_edges == set(EDGES)
        effects = exploration.models["Dense"].head_effects()
        effects = effects.query("part == 'a1.h1'")["effect"].tolist()
        before, now = (each.tolist() for each in exploration.models["Dense"].values())
        for target, (_, read_at) in enumerate(exploration.targets):
            best, second = whole[read_at].topk(2).indices.tolist()
            expected = [
                choose(each[read_at], best, second).item() for each in (whole, cut, without)
            ]
            assert [before[target], now[target]] == pytest.approx(expected[:2], abs=1e-9)
            assert effects[target] == pytest.approx(expected[2] - expected[1], abs=1e-9)
    with pytest.raises(ValueError, match="single token; '77' has 2"):
        exploration.measure(Quantity(answer_logit, answer="77"))
    assert exploration.quantity.answer == "7"


def remove_some(exploration: Exploration, panel: str) -> None:
    for layer, head in HEADS:
        exploration.models[panel].toggle_head(layer, head)
    exploration.models[panel].toggle_attention_edges(EDGES)


@pytest.mark.parametrize("panel", ["Dense", "Sparse"])
def test_logits_under_removals_are_those_of_hooks_by_hand(exploration, models, panel):
    def check(*removed):
        expected = by_hand(models[panel], *removed)
        found = exploration.models[panel].now.logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        return expected

    (other,) = {"Dense", "Sparse"} - {panel}
    beside, plain = exploration.models[other].now.logits.clone(), check()
    exploration.models[panel].toggle_head(0, 1)
    check(HEADS)
    exploration.models[panel].toggle_attention_edges(EDGES)
    assert not torch.allclose(check(HEADS, EDGES), plain, atol=1e-4)
    # Panels are independent.
    assert torch.equal(exploration.models[other].now.logits, beside)
    assert exploration.models[panel].removed_heads == {(0, 1)}
    assert exploration.models[panel].removed_edges == set(EDGES)
    assert exploration.models[other].removed_edges == set()


def test_the_gates_of_the_sparse_model_are_on(exploration, models):
    model = models["Sparse"]
    with model.opened(), torch.no_grad():
        opened = model(model.to_tokens(PROMPT))[0]
    assert not torch.allclose(exploration.models["Sparse"].now.logits, opened, atol=1e-6)
    graph = exploration.models["Sparse"].now.graph
    closed = ~graph.gates & torch.ones(11, 11, dtype=torch.bool).tril()
    assert closed.any() and not graph.attention[closed].any()


@pytest.mark.parametrize("panel", ["Dense", "Sparse"])
def test_restoring_gives_the_first_logits_exactly(exploration, panel):
    first = exploration.models[panel].now.logits.clone()
    graph = exploration.models[panel].now.graph
    remove_some(exploration, panel)
    assert not torch.equal(exploration.models[panel].now.logits, first)
    exploration.restore()
    assert torch.equal(exploration.models[panel].now.logits, first)
    assert torch.equal(exploration.models[panel].now.graph.attention, graph.attention)
    # One by one instead of all at once.
    remove_some(exploration, panel)
    remove_some(exploration, panel)
    assert exploration.models[panel].removed_heads == set()
    assert exploration.models[panel].removed_edges == set()
    assert torch.equal(exploration.models[panel].now.logits, first)


def test_nothing_is_left_on_the_models(exploration, models):
    def hooks_of(model: Any) -> list[int]:
        points = model.hook_dict.values()
        return [len(p._forward_hooks) + len(p._forward_pre_hooks) for p in points]

    before = {title: hooks_of(model) for title, model in models.items()}
    weights = {t: [p.clone() for p in m.parameters()] for t, m in models.items()}
    for panel in models:
        remove_some(exploration, panel)
        exploration.models[panel].logit_lens(2, 10)
        with pytest.raises(ValueError, match="among its heads"):
            exploration.models[panel].toggle_head(5, 0)
    assert before == {title: hooks_of(model) for title, model in models.items()}
    for title, model in models.items():
        assert all(map(torch.equal, weights[title], model.parameters()))
        assert all(parameter.grad is None for parameter in model.parameters())


def test_the_graph_has_no_removed_edge(exploration, models):
    whole = trace_attention(models["Sparse"], PROMPT, attribution=True)
    first = exploration.models["Sparse"].now.graph
    assert torch.equal(first.attention, whole.attention)
    assert torch.equal(first.attribution, whole.attribution)
    remove_some(exploration, "Sparse")
    graph = exploration.models["Sparse"].now.graph
    assert not graph.attention[0, 1].any() and not graph.gates[0, 1].any()
    assert not graph.attribution[:, 0, 1].any()
    for edge in EDGES:
        assert graph.attention[edge] == 0 and not graph.gates[edge]
    assert torch.equal(graph.attention[0, 0], whole.attention[0, 0])


def test_the_graph_reads_later_layers_under_the_removals(exploration, models):
    model, edges = models["Dense"], [(0, 1, 10, 3)]
    exploration.models["Dense"].toggle_head(0, 0)
    exploration.models["Dense"].toggle_attention_edges(edges)
    with torch.no_grad(), model.hooks(fwd_hooks=hooks([(0, 0)], edges)):
        _, cache = model.run_with_cache(model.to_tokens(PROMPT))
    pattern = cache["blocks.1.attn.hook_pattern"][0]
    torch.testing.assert_close(exploration.models["Dense"].now.graph.attention[1], pattern)


def test_outputs_tell_logits_and_probabilities_before_and_after(exploration, models):
    model, tokenizer = models["Dense"], addition_tokenizer()
    remove_some(exploration, "Dense")
    for target, (_, read_at) in enumerate(exploration.targets):
        before = by_hand(model)[read_at]
        after = by_hand(model, HEADS, EDGES)[read_at]
        table = exploration.models["Dense"].outputs(target, top=4)
        tokens = tokenizer.convert_tokens_to_ids(table["token"].tolist())
        for suffix, logits in (("_before", before), ("", after)):
            expected = {
                "logit": logits,
                "probability": logits.softmax(-1),
                "log_probability": logits.softmax(-1).log(),
            }
            for name, values in expected.items():
                found = table[name + suffix].tolist()
                assert found == pytest.approx(values[tokens].tolist(), abs=1e-9)
        assert len(table) == 4 and table["logit"].is_monotonic_decreasing
        assert tokens[0] == after.argmax() and before.argmax() in tokens


def test_the_logit_lens_is_the_final_norm_and_the_unembedding(exploration, models):
    model = models["Dense"]
    with torch.no_grad():
        _, cache = model.run_with_cache(model.to_tokens(PROMPT))
        for level, name in enumerate(("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post")):
            logits = model.unembed(model.ln_final(cache[name]))[0, 7]
            best = exploration.models["Dense"].logit_lens(level, 7).iloc[0]
            assert best["token"] == model.tokenizer.decode([int(logits.argmax())])
            assert best["logit"] == pytest.approx(logits.max().item(), abs=1e-9)
    # At the last level it reads the model's own output, without what is removed.
    remove_some(exploration, "Dense")
    best = exploration.models["Dense"].logit_lens(2, 10, top=1).iloc[0]
    largest = exploration.models["Dense"].now.logits[10].max().item()
    assert best["logit"] == pytest.approx(largest, abs=1e-9)


@pytest.mark.parametrize("kind", SHAPES[1:])
def test_other_architectures(build_small, kind):
    model = build_small(kind)
    exploration = Exploration({"m": model}, PROMPT)
    remove_some(exploration, "m")
    expected = by_hand(model, HEADS, EDGES)
    torch.testing.assert_close(exploration.models["m"].now.logits, expected, rtol=0, atol=1e-12)


# ---- prompts and positions -----------------------------------------------------------------------


def test_positions_that_can_be_chosen(models):
    assert Exploration(models, PROMPT).targets == tuple((c, c) for c in range(6, 11))
    assert Exploration(models, PROMPT).first_target == 4
    assert Exploration(models, PROMPT, position=7).first_target == 1
    assert Exploration(models, PROMPT, position=-2).first_target == 3
    assert Exploration(models, "36+28=", position=3).targets == ((3, 2),)
    chosen = Exploration(models, "36+28=", positions=[2, 4], position=2)
    assert (chosen.targets, chosen.first_target) == (((2, 1), (4, 3)), 0)
    # Negative ones count alike among positions and as the one shown first: -1 follows the prompt.
    assert Exploration(models, "36+28=", position=-1).targets == ((6, 5),)
    last = Exploration(models, "36+28=", positions=[-3, -1, 2], position=-1)
    assert (last.targets, last.first_target) == (((4, 3), (6, 5), (2, 1)), 1)
    with pytest.raises(ValueError, match=r"position is -1.* one of \[2, 4\]"):
        Exploration(models, "36+28=", positions=[2, 4], position=-1)
    with pytest.raises(ValueError, match=r"position is 3.* one of \[2, 4\]"):
        Exploration(models, "36+28=", positions=[2, 4], position=3)


def test_tokens_are_a_prompt_too(models):
    tokens = models["Dense"].to_tokens(PROMPT)[0]
    by_tokens, by_text = Exploration(models, tokens), Exploration(models, PROMPT)
    assert by_tokens.prompt == PROMPT
    assert torch.equal(by_tokens.models["Dense"].now.logits, by_text.models["Dense"].now.logits)


def test_another_prompt_of_the_same_length_keeps_what_is_removed(exploration, models):
    remove_some(exploration, "Dense")
    assert exploration.show_prompt("11+11=?????")
    assert exploration.models["Dense"].removed_heads == {(0, 1)}
    assert exploration.models["Dense"].removed_edges == set(EDGES)
    fresh = Exploration(models, "11+11=?????")
    remove_some(fresh, "Dense")
    assert torch.equal(exploration.models["Dense"].now.logits, fresh.models["Dense"].now.logits)
    # It is read at the same columns.
    exploration = Exploration(models, "36+28=00064", positions=[7, 10])
    exploration.show_prompt("11+11=00022")
    assert exploration.targets == ((7, 6), (10, 9))


def test_another_length_restores_edges_and_keeps_heads(exploration):
    remove_some(exploration, "Dense")
    assert not exploration.show_prompt("11+11=")
    assert exploration.models["Dense"].removed_heads == {(0, 1)}
    assert exploration.models["Dense"].removed_edges == set()
    assert exploration.targets == ((6, 5),)


# ---- bad input -----------------------------------------------------------------------------------


def test_a_model_without_a_tokenizer_is_shown_by_labels(build_tiny):
    model, tokens = build_tiny("float64"), torch.tensor([3, 1, 4])
    exploration = Exploration({"m": model}, tokens, labels=["x", "y", "z"])
    assert exploration.models["m"].now.graph.input_tokens == ("x", "y", "z", "?")
    best = model(tokens[None])[0, 2].argmax().item()
    assert exploration.models["m"].outputs()["token"][0] == str(best) and exploration.prompt == ""
    with pytest.raises(ValueError, match="no tokenizer for the text '1'"):
        exploration.show_prompt("1")


def test_a_bidirectional_model_loses_edges_from_later_columns(build_tiny):
    model, tokens = build_tiny("float64", attention_dir="bidirectional"), torch.tensor([3, 1, 4])
    explored = Exploration({"m": model}, tokens, positions=[0]).models["m"]
    explored.toggle_attention_edges([(0, 1, 0, 2)])
    expected = by_hand(model, edges=[(0, 1, 0, 2)], tokens=tokens)
    torch.testing.assert_close(explored.now.logits, expected, rtol=0, atol=1e-12)
    assert not explored.now.graph.gates[0, 1, 0, 2] and explored.n_read == 3


def test_models_that_see_other_columns_are_refused(build_small, models):
    longer = build_small(default_prepend_bos=True)
    longer.tokenizer.bos_token = "?"  # a bridge prepends what its tokenizer has, and nothing else
    with pytest.raises(ValueError, match="into the same columns; 'Dense' has 11 and 'BOS' 12"):
        Exploration({"Dense": models["Dense"], "BOS": longer}, PROMPT)


def test_closed_mlps_are_part_of_every_run(build_small):
    """Effects, removals and the logit lens of a model with gates on MLPs, against plain runs."""
    sparse = SparseTransformer(build_small(seed=1), initial_bias=0.3, mlps=True)
    with torch.no_grad():
        sparse.mlp_gates.weight.normal_(generator=torch.Generator().manual_seed(0))
        sparse.mlp_gates.bias.zero_()
    tokens = sparse.to_tokens(PROMPT)
    counts = sparse.run_with_counts(tokens, keep_gates=True)[1]
    assert 0.2 < counts.mlp_gates.double().mean() < 0.8
    exploration = Exploration({"Sparse": sparse}, PROMPT)
    plain = by_hand(sparse)
    torch.testing.assert_close(exploration.models["Sparse"].now.logits, plain, rtol=0, atol=1e-12)
    graph = exploration.models["Sparse"].now.graph
    assert torch.equal(graph.gates[:, :, :11, :11], counts.gates[:, 0])
    exploration.models["Sparse"].compute_edge_effects()
    graph = exploration.models["Sparse"].now.graph
    edge = tuple(graph.gates.nonzero()[-1].tolist())
    _, read_at = exploration.targets[-1]
    predicted = int(plain[read_at].argmax())
    change = by_hand(sparse, edges=[edge])[read_at].log_softmax(-1) - plain[read_at].log_softmax(-1)
    torch.testing.assert_close(graph.effect[-1][edge], change[predicted], rtol=0, atol=1e-12)
    exploration.models["Sparse"].toggle_head(0, 1)
    expected = by_hand(sparse, heads=HEADS)
    logits = exploration.models["Sparse"].now.logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    exploration.restore()
    last = exploration.models["Sparse"].logit_lens(2, read_at, top=1)
    assert last["logit"].iloc[0] == pytest.approx(plain[read_at].max().item(), rel=1e-9)

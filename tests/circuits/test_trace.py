"""Attention traced through a prompt: columns, gates, attributions against finite differences."""

from dataclasses import replace

import pytest
import torch
from architectures import plain_transformer
from tiny import SHAPES

from sparse_tl import (
    SparseTransformer,
    ablate_attention_edges,
    load_addition_models,
    trace_attention,
)
from sparse_tl.backend import boot
from sparse_tl.circuits.prompt.attention import AttentionGraph, predicted_columns
from sparse_tl.metrics import answer_logit, log_probability, logit_difference
from sparse_tl.plots import figure
from sparse_tl.tasks.addition import addition_tokenizer
from sparse_tl.zoo import build_addition_model


@pytest.fixture(scope="module")
def model():
    model = build_addition_model(seed=3, device="cpu").double()
    model.cfg.dtype = torch.float64  # or the residual stream is rounded to float32 on its way
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def test_the_next_token_is_read_at_the_last_column(model):
    graph = trace_attention(model, "36+28=0006")
    assert graph.input_tokens == tuple("36+28=0006?")
    assert graph.targets == ((10, 9),)
    predicted = model(model.to_tokens("36+28=0006"))[0, -1].argmax().item()
    assert graph.output_tokens == (*"36+28=0006", model.tokenizer.decode([predicted]))
    assert graph.attention.shape == (4, 4, 11, 11)
    assert graph.attention[..., 10, :].abs().max() == 0
    assert not graph.gates[..., 10, :].any() and graph.gates[:, :, 9, :10].all()
    # The column of a token that is still to come has no edges.
    assert graph.n_possible.unique().tolist() == [10 * 11 / 2]
    assert "880 of 880 attention edges open" in repr(graph)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_dense_models_edges_are_where_it_attends(name):
    """Not beyond a layer's window, of four columns in all layers or in two."""
    model = boot(plain_transformer(name))
    tokens = torch.arange(3, 13)
    graph = trace_attention(model, tokens)
    assert torch.equal(graph.gates, graph.attention > 0)
    assert torch.equal(graph.n_possible, graph.gates.sum(dim=(-2, -1)))
    # Ten columns are read; the eleventh is predicted.
    assert graph.n_possible[:, 0].tolist() == [34, 55 if name == "gemma2" else 34, 34]
    assert f"of {int(graph.gates.sum()):,} attention edges" in str(figure(graph))


def test_mask_tokens_are_read_at_their_own_column(model):
    graph = trace_attention(model, "36+28=?????")
    assert graph.targets == tuple((column, column) for column in range(6, 11))
    assert graph.input_tokens == tuple("36+28=?????")


def test_every_mask_token_that_is_run_has_its_prediction_in_the_row():
    _, sparse = load_addition_models()
    whole = trace_attention(sparse, "36+28=?????", attribution=True, max_effects=100)
    one = trace_attention(sparse, "36+28=?????", positions=[9], attribution=True, max_effects=100)
    assert whole.output_tokens == tuple("36+28=00064")
    assert one.output_tokens == tuple("36+28=0006?")  # column 10 was not run
    assert one.targets == ((9, 9),) and one.n_read == 10
    # Edges are traced up to the column that is read.
    assert not one.gates[..., 10, :].any() and whole.gates[..., 10, :].any()
    assert torch.equal(one.attention[..., :10, :10], whole.attention[..., :10, :10])
    for kind in ("effect", "first-order"):
        torch.testing.assert_close(one.edge_weights(kind, 0), whole.edge_weights(kind, 3))


def test_predicted_columns(model, build_tiny):
    assert predicted_columns(model, "36+28=?????") == [6, 7, 8, 9, 10]
    assert predicted_columns(model, "36+28=00?4?") == [8, 10]
    assert predicted_columns(model, "36+28=0006") == list(range(1, 11))
    assert predicted_columns(build_tiny(), torch.tensor([3])) == [1]


def test_positions_inside_a_prompt_are_read_one_to_the_left(model):
    graph = trace_attention(model, "36+28=00064", positions=[7, -2])
    assert graph.targets == ((7, 6), (10, 9))
    # The model reads up to column 9 only; what stands in column 10 is not known to it.
    assert graph.input_tokens == tuple("36+28=0006?")


def test_the_last_position_is_the_one_that_is_predicted_by_default(model):
    """Position -1 is the token with which the model continues the prompt."""
    for prompt in ("36+28=", "36+28=?????", "36+28=??"):
        last = trace_attention(model, prompt, positions=[-1])
        assert last.targets == trace_attention(model, prompt).targets[-1:]
        before = trace_attention(model, prompt, positions=[-2])
        assert before.targets[0][0] == last.targets[0][0] - 1
    with pytest.raises(ValueError, match=r"position -7 .* in 1\.\.6"):
        trace_attention(model, "36+28=", positions=[-7])


def test_attention_is_the_gated_pattern(model):
    tokens = model.to_tokens("36+28=0006")
    sparse = SparseTransformer(model, initial_bias=-0.01)
    try:
        graph = trace_attention(sparse, "36+28=0006")
        _, cache = sparse.run_with_cache(tokens)
    finally:
        sparse.unwrap()
    for layer in range(4):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]
        assert torch.equal(graph.attention[layer, :, :10, :10], pattern)
        assert torch.equal(graph.gates[layer, :, :10, :10], pattern > 0)
    assert 0 < graph.gates.sum() < 4 * 4 * 55


METRICS = {
    log_probability: lambda logits, best, second: logits[best] - logits.logsumexp(dim=0),
    logit_difference: lambda logits, best, second: logits[best] - logits[second],
    answer_logit: lambda logits, best, second: logits[best],
}


@pytest.mark.parametrize("metric", METRICS)
def test_attribution_is_the_derivative_by_the_edges_gate(model, metric):
    graph = trace_attention(
        model, "36+28=?????", positions=[9, 10], attribution=True, metric=metric
    )
    tokens = model.to_tokens("36+28=?????")
    for target, column in enumerate((9, 10)):
        best, second = model(tokens)[0, column].topk(2).indices
        assert graph.answers[target] == model.tokenizer.decode([int(best)])
        assert graph.wrong[target] == model.tokenizer.decode([int(second)])
        for layer, head, query, key in ((0, 1, 10, 3), (1, 2, 9, 4), (3, 0, 10, 10)):
            ends = []
            for gate in (1 + 1e-5, 1 - 1e-5):

                def scale(pattern, hook, gate=gate, head=head, query=query, key=key):
                    pattern[0, head, query, key] *= gate
                    return pattern

                name = f"blocks.{layer}.attn.hook_pattern"
                logits = model.run_with_hooks(tokens, fwd_hooks=[(name, scale)])[0, column]
                ends.append(METRICS[metric](logits, best, second))
            numeric = ((ends[1] - ends[0]) / 2e-5).item()  # of a removal: the gate goes down
            found = graph.edge_weights("first-order", target)[layer, head, query, key].item()
            assert found == pytest.approx(numeric, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", [*SHAPES, "float64"])
def test_attributions_of_many_positions_are_those_of_single_backward_passes(build_tiny, kind):
    model = build_tiny(kind)
    tokens = torch.tensor([1, 5, 2, 7, 3, 3, 8, 1, 0, 4])
    # More than one backward pass holds.
    positions = [*range(1, 11), *range(1, 11)]
    graph = trace_attention(model, tokens, positions=positions, attribution=True)
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(graph.n_layers)]
    patterns = {}

    def keep(pattern, hook):
        patterns[hook.name] = pattern  # of weights that have gradients
        return pattern

    for target, column in enumerate(positions[:10]):
        with model.hooks(fwd_hooks=[(name, keep) for name in names]):
            best = model(tokens[None])[0, column - 1].log_softmax(dim=0).max()
        gradients = torch.autograd.grad(best, [patterns[name] for name in names])
        for layer, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
            expected = (-patterns[name] * gradient)[0].detach()
            for row in (target, target + 10):
                found = graph.edge_weights("first-order", row)[layer, :, :10, :10]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---- exact effects -------------------------------------------------------------------------------


def test_effects_of_open_edges_are_those_of_ablating_them_one_by_one():
    _, sparse = load_addition_models()
    tokens = sparse.to_tokens("36+28=?????")
    graph = trace_attention(sparse, "36+28=?????", attribution=True, max_effects=100)
    whole = sparse(tokens)[0].detach()
    missed = 0
    for layer, head, query, key in graph.gates.nonzero().tolist():
        with torch.no_grad(), ablate_attention_edges(sparse, [(layer, head, query, key)]):
            cut = sparse(tokens)[0]
        for target, (_, read_at) in enumerate(graph.targets):
            token = whole[read_at].argmax()
            after, before = cut[read_at].double(), whole[read_at].double()
            expected = (after.log_softmax(0) - before.log_softmax(0))[token].item()
            found = graph.edge_weights("effect", target)[layer, head, query, key].item()
            assert found == pytest.approx(expected, abs=1e-4)
            estimate = graph.edge_weights("first-order", target)[layer, head, query, key].item()
            missed += abs(expected) > 1 and abs(estimate) < 0.1 * abs(expected)
    assert missed  # what the gradient says is no effect
    assert graph.effect.min() < -3 and not graph.effect[:, ~graph.gates].any()


def test_effects_are_left_out_where_too_many_edges_are_open(model):
    graph = trace_attention(model, "36+28=?????", max_effects=1055)
    assert graph.effect is None and graph.gates.sum() == 1056


@pytest.mark.long
def test_of_too_many_open_edges_the_strongest_have_exact_effects(model):
    """As many as there is time for: one batch."""
    prompt, columns = "36+28=?????", {"positions": [9, 10]}
    graph = trace_attention(model, prompt, max_effects=1055, seconds=1e-9, **columns)
    assert graph.gates.sum() == 1056 and graph.attribution is not None
    sizes = graph.attribution.abs()
    strength = (sizes / sizes.amax(dim=(1, 2, 3, 4), keepdim=True)).amax(dim=0)
    known = ~graph.effect.isnan()
    assert torch.equal(known[0], known[1])
    assert 0 < known[0][graph.gates].sum() < 50 and not graph.effect[:, ~graph.gates].any()
    chosen = known[0] & graph.gates
    assert strength[chosen].min() >= strength[graph.gates & ~chosen].max()
    tokens = model.to_tokens(prompt)
    with torch.no_grad():
        whole = model(tokens)[0].log_softmax(dim=-1)
        for edge in chosen.nonzero().tolist():
            with ablate_by_hand(model, edge):
                cut = model(tokens)[0].log_softmax(dim=-1)
            for target, column in enumerate((9, 10)):
                best = whole[column].argmax()
                expected = (cut - whole)[column, best].item()
                assert graph.effect[(target, *edge)].item() == pytest.approx(expected, abs=1e-9)
    everything = trace_attention(model, prompt, seconds=600, **columns)
    assert everything.attribution is None and not everything.effect.isnan().any()
    torch.testing.assert_close(everything.effect[known], graph.effect[known], rtol=0, atol=1e-12)


# ---- other models --------------------------------------------------------------------------------


def test_a_bidirectional_model_runs_the_whole_prompt(build_tiny):
    model = build_tiny("float64", attention_dir="bidirectional")
    tokens = torch.tensor([1, 5, 2, 7, 3])
    graph = trace_attention(model, tokens, positions=[0], attribution=True, max_effects=200)
    logits, cache = model.run_with_cache(tokens[None])
    assert graph.targets == ((0, 0),) and graph.output_tokens[0] == str(
        logits[0, 0].argmax().item()
    )
    assert graph.input_tokens == ("1", "5", "2", "7", "3")
    for layer in range(2):
        assert torch.equal(graph.attention[layer], cache["pattern", layer][0])
    assert graph.gates.all() and graph.n_possible.unique().tolist() == [25]
    with ablate_by_hand(model, (0, 1, 2, 4)):
        cut = model(tokens[None])
    change = cut.log_softmax(-1) - logits.log_softmax(-1)
    expected = change[0, 0, logits[0, 0].argmax()].item()
    assert graph.effect[0, 0, 1, 2, 4].item() == pytest.approx(expected, abs=1e-9) != 0


def ablate_by_hand(model, edge):
    layer, head, query, key = edge

    def cut(pattern, hook):
        pattern[:, head, query, key] = 0
        return pattern

    return model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", cut)])


def test_a_bidirectional_model_without_mask_tokens_asks_for_positions(build_tiny):
    model = build_tiny(attention_dir="bidirectional")
    with pytest.raises(ValueError, match="pass positions="):
        trace_attention(model, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"positions in 0\.\.1"):
        trace_attention(model, torch.tensor([1, 2]), positions=[2])


def test_a_model_without_a_tokenizer_takes_labels(build_tiny):
    model, tokens = build_tiny(), torch.tensor([1, 5, 2])
    graph = trace_attention(model, tokens, labels=["a", "b", "c"])
    assert graph.input_tokens == ("a", "b", "c", "?")
    assert trace_attention(model, tokens).input_tokens == ("1", "5", "2", "?")
    with pytest.raises(ValueError, match="2 labels for 3 tokens"):
        trace_attention(model, tokens, labels=["a", "b"])


def test_outputs_that_are_no_tokens_are_numbers(build_tiny):
    tokenizer = addition_tokenizer()
    classifier = build_tiny(d_vocab_out=3, tokenizer=tokenizer, default_prepend_bos=False)
    graph = trace_attention(classifier, "1+1=")
    best = classifier(classifier.to_tokens("1+1="))[0, -1].argmax().item()
    assert graph.output_tokens[-1] == str(best)


def test_permanent_hooks_of_the_users_own_stay_on(model):
    def halve(z, hook):
        return 0.5 * z

    def first_row(z, hook):
        z[0] = 0
        return z

    point = model.hook_dict["blocks.0.attn.hook_z"]
    plain = trace_attention(model, "1+1=")
    try:
        point.add_hook(halve, is_permanent=True)
        graph = trace_attention(model, "1+1=", max_effects=200)
        assert not torch.equal(graph.attention[1], plain.attention[1])
        assert graph.effect is not None
        point.add_hook(first_row, is_permanent=True)
        with pytest.raises(ValueError, match="Remove hooks that use other rows"):
            trace_attention(model, "1+1=", max_effects=200)
    finally:
        model.reset_hooks(including_permanent=True)


# ---- graphs --------------------------------------------------------------------------------------


def test_edge_weights():
    attention = torch.rand(2, 3, 4, 4).tril()
    attribution, effect = torch.randn(2, 2, 2, 3, 4, 4)
    texts = ("a",) * 4, ("b",) * 4
    plain = AttentionGraph(attention, attention > 0, *texts, targets=((1, 0), (3, 2)))
    graph = replace(plain, attribution=attribution, effect=effect)
    assert graph.edge_weights() is graph.attention
    assert torch.equal(graph.edge_weights("first-order"), attribution[1])
    assert torch.equal(graph.edge_weights("effect", 0), effect[0])
    for kind, option in (("effect", "max_effects"), ("first-order", "attribution=True")):
        with pytest.raises(ValueError, match=f"{kind}.*{option}"):
            plain.edge_weights(kind)


def test_a_graph_is_tabulated_and_told():
    attention = torch.zeros(1, 2, 3, 3)
    attention[0, 1, 2, 0], attention[0, 0, 1, 1] = 0.25, 0.5
    graph = AttentionGraph(
        attention, attention > 0, ("a", "b", "?"), ("a", "b", "c"), ((2, 2),),
        effect=-4 * attention[None],
    )  # fmt: skip
    assert graph.to_pandas().to_numpy().tolist() == [[0, 0, 1, 1, 0.5, -2], [0, 1, 2, 0, 0.25, -1]]
    said = "AttentionGraph('a b ?': 2 of 12 attention edges open"
    assert repr(graph) == f"{said}; effects on answer_logit, in logits)"

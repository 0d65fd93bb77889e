"""Attention traced through a prompt: columns, gates, attributions against finite differences."""

import pytest
import torch

from sparse_tl import SparseTransformer, build_addition_model, trace_attention


@pytest.fixture(scope="module")
def model():
    model = build_addition_model(seed=3, device="cpu").double()
    model.cfg.dtype = torch.float64  # or the residual stream is rounded to float32 on its way
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def test_the_next_token_is_read_at_the_last_column(model):
    flow = trace_attention(model, "36+28=0006")
    assert flow.input_tokens == tuple("36+28=0006?")
    assert flow.targets == ((10, 9),)
    predicted = model(model.to_tokens("36+28=0006"))[0, -1].argmax().item()
    assert flow.output_tokens == (*"36+28=0006", model.tokenizer.decode([predicted]))
    assert flow.attention.shape == (4, 4, 11, 11)
    assert flow.attention[..., 10, :].abs().max() == 0
    assert not flow.gates[..., 10, :].any() and flow.gates[:, :, 9, :10].all()


def test_mask_tokens_are_read_at_their_own_column(model):
    flow = trace_attention(model, "36+28=?????")
    assert flow.targets == tuple((column, column) for column in range(6, 11))
    assert flow.input_tokens == tuple("36+28=?????")


def test_positions_inside_a_prompt_are_read_one_to_the_left(model):
    flow = trace_attention(model, "36+28=00064", positions=[7, -1])
    assert flow.targets == ((7, 6), (10, 9))
    # The model reads up to column 9 only; what stands in column 10 is not known to it.
    assert flow.input_tokens == tuple("36+28=0006?")


def test_attention_is_the_gated_pattern(model):
    tokens = model.to_tokens("36+28=0006")
    sparse = SparseTransformer(model, initial_bias=-0.01)
    try:
        flow = trace_attention(sparse, "36+28=0006")
        _, cache = sparse.run_with_cache(tokens)
    finally:
        sparse.unwrap()
    for layer in range(4):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]
        assert torch.equal(flow.attention[layer, :, :10, :10], pattern)
        assert torch.equal(flow.gates[layer, :, :10, :10], pattern > 0)
    assert 0 < flow.gates.sum() < 4 * 4 * 55


def test_attribution_is_the_derivative_by_the_edges_gate(model):
    flow = trace_attention(model, "36+28=?????", positions=[9, 10], attribution=True)
    tokens = model.to_tokens("36+28=?????")
    for target, column in enumerate((9, 10)):
        best = model(tokens)[0, column].argmax()
        for layer, head, query, key in ((0, 1, 10, 3), (1, 2, 9, 4), (3, 0, 10, 10)):
            ends = []
            for gate in (1 + 1e-5, 1 - 1e-5):

                def scale(pattern, hook, gate=gate, head=head, query=query, key=key):
                    pattern[0, head, query, key] *= gate
                    return pattern

                name = f"blocks.{layer}.attn.hook_pattern"
                ends.append(
                    model.run_with_hooks(tokens, fwd_hooks=[(name, scale)])[0, column, best]
                )
            numeric = ((ends[0] - ends[1]) / 2e-5).item()
            found = flow.edge_weights("attribution", target)[layer, head, query, key].item()
            assert found == pytest.approx(numeric, rel=1e-5, abs=1e-9)


def test_edges_that_cannot_reach_the_target_have_no_attribution(model):
    flow = trace_attention(model, "36+28=00064", positions=[7], attribution=True)
    effects = flow.edge_weights("attribution", 0)
    assert effects.abs().max() > 0
    assert effects[..., 7:, :].abs().max() == 0
    # In the last layer only the column that is read can matter.
    assert effects[-1, :, :6].abs().max() == 0


def test_tracing_leaves_the_model_as_it_was(model):
    tokens = model.to_tokens("36+28=0006")
    before = model(tokens)
    trace_attention(model, tokens[0], attribution=True)
    assert torch.equal(model(tokens), before)
    assert not any(point._forward_hooks for point in model.hook_dict.values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("prompt", "positions", "message"),
    [
        ("", None, "empty text"),
        ("36+28=000640", None, "at most 11 tokens"),
        ("36+28=", [0], r"positions in 1\.\.6"),
        ("36+28=", [7], r"positions in 1\.\.6"),
        ("36+28=", [], "at least one position"),
    ],
)
def test_bad_prompts_and_positions_are_refused(model, prompt, positions, message):
    with pytest.raises(ValueError, match=message):
        trace_attention(model, prompt, positions=positions)

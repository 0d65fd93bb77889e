"""The wrapper: open gates are the model, closed gates are formulas, nothing is left behind."""

import inspect
from collections.abc import Callable

import pytest
import torch
from tiny import HAS_HOOKED, SHAPES
from typing_extensions import get_protocol_members

from sparse_tl import PromptPairs, SparseTransformer
from sparse_tl.backend import HookedModel, Model, read_parameters
from sparse_tl.data.prompts import ModelWithTokenizer


def scores_and_pattern(model, tokens, layer=0):
    _, cache = model.run_with_cache(tokens)
    return (
        cache[f"blocks.{layer}.attn.hook_attn_scores"],
        cache[f"blocks.{layer}.attn.hook_pattern"],
    )


def leftovers(model):
    return [
        name
        for name, point in model.hook_dict.items()
        if point._forward_hooks or point._forward_pre_hooks or point.fwd_hooks or point.bwd_hooks
    ]


def test_a_wrapper_is_a_model_to_every_python(build_tiny):
    """From 3.12 on, `isinstance` with a protocol ignores what `__getattr__` provides."""
    sparse = SparseTransformer(build_tiny("plain"))
    for protocol in (HookedModel, ModelWithTokenizer):
        assert isinstance(sparse, protocol)
        for name in get_protocol_members(protocol):
            inspect.getattr_static(sparse, name)


@pytest.mark.parametrize("kind", [*SHAPES, "float64"])
def test_gates_are_the_sign_of_score_plus_bias(build_tiny, tokens, kind):
    model = build_tiny(kind)
    # The first layer's scores do not depend on any gate.
    scores, pattern = scores_and_pattern(model, tokens)
    sparse = SparseTransformer(model, gates="score")
    with torch.no_grad():
        sparse.gates.bias.copy_(torch.randn(sparse.gates.bias.shape) * 0.1)
    _, counts = sparse.run_with_counts(tokens, keep_gates=True)
    expected = scores + sparse.gates.bias[0, :, None, None] > 0
    assert 0 < expected.sum() < (scores > -1e30).sum()
    assert torch.equal(counts.gates[0], expected)
    assert torch.equal(counts.active[0], expected.sum(dim=(-2, -1)))
    gated = scores_and_pattern(sparse, tokens)[1]
    assert torch.equal(gated, pattern * expected)


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_expected_count_is_the_mean_of_sampled_counts(build_tiny, tokens, kind):
    sparse = SparseTransformer(build_tiny(kind, n_layers=1), initial_bias=0.0)
    expected = sparse.count_attention_edges(tokens).expected
    name = "blocks.0.attn.hook_pattern"
    generator = torch.Generator().manual_seed(0)
    runs = 400
    with sparse.sampled(generator), torch.no_grad():
        _, cache = sparse.run_with_cache(tokens.repeat(runs, 1), names_filter=name)
    total = (cache[name] > 0).sum(dim=(-2, -1)).view(runs, 3, -1).sum(dim=0)
    # 36 causal pairs: a standard deviation of at most 3 per run, 0.15 for the mean over 400.
    torch.testing.assert_close(total / runs, expected[0].float(), atol=0.6, rtol=0)


def test_users_hooks_see_the_gated_pattern_whenever_they_were_added(build_tiny, tokens):
    model = build_tiny("plain")
    seen = {}
    name = "blocks.0.attn.hook_pattern"
    model.add_hook(name, lambda p, hook: seen.update(before=p))
    sparse = SparseTransformer(model, initial_bias=-0.05)
    first = {"prepend": True} if HAS_HOOKED else {}  # a bridge's hooks run in their order
    model.add_hook(name, lambda p, hook: seen.update(prepended=p), **first)
    sparse.run_with_hooks(tokens, fwd_hooks=[(name, lambda p, hook: seen.update(temporary=p))])
    gates = sparse.run_with_counts(tokens, keep_gates=True)[1].gates[0]
    assert not gates.all()
    for who in ("before", "prepended", "temporary"):
        assert seen[who][~gates].abs().max() == 0, who
        assert (seen[who][gates] > 0).all(), who


def test_editing_the_scores_moves_the_gate(build_tiny, tokens):
    sparse = SparseTransformer(build_tiny("plain"), initial_bias=-1e3)

    def lift(scores, hook):
        scores[:, 0, 5, 2] += 2e3
        return scores

    with sparse.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", lift)]):
        gates = sparse.run_with_counts(tokens, keep_gates=True)[1].gates
    assert gates[0, :, 0, 5, 2].all()
    assert gates.sum() == len(tokens)


def test_training_under_left_padding_has_finite_gradients(build_tiny, tokens):
    sparse = SparseTransformer(build_tiny("plain"))
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    with sparse.sampled(torch.Generator().manual_seed(0)):
        logits, counts = sparse.run_with_counts(tokens, attention_mask=mask)
    (logits[:, 3:].logsumexp(-1).sum() + counts.expected.sum()).backward()
    for name, parameter in read_parameters(sparse).items():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert sparse.gates.bias.grad.abs().min() > 0


def test_one_prompt_is_a_batch_of_one(build_tiny, tokens):
    sparse, prompt = SparseTransformer(build_tiny("grouped"), initial_bias=0.0), tokens[0]
    options = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "stop_at_eos": False}
    expected = sparse.generate(prompt[None], **options)
    assert expected.shape == (1, 11)
    assert torch.equal(sparse.generate(prompt, **options), expected)
    assert torch.equal(sparse.generate(input=prompt, **options), expected)
    mask = torch.ones_like(prompt)
    mask[-2:] = 0  # padding
    _, counts = sparse.run_with_counts(prompt[None], attention_mask=mask[None])
    assert counts.tokens.tolist() == [6]
    for found in (
        sparse.run_with_counts(prompt, attention_mask=mask)[1],
        sparse.count_attention_edges(prompt, attention_mask=mask),
    ):
        assert torch.equal(found.active, counts.active)
        assert torch.equal(found.possible, counts.possible)
    logits = sparse(prompt[None], attention_mask=mask[None])
    assert torch.equal(sparse(prompt, attention_mask=mask), logits)


def test_the_wrapper_speaks_like_the_model(build_tiny, tokens):
    model = build_tiny("plain")
    sparse = SparseTransformer(model)
    assert sparse.cfg is model.cfg and sparse.tokenizer is model.tokenizer
    assert sparse.W_Q is not None and torch.equal(sparse.W_E, model.W_E)
    loss = sparse(tokens, return_type="loss")
    assert loss.ndim == 0
    with pytest.raises(AttributeError):
        _ = sparse.no_such_thing


def test_unwrapping_leaves_nothing_behind(build_tiny, tokens):
    model = build_tiny("plain")
    dense = model(tokens)
    sparse = SparseTransformer(model, initial_bias=-1.0)
    sparse(tokens)
    assert sparse.unwrap() is model
    assert torch.equal(model(tokens), dense)
    assert leftovers(model) == []
    assert not hasattr(model, "_sparse_tl_wrapped")
    sparse.unwrap()
    with pytest.raises(RuntimeError, match="unwrapped"):
        sparse(tokens)
    SparseTransformer(model).unwrap()


def test_folders_that_are_not_ours_are_refused(build_tiny, tmp_path):
    sparse = SparseTransformer(build_tiny("plain"))
    sparse.save_pretrained(tmp_path / "sparse")
    other = SparseTransformer(build_tiny("plain", n_layers=3))
    other.save_pretrained(tmp_path / "other")
    gates = (tmp_path / "other" / "gates.safetensors").read_bytes()
    (tmp_path / "sparse" / "gates.safetensors").write_bytes(gates)
    with pytest.raises(ValueError, match="size mismatch for bias"):
        SparseTransformer.from_pretrained(tmp_path / "sparse")
    (tmp_path / "sparse" / "gates.safetensors").write_bytes(gates[:20])
    with pytest.raises(ValueError, match="gates.safetensors"):
        SparseTransformer.from_pretrained(tmp_path / "sparse")


def test_open_edges_are_those_of_the_gates(build_tiny: Callable[..., Model]) -> None:
    sparse = SparseTransformer(build_tiny(), initial_bias=0.0)
    tokens = torch.randint(13, (5, 6), generator=torch.Generator().manual_seed(0))
    gates = sparse.run_with_counts(tokens, keep_gates=True)[1].gates
    assert gates is not None
    table = sparse.open_attention_edges(tokens, batch_size=2)
    assert (table["share"].diff().dropna() <= 0).all()
    assert table["share"].sum() * 5 == pytest.approx(int(gates.sum()))
    row = table.iloc[-1]
    place = [int(row[name]) for name in ("layer", "head", "query", "key")]
    assert gates[place[0], :, place[1], place[2], place[3]].float().mean() == row["share"]
    assert row["share"] > 0
    with pytest.raises(ValueError, match="at least one prompt"):
        sparse.open_attention_edges(tokens[:0])


def test_edges_of_pairs_are_those_of_their_clean_prompts(build_tiny: Callable[..., Model]) -> None:
    sparse, tokens = SparseTransformer(build_tiny()), torch.arange(12).view(2, 6)
    one, ends = torch.ones(2, 1).long(), torch.tensor([5, 3])
    pairs = PromptPairs(tokens, tokens.flip(1), one, one + 1, ends)
    mask = (torch.arange(6) <= ends[:, None]).long()
    expected = sparse.count_attention_edges(tokens.to(torch.int32), attention_mask=mask)
    assert torch.equal(sparse.count_attention_edges(pairs).active, expected.active)
    assert expected.tokens.tolist() == [6, 4]
    opened = sparse.open_attention_edges(tokens, attention_mask=mask)
    assert sparse.open_attention_edges(pairs).equals(opened)

"""Masks on any hook point: the formula, the oracle of zeroing by hand, and gradients."""

import pytest
import torch

from sparse_tl import HeadGates, HookMask, SparseTransformer
from sparse_tl.gates import BernoulliGate, GateMode


@pytest.fixture
def tokens():
    return torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(1))


def test_head_gates_of_one_keep_and_of_zero_silence(build_tiny, tokens):
    model = build_tiny("plain")
    clean = model(tokens)
    mask = HeadGates(model, distribution=BernoulliGate())
    assert mask.gates.shape == (model.cfg.n_layers, model.cfg.n_heads)
    with mask.attached(model):
        assert torch.equal(model(tokens), clean)
    mask.logits.data[1, 0] = -1.0

    def silence(z, hook):
        z[:, :, 0] = 0
        return z

    with mask.attached(model):
        gated = model(tokens)
    oracle = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", silence)])
    assert torch.equal(gated, oracle)
    assert torch.equal(model(tokens), clean)


def test_a_gate_interpolates_between_clean_and_patch(build_tiny, tokens):
    model = build_tiny("plain")
    _, corrupted = model.run_with_cache(tokens.flip(1))
    name = "blocks.0.mlp.hook_post"
    mask = HookMask(model, name, axes=-1, patch={name: corrupted[name]}, initial_logit=0.4)
    seen = {}
    clean = model.run_with_cache(tokens)[1][name]
    with mask.attached(model):
        model.run_with_hooks(tokens, fwd_hooks=[(name, lambda a, hook: seen.update(a=a))])
    gate = torch.sigmoid(torch.tensor(0.4))
    torch.testing.assert_close(seen["a"], gate * clean + (1 - gate) * corrupted[name])


def test_positions_and_residual_dimensions_can_be_gated(build_tiny, tokens):
    model = build_tiny("plain")
    name = "blocks.1.hook_resid_pre"
    mask = HookMask(model, name, axes=(1, 2), sample=tokens, distribution=BernoulliGate())
    assert mask.logits.shape == (1, 6, model.cfg.d_model)
    mask.logits.data[0, 2, 5] = -1.0
    seen = {}
    with mask.attached(model):
        model.run_with_hooks(tokens, fwd_hooks=[(name, lambda a, hook: seen.update(a=a))])
        with pytest.raises(ValueError, match="6 gates along axis 1"):
            model(tokens[:, :4])
    assert (seen["a"][:, 2, 5] == 0).all()
    assert (seen["a"] == 0).sum() == len(tokens)


def test_head_gates_have_the_gradient_of_finite_differences(build_tiny, tokens):
    model = build_tiny("float64")
    mask = HeadGates(model, initial_logit=0.2)

    def loss() -> torch.Tensor:
        with mask.attached(model):
            return model(tokens, return_type="loss")

    loss().backward()
    for index in ((0, 1), (1, 0)):
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                mask.logits[index] += step
                ends.append(loss().item())
                mask.logits[index] -= step
        assert mask.logits.grad[index].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


def test_masks_learn(build_tiny, tokens):
    model = build_tiny("plain").requires_grad_(False)
    mask = HeadGates(model, distribution=BernoulliGate(), initial_logit=1.0)
    optimizer = torch.optim.Adam(mask.parameters(), lr=0.2)
    for step in range(30):
        with mask.attached(model, GateMode.SAMPLED, torch.Generator().manual_seed(step)):
            model(tokens, return_type=None)
        optimizer.zero_grad()
        mask.expected_size().backward()
        optimizer.step()
    assert mask.gates.sum() == 0


def test_a_mask_works_on_a_sparse_model_and_leaves_it(build_tiny, tokens):
    sparse = SparseTransformer(build_tiny("plain"), initial_bias=0.0)
    before = sparse(tokens)
    mask = HeadGates(sparse, distribution=BernoulliGate(), initial_logit=-1.0)
    with pytest.raises(RuntimeError, match="planted"), mask.attached(sparse):
        assert not torch.equal(sparse(tokens), before)
        raise RuntimeError("planted")
    assert torch.equal(sparse(tokens), before)


def test_bad_masks_are_refused_before_any_work(build_tiny, tokens):
    model = build_tiny("plain")
    with pytest.raises(ValueError, match="Did you mean"):
        HookMask(model, "blocks.7.mlp.hook_post", axes=-1)
    with pytest.raises(ValueError, match="use_attn_result"):
        HookMask(model, "blocks.0.attn.hook_result", axes=-1)
    with pytest.raises(ValueError, match="axis 0 is the batch"):
        HookMask(model, "blocks.0.mlp.hook_post", axes=0)
    with pytest.raises(ValueError, match="distinct axes"):
        HookMask(model, "blocks.0.mlp.hook_post", axes=(2, -1))
    with pytest.raises(ValueError, match="one rank"):
        HookMask(model, ["blocks.0.mlp.hook_post", "blocks.0.attn.hook_z"], axes=-1)
    with pytest.raises(ValueError, match="same sizes"):
        HookMask(model, ["blocks.0.mlp.hook_post", "blocks.0.hook_mlp_out"], axes=-1)
    with pytest.raises(ValueError, match="patch for every hook point"):
        HookMask(model, "blocks.0.mlp.hook_post", axes=-1, patch={})

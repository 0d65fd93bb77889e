"""Gates at any site: the formula, the oracle of zeroing by hand, and gradients."""

import pytest
import torch
from finite_differences import derivative

from sparse_tl import GatedRun, Heads, HookPoints, SparseTransformer, gated


@pytest.fixture
def tokens():
    return torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(1))


def test_a_gate_interpolates_between_clean_and_patch(build_tiny, tokens):
    model = build_tiny("plain")
    _, corrupted = model.run_with_cache(tokens.flip(1))
    name = "blocks.0.mlp.hook_post"
    site = HookPoints([name], (-1,))
    gate = torch.tensor(0.4).sigmoid()
    gates = gate.expand(1, model.cfg.d_mlp)
    seen = {}
    clean = model.run_with_cache(tokens)[1][name]
    for patch in ({"patch": corrupted}, {"patch": "corrupted", "reference": tokens.flip(1)}):
        with gated(model, site, gates, **patch):
            model.run_with_hooks(tokens, fwd_hooks=[(name, lambda a, hook: seen.update(a=a))])
        torch.testing.assert_close(seen["a"], gate * clean + (1 - gate) * corrupted[name])


@torch.no_grad()
def test_prompts_after_a_single_one_have_reference_prompts_of_their_own(build_tiny, tokens):
    model, name = build_tiny("plain"), "blocks.0.hook_mlp_out"
    reference = torch.randint(0, 13, (20, 6), generator=torch.Generator().manual_seed(2))
    many = tokens.repeat(8, 1)
    gates = torch.zeros(1, model.cfg.d_model)
    with gated(model, HookPoints([name], (2,)), gates, "resample", reference=reference):
        model(many[:1])
        found = model.run_with_cache(many)[1][name]
    assert len(found.unique(dim=0)) > 4


def test_positions_and_residual_dimensions_can_be_gated(build_tiny, tokens):
    model = build_tiny("plain")
    name = "blocks.1.hook_resid_pre"
    site = HookPoints([name], (1, 2))
    gates = torch.ones(1, 6, model.cfg.d_model)
    gates[0, 2, 5] = 0
    seen = {}
    with gated(model, site, gates):
        model.run_with_hooks(tokens, fwd_hooks=[(name, lambda a, hook: seen.update(a=a))])
        with pytest.raises(ValueError, match="6 entries along axis 1"):
            model(tokens[:, :4])
    assert (seen["a"][:, 2, 5] == 0).all()
    assert (seen["a"] == 0).sum() == len(tokens)


def test_head_gates_have_the_gradient_of_finite_differences(build_tiny, tokens):
    model = build_tiny("float64")
    logits = torch.full((2, 2), 0.2, dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        with gated(model, Heads(), logits.sigmoid()):
            return model(tokens, return_type="loss")

    loss().backward()
    for index in ((0, 1), (1, 0)):
        slope = derivative(loss, logits, index)
        assert logits.grad[index].item() == pytest.approx(slope, rel=1e-5)


def test_gates_work_on_a_sparse_model_and_leave_it(build_tiny, tokens):
    sparse = SparseTransformer(build_tiny("plain"), initial_bias=0.0)
    before = sparse(tokens)
    with pytest.raises(RuntimeError, match="planted"), gated(sparse, Heads(), torch.zeros(2, 2)):
        assert not torch.equal(sparse(tokens), before)
        raise RuntimeError("planted")
    assert torch.equal(sparse(tokens), before)


@pytest.mark.parametrize("patch", ["zero", "corrupted"])
def test_a_run_starts_from_the_model_where_only_gates_tell_their_sizes(build_tiny, tokens, patch):
    """With a user's hook, every pass also runs the setting that it starts from."""
    model = build_tiny("float64")
    model.add_hook("blocks.0.hook_attn_out", lambda value, hook: 2 * value)
    site = HookPoints(["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"], (1, 2))
    gates = torch.rand(3, 2, 6, model.cfg.d_model, dtype=torch.float64)
    gates[:, 0] = 1
    reference = {} if patch == "zero" else {"reference": tokens.flip(1)}
    run = GatedRun(model, site, tokens, tokens >= 0, patch, **reference)
    with torch.no_grad():
        torch.testing.assert_close(run.start_from(None), model(tokens).flatten(0, 1))
        found = run.logits(gates)
        for setting, logits in zip(gates, found, strict=True):
            with gated(model, site, setting, patch, **reference):
                torch.testing.assert_close(logits, model(tokens).flatten(0, 1))
    assert (found - run.clean_logits).abs().max() > 0.1


def test_gates_of_another_shape_are_refused(build_tiny):
    """Some of them could be broadcast."""
    for gates in (torch.ones(3, 2), torch.ones(2), torch.ones(1, 1, 2, 2)):
        with (
            pytest.raises(ValueError, match=r"gates at Heads.* need the shape \[2, 2\]"),
            gated(build_tiny("plain"), Heads(), gates),
        ):
            pass

"""What is trained on a model. The first paragraph of each docstring stands on the page."""

from __future__ import annotations

import torch
from double_precision import DoublePrecision

from architecture_checks.subject import (
    ECHOES,
    FLOAT32,
    FLOAT64,
    GATES,
    PAIRS,
    QUIET,
    READ,
    Subject,
    metric_of,
    near,
    require,
    with_heads,
)
from sparse_tl import (
    GatedRun,
    Heads,
    ShuffledStream,
    SparseTransformer,
    TargetDataset,
    evaluate_held_out,
    fit_head_gates,
    logit_difference,
    post_train,
)
from sparse_tl.backend import adapt


def head_gating(subject: Subject) -> float:
    """Logits under gates on all heads and the gradient of the gates, compared with hooks by hand.
    Then, on a model trained to repeat the last token but one, gates fitted with the usual penalty
    stay within their allowed loss, which hooks by hand reproduce (to 1e-5), and gates pushed open
    are more open than gates pushed closed."""
    model = subject.exact
    gates, by_hand = (GATES.double().requires_grad_() for _ in range(2))
    with DoublePrecision():
        found = GatedRun(model, Heads(), PAIRS.clean, READ, "zero").logits(gates[None])[0]
        expected = with_heads(model, PAIRS.clean, by_hand)
        logit_difference(found, PAIRS).mean().backward()
        metric_of(expected).backward()
    off = near(found.detach(), PAIRS.read(expected).detach(), FLOAT64, "the logits under gates")
    off = max(off, near(gates.grad, by_hand.grad, FLOAT64, "the gradient of the gates"))
    _fits(subject)
    return off


def _fits(subject: Subject) -> None:
    model, tokens = adapt(subject.learned).copy(), ECHOES.tokens
    rows = TargetDataset.from_tokens(tokens, [(2, 8)] * len(tokens))
    roles = fit_head_gates(model, rows, seeds=2, held_out=rows, updates=60, batch_size=32, **QUIET)
    with torch.no_grad():
        for stage, fitted in enumerate((roles.g0, roles.g_plus, roles.g_minus)):
            for seed, gates in enumerate(fitted):
                logits = with_heads(model, tokens, gates)[:, 1:-1].log_softmax(dim=-1)
                loss = -logits.gather(2, tokens[:, 2:, None]).mean()
                near(roles.losses[stage, seed], loss, FLOAT32, "a fitted loss")
    require(bool(roles.fitted.all()), f"the losses {roles.losses.tolist()} are too large")
    opened, shut = (gates.mean().item() for gates in (roles.g_plus, roles.g_minus))
    require(opened > shut + 0.2, f"gates of {opened:.2f} when pushed open, {shut:.2f} when shut")


def post_training(subject: Subject) -> str:
    """The share of active attention edges before and after 200 steps of post-training of that
    model, on that task. The loss stays within its target, 0.05 nats over the dense model, and at
    least a tenth of the edges is removed."""
    sparse = SparseTransformer(adapt(subject.learned).copy())
    before = _active(sparse)
    outcome = post_train(
        sparse,
        ShuffledStream(ECHOES, 32),
        target_loss="+0.05",
        validation=ECHOES,
        steps=200,
        learning_rate=5e-3,
        **QUIET,
    )
    dense, loss = (evaluate_held_out(model, ECHOES).loss for model in (subject.learned, sparse))
    require(outcome.feasible, "the target was missed")
    require(loss <= dense + 0.05, f"a loss of {loss:.3f} nats, {dense:.3f} without gates")
    after = _active(sparse)
    require(after <= 0.9 * before, f"{after:.0%} of the attention edges, {before:.0%} before")
    return f"{before:.0%} to {after:.0%}"


def _active(sparse: SparseTransformer) -> float:
    counts = sparse.count_attention_edges(ECHOES.tokens)
    return (counts.active.sum() / counts.possible.sum()).item()

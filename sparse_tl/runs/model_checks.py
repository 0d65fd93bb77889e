"""Whether a model can carry gates: its hook points fire, its attention matters, what it will take.

1. The hook points that gates need are there and fire, once each per forward pass.
2. With all gates open the logits are those of the model, bit for bit.
3. With every attention pattern at zero the logits move.
4. Nothing is left on the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model, Order, attached, attention_shape, layer_points
from sparse_tl.runs.diagnosis import Check, State
from sparse_tl.training import TargetLoss
from sparse_tl.training.constraint import LossConstraint
from sparse_tl.training.objectives import SparsityObjective

HOOKS = ("attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")
"""Where gates read and write: scores and patterns of attention edges, outputs of heads."""
WINDOW, BATCH_SIZE = 128, 8
"""Of `sparse-tl post-train` unless told otherwise."""
COPIES = 6
"""Of the weights in post-training: themselves, gradients, Adam's two averages, the dense model and
the best weights so far."""


@torch.no_grad()
def check_hooks(model: Model, group: str) -> list[Check]:
    """Whether gates work on a model, which is left as it was."""
    tokens = random_tokens(model, min(16, model.cfg.n_ctx))
    before = _count_hooks(model)
    plain = model(tokens)
    checks = [_fires(model, tokens, suffix, group) for suffix in HOOKS]
    if any(check.state == "failed" for check in checks):
        return checks
    sparse = SparseTransformer(model)
    try:
        with sparse.opened():
            same = torch.equal(sparse(tokens), plain)
    finally:
        sparse.unwrap()
    checks.append(
        _judged(
            group,
            "open gates",
            same,
            "the logits are the model's, bit for bit",
            "the logits differ from the model's by rounding or more",
            "Post-training would start from another model than yours; please report this model.",
        )
    )
    points = layer_points(model, "attn.hook_pattern")
    with attached(model, [(name, Order.LAST, torch.zeros_like) for name in points]):
        moved = (model(tokens) - plain).abs().max().item()
    checks.append(
        _judged(
            group,
            "closed gates",
            moved > 0,
            f"zeroing all attention patterns moves the logits by up to {moved:.3g}",
            "zeroing all attention patterns leaves the logits as they are",
            "This model ignores edits to its attention: gates would have no effect on it.",
        )
    )
    checks.append(
        _judged(
            group,
            "afterwards",
            _count_hooks(model) == before,
            "no hook is left on the model",
            "hooks are left on the model",
            "Load the model again, and please report this.",
        )
    )
    return checks


def _fires(model: Model, tokens: Tensor, suffix: str, group: str) -> Check:
    fired: dict[str, int] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        def count(_: Tensor) -> None:
            fired[name] = fired.get(name, 0) + 1

        return count

    short = suffix.rsplit(".", 1)[-1]
    try:
        names = layer_points(model, suffix)
        with attached(model, [(name, Order.LAST, note(name)) for name in names]):
            model(tokens)
    except ValueError as error:
        return Check(group, short, "failed", str(error), "Gates cannot sit on this model.")
    wrong = [name for name in names if fired.get(name) != 1]
    return _judged(
        group,
        short,
        not wrong,
        f"fires in all {len(names)} layers",
        f"does not fire once per forward pass: {', '.join(wrong[:3])}",
        "Gates cannot sit on this model as it is configured.",
    )


@dataclass(frozen=True)
class TrainingMemory:
    """What post-training holds at once, in bytes.

    Args:
        weights: all copies of the weights.
        activations: kept for the backward pass of one batch.
        window: tokens per window.
        batch_size: windows per batch.
    """

    weights: int
    activations: int
    window: int
    batch_size: int


def training_memory(model: Model) -> TrainingMemory:
    """What post-training all weights will hold, from what one window keeps for its backward pass.

    Args:
        model: dense; left as it was.
    """
    window = min(WINDOW, model.cfg.n_ctx)
    sparse = SparseTransformer(model)
    own = {p.untyped_storage().data_ptr() for p in sparse.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    flags = {parameter: parameter.requires_grad for parameter in sparse.parameters()}
    batch = TokenBatch.next_token(random_tokens(model, window))
    target = TargetLoss.parse("+0.05")
    objective = SparsityObjective(sparse, model, target, LossConstraint(target.nats), 0.5)
    generator = torch.Generator(batch.tokens.device).manual_seed(0)
    try:
        sparse.requires_grad_(True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            loss, _ = objective.measure(batch, generator, 0.0)
            del loss
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        sparse.unwrap()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    activations = sum(size for place, size in kept.items() if place not in own)
    return TrainingMemory(COPIES * weights, BATCH_SIZE * activations, window, BATCH_SIZE)


def attention_edges(model: Model, n_tokens: int) -> int:
    """Causal attention edges of one prompt, over all layers and heads."""
    shape = attention_shape(model)
    return shape.n_layers * shape.n_heads * n_tokens * (n_tokens + 1) // 2


def random_tokens(model: Model, length: int) -> Int[Tensor, "1 pos"]:
    """A prompt that means nothing, always the same."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, (1, length), generator=generator)
    return tokens.to(model.embed.W_E.device)


def _count_hooks(model: Model) -> int:
    points = model.hook_dict.values()
    return sum(len(p._forward_hooks) + len(p._forward_pre_hooks) for p in points)


def _judged(group: str, name: str, good: bool, fine: str, bad: str, advice: str) -> Check:
    state: State = "fine" if good else "failed"
    return Check(group, name, state, fine if good else bad, "" if good else advice)

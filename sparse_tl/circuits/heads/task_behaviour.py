"""Which heads move the answers, and which steer these heads, on prompts that contain the answers.

With the attention A from the last position, the values v, and the unembedding d of the answers
minus that of the wrong answers,

    mover       = sum over j, x_j an answer, of A_j norm_share(W_O v_j) . d / logit difference
    suppression = the same over j, x_j a wrong answer
    inhibition  = (z_clean - z_corrupted) . d a / d z,   z at the last position

where ``a`` is the movers' attention to answers minus that to wrong answers, averaged over heads
with weights proportional to positive mover scores. Scores are means over pairs; mover and
suppression scores are divided by the mean logit difference.

1. Run the clean prompts, and split what each head writes by the token that it attends to.
2. Weight heads by their mover scores.
3. Differentiate the movers' attention with respect to the outputs of all heads, as in attribution
   patching.

Reference: Wang et al., arXiv 2211.00593 (name movers, S-inhibition); McDougall et al., arXiv
2310.04625 (copy suppression).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.prompt.logit_attribution import towards_answers
from sparse_tl.data import PromptPairs
from sparse_tl.lens import Adapter, check_numbers, check_pairs, record, tolerance


def task_behaviour(
    adapter: Adapter, pairs: PromptPairs, batch_size: int, step: Callable[[], None]
) -> dict[str, Float[Tensor, "layer head"]]:
    """The scores of each behaviour on prompt pairs, on the CPU.

    Args:
        adapter: adapter of the model.
        pairs: prompt pairs.
        batch_size: prompt pairs per pass.
        step: called after each batch.

    Raises:
        ValueError: no prompt contains its answer, the model does not prefer the answers on average,
            or it cannot run the prompts.
    """
    check_pairs(adapter, pairs)
    if not _answer_positions(pairs)[0].any():
        raise ValueError(
            "expected pairs whose clean prompts contain the answer, to see which heads move it; no "
            "prompt does"
        )
    batches = [batch.to(adapter.device) for batch in pairs.split(batch_size)]
    moved, difference = map(
        torch.cat, zip(*(_moved(adapter, batch) for batch in batches), strict=True)
    )
    total = difference.mean()
    if not total > 0:
        raise ValueError(
            "expected pairs in which the model prefers the answers to the wrong answers, since "
            f"scores are shares of this difference; it is {total.item():.4g} on average. "
            "measure_skill says whether a model does a task."
        )
    mover, suppression = moved.mean(dim=0) / total
    weights = mover.clamp(min=0)
    weights = weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    lost = list[Tensor]()
    for batch in batches:
        lost.append(_lost(adapter, batch, weights))
        step()
    inhibition = torch.cat(lost).mean(dim=0)
    return {"mover": mover, "suppression": suppression, "inhibition": inhibition}


def heads_values(
    adapter: Adapter, kept: Mapping[str, Tensor]
) -> Iterator[
    tuple[int, Float[Tensor, "row head query key"], Float[Tensor, "row key head d_head"]]
]:
    """Each layer, its attention pattern, and the values of each head.

    Args:
        adapter: adapter of the model.
        kept: activations recorded at ``hook_pattern``, ``hook_v`` and ``hook_z``.

    Raises:
        ValueError: the output of heads is not the average of values, weighted by the pattern.
    """
    for layer in range(adapter.n_layers):
        pattern, values, z = (
            kept[f"blocks.{layer}.attn.hook_{at}"] for at in ("pattern", "v", "z")
        )
        values = values.repeat_interleave(adapter.n_heads // values.shape[2], dim=2)
        error = (torch.einsum("bhqk,bkhd->bqhd", pattern.to(values), values) - z).abs().max()
        if not error <= tolerance(values.dtype) * values.abs().max():
            raise ValueError(
                "expected heads that write averages of values, weighted by their attention; those "
                f"of layer {layer} of {adapter.name!r} write something else (off by {error:.3g}), "
                "so what they write cannot be split by the tokens that they attend to"
            )
        yield layer, pattern, values


def _moved(
    adapter: Adapter, batch: PromptPairs
) -> tuple[Float[Tensor, "pair two layer head"], Float[Tensor, " pair"]]:
    """Logits that heads add by attending to right and to wrong answers; the logit difference."""
    names = [
        name for at in ("pattern", "v", "z") for name in adapter.layer_points(f"attn.hook_{at}")
    ]
    names += [adapter.heads_point(layer) for layer in range(adapter.n_layers)]
    kept, final = record(adapter, batch.clean, names)
    check_numbers(adapter, final)
    rows, ends = torch.arange(len(batch), device=final.device), batch.positions
    final, moved = final[rows, ends].double(), list[Tensor]()
    for layer, pattern, values in heads_values(adapter, kept):
        z, written = (
            kept[name][rows, ends].double()
            for name in (f"blocks.{layer}.attn.hook_z", adapter.heads_point(layer))
        )
        # If a norm follows attention, what heads write is z divided by a scale.
        factor = (written * z).sum(dim=(1, 2)) / z.square().sum(dim=(1, 2)).clamp(min=1e-30)
        attention = pattern[rows, :, ends].double()
        parts = [
            torch.einsum("pk,phk,pkhd,p->phd", mask.double(), attention, values.double(), factor)
            for mask in _answer_positions(batch)
        ]
        shares = adapter.heads_written(layer, torch.stack(parts, dim=1))
        added, _ = towards_answers(adapter, batch, shares.permute(0, 2, 1, 3).flatten(0, 1), final)
        moved.append(added.unflatten(0, (-1, 2)))
    of_stream, of_biases = towards_answers(adapter, batch, final[None], final)
    return torch.stack(moved).permute(3, 2, 0, 1).cpu(), (of_stream[0] + of_biases).cpu()


def _lost(
    adapter: Adapter, batch: PromptPairs, weights: Float[Tensor, "layer head"]
) -> Float[Tensor, "pair layer head"]:
    """What `_preference` would lose by patching each head at the last position, to first order."""
    outputs, patterns = (adapter.layer_points(f"attn.hook_{at}") for at in ("z", "pattern"))
    corrupted, _ = record(adapter, batch.corrupted, outputs)
    clean, _ = record(adapter, batch.clean, [*outputs, *patterns], differentiable=True)
    with autograd(True):
        preferred = _preference(batch, [clean[name] for name in patterns], weights)
        z = [clean[name] for name in outputs]
        gradients = torch.autograd.grad(preferred, z, allow_unused=True, materialize_grads=True)
    rows, lost = torch.arange(len(batch), device=preferred.device), list[Tensor]()
    for name, gradient in zip(outputs, gradients, strict=True):
        change = clean[name].detach() - corrupted[name]
        lost.append((change * gradient)[rows, batch.positions].double().sum(dim=-1))
    return torch.stack(lost, dim=1).cpu()


def _preference(
    batch: PromptPairs, patterns: list[Tensor], weights: Float[Tensor, "layer head"]
) -> Float[Tensor, ""]:
    """The movers' attention to answers minus that to wrong answers, summed over pairs."""
    rows = torch.arange(len(batch), device=patterns[0].device)
    answers, wrong = _answer_positions(batch)
    attention = torch.stack([pattern[rows, :, batch.positions] for pattern in patterns])
    sign = answers.to(attention) - wrong.to(attention)
    return torch.einsum("lphk,pk,lh->", attention, sign, weights.to(attention))


def _answer_positions(
    batch: PromptPairs,
) -> tuple[Bool[Tensor, "pair pos"], Bool[Tensor, "pair pos"]]:
    """The positions of answers in the clean prompts, and those of wrong answers."""
    answers, wrong = (
        (batch.clean[:, :, None] == tokens[:, None]).any(dim=-1)
        for tokens in (batch.answers, batch.wrong)
    )
    return answers, wrong

"""What each head does: where it attends, and what it copies.

1. Run prompts of random tokens that are repeated once, ``x_1 ... x_n x_1 ... x_n``, after the text
   that the model's prompts start with.
2. Average the attention from the second copy, without its first token, to four places:

       previous token    the token before
       duplicate token   the same token in the first copy
       induction         the token after the duplicate, which comes next
       sink              the first token of the prompt

   The places are distinct, so the four scores of a head sum to at most 1.
3. *Copying* measures whether attending to a token raises its own logit more than the logits of the
   others. With ``l_j = W_U^T norm(W_O v_j)``, the logits (before the bias) that a head would add if
   it attended to ``x_j`` alone, and j in the first copy,

       copying = mean over j and t != j of sign(l_j[x_j] - l_j[x_t])

   1: always; 0: as often as not; -1: never. Positive factors, such as the scale of the norm, have
   no influence.
4. On prompt pairs, also measure which heads move the answer
   (`sparse_tl.circuits.heads.task_behaviour`).

Reference: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; Olsson et al.,
arXiv 2209.11895 (prefix matching). Their copying scores use weights alone, or logits over the
vocabulary; this one uses the values in a run, and the logits of the prompt's tokens.
"""

from __future__ import annotations

import random
from typing import Annotated

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Seed, checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.heads.head_kinds import HeadBehaviour
from sparse_tl.circuits.heads.task_behaviour import heads_values, task_behaviour
from sparse_tl.data import PromptPairs
from sparse_tl.data.random_tokens import ordinary_tokens, start_of_prompts
from sparse_tl.lens import (
    Adapter,
    HookedModel,
    Norm,
    adapt,
    check_numbers,
    check_tokens,
    in_evaluation_mode,
    record,
)
from sparse_tl.progress import tracked


@checked
@in_evaluation_mode
@autograd(False)
def head_behaviour(
    model: HookedModel,
    pairs: PromptPairs | None = None,
    *,
    n: AtLeastOne = 16,
    length: Annotated[int, Ge(3), Le(100_000)] = 32,
    seed: Seed = 0,
    batch_size: AtLeastOne = 8,
    progress: bool = True,
) -> HeadBehaviour:
    """Scores of every head: what it attends to, what it copies and, on a task, what it moves.

    On repeated random tokens: the share of attention to the previous token, to the same token in
    the first copy (duplicate token), to the token after that one (induction) and to the first token
    (sink); and copying, -1 to 1. On prompt pairs:

    - *mover*: share of the logit difference that the head adds by attending to the answers, as the
      name movers of IOI do. Below 0, the head lowers the answer's logit.
    - *suppression*: the same by attending to the wrong answers.
    - *inhibition*: how much of the movers' attention to the answers, minus that to the wrong
      answers, would be lost, to first order, if the head's output at the last position came from
      the corrupted prompt. High for the S-inhibition heads of IOI.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs that contain their answers and wrong answers, such as those of IOI.
        n: number of prompts of random tokens.
        length: number of random tokens, all different, that each prompt repeats.
        seed: random seed for the tokens.
        batch_size: prompts per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the model is not the sum of its components, is not causal, predicts something
            other than tokens, or has heads that do not write averages of values; its context or
            its vocabulary is too small; no prompt contains its answer, or the model does not prefer
            the answers.
    """
    adapter = adapt(model)
    adapter.graph  # noqa: B018 - checks that the model is the sum of its parts
    if adapter.d_vocab_out != adapter.d_vocab:
        raise ValueError(
            "expected a model that predicts the tokens that it reads, to see which it copies; "
            f"{adapter.name!r} reads {adapter.d_vocab} and has {adapter.d_vocab_out} outputs"
        )
    tokens, prompt_start = _repeated_tokens(model, n, length, seed)
    check_tokens(adapter, tokens)
    batches = tokens.split(batch_size)
    n_of_pairs = 0 if pairs is None else -(-len(pairs) // batch_size)
    with tracked("scoring heads", len(batches) + n_of_pairs, progress) as step:
        by_batch = list[dict[str, Tensor]]()
        for batch in batches:
            by_batch.append(_on_random_tokens(adapter, batch.to(adapter.device), length))
            step()
        scores = {
            name: torch.cat([batch[name] for batch in by_batch]).mean(dim=0) for name in by_batch[0]
        }
        if pairs is not None:
            scores |= task_behaviour(adapter, pairs, batch_size, step)
    return HeadBehaviour(scores, prompt_start)


def _repeated_tokens(
    model: HookedModel, n: int, length: int, seed: int
) -> tuple[Int[Tensor, "prompt pos"], str]:
    """Prompts of random tokens that are repeated once, and the text that all prompts start with."""
    start, prompt_start = start_of_prompts(model)
    vocabulary, rng = ordinary_tokens(model), random.Random(seed)
    if len(vocabulary) < length:
        raise ValueError(
            f"expected a vocabulary of at least {length} tokens, to draw so many different ones; "
            f"it has {len(vocabulary)} besides special tokens. Choose a smaller `length`."
        )
    drawn = [rng.sample(vocabulary, length) for _ in range(n)]
    return torch.tensor([[*start, *row, *row] for row in drawn]), prompt_start


def _on_random_tokens(
    adapter: Adapter, tokens: Int[Tensor, "prompt pos"], length: int
) -> dict[str, Float[Tensor, "prompt layer head"]]:
    """The scores of each prompt, on the CPU."""
    queries = torch.arange(1 - length, 0) + tokens.shape[1]
    keys_of = {
        "previous token": queries - 1,
        "duplicate token": queries - length,
        "induction": queries - length + 1,
        "sink": torch.zeros_like(queries),
    }
    first = slice(tokens.shape[1] - 2 * length, tokens.shape[1] - length)
    by_layer: dict[str, list[Tensor]] = {name: [] for name in [*keys_of, "copying"]}
    names = [f"blocks.{layer}.attn.hook_{at}" for layer in range(adapter.n_layers) for at in "vz"]
    kept, final = record(adapter, tokens, [*names, *adapter.layer_points("attn.hook_pattern")])
    check_numbers(adapter, final)
    for layer, pattern, values in heads_values(adapter, kept):
        for name, keys in keys_of.items():
            by_layer[name].append(pattern[:, :, queries, keys].double().mean(dim=-1))
        copying = _copying(adapter, layer, values[:, first], tokens[:, first], final[:, first])
        by_layer["copying"].append(copying)
    return {name: torch.stack(layers, dim=1).cpu() for name, layers in by_layer.items()}


def _copying(
    adapter: Adapter,
    layer: int,
    values: Float[Tensor, "prompt pos head d_head"],
    tokens: Int[Tensor, "prompt pos"],
    final: Float[Tensor, "prompt pos d_model"],
) -> Float[Tensor, "prompt head"]:
    """The copying score, over the tokens of the prompt."""
    written = adapter.heads_written(layer, values.double())
    norm = adapter.norms().get("ln_final", Norm(None, None, None, 0.0))
    weight, _ = adapter.unembedding()
    unembedded = weight.T[tokens].double()
    logits = torch.einsum("hpjd,ptd->phjt", norm.share(written, final.double()), unembedded)
    own = logits.diagonal(dim1=-2, dim2=-1)[..., None]
    return (own - logits).sign().sum(dim=(-2, -1)) / (logits.shape[-1] * (logits.shape[-1] - 1))

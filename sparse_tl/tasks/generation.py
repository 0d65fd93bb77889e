"""What models generate: whether it contains a text, whether it stops, and whether models agree.

The effect of a head on the next token may not show in what a model goes on to write, and the other
way round. `continuations` writes on prompts, also inside `ablate_heads`, `gated` or `intervene`,
and `compare_continuations` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import (
    HookedModel,
    adapt,
    check_padding,
    check_pairs,
    check_tokens,
    in_evaluation_mode,
)
from sparse_tl.data.pairs import NO_TOKEN, PromptPairs, mask_of_padding, padded
from sparse_tl.data.prompts import added_text, check_known, check_tokenizer, start_of_prompts
from sparse_tl.gates.run import clean_outputs
from sparse_tl.progress import tracked
from sparse_tl.results import Result
from sparse_tl.tasks.skill_battery import wilson_interval


@dataclass(frozen=True, eq=False)
class Continuations(Result):
    """Prompts, and what a model writes after them.

    Args:
        prompts: texts of the prompts, with what they begin with, such as BOS.
        texts: what follows each prompt.
        tokens: its tokens; `NO_TOKEN` after the end of a text.
        stops: whether the model ended the text (by its EOS token).
    """

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    tokens: Int[Tensor, "prompt token"]
    stops: Bool[Tensor, " prompt"]

    @checked
    def contains(self, text: str | Sequence[str]) -> Bool[Tensor, " prompt"]:
        """Whether each continuation contains a text: one for all, or one for each prompt."""
        wanted = [text] * len(self.texts) if isinstance(text, str) else text
        return torch.tensor([one in whole for one, whole in zip(wanted, self.texts, strict=True)])

    def agreement(self, other: Continuations) -> Int[Tensor, " prompt"]:
        """The number of tokens before the first one that differs from another continuation.

        Raises:
            ValueError: the prompts are not the same, or the numbers of tokens.
        """
        if self.prompts != other.prompts or self.tokens.shape != other.tokens.shape:
            raise ValueError("continuations agree or not on the same prompts, and as many tokens")
        return (self.tokens == other.tokens).long().cumprod(dim=1).sum(dim=1)

    def to_pandas(self) -> pd.DataFrame:
        """One row per prompt."""
        columns = {"prompt": self.prompts, "continuation": self.texts, "stops": self.stops}
        return pd.DataFrame(columns)


@checked
@in_evaluation_mode
@torch.no_grad()
def continuations(
    model: HookedModel,
    prompts: Sequence[str] | PromptPairs,
    n_tokens: AtLeastOne = 20,
    *,
    prepend_bos: bool | None = None,
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Continuations:
    """Continue prompts by the most likely token, again and again, up to the EOS token.

    Every token takes a full pass, without a key-value cache: what acts on the model acts as it does
    in all analyses, and columns may count from the end.

    Args:
        model: dense or sparse model, also with heads ablated or under interventions.
        prompts: texts; or prompt pairs, whose clean prompts are continued.
        n_tokens: maximum number of tokens.
        prepend_bos: whether texts start with the BOS token; by default as the model's own do.
        batch_size: prompts per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the model has no tokenizer, or one that does not know a text; there is no
            prompt; or prompts and tokens exceed the model's context.
    """
    adapter, tokenizer = adapt(model), model.tokenizer
    check_tokenizer(tokenizer)
    if isinstance(prompts, PromptPairs):
        check_pairs(adapter, prompts)
        ends = prompts.positions.tolist()
        rows = [row[: end + 1] for row, end in zip(prompts.clean.tolist(), ends, strict=True)]
    else:
        start, _ = start_of_prompts(model, prepend_bos)
        for row, text in enumerate(prompts):
            check_known(tokenizer, text, f"prompt {row}: ")
        rows = [[*start, *tokenizer.encode(text, add_special_tokens=False)] for text in prompts]
    if not rows or not adapter.causal:
        raise ValueError("there is no prompt to continue, or the model attends in both directions")
    found = list[Tensor]()
    with tracked("generating", -(-len(rows) // batch_size) * n_tokens, progress) as step:
        for first in range(0, len(rows), batch_size):
            some = rows[first : first + batch_size]
            tokens = padded([[*row, *[0] * n_tokens] for row in some], 0).to(adapter.device)
            check_tokens(adapter, tokens)
            lengths = torch.tensor([*map(len, some)], device=tokens.device)
            check_padding(adapter, mask_of_padding(lengths + n_tokens - 1, tokens.shape[1]))
            for n in range(n_tokens):
                width = int(lengths.max()) + n
                read = F.one_hot(lengths + n - 1, width).bool()
                _, logits = clean_outputs(adapter, tokens[:, :width], read)
                tokens.scatter_(1, (lengths + n)[:, None], logits.argmax(dim=-1, keepdim=True))
                step()
            columns = lengths[:, None] + torch.arange(n_tokens, device=tokens.device)
            found.append(tokens.gather(1, columns).cpu())
    added, eos = torch.cat(found), tokenizer.eos_token_id
    ended = torch.zeros_like(added) if eos is None else (added == eos).long()
    added = added.masked_fill(ended.cumsum(dim=1) > ended, NO_TOKEN)
    texts = (
        added_text(tokenizer, row, [one for one in new if one != NO_TOKEN])
        for row, new in zip(rows, added.tolist(), strict=True)
    )
    begun = tuple(tokenizer.decode(row) for row in rows)
    return Continuations(begun, tuple(texts), added, ended.any(dim=1))


@checked
def compare_continuations(
    runs: Mapping[str, Continuations],
    *,
    contains: str | Sequence[str] | None = None,
) -> pd.DataFrame:
    """What models, or one model under ablations, write on the same prompts.

    Args:
        runs: continuations by name; the others are compared with the first, such as the dense
            model's.
        contains: a text to look for in the continuations: one for all prompts, or one for each.

    Returns:
        One row per run. Shares of prompts, each with the ends of its 95 % interval (``_low``,
        ``_high``): ``contains``; ``stops``; ``agrees``, the same tokens as the first run
        throughout. And ``agreement``, the mean number of tokens before the first difference.

    Raises:
        ValueError: as in `Continuations.agreement`.
    """
    first, *_ = runs.values()
    rows = []
    for run in runs.values():
        agreement = run.agreement(first)
        shares = {} if contains is None else {"contains": run.contains(contains)}
        shares |= {"stops": run.stops, "agrees": agreement == run.tokens.shape[1]}
        row = dict[str, float]()
        for name, hits in shares.items():
            share, ends = hits.double().mean().item(), wilson_interval(int(hits.sum()), len(hits))
            row[name], row[f"{name}_low"], row[f"{name}_high"] = share, *ends
        rows.append({**row, "agreement": agreement.double().mean().item()})
    return pd.DataFrame(rows, index=[*runs])

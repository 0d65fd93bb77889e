"""What the residual stream says about the logits: the logit lens, and direct logit attribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import (
    Adapter,
    HookedModel,
    adapt,
    check_numbers,
    check_sums_under_hooks,
    hooked,
    in_evaluation_mode,
    record,
    source_outputs,
    tolerance,
)
from sparse_tl.circuits.pair_runs import batches_of
from sparse_tl.circuits.prompt.tokens import (
    Prompt,
    Token,
    output_number,
    output_text,
    prompt_tokens,
    token_texts,
)
from sparse_tl.data import PromptPairs
from sparse_tl.data.pairs import NO_TOKEN
from sparse_tl.data.prompts import Encoder, check_known, continued
from sparse_tl.progress import tracked
from sparse_tl.results import OfPrompts, Result


@dataclass(frozen=True, eq=False)
class LogitLens(Result):
    """Predictions of one prompt by layer and position, from `logit_lens`.

    Each row is a residual stream; the last row, after the last layer, is the model's prediction.

    Args:
        tokens: text of each position.
        answer: text of the token whose probability is tracked.
        probability: probability of the answer as the next token.
        top: text of the most likely next token.
        top_probability: probability of that token.
    """

    tokens: Sequence[str]
    answer: str
    probability: Float[Tensor, "row pos"]
    top: Sequence[Sequence[str]]
    top_probability: Float[Tensor, "row pos"]

    @property
    def rows(self) -> tuple[str, ...]:
        """The name of each row: the layer that reads the residual stream, or "final"."""
        return (*map(str, range(len(self.top) - 1)), "final")

    def to_pandas(self) -> pd.DataFrame:
        """One row per layer and position: token, top token, and both probabilities."""
        n_positions = len(self.tokens)
        return pd.DataFrame(
            {
                "layer": [row for row in self.rows for _ in self.tokens],
                "position": list(range(n_positions)) * len(self.rows),
                "token": list(self.tokens) * len(self.rows),
                "top": [text for row in self.top for text in row],
                "top_probability": self.top_probability.flatten().tolist(),
                "probability": self.probability.flatten().tolist(),
            }
        )

    def _summary(self) -> pd.DataFrame:
        """The top tokens by layer, the last layer first, and position."""
        columns = [f"{position} {token!r}" for position, token in enumerate(self.tokens)]
        rows = [[name, *row] for name, row in zip(self.rows, self.top, strict=True)]
        return pd.DataFrame(rows[::-1], columns=["layer", *columns])

    def __repr__(self) -> str:
        shown = ", ".join(f"{p:.2g}" for p in self.probability[:, -1].tolist())
        return f"LogitLens({self.answer!r} after {self.tokens[-1]!r}, by layer: {shown})"


@checked
@in_evaluation_mode
@torch.no_grad()
def logit_lens(model: HookedModel, prompt: Prompt, *, answer: Token | None = None) -> LogitLens:
    """What the model would predict if it ended before a layer, at each layer and position.

        logits[layer, pos] = unembed(norm(residual stream that enters the layer))

    with the model's final norm and unembedding; after the last layer, these are the model's logits.

    Args:
        model: dense or sparse model; left unchanged.
        prompt: text or tokens.
        answer: token to track, as text or number; by default the model's prediction after the
            prompt. If prompt and answer are both texts, they are tokenised as one, so that a space
            at the end of the prompt can become part of the answer's token.

    Raises:
        ValueError: the model cannot run the prompt, or the answer is not exactly one token after
            the prompt.

    Reference: nostalgebraist, "interpreting GPT: the logit lens", 2020.
    """
    adapter, tokens = adapt(model), prompt_tokens(model, prompt)
    if isinstance(answer, str) and isinstance(prompt, str):
        encode = Encoder(model.tokenizer)
        check_known(model.tokenizer, answer)
        start = tokens[: len(tokens) - len(encode(prompt))]
        before, answer = continued(encode, prompt, answer)
        tokens = torch.cat([start, tokens.new_tensor(before)])
    names = adapter.layer_points("hook_resid_pre")
    kept, final = record(adapter, tokens[None].to(adapter.device), names)
    streams = [*(kept[name] for name in names), final]
    logits = adapter.logits(final)[0, -1]
    check_numbers(adapter, logits)
    tracked = int(logits.argmax()) if answer is None else output_number(model, answer, tokens)
    probability, top, top_probability = [], [], []
    prefixes = [tokens[: position + 1] for position in range(len(tokens))]
    for stream in streams:  # one at a time: a vocabulary can have 250,000 tokens
        probabilities = adapter.logits(stream)[0].float().softmax(dim=-1)
        probability.append(probabilities[:, tracked].cpu())
        top_probability.append(probabilities.max(dim=-1).values.cpu())
        best = zip(probabilities.argmax(dim=-1).tolist(), prefixes, strict=True)
        top.append([output_text(model, token, prefix) for token, prefix in best])
    return LogitLens(
        token_texts(model, tokens),
        output_text(model, tracked, tokens),
        torch.stack(probability),
        top,
        torch.stack(top_probability),
    )


@dataclass(frozen=True, eq=False)
class LogitAttribution(OfPrompts):
    """What each component writes towards the answer, from `attribute_logits`.

    Args:
        components: "input"; heads ("a0.h1"), MLPs ("m0") and attention biases ("a0.b") by layer;
            and "bias", the biases of the final norm and the unembedding.
        values: logits that each component adds, per prompt pair; positive: towards the answer.
        n_heads: number of heads of a layer.
    """

    components: Sequence[str]
    values: Float[Tensor, "component pair"]
    n_heads: int

    @property
    def total(self) -> Float[Tensor, " pair"]:
        """The sum over components: the logit difference before a soft cap."""
        return self.values.sum(dim=0)

    def __getitem__(self, component: str) -> float:
        """The logits that one component adds, mean over pairs.

        Raises:
            ValueError: the model lacks the component.
        """
        if component not in self.components:
            raise ValueError(f"the model has no component {component!r}")
        return self.values[self.components.index(component)].mean().item()

    def to_pandas(self) -> pd.DataFrame:
        """One row per component: mean and standard deviation over pairs, in logits."""
        spread = self.values.std(dim=1, correction=0).tolist()
        means = self.values.mean(dim=1).tolist()
        return pd.DataFrame({"component": self.components, "logits": means, "std": spread})

    def _summary(self) -> pd.DataFrame:
        """The components with the largest attributions."""
        return self.to_pandas().sort_values("logits", key=abs, ascending=False).head(20)

    def __repr__(self) -> str:
        means = self.values.mean(dim=1)
        best = means.abs().argsort(descending=True, stable=True)[:3].tolist()
        listed = ", ".join(f"{self.components[i]} {means[i]:+.3g}" for i in best)
        return (
            f"LogitAttribution({self.total.mean():+.3g} logits over {self.values.shape[1]} pairs "
            f"from {len(self.components)} components: {listed}, ...)"
        )


@checked
@in_evaluation_mode
@torch.no_grad()
def attribute_logits(
    model: HookedModel, pairs: PromptPairs, *, batch_size: AtLeastOne = 32, progress: bool = True
) -> LogitAttribution:
    """Direct logit attribution: how much each component writes towards the answer.

        attribution[component] = norm_share(what it writes) . (W_U[answer] - W_U[wrong])

    on the clean prompts, at the position that is read. With the scale of the final norm held fixed,
    the logits (before a soft cap) are linear in the final residual stream, so input, heads, MLPs
    and biases add up to the logit difference. What a component does through later components does
    not count.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs whose answers have one token; without wrong answers, the logit of the
            answers is attributed.
        batch_size: prompt pairs per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the model is not the sum of its components, or cannot run the prompts, or an
            answer has several tokens.

    Reference: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021.
    """
    adapter = adapt(model)
    graph, names = adapter.graph, adapter.source_points()
    one_token = pairs.of_one_token("logits are attributed at one position: evaluate a circuit")
    batches = batches_of(adapter, one_token, batch_size)
    sources = [str(node) for node in graph.sources]
    biases = [f"a{layer}.b" for layer in range(graph.n_layers)]
    by_batch: list[Tensor] = []
    with tracked("attributing logits", len(batches), progress) as step:
        for batch in batches:
            check_sums_under_hooks(adapter, batch.clean)
            kept, final = record(adapter, batch.clean, names)
            read = batch.forced.read
            at_read = {name: kept[name][read][:, None] for name in names}
            written = source_outputs(adapter, at_read)
            b_O = torch.stack([adapter.b_O(layer) for layer in range(graph.n_layers)])
            b_O = b_O[:, None].expand(-1, len(batch), -1)
            parts = torch.cat([written[:, :, 0], b_O.to(written)])
            _check_sum(adapter, parts, final[read])
            values, bias = towards_answers(adapter, batch, parts, final[read])
            added = torch.cat([values, bias[None]])
            check_numbers(adapter, added)
            by_batch.append(added.cpu())
            step()
    values = torch.cat(by_batch, dim=1)
    row_of = {name: row for row, name in enumerate([*sources, *biases, "bias"])}
    components = [*sources, "bias"]
    for bias in biases:  # each after the last head of its layer
        last_head = bias.replace(".b", f".h{graph.n_heads - 1}")
        components.insert(components.index(last_head) + 1, bias)
    values = values[[row_of[name] for name in components]]
    return LogitAttribution(tuple(components), values, graph.n_heads, prompt_start=pairs.start)


def _check_sum(
    adapter: Adapter,
    parts: Float[Tensor, "part pair d_model"],
    residual: Float[Tensor, "pair d_model"],
) -> None:
    """Check that parts add up to the residual stream, and that no hook can edit what follows."""
    error = float((parts.sum(dim=0) - residual).abs().max())
    ends = [getattr(adapter.model, "ln_final", None), adapter.model.unembed]
    after = [module for end in ends if end is not None for module in end.modules()]
    if error > tolerance(residual.dtype) * float(residual.abs().max()) or any(map(hooked, after)):
        raise ValueError(
            f"components do not add up to the logit difference: a hook on {adapter.name!r} adds "
            f"something else (up to {error:.3g} in the residual stream), or can edit the final "
            "normalisation or the unembedding. Remove it first."
        )


def towards_answers(
    adapter: Adapter,
    batch: PromptPairs,
    parts: Float[Tensor, "part pair d_model"],
    residual: Float[Tensor, "pair d_model"],
) -> tuple[Float[Tensor, "part pair"], Float[Tensor, " pair"]]:
    """The logit difference that each part of the residual stream adds, and that of the biases.

    The whole residual stream sets the scale of the final norm.
    """
    weight, bias = adapter.unembedding()
    norm = adapter.final_norm
    (right, right_bias), (wrong, wrong_bias) = (
        _mean_unembedding(weight, bias, tokens) for tokens in (batch.answers, batch.wrong)
    )
    direction, of_biases = right - wrong, right_bias - wrong_bias
    shares = norm.share(parts.double(), residual.double())
    if norm.bias is not None:
        of_biases = of_biases + direction @ norm.bias.double()
    return (shares * direction).sum(dim=-1), of_biases


def _mean_unembedding(
    weight: Float[Tensor, "d_model vocab"],
    bias: Float[Tensor, " vocab"],
    tokens: Int[Tensor, "pair token"],
) -> tuple[Float[Tensor, "pair d_model"], Float[Tensor, " pair"]]:
    """The mean weights and biases of each row's tokens; 0 for a row without tokens."""
    shares = (tokens != NO_TOKEN).double()
    shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1)
    tokens = tokens.clamp(min=0)
    direction = torch.einsum("pt,ptd->pd", shares, weight.T[tokens].double())
    return direction, (shares * bias[tokens].double()).sum(dim=1)

"""Direct logit attribution: how much each component writes towards the answer.

    attribution[component] = norm_share(what it writes) . (W_U[answer] - W_U[wrong])

at the position that is read. With the scale of the final norm held fixed, logits before a soft cap
are linear in the final residual stream. Input, heads, MLPs and biases therefore add up to the logit
difference. What a component does through later components is not counted.

Reference: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl import ranks
from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data import PromptPairs
from sparse_tl.data.pairs import NO_TOKEN
from sparse_tl.gates import CircuitEdges
from sparse_tl.lens import (
    Adapter,
    HookedModel,
    Norm,
    adapt,
    check_numbers,
    hooked,
    in_evaluation_mode,
    record,
    source_outputs,
    tolerance,
)
from sparse_tl.progress import tracked
from sparse_tl.results import Result
from sparse_tl.scopes import autograd

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class LogitAttribution(Result):
    """What each component writes towards the answer, from `attribute_logits`.

    Args:
        components: "input"; heads ("a0.h1"), MLPs ("m0") and attention biases ("a0.b") by layer;
            and "bias", that of the final norm and the unembedding.
        values: logits that each component adds, per prompt pair; positive: towards the answer.
        n_heads: number of heads of a layer.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    components: Sequence[str]
    values: Float[Tensor, "component pair"]
    n_heads: int
    prompt_start: str | None = None

    @property
    def total(self) -> Float[Tensor, " pair"]:
        """The sum over components: the logit difference before a soft cap."""
        return self.values.sum(dim=0)

    def __getitem__(self, component: str) -> float:
        """The mean over pairs of one component.

        Raises:
            ValueError: the model lacks the component.
        """
        if component not in self.components:
            raise ValueError(
                f"expected one of {self.components[0]!r} to {self.components[-1]!r}; got "
                f"{component!r}"
            )
        return self.values[self.components.index(component)].mean().item()

    def to_pandas(self) -> pd.DataFrame:
        """One row per component: its mean and its standard deviation over pairs, in logits."""
        import pandas as pd

        spread = self.values.std(dim=1, correction=0).tolist()
        means = self.values.mean(dim=1).tolist()
        return pd.DataFrame({"component": self.components, "logits": means, "std": spread})

    def _summary(self) -> pd.DataFrame:
        """The components with the largest attributions."""
        found = self.to_pandas()
        return found.sort_values("logits", key=abs, ascending=False).head(20)

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
@autograd(False)
def attribute_logits(
    model: HookedModel, pairs: PromptPairs, *, batch_size: AtLeastOne = 32, progress: bool = True
) -> LogitAttribution:
    """Direct logit attribution of the clean prompts' logit difference, answers minus wrong.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs; without wrong answers, only the answers' logit is attributed.
        batch_size: prompt pairs per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the model is not the sum of its components, or cannot run the prompts.
    """
    adapter = adapt(model)
    graph, names = adapter.graph, adapter.source_points()
    runs = PairRuns(model, CircuitEdges(), pairs, "zero", batch_size, shared=True)
    sources = [str(node) for node in graph.sources]
    biases = [f"a{layer}.b" for layer in range(graph.n_layers)]
    found: list[Tensor] = []
    with tracked("attributing logits", len(runs), progress) as step:
        for batch, run in runs:
            kept, final = record(adapter, batch.clean, names)
            read = {name: kept[name][run.read][:, None] for name in names}
            written = source_outputs(adapter, read)
            constant = torch.stack([adapter.b_O(layer) for layer in range(graph.n_layers)])
            constant = constant[:, None].expand(-1, len(batch), -1)
            parts = torch.cat([written[:, :, 0], constant.to(written)])
            _check_sum(adapter, parts, final[run.read])
            values, rest = towards_answers(adapter, batch, parts, final[run.read])
            added = torch.cat([values, rest[None]])
            check_numbers(adapter, added)
            found.append(added.cpu())
            step()
    values = torch.cat(ranks.in_order(found), dim=1)
    order = {name: place for place, name in enumerate([*sources, *biases, "bias"])}
    last = f".h{graph.n_heads - 1}"
    components = []
    for name in sources:
        components += [name, f"{name.removesuffix(last)}.b"] if name.endswith(last) else [name]
    components.append("bias")
    values = values[[order[name] for name in components]]
    return LogitAttribution(tuple(components), values, graph.n_heads, pairs.start)


def _check_sum(
    adapter: Adapter,
    parts: Float[Tensor, "part pair d_model"],
    residual: Float[Tensor, "pair d_model"],
) -> None:
    """Check that parts add up to the residual stream, and that no hook may edit what follows."""
    off = float((parts.sum(dim=0) - residual).abs().max())
    ends = [getattr(adapter.model, "ln_final", None), adapter.model.unembed]
    after = [part for end in ends if end is not None for part in end.modules()]
    if off > tolerance(residual.dtype) * float(residual.abs().max()) or any(map(hooked, after)):
        raise ValueError(
            "expected components that add up to the logit difference; a hook on "
            f"{adapter.name!r} adds something else (up to {off:.3g} in the residual stream), or "
            "may edit the final normalisation or the unembedding: remove it first"
        )


def towards_answers(
    adapter: Adapter,
    batch: PromptPairs,
    parts: Float[Tensor, "part pair d_model"],
    residual: Float[Tensor, "pair d_model"],
) -> tuple[Float[Tensor, "part pair"], Float[Tensor, " pair"]]:
    """The logit difference that each part of the residual stream adds, and that of the biases."""
    weight, bias = adapter.unembedding()
    norm = adapter.norms().get("ln_final", Norm(None, None, None, 0.0))
    directions, constant = zip(
        *(_mean(weight, bias, tokens) for tokens in (batch.answers, batch.wrong)), strict=True
    )
    direction = directions[0] - directions[1]
    shares = norm.share(parts.double(), residual.double())
    values = (shares * direction).sum(dim=-1)
    rest = constant[0] - constant[1]
    if norm.bias is not None:
        rest = rest + direction @ norm.bias.double()
    return values, rest


def _mean(
    weight: Float[Tensor, "d_model vocab"],
    bias: Float[Tensor, " vocab"],
    tokens: Int[Tensor, "pair token"],
) -> tuple[Float[Tensor, "pair d_model"], Float[Tensor, " pair"]]:
    """The mean unembedding of each row's tokens; 0 for a row without."""
    given = (tokens != NO_TOKEN).double()
    given = given / given.sum(dim=1, keepdim=True).clamp(min=1)
    tokens = tokens.clamp(min=0)
    direction = torch.einsum("pt,ptd->pd", given, weight.T[tokens].double())
    return direction, (given * bias[tokens].double()).sum(dim=1)

"""The attribution graph of one prompt: how its tokens, heads and neurons make a logit.

The model is *linearised* at the prompt: attention patterns, gates and the scales of norms are held
fixed, and each MLP neuron is a multiple of what enters its activation function (the rules of RelP,
`sparse_tl.backend.relevance`). In the linearised model every node is a sum over the nodes before
it,

    a_t = sum_s w_st + constant_t,      w_st = u_s . g_t,

where u_s is what node s adds to the residual stream at a position, and g_t the gradient of node t
with respect to the stream that it reads there. Nodes are

- the *embedding* of a token, at its position;
- an *attention edge*, ``a5.h2@7<-3``: head 2 of layer 5 moves something from position 3 to 7. On a
  sparse model, these are the few open edges;
- a *neuron* of an MLP at a position, ``m10.n533@7``; or, with transcoders, a *feature*,
  ``m10.f533@7``, and the *error* of what the features of a layer do not explain, ``m10.error@7``;
- the *target*: a logit, a difference of two, or the mean of the most likely ones.

Weights are given as *flow*: ``w_st`` times the derivative of the target with respect to node t, in
logits. What flows into a node flows out of it, so the flow of a node is its total effect on the
target in the linearised model. An attention edge carries a vector; its inputs are measured along
the direction in which the target depends on it.

A graph keeps the nodes with the largest absolute flow. Influence is that of circuit-tracer: the
share of the absolute flow into the target that comes from a node over all paths within the graph.
With A the absolute flows, divided by the sum of all absolute flows into a node, from whatever node
of the model, it is ``(A + A^2 + ...)`` from the node to the target; biases are no inputs.

A graph says what is moved and computed, given where each head attends. Why it attends there,
through its queries and keys, is no part of it; `graph_effect` measures what that leaves out.

References: Ameisen et al., *Circuit Tracing* (2025); RelP, arXiv 2508.21258; neurons as nodes,
arXiv 2601.22594.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.circuits.prompt.linearised import Linearised
from sparse_tl.circuits.prompt.tokens import (
    Prompt,
    Token,
    output_number,
    output_text,
    prompt_tokens,
    read_out,
    text_around,
    token_texts,
)
from sparse_tl.circuits.prompt.transcoders import Basis, transcoders_of
from sparse_tl.contexts import autograd
from sparse_tl.results import Result

_NAMES = {
    "embedding": "embedding@{position}",
    "attention edge": "a{layer}.h{index}@{position}<-{source}",
    "neuron": "m{layer}.n{index}@{position}",
    "feature": "m{layer}.f{index}@{position}",
    "error": "m{layer}.error@{position}",
    "target": "target",
}


@dataclass(frozen=True, eq=False)
class AttributionGraph(Result):
    """How a prompt's tokens, attention edges and neurons make a logit; see this module.

    Args:
        prompt: text of the prompt.
        tokens: text of each token.
        token_ids: number of each token.
        target: what the graph explains, such as ``"Mary"`` or ``"Mary" - "John"``.
        answers: numbers of the target's tokens.
        weights: weight of each in the target: their sum is 1, and the mean logit is subtracted; or
            1 and -1 for a difference.
        value: value of the target, in logits.
        nodes: one row per node, in the order of the model: its ``name`` and ``kind``, ``layer``,
            ``index`` (of the head, neuron or feature), ``position`` and ``source`` (the position
            that an attention edge reads; otherwise its own), ``activation`` (the pattern's value of
            an edge; the norm of an embedding or error), ``flow``, ``influence``, ``inputs`` (the
            sum of absolute flows into it), what of its flow comes from no node: ``constant``
            (biases) and ``left_out``, all in logits; and the tokens whose logits it directly
            raises and lowers most, ``promotes`` and ``suppresses``; after `with_examples` also
            ``examples``, after `with_labels` ``label`` and ``group``.
        links: one row per pair of nodes: ``source`` and ``target``, rows of `nodes`, and ``flow``.
    """

    prompt: str
    tokens: Sequence[str]
    token_ids: Sequence[int]
    target: str
    answers: Sequence[int]
    weights: Sequence[float]
    value: float
    nodes: pd.DataFrame
    links: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """The nodes by decreasing absolute flow."""
        by_flow = self.nodes.sort_values("flow", key=abs, ascending=False, kind="stable")
        return by_flow.reset_index(drop=True)

    @checked
    def with_labels(
        self, labels: Mapping[str, str], groups: Mapping[str, Sequence[str]] | None = None
    ) -> AttributionGraph:
        """The graph with your names for nodes, and for groups of them; earlier ones stay.

        They are saved with the graph, shown in its figure, where each group is a supernode, and
        exported by `to_circuit_tracer`.

        Args:
            labels: the label of each node, by its name.
            groups: the names of the nodes in each group; a node is in one at most.

        Raises:
            ValueError: the graph has no such node.
        """
        members = {node: name for name, nodes in (groups or {}).items() for node in nodes}
        if unknown := (labels.keys() | members.keys()) - set(self.nodes["name"]):
            raise ValueError(f"the graph has no node {', '.join(sorted(unknown))}")
        nodes = self.nodes.copy()
        for column, given in ("label", labels), ("group", members):
            before = nodes[column] if column in nodes else [""] * len(nodes)
            named = zip(nodes["name"], before, strict=True)
            nodes[column] = [given.get(name, old) for name, old in named]
        return replace(self, nodes=nodes)

    @property
    def groups(self) -> dict[str, list[str]]:
        """The names of the nodes in each group of `with_labels`."""
        if "group" not in self.nodes:
            return {}
        grouped = self.nodes[self.nodes["group"] != ""].groupby("group", sort=False)["name"]
        return {str(name): list(members) for name, members in grouped}

    @property
    def replacement_score(self) -> float:
        """The share of the target's influence that comes from tokens, through nodes of the graph.

        As ``compute_graph_scores`` of circuit-tracer does, where all that is left out counts as
        errors, from which the rest comes.
        """
        return self._beside_errors(self.nodes["kind"] == "embedding")

    @property
    def completeness_score(self) -> float:
        """The share of the flow into nodes, weighted by their influence, that the graph explains.

        As circuit-tracer's, too; errors have no inputs to explain.
        """
        return self._beside_errors(self.nodes["kind"] != "error")

    def _beside_errors(self, some: pd.Series) -> float:
        """The share of some nodes' influence in theirs and that of errors and what is left out.

        Each node passes its influence on to its inputs, so the latter is what does not come from
        nodes without any.
        """
        influence, inputs, kinds = (self.nodes[name] for name in ("influence", "inputs", "kind"))
        errors = max(0.0, 1 - influence[(inputs == 0) & (kinds != "error")].sum())
        return float(influence[some].sum() / (influence[some].sum() + errors))

    def __repr__(self) -> str:
        size = f"{len(self.nodes):,} nodes, {len(self.links):,} links"
        return f"AttributionGraph({self.target} {self.value:+.3f} logits: {size})"


@checked
@in_evaluation_mode
@autograd(True)
def attribution_graph(
    model: HookedModel,
    prompt: Prompt,
    *,
    target: Token | tuple[Token, Token] | None = None,
    top: AtLeastOne = 1,
    basis: Basis = "neurons",
    max_nodes: AtLeastOne = 300,
) -> AttributionGraph:
    """The nodes and links that make a logit, strongest first.

    Args:
        model: dense or sparse model; left unchanged.
        prompt: text or tokens; the logits are read at its end.
        target: token whose logit is explained, above the mean logit; by default the prediction. Of
            two tokens, the difference of their logits.
        top: without a target, the number of most likely tokens whose logits are explained together,
            weighted by their probabilities.
        basis: what MLPs are a sum of: neurons, or the features of `load_transcoders`.
        max_nodes: maximum number of nodes, besides embeddings and the target.

    Raises:
        ValueError: the model's parts do not add up to its logits, or have no linear rule; the
            prompt cannot be run, a target is not one token, or the transcoders do not fit.
    """
    tokens, adapter = prompt_tokens(model, prompt), adapt(model)
    run = Linearised(adapter, tokens, transcoders_of(basis, adapter))
    if target is None:
        logits = adapter.logits(run.final.detach()[None, None])[0, 0].detach()
        likely = logits.float().softmax(dim=-1).topk(min(top, adapter.d_vocab_out))
        answers = likely.indices.tolist()
        weights = (likely.values / likely.values.sum()).tolist()
    else:
        given = target if isinstance(target, tuple) else (target,)
        answers = [output_number(model, token, tokens) for token in given]
        if len(answers) > len(set(answers)):
            raise ValueError(f"the target {target} is the difference of a token and itself")
        weights = [1.0, -1.0][: len(given)]
    value = run.explain(answers, weights)
    names = [f'"{output_text(model, number, tokens)}"' for number in answers]
    nodes, links, added = run.nodes(max_nodes)
    nodes["influence"] = _influence(nodes, links)
    rows: list[Any] = nodes.to_dict("records")
    nodes.insert(0, "name", [_NAMES[row["kind"]].format(**row) for row in rows])
    promoted, suppressed = read_out(model, added, run.final.detach()[None])
    for column, texts in ("promotes", promoted), ("suppresses", suppressed):
        nodes[column] = [*texts[:-1], []]  # the target writes nothing
    name = (" - " if sum(weights) == 0 else ", ").join(names)
    written = "".join(text_around(model, tokens, 0)), token_texts(model, tokens), tokens.tolist()
    return AttributionGraph(*written, name, answers, weights, value, nodes, links)


def _influence(nodes: pd.DataFrame, links: pd.DataFrame) -> list[float]:
    """The share of the flow into the target that comes from each node, by all paths of links."""
    inputs, influence = nodes["inputs"].tolist(), [0.0] * len(nodes)
    influence[-1] = 1.0
    last_first = links.sort_values("target", ascending=False, kind="stable")
    for source, target, flow in last_first.itertuples(index=False):
        influence[source] += influence[target] * abs(flow) / inputs[target]
    return influence

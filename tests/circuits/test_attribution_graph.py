"""Attribution graphs, against a model that is linearised by hand, and by laws of conservation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, plain_transformer
from torch import Tensor

from sparse_tl import to_circuit_tracer
from sparse_tl.backend import adapt, boot
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph, attribution_graph
from sparse_tl.circuits.prompt.examples import find_examples, with_examples
from sparse_tl.circuits.prompt.graph_checks import check_graph, graph_effect, scale_nodes
from sparse_tl.zoo import load_addition_models

pytestmark = pytest.mark.usefixtures("double_precision")

TOKENS = torch.tensor([1, 7, 3, 9, 7])
ALL = 10**5
LINEAR = ("gpt2", "llama", "gemma2", "gpt_neox", "olmo2")

Edit = Callable[[Tensor], Tensor | None]


class FrozenModel:
    """A model whose patterns, norms and activation functions are those of one prompt, by hooks."""

    def __init__(self, model: Any, graph: AttributionGraph) -> None:
        self.model, self.answer = model, graph
        self.at: dict[str, Tensor] = {}
        names = [name for name in model.hook_dict if ".mlp.hook_" in name or ".attn.hook_" in name]
        logits, cache = model.run_with_cache(TOKENS[None])
        self.at = {name: cache[name] for name in names if name in cache}
        self.first = int(logits[0, -1].argmax())
        self.norms = _norms_of(model)

    def target(self, edits: dict[str, Edit]) -> float:
        """The logit of the prediction minus the mean, with some activations edited."""
        hooks = [(name, _as_hook(self._frozen(name, edits.get(name)))) for name in self.at]
        with _frozen_norms(self.model, self.norms):
            logits = self.model.run_with_hooks(TOKENS[None], fwd_hooks=hooks)[0, -1]
        cap = self.model.cfg.output_logits_soft_cap
        if cap and cap > 0:
            logits = cap * torch.atanh(logits / cap)
        return (logits[self.first] - logits.mean()).item()

    def _frozen(self, name: str, edit: Edit | None) -> Edit:
        block, _, point = name.rpartition(".")
        seen = self.__dict__.setdefault("seen", {})

        def run(value: Tensor) -> Tensor | None:
            seen[name] = value
            if point == "hook_pattern":
                value = self.at[name]
            if point == "hook_post":
                factors = [
                    f"{block}.{factor}"
                    for factor in ("hook_pre", "hook_pre_linear")
                    if f"{block}.{factor}" in self.at
                ]
                parts = [self.at[name] / self.at[f] * seen[f] for f in factors]
                value = torch.stack(parts).mean(dim=0)
            return value if edit is None else edit(value)

        return run


def _norms_of(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """What each norm of the stream reads and gives on the prompt."""
    before: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda m, args, kwargs, out: before.__setitem__(name, (_given(args, kwargs), out))

    handles = [
        attrgetter(name)(model).register_forward_hook(keep(name), with_kwargs=True)
        for name in adapt(model).norms()
    ]
    model(TOKENS[None])
    for handle in handles:
        handle.remove()
    return before


@contextmanager
def _frozen_norms(model: Any, before: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Each norm of the stream is linear in its input, around the input of the prompt."""

    def linear(name: str, norm: Any) -> Any:
        def run(_module: Any, args: Any, kwargs: Any, _out: Tensor) -> Tensor:
            x, y = before[name]
            change = _given(args, kwargs) - x
            if norm.kind == "layer":
                x = x - x.mean(dim=-1, keepdim=True)
                change = change - change.mean(dim=-1, keepdim=True)
            scale = (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
            return y + norm.weight * change / scale

        return run

    handles = [
        attrgetter(name)(model).register_forward_hook(linear(name, norm), with_kwargs=True)
        for name, norm in adapt(model).norms().items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _given(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _as_hook(edit: Edit) -> Any:
    return lambda value, hook: edit(value)


def _without(node: dict[str, Any]) -> tuple[str, Edit]:
    """The hook point where a node acts, and an edit that removes it there."""
    layer, index, position = node["layer"], node["index"], node["position"]

    def edit(value: Tensor) -> Tensor:
        value = value.clone()
        if node["kind"] == "neuron":
            value[0, position, index] = 0
        else:
            value[0, index, position, node["source"]] = 0
        return value

    kind = "mlp.hook_post" if node["kind"] == "neuron" else "attn.hook_pattern"
    return f"blocks.{layer}.{kind}", edit


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.every_case
def test_the_flow_of_a_node_is_its_effect_in_the_frozen_model(name: str) -> None:
    model = boot(plain_transformer(name, "float64"))
    graph = attribution_graph(model, TOKENS, max_nodes=ALL)
    conserves(graph)
    if name == "llama":  # which has no biases
        assert (graph.nodes["constant"].abs() < 1e-9).all()
    if name == "gpt2":
        assert (graph.nodes["constant"].abs() > 1e-6).any()
    frozen = FrozenModel(model, graph)
    assert frozen.target({}) == pytest.approx(graph.value, rel=1e-9)
    nodes = graph.nodes[graph.nodes["kind"].isin(["neuron", "attention edge"])]
    for node in nodes.sample(10, random_state=0).to_dict("records"):
        lost = graph.value - frozen.target(dict([_without(node)]))
        assert lost == pytest.approx(node["flow"], rel=1e-6, abs=1e-9), node["name"]


def conserves(graph: AttributionGraph) -> None:
    """Check that all flow into each node leaves it, and that nothing is left out."""
    nodes, links = graph.nodes, graph.links
    into = links.groupby("target")["flow"].sum().reindex(nodes.index, fill_value=0.0)
    out = links.groupby("source")["flow"].sum().reindex(nodes.index, fill_value=0.0)
    inner = ~nodes["kind"].isin(["embedding", "error"])
    assert (nodes["left_out"].abs() < 1e-9).all()
    absolute = links.assign(flow=links["flow"].abs()).groupby("target")["flow"].sum()
    assert absolute.reindex(nodes.index, fill_value=0.0).tolist() == pytest.approx(
        nodes["inputs"].tolist(), rel=1e-6, abs=1e-9
    )
    assert torch.allclose(
        *(torch.tensor(x[inner].to_numpy()) for x in (into + nodes["constant"], nodes["flow"]))
    )
    writing = nodes["kind"] != "target"
    assert torch.allclose(*(torch.tensor(x[writing].to_numpy()) for x in (out, nodes["flow"])))
    assert bool((links["source"] < links["target"]).all())
    assert nodes["influence"].iloc[-1] == 1.0 and bool((nodes["influence"] <= 1 + 1e-9).all())


def test_few_nodes_say_what_they_leave_out() -> None:
    model = boot(plain_transformer("llama", "float64"))
    whole = attribution_graph(model, TOKENS, max_nodes=ALL)
    few = attribution_graph(model, TOKENS, max_nodes=30)
    assert len(few.nodes) == 30 + len(TOKENS) + 1
    assert set(few.nodes["name"]) <= set(whole.nodes["name"])
    same = whole.nodes.set_index("name").loc[few.nodes["name"]]
    assert few.nodes["flow"].tolist() == pytest.approx(same["flow"].tolist())
    into = few.links.groupby("target")["flow"].sum().reindex(few.nodes.index, fill_value=0.0)
    inner = few.nodes[few.nodes["kind"] != "embedding"]
    total = into.loc[inner.index] + inner["constant"] + inner["left_out"]
    assert total.tolist() == pytest.approx(inner["flow"].tolist())
    assert few.value == pytest.approx(whole.value)
    assert few.nodes["inputs"].tolist() == pytest.approx(same["inputs"].tolist())
    assert (few.nodes["influence"].to_numpy() <= same["influence"].to_numpy() + 1e-9).all()
    assert (whole.replacement_score, whole.completeness_score) == pytest.approx((1.0, 1.0))
    assert (few.replacement_score, few.completeness_score) == pytest.approx(_scores_by_hand(few))


def _scores_by_hand(graph: AttributionGraph) -> tuple[float, float]:
    """``compute_graph_scores`` of circuit-tracer, where one more node has all that is left out."""
    n = len(graph.nodes)
    matrix = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    for source, target, flow in graph.links.itertuples(index=False):
        matrix[target, source] = abs(flow)
    inputs = torch.tensor(graph.nodes["inputs"].to_numpy())
    matrix[:n, n] = inputs - matrix[:n, :n].sum(dim=1)
    matrix = matrix / matrix.sum(dim=1, keepdim=True).clamp(min=1e-10)
    logits = torch.zeros(n + 1, dtype=torch.float64)
    logits[n - 1] = 1.0
    influence = logits @ (torch.linalg.inv(torch.eye(n + 1, dtype=torch.float64) - matrix)) - logits
    tokens = torch.tensor((graph.nodes["kind"] == "embedding").to_numpy())
    from_tokens = influence[:n][tokens].sum()
    known, weight = 1 - matrix[:, n], influence + logits
    replacement = from_tokens / (from_tokens + influence[n])
    return replacement.item(), ((known * weight).sum() / weight.sum()).item()


def test_two_tokens() -> None:
    model = boot(plain_transformer("llama", "float64"))
    one, other = (
        attribution_graph(model, TOKENS[:3], target=target, max_nodes=ALL)
        for target in ((5, 4), (4, 5))
    )
    logits = model(TOKENS[None])[0, 2]
    assert one.value == pytest.approx((logits[5] - logits[4]).item())
    assert other.value == pytest.approx(-one.value)
    assert len(one.tokens) == 3
    assert one.nodes["position"].max() == 2


def test_models_without_a_linear_rule_are_refused() -> None:
    assert "mixtral" in ARCHITECTURES
    with pytest.raises(ValueError, match="relp|neurons"):
        attribution_graph(boot(plain_transformer("mixtral", "float64")), TOKENS)


def test_what_cannot_be_explained_is_refused_in_a_sentence() -> None:
    model = boot(plain_transformer("llama", "float64"))
    everything = attribution_graph(model, TOKENS[:1], top=10**6)  # one token, and all outputs
    assert sum(everything.weights) == pytest.approx(1) and everything.nodes["position"].max() == 0
    with pytest.raises(ValueError, match="no text"):
        find_examples(model, [])
    with torch.no_grad():
        next(iter(model.parameters())).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        attribution_graph(model, TOKENS)


def test_a_check_removes_one_node_at_a_time() -> None:
    model = boot(plain_transformer("llama", "float64"))
    graph = attribution_graph(model, TOKENS, max_nodes=ALL)
    check, by_name = check_graph(model, graph, n=15), graph.nodes.set_index("name", drop=False)

    def value(*hooks: Any) -> float:
        logits = model.run_with_hooks(TOKENS[None], fwd_hooks=list(hooks))[0, -1]
        return (logits[graph.answers[0]] - logits.mean()).item()

    whole = value()
    for row in check.nodes.to_dict("records"):
        point, edit = _without(by_name.loc[row["name"]].to_dict())
        assert row["exact"] == pytest.approx(value((point, _as_hook(edit))) - whole)
        assert row["predicted"] == -by_name.loc[row["name"], "flow"]
    assert check.nodes["predicted"].abs().is_monotonic_decreasing
    assert -1 <= check.correlation <= 1 and len(check.misses) < 15


def test_the_effect_of_a_graph_is_that_of_what_is_kept() -> None:
    model = boot(plain_transformer("gemma2", "float64"))
    graph, corrupted = attribution_graph(model, TOKENS, max_nodes=ALL), TOKENS.flip(0)
    assert graph_effect(model, graph, corrupted) == pytest.approx(
        _effect_by_hand(model, graph, corrupted, ["attention edge", "neuron"])
    )
    few = replace(graph, nodes=graph.nodes[graph.nodes["kind"] == "neuron"])
    found = graph_effect(model, few, corrupted)
    assert found == pytest.approx(_effect_by_hand(model, few, corrupted, ["neuron"]))
    edges = replace(graph, nodes=graph.nodes[graph.nodes["kind"] == "attention edge"])
    frozen = graph_effect(model, edges, corrupted, patterns="prompt")
    assert frozen == pytest.approx(_effect_by_hand(model, edges, corrupted, ["pattern"]))
    assert frozen != pytest.approx(graph_effect(model, edges, corrupted))
    with pytest.raises(ValueError, match="same length"):
        graph_effect(model, graph, TOKENS[:2])
    with pytest.raises(ValueError, match="no effect"):
        graph_effect(model, graph, TOKENS)


def test_nodes_are_scaled_all_at_once() -> None:
    model = boot(plain_transformer("llama", "float64"))
    graph = attribution_graph(model, TOKENS, max_nodes=40)
    nodes = graph.to_pandas().query("kind in ('neuron', 'attention edge')")
    nodes = nodes.drop_duplicates(["kind", "layer"])
    factors = {name: 0.5 * row for row, name in enumerate(nodes["name"])}

    def scaled(row: dict[str, Any], factor: float) -> tuple[str, Any]:
        point, edit = _without(row)
        return point, lambda value, hook: factor * value + (1 - factor) * edit(value)

    rows = zip(nodes.to_dict("records"), factors.values(), strict=True)
    logits = [
        model.run_with_hooks(TOKENS[None], fwd_hooks=hooks)[0, -1]
        for hooks in ([], [scaled(row, factor) for row, factor in rows])
    ]
    expected = [(each[graph.answers[0]] - each.mean()).item() for each in logits]
    assert scale_nodes(model, graph, factors) == pytest.approx(expected)
    for name in ("target", "embedding@0", "m0.n0@99"):
        with pytest.raises(ValueError, match="no node .* to scale"):
            scale_nodes(model, graph, {name: 0.0})


def test_a_graph_of_another_model_is_refused() -> None:
    """Of the same sizes: a dense model beside its sparse version."""
    model, other = (boot(plain_transformer("llama", "float64")) for _ in range(2))
    graph = attribution_graph(model, TOKENS, max_nodes=20)
    with torch.no_grad():
        other.unembed.W_U.mul_(1.01)
    name = next(name for name in graph.nodes["name"] if name.startswith("m0."))
    for check in (
        lambda: check_graph(other, graph),
        lambda: scale_nodes(other, graph, {name: 0.0}),
        lambda: graph_effect(other, graph, TOKENS.flip(0)),
    ):
        with pytest.raises(ValueError, match="pass the model"):
            check()


def test_labels_are_kept_and_exported(tmp_path: Path) -> None:
    graph = attribution_graph(boot(plain_transformer("llama", "float64")), TOKENS, max_nodes=20)
    names = graph.nodes["name"].tolist()[6:10]
    named = graph.with_labels({names[0]: "first"}).with_labels(
        {names[1]: "second"}, {"pair": names[2:]}
    )
    loaded = AttributionGraph.load(named.save(tmp_path / "graph"))
    labels = loaded.nodes.set_index("name")["label"]
    assert labels[labels != ""].to_dict() == {names[0]: "first", names[1]: "second"}
    assert loaded.groups == {"pair": names[2:]} and graph.groups == {}
    viewed = to_circuit_tracer(loaded)
    assert [node["clerp"] for node in viewed["nodes"]][6:8] == ["first", "second"]
    ids = [node["node_id"] for node in viewed["nodes"]]
    assert viewed["qParams"]["supernodes"] == [["pair", ids[8], ids[9]]]
    with pytest.raises(ValueError, match=r"no node m9\.n0@0"):
        graph.with_labels({"m9.n0@0": "none"})


def _effect_by_hand(model: Any, graph: AttributionGraph, corrupted: Tensor, kinds: Any) -> float:
    """The MLPs' neurons, neurons and heads, or patterns of the prompt, as are the embeddings."""

    def value(tokens: Tensor, edits: dict[str, Tensor]) -> float:
        hooks = [(name, lambda _, hook, to=to: to) for name, to in edits.items()]
        logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)[0, -1]
        return (logits[graph.answers[0]] - logits.mean()).item()

    _, cache = model.run_with_cache(corrupted[None])
    low, high = value(corrupted, {}), value(TOKENS, {})
    ends = [f"blocks.{n}.attn.hook_z" for n in range(model.cfg.n_layers)]
    edits = {} if "attention edge" in kinds else {name: cache[name] for name in ends}
    if kinds == ["pattern"]:
        _, own = model.run_with_cache(TOKENS[None])
        edits = {name: own[name] for name in own if name.endswith("hook_pattern")}
        edits |= {name: cache[name] for name in cache if name.endswith("mlp.hook_post")}
    return (value(TOKENS, edits) - low) / (high - low)


def test_of_a_long_text_the_beginning_is_read() -> None:
    model = boot(plain_transformer("llama", "float64"))
    text = torch.arange(2 * model.cfg.n_ctx) % model.cfg.d_vocab
    whole, cut = (find_examples(model, [x], progress=False) for x in (text, text[: len(text) // 2]))
    assert all(map(torch.equal, whole.values, cut.values))


def test_examples_are_where_a_neuron_is_most_active() -> None:
    model, _ = load_addition_models()
    graph = attribution_graph(model, "36+28=", max_nodes=40)
    texts = [f"{a}+{b}=" for a in (12, 57, 98) for b in (3, 46)]
    examples = find_examples(model, texts, n=2, progress=False)
    found = with_examples(model, graph, examples)
    neurons = found.nodes[found.nodes["kind"] == "neuron"]
    assert len(neurons) and not any(found.nodes["examples"][found.nodes["kind"] == "embedding"])
    caches = [model.run_with_cache(text)[1] for text in texts]
    for row in neurons.to_dict("records"):
        name, sign = f"blocks.{row['layer']}.mlp.hook_post", 1 if row["activation"] >= 0 else -1
        values = [(sign * cache[name][0, :, row["index"]]).max().item() for cache in caches]
        shown = [sign * value for *_, value in row["examples"]]
        assert shown == pytest.approx(sorted(values, reverse=True)[:2], rel=1e-4, abs=1e-5)
        assert all("".join(parts) in texts for *parts, _ in row["examples"])

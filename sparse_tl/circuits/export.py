"""Scores and circuits in the formats of other tools: EAP-IG, MIB's track, circuit-tracer's viewer.

In the graph JSON of EAP-IG, which submissions to MIB also have, every query head has its own edges
into k and v. An edge into a key-value head is written as one edge for each head of its group, all
kept or none, each with an equal share of the score. Reading joins them again.

The graph JSON that circuit-tracer's viewer and Neuronpedia read describes features of transcoders;
here each node is a component. The input is an "embedding", the logits are a "logit", and heads and
MLPs are "cross layer transcoder" features, whose ``clerp``, the text that the viewer shows, is the
component's name. Because the viewer's layers are numbers, the heads and the MLP of a layer share a
row. Columns are positions. Checked in the viewer of circuit-tracer 0.5.0, which shows no example
texts for components.

Reference: github.com/hannamw/EAP-IG; Mueller et al., arXiv 2504.13151 (MIB), and
``evaluate_area_under_curve`` in github.com/hannamw/MIB-circuit-track; ``circuit_tracer/frontend``
of github.com/safety-research/circuit-tracer, schema version 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import HookedModel
from sparse_tl.circuits.circuit import Circuit, Scores
from sparse_tl.circuits.evaluation import Evaluation, evaluate
from sparse_tl.circuits.paths import PositionedNode, path_graph
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitGraph, Destination, PositionedGraph
from sparse_tl.metrics import Metric
from sparse_tl.results import Result
from sparse_tl.storage.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    recover_folder,
    write_json,
)

MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Maximum shares of all circuit edges that MIB's circuits keep."""
_IMPORTANCES = "importances.json"
_FEATURE = "cross layer transcoder"


# ---- EAP-IG --------------------------------------------------------------------------------------


@checked
def to_eap_ig(scores: Scores, circuit: Circuit, d_model: AtLeastOne) -> dict[str, Any]:
    """Scores and circuit as the JSON of EAP-IG's ``Graph.to_json``; scores keep their sign.

    Args:
        scores: scores of every edge.
        circuit: edges that are kept.
        d_model: residual stream width of the model, required by EAP-IG's loader.

    Raises:
        ValueError: the model has no MLPs, which the format requires, or the scores are of other
            edges than the circuit.
    """
    graph = circuit.graph
    if scores.grid != graph:
        raise ValueError(f"the scores are of {scores.grid!r}, the circuit of {graph!r}")
    if not graph.has_mlps:
        raise ValueError(f"the format requires a model with MLPs; {graph!r} has none")
    ungrouped = _ungrouped(graph)
    column_of, share = _columns(graph, ungrouped)
    rows, columns = (circuit.mask.any(dim=axis).nonzero()[:, 0].tolist() for axis in (1, 0))
    in_graph = {graph.sources[row] for row in rows}
    for column in columns:
        in_graph.update(graph.readers_of(graph.destinations[column]))
    kept = circuit.mask.cpu()[:, column_of][ungrouped.exists].tolist()
    values = (scores.mean().cpu().double()[:, column_of] * share)[ungrouped.exists].tolist()
    named = zip(ungrouped.names(ungrouped.places), kept, values, strict=True)
    return {
        "cfg": {
            "n_layers": graph.n_layers,
            "n_heads": graph.n_heads,
            "d_model": d_model,
            "parallel_attn_mlp": graph.parallel,
        },
        "nodes": {str(node): {"in_graph": node in in_graph} for node in graph.nodes},
        "edges": {name: {"in_graph": is_in, "score": value} for name, is_in, value in named},
    }


@checked
def from_eap_ig(
    content: Mapping[str, Any], graph: CircuitGraph | None = None
) -> tuple[Scores, Circuit]:
    """Scores and circuit from the JSON of EAP-IG's ``Graph.to_json``.

    Args:
        content: the JSON.
        graph: the model's graph; required for grouped-query attention, which the JSON omits.

    Raises:
        ValueError: an edge does not exist, the sizes are not those of `graph`, or heads that share
            a key-value head keep different edges.
    """
    cfg, edges = content["cfg"], content["edges"]
    ungrouped = CircuitGraph(
        cfg["n_layers"], cfg["n_heads"], cfg["n_heads"], parallel=cfg["parallel_attn_mlp"]
    )
    graph = ungrouped if graph is None else graph
    if _ungrouped(graph) != ungrouped:
        raise ValueError(f"these are the edges of {ungrouped!r}, not of {graph!r}")
    numbers = {name: number for number, name in enumerate(ungrouped.names(ungrouped.places))}
    for name in edges.keys() - numbers.keys():
        ungrouped.index(name)  # raises, and says why
    places = tuple(ungrouped.places[[numbers[name] for name in edges]].T)
    scores = torch.zeros(ungrouped.exists.shape, dtype=torch.float64)
    values = [edge.get("score", 0.0) for edge in edges.values()]
    scores[places] = torch.tensor(values, dtype=torch.float64)
    mask = torch.zeros_like(ungrouped.exists)
    mask[places] = torch.tensor([edge["in_graph"] for edge in edges.values()], dtype=torch.bool)
    column_of, _ = _columns(graph, ungrouped)
    grouped = torch.zeros(graph.exists.shape, dtype=torch.float64).index_add(1, column_of, scores)
    grouped_mask = torch.zeros(graph.exists.shape).index_add(1, column_of, mask.float()) > 0
    if not torch.equal(grouped_mask[:, column_of], mask):
        raise ValueError("the heads that share a key-value head do not keep the same edges")
    return Scores(graph, grouped, "imported"), Circuit(graph, grouped_mask)


def _ungrouped(graph: CircuitGraph) -> CircuitGraph:
    """The graph in which every query head has its own edges into k and v."""
    return replace(graph, n_kv_heads=graph.n_heads, coupled=False)


def _columns(
    graph: CircuitGraph, ungrouped: CircuitGraph
) -> tuple[Int[Tensor, " column"], Float[Tensor, " column"]]:
    """For each column of `ungrouped`, the column of `graph`, and the share of its score."""
    column_at = {
        Destination(reader, to.slot): column
        for column, to in enumerate(graph.destinations)
        for reader in graph.readers_of(to)
    }
    column_of = torch.tensor([column_at[to] for to in ungrouped.destinations])
    return column_of, 1 / column_of.bincount()[column_of]


# ---- MIB -----------------------------------------------------------------------------------------


@checked
def save_mib(scores: Scores, folder: str | Path, d_model: AtLeastOne) -> Path:
    """Write a folder of a submission to MIB's circuit localization track, and return its path.

    It holds ``importances.json``, from which MIB takes circuits of its sizes. The sign is the
    opposite of that of `Scores`: a positive importance helps.

    Args:
        scores: scores of circuit edges.
        folder: folder named by task and model, such as ``submission/ioi_gpt2``; the leaderboard
            skips other names. It is written completely or not at all.
        d_model: residual stream width of the model.

    Raises:
        ValueError: the model has no MLPs, or the folder holds other files.

    Reference: arXiv 2504.13151 and github.com/hannamw/MIB-circuit-track.
    """
    folder = Path(folder)
    content = to_eap_ig(replace(scores, values=-scores.mean()), scores.top(0), d_model)
    check_replaceable(folder, _IMPORTANCES)
    with atomic_folder(folder) as temporary:
        write_json(temporary / _IMPORTANCES, content, indent=None)
    return folder


@checked
def load_mib(folder: str | Path, graph: CircuitGraph | None = None) -> Scores:
    """Scores from a folder of a submission to MIB, with the sign of `Scores`.

    Args:
        folder: folder as written by `save_mib`. Only JSON is read, since ``.pt`` files are pickles.
        graph: the model's graph, required for grouped-query attention.

    Raises:
        FileNotFoundError: the folder has no ``importances.json``.
        ValueError: as in `from_eap_ig`.
    """
    recover_folder(folder)
    path = Path(folder) / _IMPORTANCES
    try:
        scores, _ = from_eap_ig(read_json(path), graph)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an EAP-IG graph: {error}") from error
    return replace(scores, values=-scores.values)


@dataclass(frozen=True, eq=False)
class MIBEvaluation(Result):
    """Evaluations of circuits of MIB's sizes, by two rankings of the same scores.

    With the faithfulness f(k) (`Evaluation.effect`) of the circuit that keeps a fraction k of the
    edges, integrated from 0.001 to 1 by trapezoids between `MIB_FRACTIONS`:

    - ``CPR = integral f(k) dk``, with edges ranked by how much they help; larger is better.
    - ``CMD = integral |1 - f(k)| dk``, with edges ranked by absolute score; 0 is best.

    ``sizes`` do not count edges without effect (`Circuit.connected`); k does. Under zero and mean
    patches, MIB's code also drops edges without a path from the input. Such edges have an effect
    there, and are kept here.

    Args:
        signed: evaluation of the circuits whose edges help most.
        absolute: evaluation of the circuits whose edges have the largest absolute scores.
    """

    signed: Evaluation
    absolute: Evaluation

    @property
    def cpr(self) -> float:
        """MIB's circuit performance ratio; above 0.999 only if some circuit outdoes the model."""
        return _area(self.signed.effect)

    @property
    def cmd(self) -> float:
        """MIB's circuit-model distance."""
        return _area((1 - self.absolute.effect).abs())

    def to_pandas(self) -> pd.DataFrame:
        """One row per fraction: size, faithfulness and its 95 % interval, for both rankings."""
        tables = [pd.DataFrame({"fraction": MIB_FRACTIONS})]
        for name, of in (("signed", self.signed), ("absolute", self.absolute)):
            table = of.to_pandas().rename(columns={"explained_effect": "faithfulness"})
            tables.append(table.drop(columns="metric").add_prefix(f"{name}_"))
        return pd.concat(tables, axis=1)

    def __repr__(self) -> str:
        return f"MIBEvaluation(CPR {self.cpr:.3f}, CMD {self.cmd:.3f})"


@checked
def evaluate_mib(
    model: HookedModel, pairs: PromptPairs, metric: Metric, scores: Scores, **options: Any
) -> MIBEvaluation:
    """CPR and CMD of scores of circuit edges.

    With grouped-query attention, MIB counts one edge into k and one into v per query head, while
    this package counts one per key-value head, so a fraction is of fewer edges.

    Args:
        pairs: prompt pairs, ideally not the ones that were scored.
        metric: metric function with one value per pair; MIB's is `logit_difference`.
        scores: scores of the circuit edges.
        **options: further arguments of `evaluate`.
    """
    n_edges = scores.top(0).graph.n_edges
    patch = options.get("patch", "corrupted")
    evaluations: list[Evaluation] = []
    for signed in (True, False):
        top = [scores.top(int(share * n_edges), signed=signed) for share in MIB_FRACTIONS]
        circuits = [circuit.connected(patch=patch) for circuit in top]
        evaluations.append(evaluate(model, pairs, metric, circuits, **options))
    return MIBEvaluation(*evaluations)


def _area(heights: Tensor) -> float:
    return torch.trapezoid(heights, torch.tensor(MIB_FRACTIONS, dtype=heights.dtype)).item()


# ---- circuit-tracer -----------------------------------------------------------------------------


@checked
def to_circuit_tracer(
    circuit: Circuit | AttributionGraph,
    scores: Scores | None = None,
    *,
    slug: str = "circuit",
    prompt_tokens: Sequence[str] | None = None,
) -> dict[str, Any]:
    """A circuit, or an attribution graph, as JSON for circuit-tracer's viewer and Neuronpedia.

    Write it with ``json.dump`` to ``{slug}.json`` in a folder, add its metadata there with
    ``circuit_tracer.frontend.utils.add_graph_metadata(graph["metadata"], folder)``, and open the
    folder with ``circuit_tracer.frontend.local_server.serve(folder)``.

    The weight of a link is minus its score, so that a positive weight helps, as in circuit-tracer;
    without scores it is 1. Weights of links between the same nodes (q, k and v) are summed. The
    keys and values that a head reads at a position are a separate node; the weight of its link to
    the head is the total ``|score|`` that it reads, without a sign. The influence of a node is
    cumulative, since the viewer prunes by it: the share of all influence held by nodes with at
    least as much. A circuit without positions is placed at the second token. ``<`` in names of
    positions becomes a quotation mark; token texts stay unchanged.

    Args:
        circuit: circuit of circuit edges, with or without positions; or an attribution graph, whose
            weights are flows and whose tokens are known.
        scores: scores of a circuit's edges.
        slug: name of the graph.
        prompt_tokens: text of each position; its name by default.

    Raises:
        ValueError: the circuit is not of circuit edges, the scores are of other edges, or the
            number of tokens differs.
    """
    if isinstance(circuit, AttributionGraph):
        return _of_graph(circuit, slug)
    grid = circuit.grid
    if scores is not None and scores.grid != grid:
        raise ValueError(f"the scores are of {scores.grid!r}, the circuit of {grid!r}")
    positioned = isinstance(grid, PositionedGraph)
    graph, positions = (grid.graph, grid.positions) if positioned else (circuit.graph, ("all",))
    tokens = list(positions if prompt_tokens is None else prompt_tokens)
    if len(tokens) != len(positions):
        raise ValueError(f"{len(tokens)} prompt_tokens for {len(positions)} positions")
    paths = path_graph(circuit, scores)
    # The viewer draws nothing if all nodes are at the first token.
    start = int(not any(node.position for node in paths.nodes))
    influences, weights = [0.0] * len(paths.nodes), defaultdict[tuple[int, int], float](float)
    for link, influence in zip(paths.links, paths.influence, strict=True):
        influences[link.source] += influence
        if link.reader in paths.ends[1]:
            influences[link.reader] += influence
        weight = link.weight
        if link.edge >= 0 and paths.scores is not None:
            weight = -paths.scores[link.edge]
        weights[link.source, link.reader] += weight
    total, nodes = sum(influences) or 1.0, list[dict[str, Any]]()
    for node, influence in zip(paths.nodes, influences, strict=True):
        # Rounding must not lift this above 1: the viewer drops nodes above its threshold.
        share = min(1.0, sum(x for x in influences if x >= influence) / total)
        nodes.append({**_node(node, graph, start), "influence": share})
    ids = [node["node_id"] for node in nodes]
    links = [
        {"source": ids[source], "target": ids[reader], "weight": weight}
        for (source, reader), weight in weights.items()
    ]
    return _viewed(slug, [""] * start + tokens, nodes, links)


def _viewed(
    slug: str, tokens: Sequence[str], nodes: list[dict[str, Any]], links: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the viewer reads."""
    metadata = {
        "slug": slug,
        "scan": "sparse_tl",
        "transcoder_list": [],
        "prompt_tokens": [*tokens],
        "prompt": "".join(tokens),
        "node_threshold": 1.0,
        "schema_version": 1,
    }
    view = {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
    return {"metadata": metadata, "qParams": view, "nodes": nodes, "links": links}


_VIEWED = {
    "embedding": "embedding",
    "error": "mlp reconstruction error",
    "target": "logit",
}
"""The viewer's name of each kind of node; all others are features of a transcoder there."""


def _of_graph(graph: AttributionGraph, slug: str) -> dict[str, Any]:
    """An attribution graph for the viewer; attention edges stand where they write."""
    influence, nodes = graph.nodes["influence"], list[dict[str, Any]]()
    rows: list[Any] = graph.nodes.to_dict("records")
    for number, row in enumerate(rows):
        kind, share = row["kind"], influence[influence >= row["influence"]].sum() / influence.sum()
        text = {
            "embedding": f'Emb: "{graph.tokens[row["position"]]}"',
            "target": 'Output "{}" (p=?)'.format(graph.target.replace('"', "'")),
        }.get(kind, row.get("label") or row["name"])
        layer = "E" if kind == "embedding" else str(row["layer"] + (kind == "target"))
        node = _viewed_node(_VIEWED.get(kind, _FEATURE), layer, number, row["position"], text)
        nodes.append({**node, "influence": min(1.0, float(share))})
        if kind in ("neuron", "feature"):
            nodes[-1]["activation"] = row["activation"]
    ids = [node["node_id"] for node in nodes]
    links = [
        {"source": ids[int(source)], "target": ids[int(target)], "weight": flow}
        for source, target, flow in graph.links.itertuples(index=False)
    ]
    viewed = _viewed(slug, graph.tokens, nodes, links)
    for name, members in graph.groups.items():
        in_group = [ids[number] for number, row in enumerate(rows) if row["name"] in members]
        viewed["qParams"]["supernodes"].append([name, *in_group])
        viewed["qParams"]["pinnedIds"] += in_group  # the viewer groups pinned nodes
    return viewed


def _node(node: PositionedNode, graph: CircuitGraph, start: int) -> dict[str, Any]:
    """A node as JSON, but for its influence; the first position is at the column `start`."""
    # Within a layer: heads, then their keys and values, then the MLP.
    number = node.component.head + graph.n_heads * node.keys
    if node.kind == "mlp":
        number = 2 * graph.n_heads
    kind, layer, text = _FEATURE, str(node.component.layer), str(node)
    text = text.replace("<kv>", " keys and values")
    if node.kind == "input":
        kind, layer = "embedding", "E"
    elif node.kind == "logits":
        kind, layer = "logit", str(graph.n_layers + 1)
        # The viewer expects a token in quotes and a probability; a metric may read several logits.
        text = 'Output "{}" (p=?)'.format(text.replace('"', "'"))
    return _viewed_node(kind, layer, number, start + (node.position or 0), text)


def _viewed_node(kind: str, layer: str, number: int, position: int, text: str) -> dict[str, Any]:
    """A node as the viewer reads it; `number` is its own within its layer."""
    feature = number
    if kind == _FEATURE:
        # Layer and number as one (Cantor's pairing): the viewer shows ``L3/7`` for a3.h7.
        diagonal = int(layer) + number
        feature = diagonal * (diagonal + 1) // 2 + number
    return {
        "node_id": f"{layer}_{number}_{position}",
        "feature": feature,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kind,
        "token_prob": 0.0,
        "is_target_logit": kind == "logit",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{'L' if kind == 'logit' else layer}_{number}-{position}",
        # The viewer reads its tooltips as HTML.
        "clerp": text.replace("<", "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}"),
        "activation": None,
    }

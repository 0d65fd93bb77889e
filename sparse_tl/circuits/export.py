"""The formats of other tools: EAP-IG and MIB's track for circuits, circuit-tracer's for graphs.

In the graph JSON of EAP-IG, which submissions to MIB also have, every query head has its own edges
into k and v. An edge into a key-value head is written as one edge for each head of its group, all
kept or none, each with an equal share of the score. Reading joins them again.

Nodes of an attribution graph are "embedding", "logit" or "cross layer transcoder" features in the
JSON that circuit-tracer's viewer and Neuronpedia read; the viewer shows a node's ``clerp``, here
its name. Checked in the viewer of circuit-tracer 0.5.0.

Reference: github.com/hannamw/EAP-IG; Mueller et al., arXiv 2504.13151 (MIB), and
``evaluate_area_under_curve`` in github.com/hannamw/MIB-circuit-track; ``circuit_tracer/frontend``
of github.com/safety-research/circuit-tracer, schema version 1.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from sparse_tl.circuits.prompt.attribution_graph import AttributionGraph
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitGraph, Destination
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
    places = tuple(torch.tensor([ungrouped.index(name) for name in edges]).view(-1, 2).T)
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
            tables.append(table.drop(columns=["deviation", "metric"]).add_prefix(f"{name}_"))
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

_VIEWED = {"embedding": "embedding", "error": "mlp reconstruction error", "target": "logit"}
"""The viewer's name of each kind of node; all others are features of a transcoder there."""


@checked
def to_circuit_tracer(graph: AttributionGraph, *, slug: str = "graph") -> dict[str, Any]:
    """An attribution graph as JSON for circuit-tracer's viewer and Neuronpedia.

    Write it with ``json.dump`` to ``{slug}.json`` in a folder, add its metadata there with
    ``circuit_tracer.frontend.utils.add_graph_metadata(graph["metadata"], folder)``, and open the
    folder with ``circuit_tracer.frontend.local_server.serve(folder)``.

    The weight of a link is its flow. Attention edges stand where they write. The influence of a
    node is cumulative, since the viewer prunes by it: the share of all influence held by nodes with
    at least as much.

    Args:
        graph: the attribution graph.
        slug: name of the graph.
    """
    nodes = list[dict[str, Any]]()
    influence, rows = graph.nodes["influence"], graph.nodes.to_dict("records")
    for number, row in enumerate(rows):
        kind, position = row["kind"], row["position"]
        text = {
            "embedding": f'Emb: "{graph.tokens[position]}"',
            # The viewer expects a token in quotes and a probability.
            "target": 'Output "{}" (p=?)'.format(graph.target.replace('"', "'")),
        }.get(kind, row.get("label") or row["name"])
        layer = "E" if kind == "embedding" else str(row["layer"] + (kind == "target"))
        feature, viewed = number, _VIEWED.get(kind, "cross layer transcoder")
        if kind not in _VIEWED:
            # Layer and number as one (Cantor's pairing): the viewer shows them apart.
            diagonal = row["layer"] + number
            feature = diagonal * (diagonal + 1) // 2 + number
        share = influence[influence >= row["influence"]].sum() / influence.sum()
        nodes.append(
            {
                "node_id": f"{layer}_{number}_{position}",
                "feature": feature,
                "layer": layer,
                "ctx_idx": position,
                "feature_type": viewed,
                "token_prob": 0.0,
                "is_target_logit": kind == "target",
                "run_idx": 0,
                "reverse_ctx_idx": 0,
                "jsNodeId": f"{'L' if kind == 'target' else layer}_{number}-{position}",
                # The viewer reads its tooltips as HTML.
                "clerp": text.replace("<", "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}"),
                "activation": row["activation"] if kind in ("neuron", "feature") else None,
                # Rounding must not lift this above 1: the viewer drops nodes above its threshold.
                "influence": min(1.0, float(share)),
            }
        )
    ids = [node["node_id"] for node in nodes]
    links = [
        {"source": ids[int(source)], "target": ids[int(target)], "weight": flow}
        for source, target, flow in graph.links.itertuples(index=False)
    ]
    metadata = {
        "slug": slug,
        "scan": "sparse_tl",
        "transcoder_list": [],
        "prompt_tokens": [*graph.tokens],
        "prompt": graph.prompt,
        "node_threshold": 1.0,
        "schema_version": 1,
    }
    by_name = dict(zip(graph.nodes["name"], ids, strict=True))
    supernodes = [[group, *map(by_name.get, names)] for group, names in graph.groups.items()]
    view = {
        "pinnedIds": [node for _, *members in supernodes for node in members],  # only these group
        "supernodes": supernodes,
        "linkType": "both",
        "clickedId": "",
        "sg_pos": "",
    }
    return {"metadata": metadata, "qParams": view, "nodes": nodes, "links": links}

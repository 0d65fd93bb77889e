"""Exchange scores and circuits with other tools: the graph JSON of EAP-IG, and MIB's submissions.

Both give every query head edges of its own into k and v. The edges of a key-value head are written
as one for each head of its group: all kept or none, with equal shares of the score. Read back, they
are one edge again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl import ranks
from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.mib import MIB_FRACTIONS
from sparse_tl.circuits.scores import Scores
from sparse_tl.files import atomic_folder, check_replaceable, read_json, write_json
from sparse_tl.graph import CircuitGraph

_SIZES = {"n_layers": int, "n_heads": int, "parallel_attn_mlp": bool}
_MAX_HEADS = 1024
"""As 7B models have: a file may leave out edges, but not make a graph that fills the memory."""
_IMPORTANCES = "importances.json"
_CIRCUITS = tuple(f"circuit_{fraction:g}.json" for fraction in MIB_FRACTIONS[:-1])


@checked
def to_eap_ig(scores: Scores, circuit: Circuit, d_model: AtLeastOne) -> dict[str, Any]:
    """The JSON of EAP-IG's ``Graph.to_json``; scores keep their sign.

    Args:
        scores: scores of every edge.
        circuit: edges that are kept.
        d_model: residual stream width of the model, required by EAP-IG's loader.

    Raises:
        ValueError: the model has no MLPs, which the format lacks, or the scores are of other edges.
    """
    if scores.site != circuit.graph:
        raise ValueError(f"expected scores of {circuit.graph!r}, as the circuit; got {scores!r}")
    return _content(circuit, scores.mean(), d_model)


@checked
def from_eap_ig(
    content: Mapping[str, Any], graph: CircuitGraph | None = None
) -> tuple[Scores, Circuit]:
    """Scores and circuit from the JSON of EAP-IG's ``Graph.to_json``.

    Args:
        content: the JSON.
        graph: the model's graph; required for grouped-query attention, which the JSON omits.

    Raises:
        ValueError: a key is missing, the graph lacks an edge or has other sizes than `graph`, or
            heads that share a key-value head keep different edges.
    """
    missing = {"cfg", "edges"} - content.keys()
    if missing:
        raise ValueError(f"expected the JSON of an EAP-IG graph; it lacks {sorted(missing)}")
    cfg, edges = content["cfg"], content["edges"]
    for name, kind in _SIZES.items():
        if not isinstance(cfg, Mapping) or type(cfg.get(name)) is not kind:
            raise ValueError(f"expected {name} in the cfg of an EAP-IG graph; got {str(cfg)[:200]}")
    # Before all edges of such a graph are named: every head has one to the logits.
    n_heads = cfg["n_layers"] * cfg["n_heads"]
    if not isinstance(edges, Mapping) or n_heads > max(_MAX_HEADS, len(edges)):
        raise ValueError(
            f"expected the edges of an EAP-IG graph by name, all of them for {n_heads:,} heads; "
            f"got {len(edges) if isinstance(edges, Mapping) else edges!r:.200}"
        )
    own = CircuitGraph(
        cfg["n_layers"], cfg["n_heads"], cfg["n_heads"], parallel=cfg["parallel_attn_mlp"]
    )
    graph = own if graph is None else graph
    if _ungrouped(graph) != own:
        raise ValueError(f"expected the edges of {graph!r}; got those of {own!r}")
    known = {name: place for place, name in enumerate(own.names(own.places))}
    places, values, kept = list[int](), list[float](), list[bool]()
    for name, edge in edges.items():
        if name not in known:
            own.index(name)  # says why
        if not isinstance(edge, Mapping) or type(edge.get("in_graph")) is not bool:
            raise ValueError(f"expected true or false as in_graph of {name}; got {edge!r}")
        if type(edge.get("score", 0.0)) not in (int, float):
            raise ValueError(f"expected a number as score of {name}; got {edge!r}")
        places.append(known[name])
        values.append(edge.get("score", 0.0))
        kept.append(edge["in_graph"])
    rows, columns = own.places[places].T
    scores = torch.zeros(own.exists.shape, dtype=torch.float64)
    scores[rows, columns] = torch.tensor(values, dtype=torch.float64)
    mask = torch.zeros_like(own.exists)
    mask[rows, columns] = torch.tensor(kept, dtype=torch.bool)
    column_of, _ = _columns(graph, own)
    grouped = torch.zeros(graph.exists.shape, dtype=torch.float64).index_add(1, column_of, scores)
    inside = torch.zeros(graph.exists.shape).index_add(1, column_of, mask.float()) > 0
    if not torch.equal(inside[:, column_of], mask):
        raise ValueError("expected the same edges for all heads that share a key-value head")
    return Scores(graph, grouped, "imported"), Circuit(graph, inside)


@checked
def save_mib(found: Scores | Sequence[Circuit], folder: str | Path, d_model: AtLeastOne) -> Path:
    """Write one folder of a submission to MIB's circuit localization track.

    Scores become ``importances.json``, from which MIB cuts circuits of its sizes; circuits become
    one file each, with at most 0.1, 0.2, 0.5, 1, 2, 5, 10, 20 and 50 percent of the edges as MIB
    counts them. Edges on no path from the input to the logits are left out: they have no effect
    under corrupted patches, which MIB evaluates with. MIB's sign is opposite to `Scores`: a
    positive importance helps. Of several ranks, only the first writes.

    Args:
        found: scores of circuit edges, or nine circuits, smallest first.
        folder: folder named by task and model, such as ``submission/ioi_gpt2``; the leaderboard
            skips other names. It is written completely or not at all.
        d_model: residual stream width of the model.

    Raises:
        ValueError: the model has no MLPs, there are not nine circuits, one is too large, or the
            folder holds other files.

    Reference: arXiv 2504.13151 and github.com/hannamw/MIB-circuit-track.
    """
    folder = Path(folder)
    if not ranks.is_first():
        return folder
    if isinstance(found, Scores):
        names, circuits, values = (_IMPORTANCES,), [found.top(0)], -found.mean()
    else:
        names, values = _CIRCUITS, None
        circuits = [circuit.connected(patch="corrupted") for circuit in found]
        if len(circuits) != len(names):
            raise ValueError(f"expected {len(names)} circuits, smallest first; got {len(circuits)}")
        for circuit, fraction in zip(circuits, MIB_FRACTIONS, strict=False):
            _check_size(circuit, fraction)
    check_replaceable(folder, *names)
    with atomic_folder(folder) as temporary:
        for name, circuit in zip(names, circuits, strict=True):
            write_json(temporary / name, _content(circuit, values, d_model), indent=None)
    return folder


@checked
def load_mib(folder: str | Path, graph: CircuitGraph | None = None) -> Scores | list[Circuit]:
    """Read a folder of a submission to MIB, with the sign of `Scores`.

    Args:
        folder: folder as `save_mib` writes it. Only JSON is read: ``.pt`` files are pickles.
        graph: the model's graph, required for grouped-query attention.

    Returns:
        Scores if there is one file, else the circuits, smallest first.

    Raises:
        ValueError: the folder holds no JSON, or as in `from_eap_ig`.
    """
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise ValueError(f"expected importances or circuits as JSON in {folder}; there are none")
    found = []
    for path in paths:
        try:
            found.append(from_eap_ig(read_json(path), graph))
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected the JSON of an EAP-IG graph in {path}; {error}") from error
    if len(found) > 1:
        return sorted((circuit for _, circuit in found), key=len)
    scores, _ = found[0]
    return replace(scores, values=-scores.values)


def _content(
    circuit: Circuit, values: Float[Tensor, "source destination"] | None, d_model: int
) -> dict[str, Any]:
    """The JSON of a circuit, with a score of every edge if there are values."""
    graph = circuit.graph
    if not graph.has_mlps:
        raise ValueError(f"expected a model with MLPs, which the format requires; got {graph!r}")
    own = _ungrouped(graph)
    column_of, share = _columns(graph, own)
    rows, columns = (circuit.mask.any(dim=axis).nonzero()[:, 0].tolist() for axis in (1, 0))
    inside = {graph.sources[row] for row in rows}
    for column in columns:
        inside.update(graph.readers_of(graph.destinations[column]))
    kept = circuit.mask.cpu()[:, column_of][own.exists].tolist()
    named = zip(own.names(own.places), kept, strict=True)
    edges: dict[str, dict[str, Any]] = {name: {"in_graph": keeps} for name, keeps in named}
    if values is not None:
        shared = (values.cpu().double()[:, column_of] * share)[own.exists].tolist()
        for edge, value in zip(edges.values(), shared, strict=True):
            edge["score"] = value
    cfg = {
        "n_layers": graph.n_layers,
        "n_heads": graph.n_heads,
        "parallel_attn_mlp": graph.parallel,
        "d_model": d_model,
    }
    nodes = {str(node): {"in_graph": node in inside} for node in graph.nodes}
    return {"cfg": cfg, "nodes": nodes, "edges": edges}


def _check_size(circuit: Circuit, fraction: float) -> None:
    own = _ungrouped(circuit.graph)
    column_of, _ = _columns(circuit.graph, own)
    size, most = int(circuit.mask.cpu()[:, column_of].count_nonzero()), int(fraction * own.n_edges)
    if size > most:
        raise ValueError(
            f"expected a circuit of at most {most:,} edges of query heads, {fraction:.1%} of all "
            f"{own.n_edges:,}; got {size:,} edges"
        )


def _ungrouped(graph: CircuitGraph) -> CircuitGraph:
    """The graph in which every query head has edges of its own into k and v."""
    return replace(graph, n_kv_heads=graph.n_heads, coupled=False)


def _columns(
    graph: CircuitGraph, own: CircuitGraph
) -> tuple[Int[Tensor, " column"], Float[Tensor, " column"]]:
    """The column of `graph` for each of `own`, and the share of its score: 1 / (number of them)."""
    size = graph.n_heads // graph.n_kv_heads
    found = list[int]()
    for heads in graph.groups:
        columns = torch.arange(heads.columns.start, heads.columns.stop)
        n_own = heads.rows.stop - heads.rows.start
        found += columns[:n_own].tolist() + columns[n_own:].repeat_interleave(size).tolist()
    column_of = torch.tensor([*found, len(graph.destinations) - 1])
    assert len(column_of) == len(own.destinations)
    return column_of, 1 / column_of.bincount()[column_of]

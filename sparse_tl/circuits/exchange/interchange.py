"""Exchange of scores and circuits with other tools: EAP-IG's graph JSON, and submissions to MIB.

In both formats, every query head has its own edges into k and v. An edge into a key-value head is
written as one edge for each head of its group, all kept or none, each with an equal share of the
score. Reading joins them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.exchange.mib import MIB_FRACTIONS
from sparse_tl.circuits.scores import Scores
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.storage.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    recover_folder,
    write_json,
)

_SIZES = {"n_layers": int, "n_heads": int, "parallel_attn_mlp": bool}
_MAX_HEADS = 1024
"""As many as 7B models have; a file that lists few edges cannot request a larger graph."""
_IMPORTANCES = "importances.json"
_CIRCUITS = tuple(f"circuit_{fraction:g}.json" for fraction in MIB_FRACTIONS[:-1])


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
    if scores.grid != circuit.graph:
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
        ValueError: a key is missing, an edge does not exist, the sizes are not those of `graph`, or
            heads that share a key-value head keep different edges.
    """
    missing = {"cfg", "edges"} - content.keys()
    if missing:
        raise ValueError(f"expected the JSON of an EAP-IG graph; it lacks {sorted(missing)}")
    cfg, edges = content["cfg"], content["edges"]
    for name, kind in _SIZES.items():
        if not isinstance(cfg, Mapping) or type(cfg.get(name)) is not kind:
            raise ValueError(f"expected {name} in the cfg of an EAP-IG graph; got {str(cfg)[:200]}")
    # Check this before naming all edges: a file lists at least every head's edge to the logits.
    n_heads = cfg["n_layers"] * cfg["n_heads"]
    if not isinstance(edges, Mapping) or n_heads > max(_MAX_HEADS, len(edges)):
        raise ValueError(
            f"expected the edges of an EAP-IG graph by name, all of them for {n_heads:,} heads; "
            f"got {len(edges) if isinstance(edges, Mapping) else edges!r:.200}"
        )
    ungrouped = CircuitGraph(
        cfg["n_layers"], cfg["n_heads"], cfg["n_heads"], parallel=cfg["parallel_attn_mlp"]
    )
    graph = ungrouped if graph is None else graph
    if _ungrouped(graph) != ungrouped:
        raise ValueError(f"expected the edges of {graph!r}; got those of {ungrouped!r}")
    numbers = {name: number for number, name in enumerate(ungrouped.names(ungrouped.places))}
    listed, values, kept = list[int](), list[float](), list[bool]()
    for name, edge in edges.items():
        if name not in numbers:
            ungrouped.index(name)  # raises, and says why
        if not isinstance(edge, Mapping) or type(edge.get("in_graph")) is not bool:
            raise ValueError(f"expected true or false as in_graph of {name}; got {edge!r:.200}")
        if type(edge.get("score", 0.0)) not in (int, float):
            raise ValueError(f"expected a number as score of {name}; got {edge!r:.200}")
        listed.append(numbers[name])
        values.append(edge.get("score", 0.0))
        kept.append(edge["in_graph"])
    rows, columns = ungrouped.places[listed].T
    scores = torch.zeros(ungrouped.exists.shape, dtype=torch.float64)
    scores[rows, columns] = torch.tensor(values, dtype=torch.float64)
    mask = torch.zeros_like(ungrouped.exists)
    mask[rows, columns] = torch.tensor(kept, dtype=torch.bool)
    column_of, _ = _columns(graph, ungrouped)
    grouped = torch.zeros(graph.exists.shape, dtype=torch.float64).index_add(1, column_of, scores)
    grouped_mask = torch.zeros(graph.exists.shape).index_add(1, column_of, mask.float()) > 0
    if not torch.equal(grouped_mask[:, column_of], mask):
        raise ValueError("expected the same edges for all heads that share a key-value head")
    return Scores(graph, grouped, "imported"), Circuit(graph, grouped_mask)


@checked
def save_mib(found: Scores | Sequence[Circuit], folder: str | Path, d_model: AtLeastOne) -> Path:
    """Write a folder of a submission to MIB's circuit localization track, and return its path.

    Scores become ``importances.json``, from which MIB takes circuits of its sizes. Circuits become
    one file each, with at most 0.1, 0.2, 0.5, 1, 2, 5, 10, 20 and 50 percent of the edges as MIB
    counts them. Edges on no path from the input to the logits are left out: they have no effect
    under corrupted patches, with which MIB evaluates. The sign is the opposite of that of `Scores`:
    a positive importance helps.

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
    """Scores or circuits from a folder of a submission to MIB, with the sign of `Scores`.

    Args:
        folder: folder as written by `save_mib`. Only JSON is read, since ``.pt`` files are pickles.
        graph: the model's graph, required for grouped-query attention.

    Returns:
        Scores if there is one file, else the circuits, smallest first.

    Raises:
        ValueError: the folder holds no JSON, or as in `from_eap_ig`.
    """
    recover_folder(folder)
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise ValueError(f"expected importances or circuits as JSON in {folder}; there are none")
    loaded = []
    for path in paths:
        try:
            loaded.append(from_eap_ig(read_json(path), graph))
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected the JSON of an EAP-IG graph in {path}; {error}") from error
    if len(loaded) > 1:
        return sorted((circuit for _, circuit in loaded), key=len)
    scores, _ = loaded[0]
    return replace(scores, values=-scores.values)


def _content(
    circuit: Circuit, values: Float[Tensor, "source destination"] | None, d_model: int
) -> dict[str, Any]:
    """The JSON of a circuit, with the score of every edge if values are given."""
    graph = circuit.graph
    if not graph.has_mlps:
        raise ValueError(f"expected a model with MLPs, which the format requires; got {graph!r}")
    ungrouped = _ungrouped(graph)
    column_of, share = _columns(graph, ungrouped)
    rows, columns = (circuit.mask.any(dim=axis).nonzero()[:, 0].tolist() for axis in (1, 0))
    in_graph = {graph.sources[row] for row in rows}
    for column in columns:
        in_graph.update(graph.readers_of(graph.destinations[column]))
    kept = circuit.mask.cpu()[:, column_of][ungrouped.exists].tolist()
    named = zip(ungrouped.names(ungrouped.places), kept, strict=True)
    edges: dict[str, dict[str, Any]] = {name: {"in_graph": is_kept} for name, is_kept in named}
    if values is not None:
        shared = (values.cpu().double()[:, column_of] * share)[ungrouped.exists].tolist()
        for edge, value in zip(edges.values(), shared, strict=True):
            edge["score"] = value
    cfg = {
        "n_layers": graph.n_layers,
        "n_heads": graph.n_heads,
        "parallel_attn_mlp": graph.parallel,
        "d_model": d_model,
    }
    nodes = {str(node): {"in_graph": node in in_graph} for node in graph.nodes}
    return {"cfg": cfg, "nodes": nodes, "edges": edges}


def _check_size(circuit: Circuit, fraction: float) -> None:
    ungrouped = _ungrouped(circuit.graph)
    column_of, _ = _columns(circuit.graph, ungrouped)
    size = int(circuit.mask.cpu()[:, column_of].count_nonzero())
    most = int(fraction * ungrouped.n_edges)
    if size > most:
        raise ValueError(
            f"expected a circuit of at most {most:,} edges of query heads, {fraction:.1%} of all "
            f"{ungrouped.n_edges:,}; got {size:,} edges"
        )


def _ungrouped(graph: CircuitGraph) -> CircuitGraph:
    """The graph in which every query head has its own edges into k and v."""
    return replace(graph, n_kv_heads=graph.n_heads, coupled=False)


def _columns(
    graph: CircuitGraph, ungrouped: CircuitGraph
) -> tuple[Int[Tensor, " column"], Float[Tensor, " column"]]:
    """For each column of `ungrouped`, the column of `graph`, and the share of its score."""
    size = graph.n_heads // graph.n_kv_heads
    matched = list[int]()
    for group in graph.groups:
        columns = torch.arange(group.columns.start, group.columns.stop)
        n_nodes = group.rows.stop - group.rows.start
        matched += columns[:n_nodes].tolist() + columns[n_nodes:].repeat_interleave(size).tolist()
    column_of = torch.tensor([*matched, len(graph.destinations) - 1])
    assert len(column_of) == len(ungrouped.destinations)
    return column_of, 1 / column_of.bincount()[column_of]

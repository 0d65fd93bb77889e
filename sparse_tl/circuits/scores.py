"""What discovery returns: a score for every circuit edge or head, and the circuits cut by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.files import (
    atomic_folder,
    check_replaceable,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from sparse_tl.graph import CircuitGraph, Edge

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """One score per circuit edge, in units of the metric; negative: patching it lowers the metric.

    Args:
        graph: the edges.
        scores: 0 where there is no edge.
        method: how they were found.

    Raises:
        ValueError: scores of another shape, or that are no numbers.
    """

    graph: CircuitGraph
    scores: Float[Tensor, "source destination"]
    method: str

    def __post_init__(self) -> None:
        if self.scores.shape != self.graph.exists.shape:
            raise ValueError(
                f"expected scores of shape {tuple(self.graph.exists.shape)} for {self.graph!r}; "
                f"got {tuple(self.scores.shape)}"
            )
        if not bool(self.scores.isfinite().all()):
            raise ValueError("expected finite scores; some are NaN or infinite")

    def __getitem__(self, edge: Edge | str) -> float:
        return self.scores[self.graph.edge_index(edge)].item()

    def top(self, size: int, *, signed: bool = False) -> Circuit:
        """The circuit of the `size` edges with the largest scores by absolute value.

        Args:
            size: edges kept; ties are kept in the graph's order.
            signed: rank by how much an edge helps (the most negative scores) instead.

        Raises:
            ValueError: a size that the graph does not have.
        """
        if not 0 <= size <= self.graph.n_edges:
            raise ValueError(f"expected a size in 0..{self.graph.n_edges}; got {size}")
        values = self.scores[self.graph.exists]
        order = (-values if signed else values.abs()).argsort(descending=True, stable=True)
        kept = torch.zeros_like(values, dtype=torch.bool)
        kept[order[:size]] = True
        mask = torch.zeros_like(self.graph.exists)
        mask[self.graph.exists] = kept
        return Circuit(self.graph, mask)

    def to_pandas(self) -> pd.DataFrame:
        """One row per edge, the largest scores by absolute value first."""
        table = self.graph.to_pandas().assign(score=self.scores[self.graph.exists].tolist())
        return table.sort_values(
            "score", key=abs, ascending=False, kind="stable", ignore_index=True
        )

    def save(self, folder: str | Path) -> Path:
        """Write a folder of safetensors and JSON; whole or not at all.

        Raises:
            ValueError: the folder holds something else, which would be deleted.
        """
        said = {"kind": "edges", "method": self.method, "graph": self.graph.to_dict()}
        return _save_scores(Path(folder), self.scores, said)

    @staticmethod
    def load(folder: str | Path) -> EdgeScores:
        """Read what `save` wrote.

        Raises:
            ValueError: another folder, or a damaged one.
        """
        folder = Path(folder)
        said = _said(folder, "edges")
        tensors = read_tensors(folder / "scores.safetensors")
        return EdgeScores(CircuitGraph.from_dict(said["graph"]), tensors["scores"], said["method"])

    def __repr__(self) -> str:
        best = self.to_pandas().head(3)
        listed = ", ".join(f"{e} {s:.3g}" for e, s in zip(best["edge"], best["score"], strict=True))
        return f"EdgeScores({self.graph.n_edges:,} edges by {self.method}: {listed}, ...)"

    def _repr_html_(self) -> str:
        return self.to_pandas().head(20).to_html(float_format="{:.4g}".format, border=0)


@dataclass(frozen=True, eq=False)
class HeadScores:
    """One score per head, in units of the metric; negative: patching it lowers the metric."""

    scores: Float[Tensor, "layer head"]
    method: str

    def __post_init__(self) -> None:
        if not bool(self.scores.isfinite().all()):
            raise ValueError("expected finite scores; some are NaN or infinite")

    def order(self) -> list[tuple[int, int]]:
        """Heads as (layer, head), the largest scores by absolute value first."""
        ranked = self.scores.flatten().abs().argsort(descending=True, stable=True)
        return [divmod(index, self.scores.shape[1]) for index in ranked.tolist()]

    def top(self, size: int) -> HeadCircuit:
        """The circuit of the `size` heads with the largest scores by absolute value.

        Raises:
            ValueError: more heads than there are, or fewer than none.
        """
        if not 0 <= size <= self.scores.numel():
            raise ValueError(f"expected a size in 0..{self.scores.numel()}; got {size}")
        mask = torch.zeros_like(self.scores, dtype=torch.bool)
        for layer, head in self.order()[:size]:
            mask[layer, head] = True
        return HeadCircuit(mask)

    def to_pandas(self) -> pd.DataFrame:
        """One row per head, the largest scores by absolute value first."""
        import pandas as pd

        rows = [
            {"head": f"a{layer}.h{head}", "score": self.scores[layer, head].item()}
            for layer, head in self.order()
        ]
        return pd.DataFrame(rows)

    def save(self, folder: str | Path) -> Path:
        """Write a folder of safetensors and JSON; whole or not at all.

        Raises:
            ValueError: the folder holds something else, which would be deleted.
        """
        return _save_scores(Path(folder), self.scores, {"kind": "heads", "method": self.method})

    @staticmethod
    def load(folder: str | Path) -> HeadScores:
        """Read what `save` wrote.

        Raises:
            ValueError: another folder, or a damaged one.
        """
        said = _said(Path(folder), "heads")
        return HeadScores(
            read_tensors(Path(folder) / "scores.safetensors")["scores"], said["method"]
        )

    def __repr__(self) -> str:
        best = ", ".join(
            f"{h} {s:.3g}" for h, s in self.to_pandas().head(3).itertuples(index=False)
        )
        return f"HeadScores({self.scores.numel()} heads by {self.method}: {best}, ...)"

    def _repr_html_(self) -> str:
        return self.to_pandas().head(20).to_html(float_format="{:.4g}".format, border=0)


@dataclass(frozen=True, eq=False)
class Circuit:
    """Some of a graph's edges: those that are kept.

    Raises:
        ValueError: a mask of another graph, or with edges that do not exist.
    """

    graph: CircuitGraph
    mask: Bool[Tensor, "source destination"]

    def __post_init__(self) -> None:
        if self.mask.shape != self.graph.exists.shape or bool(
            (self.mask & ~self.graph.exists).any()
        ):
            raise ValueError(
                f"expected a mask over the {self.graph.n_edges:,} edges of {self.graph!r}; got one "
                f"of shape {tuple(self.mask.shape)}, or with edges that do not exist"
            )

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges that are kept."""
        return self.graph.edges_of(self.mask)

    def __len__(self) -> int:
        return int(self.mask.sum())

    def connected(self, *, patch: str = "corrupted") -> Circuit:
        """Without the edges that have no effect under a patch.

        No kept edge leads from where they end to the logits; or, where patches are corrupted
        prompts' values, none leads from the input to where they begin: a node that reads nothing
        but patches then writes its patch. (It does not where the patch is a mean or 0.)
        """
        graph, mask = self.graph, self.mask.clone()
        for row, node in enumerate(graph.sources):
            reads = node.kind == "input" or bool(mask[:, list(graph.readers(node))].any())
            if patch == "corrupted" and not reads:
                mask[row] = False
        for column in reversed(range(len(graph.destinations))):
            if not reaches_logits(graph, mask, column):
                mask[:, column] = False
        return Circuit(graph, mask)

    def to_networkx(self) -> nx.MultiDiGraph:
        """The kept edges and the nodes that they join."""
        network = self.graph.to_networkx(self.mask)
        network.remove_nodes_from([node for node, degree in network.degree() if degree == 0])
        return network

    def _repr_html_(self) -> str:
        from sparse_tl.plots import ScoredCircuit, component_diagram

        if not len(self):
            return f"<p>{self!r}</p>"
        drawn = ScoredCircuit(self.graph, self.mask)
        return component_diagram({"Circuit": drawn})._repr_html_()

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {self.graph.n_edges:,} edges of {self.graph!r})"


def _save_scores(folder: Path, scores: Tensor, said: dict[str, Any]) -> Path:
    """A folder of scores; an earlier one of the same kind is replaced, nothing else."""
    check_replaceable(folder, "scores.json")
    if (folder / "scores.json").exists():
        _said(folder, said["kind"])
    with atomic_folder(folder) as temporary:
        write_tensors(temporary / "scores.safetensors", {"scores": scores})
        write_json(temporary / "scores.json", said)
    return folder


def _said(folder: Path, kind: str) -> dict[str, Any]:
    """The JSON beside saved scores of one kind."""
    said = read_json(folder / "scores.json")
    if not isinstance(said, dict) or said.get("kind") != kind:
        raise ValueError(f"expected a folder of scores of {kind}; {folder} holds something else")
    return said


def reaches_logits(
    graph: CircuitGraph, mask: Bool[Tensor, "source destination"], column: int
) -> bool:
    """Whether what is read there goes on: some later edge of a node that reads it is kept."""
    readers = graph.readers_of(graph.destinations[column])
    return any(
        node.kind == "logits" or bool(mask[graph.source_index(node)].any()) for node in readers
    )


@dataclass(frozen=True, eq=False)
class HeadCircuit:
    """Some of a model's heads: those that are kept."""

    mask: Bool[Tensor, "layer head"]

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The heads that are kept, as (layer, head)."""
        return tuple((layer, head) for layer, head in self.mask.nonzero().tolist())

    def __len__(self) -> int:
        return int(self.mask.sum())

    def __repr__(self) -> str:
        return f"HeadCircuit({len(self)} of {self.mask.numel()} heads)"


def to_eap_ig(scores: EdgeScores, circuit: Circuit, d_model: int) -> dict[str, Any]:
    """The JSON of EAP-IG's ``Graph.to_json``, also read by the MIB benchmark.

    Args:
        scores: of every edge.
        circuit: the edges that are kept.
        d_model: of the model, which their loader asks for.

    Raises:
        ValueError: grouped-query attention or no MLPs, which that format does not have.
    """
    graph = scores.graph
    if graph.n_kv_heads != graph.n_heads or not graph.has_mlps:
        raise ValueError(f"expected heads with their own k and v, and MLPs; {graph!r} has not")
    if circuit.graph != graph:
        raise ValueError(f"expected a circuit of {graph!r}; got one of {circuit.graph!r}")
    inside = {str(node) for edge in circuit.edges for node in (edge.source, edge.destination.node)}
    values = zip(graph.edges, scores.scores[graph.exists], circuit.mask[graph.exists], strict=True)
    return {
        "cfg": {
            "n_layers": graph.n_layers,
            "n_heads": graph.n_heads,
            "parallel_attn_mlp": graph.parallel,
            "d_model": d_model,
        },
        "nodes": {str(node): {"in_graph": str(node) in inside} for node in graph.nodes},
        "edges": {
            str(edge): {"score": score.item(), "in_graph": bool(kept)}
            for edge, score, kept in values
        },
    }


def from_eap_ig(content: Mapping[str, Any]) -> tuple[EdgeScores, Circuit]:
    """Scores and circuit from the JSON of EAP-IG's ``Graph.to_json``.

    Raises:
        ValueError: a key is missing, or an edge that the graph does not have.
    """
    missing = {"cfg", "edges"} - content.keys()
    if missing:
        raise ValueError(f"expected the JSON of an EAP-IG graph; it lacks {sorted(missing)}")
    cfg = content["cfg"]
    lacking = {"n_layers", "n_heads", "parallel_attn_mlp"} - cfg.keys()
    if lacking:
        raise ValueError(f"expected the sizes of an EAP-IG graph; cfg lacks {sorted(lacking)}")
    graph = CircuitGraph(
        cfg["n_layers"], cfg["n_heads"], cfg["n_heads"], parallel=cfg["parallel_attn_mlp"]
    )
    scores = torch.zeros(graph.exists.shape, dtype=torch.float64)
    mask = torch.zeros_like(graph.exists)
    for name, edge in content["edges"].items():
        index = graph.edge_index(name)
        if not isinstance(edge, Mapping) or not {"score", "in_graph"} <= edge.keys():
            raise ValueError(f"expected a score and in_graph for every edge; {name} has {edge!r}")
        scores[index], mask[index] = edge["score"], edge["in_graph"]
    return EdgeScores(graph, scores, "imported"), Circuit(graph, mask)

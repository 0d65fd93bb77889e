"""The jobs that look at what is inside a model: what its heads do, and what made one token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_tl.circuits import AttributionGraph, HeadBehaviour, attribution_graph, with_examples
from sparse_tl.gates.sparse.sparse_transformer import load_dense_or_sparse
from sparse_tl.jobs.circuits import behaviour
from sparse_tl.jobs.folder import RunFolder, save_figures, saved
from sparse_tl.jobs.head_roles import titled
from sparse_tl.jobs.own_pairs import OwnPairs
from sparse_tl.jobs.settings import OWN_PAIRS, GraphJob, HeadBehaviourJob, takes
from sparse_tl.plots import attribution_diagram
from sparse_tl.plots.page.rendering import check_address_space
from sparse_tl.storage.files import write_csv
from sparse_tl.tasks import TASKS_BY_NAME
from sparse_tl.zoo import load_examples, load_named_model


@takes(HeadBehaviourJob)
def run_head_behaviour(out: Path, job: HeadBehaviourJob) -> HeadBehaviour:
    """Score what every head of a model does, by `head_behaviour`, and draw the heads.

    Args:
        out: folder for ``heads.csv``, the figure and the scores.

    Raises:
        ValueError: a setting is invalid, or as in `head_behaviour`.
    """
    own = None if job.pairs_file is None else OwnPairs.read(job.pairs_file)
    task = own or TASKS_BY_NAME.get(job.task or "")
    n = job.pairs or (OWN_PAIRS if own is None else len(own.rows))
    folder = RunFolder(out, job)

    def measured() -> HeadBehaviour:
        model = load_named_model(job.model, load_dense_or_sparse, device=job.device)
        pairs = None if task is None else task.pairs(model, n, seed=job.seed)
        return behaviour(model, pairs, job.progress)

    with folder.stage("head behaviour"):
        found = saved(folder / "head_behaviour", HeadBehaviour, measured)
    write_csv(folder / "heads.csv", found.to_pandas())
    save_figures({"heads": found.figure(title=job.model)}, folder.path)
    return found


@takes(GraphJob)
def run_graph(out: Path, job: GraphJob) -> dict[str, AttributionGraph]:
    """Compute and draw the attribution graph of one prompt in every model; graphs by model title.

    Args:
        out: folder for the figure, the graphs, and their nodes and links as tables.

    Raises:
        ValueError: a setting is invalid, or as in `attribution_graph`.
        MemoryError: the address space of this process is limited.
    """
    check_address_space()
    folder, graphs = RunFolder(out, job), {}
    target: Any = job.target if job.minus is None else (job.target, job.minus)
    for title, name in titled(job.model).items():

        def measured(name: str = name) -> AttributionGraph:
            model = load_named_model(name, load_dense_or_sparse, device=job.device)
            found = attribution_graph(model, job.prompt, target=target, max_nodes=job.nodes)
            if not job.examples:
                return found
            return with_examples(model, found, load_examples(model, progress=job.progress))

        place = folder / title
        with folder.stage(title):
            graph = graphs[title] = saved(place / "graph", AttributionGraph, measured)
        write_csv(place / "nodes.csv", graph.nodes)
        write_csv(place / "links.csv", graph.links)
    save_figures({"graph": attribution_diagram(graphs)}, folder.path)
    return graphs

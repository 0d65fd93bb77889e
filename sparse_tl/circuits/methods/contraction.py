"""The contraction of attribution: what sources change, times gradients of what destinations read.

    score(u -> v) = sum_places (patch_u - u) . d m / d input_v

One matrix product contracts all sources with the destinations of a few layers, over places and
d_model. Going layer by layer would spend most of the time reading the sources' writes from memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.devices import SizeByDevice
from sparse_tl.circuits.methods.read_gradients import Places, ReadGradients, at_places
from sparse_tl.lens import source_outputs
from sparse_tl.parts.graph import Node

WRITES_AT_ONCE = SizeByDevice(cpu=2**23, elsewhere=2**26)
"""Maximum number of values that all sources write, in d_model dimensions, held at one time. On a
CPU this is 32 MB in float32: C libraries return larger blocks to the system, and allocating these
again takes longer than computing their contents."""
DESTINATIONS_AT_ONCE = 128
"""Maximum number of destinations in one matrix product, if they belong to several layers."""


def contract(
    scores: Float[Tensor, "group source destination"],
    back: ReadGradients,
    change: Mapping[str, Tensor],
    groups: Int[Tensor, "batch pos"],
    sources: slice,
) -> None:
    """Add the contraction of some sources with all destinations to the scores.

    Entries without an edge are filled as well; the caller clears them. A few places are contracted
    at a time, since what every source writes in d_model dimensions is by far the largest tensor.

    Args:
        scores: scores of each group of places, on the CPU in float64.
        back: gradients with respect to the destinations' inputs.
        change: patch minus clean activation of every source.
        groups: group that each prompt position is summed into; -1 to leave it out.
        sources: sources to score.
    """
    graph, flat = back.adapter.graph, groups.flatten()
    most = WRITES_AT_ONCE.on(flat.device)
    at_once = max(1, most // (len(graph.sources) * back.adapter.d_model))
    in_order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    for places in in_order.split(at_once) if len(in_order) else ():
        own = {name: at_places(change[name], places)[None] for name in back.adapter.source_points()}
        difference = source_outputs(back.adapter, own)[:, 0]
        _contract_few(scores, back, difference, places, flat[places], sources)


def _contract_few(
    scores: Float[Tensor, "group source destination"],
    back: ReadGradients,
    difference: Float[Tensor, "source place d_model"],
    places: Places,
    groups: Int[Tensor, " place"],
    sources: slice,
) -> None:
    """Add the contributions of a few places, sorted by group, to the scores."""
    graph, n_layers = back.adapter.graph, back.adapter.n_layers
    found, counts = (some.tolist() for some in groups.unique_consecutive(return_counts=True))
    written = [part.flatten(1) for part in difference.split(counts, dim=1)]
    first, end, _ = sources.indices(len(graph.sources))
    most = graph.n_heads + 2 * graph.n_kv_heads + graph.has_mlps
    together = max(1, DESTINATIONS_AT_ONCE // most)
    buffer = difference.new_empty(together * most, *difference.shape[1:])
    for layer in range(0, n_layers, together):
        layers = range(layer, min(layer + together, n_layers))
        before = slice(first, min(end, graph.n_sources_before(Node("mlp", layers[-1]))))
        if before.start >= before.stop:  # sources of later layers
            continue
        for index, one in enumerate(layers):
            back.layer(one, places, buffer[index * most : (index + 1) * most])
        reading, start = buffer[: len(layers) * most], layer * most
        for group, flat, read in zip(found, written, reading.split(counts, dim=1), strict=True):
            product = flat[before] @ read.flatten(1).T
            scores[group, before, start : start + len(reading)] += product.cpu().double()
    for group, flat, read in zip(
        found, written, at_places(back.final, places).split(counts), strict=True
    ):
        scores[group, sources, -1] += (flat[sources] @ read.flatten()).cpu().double()

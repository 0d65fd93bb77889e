"""Where the neurons of a model are most active in text that it writes itself."""

from __future__ import annotations

from pathlib import Path

from sparse_tl.arguments import checked
from sparse_tl.backend import Model, weights_digest
from sparse_tl.circuits import Examples, find_examples
from sparse_tl.gates import SparseTransformer
from sparse_tl.storage.files import digest
from sparse_tl.training import sampled_windows
from sparse_tl.zoo.building import cache_folder

N_WINDOWS, WINDOW = 256, 64


@checked
def load_examples(
    model: Model | SparseTransformer, *, cache: str | Path | None = None, progress: bool = True
) -> Examples:
    """Where every neuron of a model is most active in text that the model writes itself.

    The first call samples 256 windows of 64 tokens (`sampled_windows`) and reads them
    (`find_examples`). The user's cache folder keeps both, under checksums of the weights and of the
    text; an interrupted call goes on.

    Args:
        model: dense or sparse model.
        cache: folder to keep them in; the user's cache folder by default.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the model cannot write text, or a file is damaged.
    """
    folder = cache_folder(cache) / "examples" / weights_digest(model)[:12]
    written = sampled_windows(
        model, N_WINDOWS, WINDOW, save_to=folder / "text.safetensors", progress=progress
    )
    place = folder / digest({"tokens": written.tokens})
    if place.exists():
        return Examples.load(place)
    found = find_examples(model, [*written.tokens], progress=progress)
    found.save(place)
    return found

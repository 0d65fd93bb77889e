"""Names on the Hugging Face hub: which are read, how, and whether the hub answers at all."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from transformer_lens.loading_from_pretrained import (
    NEED_REMOTE_CODE_MODELS,
    get_official_model_name,
)

# TransformerLens unpickles what these authors published, with all that a pickle can do.
_PICKLED = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
_DATA = ["*.json", "*.txt", "*.safetensors"]
_PATIENCE = 5.0  # seconds until the hub counts as out of reach


def official_name(name: str) -> str:
    """The hub's name for a model that TransformerLens knows.

    Raises:
        ValueError: it knows none of this name, the model is a pickle, or it is not on this machine
            and the hub cannot be reached.
    """
    try:
        official = get_official_model_name(name)
    except ValueError as error:
        # TransformerLens lists every model that it knows; the first sentence says what is wrong.
        reason = str(error).partition(" Valid official model names")[0]
        raise ValueError(
            f"expected a folder, or the name of a model on the hub; {name} is no folder, and "
            f"loading it by name failed: {reason}"
        ) from error
    if official.startswith(_PICKLED):
        raise ValueError(
            f"expected a model that is published as safetensors; {official} is a pickle, which can "
            "run code. Where you trust it, load it with HookedTransformer.from_pretrained and give "
            "that model, or save it with save_model."
        )
    _check_reachable(official)
    return official


def needs_code(official: str) -> bool:
    """Whether TransformerLens would run the code that is published with this model."""
    return official.startswith(NEED_REMOTE_CODE_MODELS)


def download(official: str) -> Path:
    """The folder of a model on this machine, with none but its data files."""
    return Path(huggingface_hub.snapshot_download(official, allow_patterns=_DATA))


def _check_reachable(official: str) -> None:
    """One request without retries: transformers would try for half a minute, file by file."""
    if isinstance(huggingface_hub.try_to_load_from_cache(official, "config.json"), str):
        return
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PATIENCE)
    except Exception as error:  # of whatever library huggingface_hub speaks with
        raise ValueError(
            f"expected a folder, or a name on a hub that can be reached; {official} is not on this "
            f"machine, and {huggingface_hub.constants.ENDPOINT} does not answer ({error})"
        ) from error

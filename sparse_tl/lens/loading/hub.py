"""Fetch hub models by name, as data."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from transformer_lens.supported_models import MODEL_ALIASES

_DATA = ["*.json", "*.txt", "*.safetensors", "chat_template.jinja"]
_REST = ["*/*", "consolidated*"]  # other formats of the same weights


def fetch(name: str) -> tuple[Path, str]:
    """Download a hub model; return its folder and its name without the author.

    Only configuration, weights and tokenizer are downloaded, as data; no code. If the hub does not
    answer, the local cache is used.

    Args:
        name: name on the hub, or TransformerLens's alias.

    Raises:
        ValueError: there is no such model, it is published as a pickle, or it is not in the cache
            and the hub does not answer.
    """
    aliases = {
        alias.lower(): official for official, known in MODEL_ALIASES.items() for alias in known
    }
    official = aliases.get(name.lower(), name)
    try:
        folder = huggingface_hub.snapshot_download(
            official, allow_patterns=_DATA, ignore_patterns=_REST
        )
    except Exception as error:  # of any underlying library
        raise ValueError(
            f"{name} is neither a folder nor a model that {huggingface_hub.constants.ENDPOINT} "
            f"gives: {str(error).strip()[:500]} Where there is no network, give the folder of a "
            f"copy (elsewhere: hf download {official})"
        ) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{official} has no safetensors in {folder}, and pickles are not fetched, since they "
            "can run code. If you trust them, load the model with transformers or TransformerLens "
            "and pass it"
        )
    return Path(folder), official.rpartition("/")[2]

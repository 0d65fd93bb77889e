"""Fetch hub models by name, as data; without a network, refuse at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import huggingface_hub
from transformer_lens.supported_models import MODEL_ALIASES

# These authors publish pickles, which can run code.
_PICKLED = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
_DATA = ["*.json", "*.txt", "*.safetensors", "chat_template.jinja"]
_REST = ["*/*", "consolidated*"]  # other formats of the same weights
_PATIENCE = 2.0  # seconds to wait for the hub


def fetch(name: str) -> tuple[Path, str]:
    """Download a hub model; return its folder and its name without the author.

    Only configuration, weights and tokenizer are downloaded, as data; no code. If the hub does not
    answer, the local cache is used.

    Args:
        name: name on the hub, or TransformerLens's alias.

    Raises:
        ValueError: there is no such model, it is published as a pickle, or the hub does not answer.
    """
    official = _official(name)
    silence = silence_of_hub()
    try:
        folder = huggingface_hub.snapshot_download(
            official,
            allow_patterns=_DATA,
            ignore_patterns=_REST,
            local_files_only=silence is not None,
        )
    except Exception as error:  # of any underlying library
        if silence is None:
            raise ValueError(
                f"expected a folder, or the name of a model on the hub that may be fetched; "
                f"{name}: {str(error).strip()[:500]}"
            ) from error
        hub = huggingface_hub.constants.ENDPOINT
        raise ValueError(
            f"expected a folder, or the name of a model on a hub that can be reached; {name} is "
            f"neither a folder nor in this machine's cache, and {hub} does not answer ({silence}). "
            "Give the folder of a copy, or fetch it where there is a network: "
            f"hf download {official}"
        ) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"expected a model that is published as safetensors; {official} has none in {folder}, "
            "and pickles are not fetched, since they can run code. If you trust them, load the "
            "model with transformers and pass it"
        )
    return Path(folder), official.rpartition("/")[2]


def _official(name: str) -> str:
    """The hub's name for a model name or alias."""
    aliases = {
        alias.lower(): official for official, known in MODEL_ALIASES.items() for alias in known
    }
    official = aliases.get(name.lower(), name)
    try:
        huggingface_hub.utils.validate_repo_id(official)
    except huggingface_hub.errors.HFValidationError as error:
        raise ValueError(
            f"expected a folder, or the name of a model on the hub; {name} is not a folder, and no "
            "model has that name"
        ) from error
    if official.startswith(_PICKLED):
        raise ValueError(
            f"expected a model that is published as safetensors; {official} is a pickle, which can "
            "run code. If you trust it, load it with TransformerLens and pass that model, or "
            "save it with save_model."
        )
    return official


def silence_of_hub() -> Any:
    """The reason why the hub does not answer; None if it does.

    Without this check, transformers and huggingface_hub would retry for half a minute, file by
    file. It runs in a thread, since time limits do not cover the look-up of host names.
    """
    outcome: list[Any] = []

    def ask() -> None:
        try:
            session = huggingface_hub.get_session()
            session.head(huggingface_hub.constants.ENDPOINT, timeout=_PATIENCE)
            outcome.append(None)
        except Exception as error:
            outcome.append(str(error).strip() or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return outcome[0] if outcome else f"within {_PATIENCE:g} seconds"

"""Models and tokenizers of Hugging Face folders, read by transformers as data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparse_tl.files import write_json
from sparse_tl.lens.architecture import dtype_named
from sparse_tl.lens.data_files import (
    check_depth,
    checked_config,
    data_alone,
    depths,
    has_tokenizer,
    json_object,
    link_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN_FIELDS = "sparse_tl"
"""What `config.json` says in a folder of ours beside what transformers reads."""
_OWN = {"model_name": str, "default_prepend_bos": bool}
_WHOLE = ("TokenizersBackend", "PreTrainedTokenizerFast")  # tokenizer.json says all
_MISFITS = ("missing", "unexpected", "mismatched")
_LARGE = 10**9  # numbers; reading fewer takes no time that a bar could show
# transformers asks on standard input where this is left out, and fetches where it may.
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


@contextmanager
def quietly() -> Iterator[None]:
    """Without the progress bars of transformers."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_model(
    folder: Path, *, dtype: torch.dtype | None, device_map: str | dict[str, Any]
) -> tuple[PreTrainedModel, Any, dict[str, Any]]:
    """The `transformers` model in a folder, its tokenizer if there is one, and our own fields.

    Args:
        folder: that holds them.
        dtype: of the weights; when left out, float32, but what a folder of our own was saved in.
        device_map: where the weights go, as `transformers` understands it.

    Raises:
        ValueError: no causal language model that transformers itself knows, weights that are
            damaged, missing, left over, pickled or quantised, or an adapter.
    """
    from transformers import AutoModelForCausalLM

    with _checked(folder) as (data, config, own, size):
        if dtype is None:
            dtype = dtype_named(config.get("dtype")) if own else torch.float32
        with _said_of(folder, "model"), nullcontext() if size > _LARGE else quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(data),
                dtype=dtype,
                device_map=device_map,
                use_safetensors=True,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # else it only says that there are some
                output_loading_info=True,
                **_LOCAL,
            )
            model, outcome = loaded
            _check_fit({kind: sorted(outcome[f"{kind}_keys"]) for kind in _MISFITS})
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ValueError(f"{device_map} leaves weights on the disk, or nowhere")
        tokenizer = _tokenizer_in(data, folder) if has_tokenizer(folder) else None
    return model, tokenizer, own


@contextmanager
def _checked(folder: Path) -> Iterator[tuple[Path, dict[str, Any], dict[str, Any], int]]:
    """What transformers may see of a folder, once its sizes are known to fit its weights.

    With it: the configuration, our own fields, and how many numbers the weights are.
    """
    config = checked_config(folder)
    own = _own_fields(config.pop(OWN_FIELDS, None), folder)
    with data_alone(folder) as data:
        write_json(data / "config.json", config)
        weights = link_weights(folder, data)
        for name, layers in depths(config):
            check_depth(layers, len(weights), f"{folder / 'config.json'} as {name}")
        size = sum(weights.values())
        with _said_of(folder, "model"):
            _check_size(data, size)
        yield data, config, own, size


def check_files(folder: Path) -> None:
    """Make sure that configuration and weights can be of one model, without reading weights.

    Raises:
        ValueError: as of `read_model`.
    """
    with _checked(folder):
        pass


def read_tokenizer(folder: Path, *, adds_bos: bool = False) -> Any:
    """The tokenizer in a folder.

    Args:
        folder: that holds its files.
        adds_bos: whether it shall begin every text with its BOS token, where it has one, also when
            its files do not say so; a HookedTransformer asks for that.

    Raises:
        ValueError: damaged files.
    """
    with data_alone(folder) as data:
        return _tokenizer_in(data, folder, adds_bos=adds_bos)


def check_tokenizer(tokenizer: Any, d_vocab: int) -> None:
    """Make sure that a tokenizer is one of a model with so many tokens.

    The model may have more, since vocabularies are padded; and a few added ones may be beyond it,
    such as Gemma 3's for images.

    Raises:
        ValueError: it numbers more tokens, or begins texts with one that the model lacks.
    """
    bos = tokenizer.bos_token_id
    if tokenizer.vocab_size > d_vocab or (bos is not None and bos >= d_vocab):
        raise ValueError(
            f"expected a tokenizer of a model with {d_vocab} tokens; got one of "
            f"{tokenizer.vocab_size} tokens that begins texts with number {bos}. It belongs to "
            "another model: give the model its own, or leave the tokenizer's files out"
        )


def _check_size(data: Path, held: int) -> None:
    """Refuse a configuration of more numbers than the files hold, before any is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(data), **_LOCAL)
    with torch.device("meta"):
        plan = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    needed = sum(parameter.numel() for parameter in plan.parameters())
    if needed > held:
        raise ValueError(f"its config.json makes a model of {needed:,} numbers; it holds {held:,}")


def _check_fit(outcome: dict[str, list[Any]]) -> None:
    """Refuse weights that transformers has made up or left out, with no more than a warning."""
    if any(outcome.values()):
        said = ", ".join(f"{kind} {found[:5]}" for kind, found in outcome.items())
        raise ValueError(f"the weights do not fit their config.json; {said}")


def _own_fields(value: Any, folder: Path) -> dict[str, Any]:
    """What `save_model` adds to the configuration; nothing where others wrote it."""
    fields = {} if value is None else value
    if not isinstance(fields, dict) or any(
        type(said) is not _OWN.get(name) for name, said in fields.items()
    ):
        raise ValueError(
            f"expected {sorted(_OWN)} as {OWN_FIELDS} in {folder / 'config.json'}; "
            f"got {str(value)[:100]}"
        )
    return fields


def _tokenizer_in(data: Path, folder: Path, *, adds_bos: bool = False) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    said = data / "tokenizer_config.json"
    named = json_object(said).get("tokenizer_class") if said.is_file() else None
    # AutoTokenizer would take the class that belongs to the model's, with a vocabulary of its own.
    reader: Any = PreTrainedTokenizerFast if named in _WHOLE else AutoTokenizer
    with _said_of(folder, "tokenizer"):
        tokenizer: Any = reader.from_pretrained(str(data), **_LOCAL)
        if adds_bos and tokenizer.bos_token is not None:
            # Where its template cannot hold this BOS token, TransformerLens prepends it.
            with suppress(ValueError):
                tokenizer = reader.from_pretrained(str(data), add_bos_token=True, **_LOCAL)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"its tokenizer_class makes a {type(tokenizer).__name__}")
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
    return tokenizer


@contextmanager
def _said_of(folder: Path, what: str) -> Iterator[None]:
    """Name the folder, whatever a wrong file leads transformers and tokenizers to raise."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:1000]
        raise ValueError(f"expected a Hugging Face {what} in {folder}; {reason}") from error

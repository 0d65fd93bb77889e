"""Read models and tokenizers from Hugging Face folders, with transformers, as data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

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
from sparse_tl.scopes import scope

OWN_FIELDS = "sparse_tl"
"""Key in `config.json` of fields that this package adds to those of transformers."""
_OWN = {"model_name": str, "default_prepend_bos": bool}
_WHOLE = ("TokenizersBackend", "PreTrainedTokenizerFast")  # tokenizer.json is complete
_MISFITS = ("missing", "unexpected", "mismatched")
_LARGE = 10**9  # weights; smaller models load too fast for a bar
# By default transformers asks on standard input, and downloads where it may.
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


@scope
def quietly() -> Iterator[None]:
    """Hide the progress bars of transformers."""
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
    """The `transformers` model in a folder, its tokenizer if any, and this package's own fields.

    Args:
        folder: folder of the model.
        dtype: dtype of the weights; by default float32, or as saved by this package.
        device_map: where the weights go, as `transformers` understands it.

    Raises:
        ValueError: the model is not a causal language model that transformers knows, or an adapter;
            weights are damaged, missing, left over, pickled or quantised.
    """
    with _checked(folder) as (data, config, own, size):
        if dtype is None:
            dtype = dtype_named(config.get("dtype")) if own else torch.float32
        with _said_of(folder, "model"), nullcontext() if size > _LARGE else quietly():
            loaded: Any = _class_of(_config_in(data)).from_pretrained(
                str(data),
                dtype=dtype,
                device_map=device_map,
                use_safetensors=True,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # otherwise it does not list them
                output_loading_info=True,
                **_LOCAL,
            )
            model, outcome = loaded
            _check_fit({kind: sorted(outcome[f"{kind}_keys"]) for kind in _MISFITS})
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ValueError(f"{device_map} leaves weights on the disk, or nowhere")
        tokenizer = _tokenizer_in(data, folder) if has_tokenizer(folder) else None
    return model, tokenizer, own


@scope
def _checked(folder: Path) -> Iterator[tuple[Path, dict[str, Any], dict[str, Any], int]]:
    """What transformers may see of a folder, once its sizes are known to fit its weights.

    Also yields the configuration, this package's own fields, and the number of weights.
    """
    config = checked_config(folder)
    own = _own_fields(config.pop(OWN_FIELDS, None), folder)
    with data_alone(folder) as data:
        write_json(data / "config.json", config)
        weights, others = link_weights(folder, data)
        for name, layers in depths(config):
            check_depth(layers, len(weights), f"{folder / 'config.json'} as {name}")
        size = sum(weights.values())
        with _said_of(folder, "model"):
            _check_plan(data, size, others)
        yield data, config, own, size


def check_files(folder: Path) -> None:
    """Check that configuration and weights can belong to one model, without reading weights.

    Raises:
        ValueError: as in `read_model`.
    """
    with _checked(folder):
        pass


def read_tokenizer(folder: Path, *, adds_bos: bool = False) -> Any:
    """Load the tokenizer in a folder.

    Args:
        folder: folder of the tokenizer's files.
        adds_bos: whether the tokenizer starts every text with its BOS token, if it has one, even if
            its files do not say so; HookedTransformer requires that.

    Raises:
        ValueError: the files are damaged.
    """
    with data_alone(folder) as data:
        return _tokenizer_in(data, folder, adds_bos=adds_bos)


def check_tokenizer(tokenizer: Any, d_vocab: int) -> None:
    """Check that a tokenizer fits a model with this many tokens.

    The model may have more, since vocabularies are padded; and a few added tokens may exceed it,
    such as Gemma 3's image tokens.

    Raises:
        ValueError: the tokenizer has more tokens, or starts texts with one that the model lacks.
    """
    bos = tokenizer.bos_token_id
    if tokenizer.vocab_size > d_vocab or (bos is not None and bos >= d_vocab):
        raise ValueError(
            f"expected a tokenizer of a model with {d_vocab} tokens; got one of "
            f"{tokenizer.vocab_size} tokens that begins texts with number {bos}. It belongs to "
            "another model: give the model its own, or leave the tokenizer's files out"
        )


def _check_plan(data: Path, held: int, others: set[str]) -> None:
    """Refuse a configuration with more weights than the files hold, before allocating any, and
    weights that are not floating-point numbers, which would be converted."""
    config = _config_in(data)
    kind = _class_of(config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # it draws initial weights
        auto = kind is AutoModelForCausalLM
        plan = kind.from_config(config, trust_remote_code=False) if auto else kind(config)
    needed = sum(parameter.numel() for parameter in plan.parameters())
    if needed > held:
        raise ValueError(f"its config.json makes a model of {needed:,} numbers; it holds {held:,}")
    wrong = sorted(others.intersection(name for name, _ in plan.named_parameters()))
    if wrong:
        raise ValueError(f"expected floating-point numbers as weights; {wrong[:5]} are not")


def _config_in(data: Path) -> Any:
    return AutoConfig.from_pretrained(str(data), **_LOCAL)


def _class_of(config: Any) -> Any:
    """The class that reads a model: the one that its configuration names if that predicts tokens.

    AutoModelForCausalLM does not know models that read images or sounds besides text, or takes a
    part of them.
    """
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        known = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
        predicts = known and (kind.can_generate() or name.endswith("ForMaskedLM"))
        if predicts and kind.config_class is type(config):
            return kind
    return AutoModelForCausalLM


def _check_fit(outcome: dict[str, list[Any]]) -> None:
    """Refuse weights that transformers initialised or dropped with only a warning."""
    if any(outcome.values()):
        said = ", ".join(f"{kind} {found[:5]}" for kind, found in outcome.items())
        raise ValueError(f"the weights do not fit their config.json; {said}")


def _own_fields(value: Any, folder: Path) -> dict[str, Any]:
    """The fields that `save_model` adds to a configuration; empty in other folders."""
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
    said = data / "tokenizer_config.json"
    named = json_object(said).get("tokenizer_class") if said.is_file() else None
    # AutoTokenizer would pick the class of the model family, with its own vocabulary.
    reader: Any = PreTrainedTokenizerFast if named in _WHOLE else AutoTokenizer
    with _said_of(folder, "tokenizer"):
        tokenizer: Any = reader.from_pretrained(str(data), **_LOCAL)
        if adds_bos and tokenizer.bos_token is not None:
            # If the template cannot hold this BOS token, TransformerLens prepends it.
            with suppress(ValueError):
                tokenizer = reader.from_pretrained(str(data), add_bos_token=True, **_LOCAL)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"its tokenizer_class makes a {type(tokenizer).__name__}")
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
    return tokenizer


@scope
def _said_of(folder: Path, what: str) -> Iterator[None]:
    """Name the folder in any error that transformers or tokenizers raise on a bad file."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:1000]
        raise ValueError(f"expected a Hugging Face {what} in {folder}; {reason}") from error

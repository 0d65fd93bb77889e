"""Read models and tokenizers from Hugging Face folders and GGUF files as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

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

from sparse_tl.calls.scopes import scope
from sparse_tl.lens.core.architecture import dtype_named
from sparse_tl.lens.core.data_files import (
    check_depth,
    checked_config,
    data_alone,
    depths,
    has_tokenizer,
    json_object,
    link,
    link_weights,
)
from sparse_tl.lens.loading.gguf_fields import take_fields
from sparse_tl.lens.loading.gguf_file import (
    NAME,
    check_taken,
    gguf_options,
    read_header,
    without_bar,
)
from sparse_tl.lens.loading.gguf_tokenizer import follow_file
from sparse_tl.storage.files import write_json

OWN_FIELDS = "sparse_tl"
"""Key in `config.json` of fields that this package adds to those of transformers."""
_OWN = {"model_name": str, "default_prepend_bos": bool}
_WHOLE = ("TokenizersBackend", "PreTrainedTokenizerFast")  # tokenizer.json is complete
_MISFITS = ("missing", "unexpected", "mismatched")
_LARGE = 10**9  # weights; smaller models load too fast for a bar
# By default, transformers asks on standard input whether to run code, and downloads files.
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


@scope
def quietly() -> Iterator[None]:
    """Hide the progress bars of transformers."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with without_bar():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_model(
    source: Path,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | None,
    device_map: str | dict[str, Any],
) -> tuple[PreTrainedModel, Any, dict[str, Any]]:
    """The model in a folder or GGUF file, its tokenizer if any, and this package's own fields.

    Args:
        source: Hugging Face folder, or GGUF file, whose weights are dequantised.
        tokenizer: tokenizer in place of the one in the folder or file, which is not read then.
        dtype: dtype of the weights; by default float32, or as saved by this package.
        device_map: where the weights go, as `transformers` understands it.

    Raises:
        ImportError: a package that is needed to read GGUF files is missing or too old.
        ValueError: the model is not a causal language model that transformers knows, or is an
            adapter; weights are damaged, missing, left over, pickled or, in a folder, quantised.
    """
    with _checked(source) as seen:
        if dtype is None:
            dtype = dtype_named(seen.dtype)
        if tokenizer is None and seen.has_tokenizer:
            tokenizer = _tokenizer_in(seen.data, source, fields=seen.fields)
        with _naming_source(source, "model"), nullcontext() if seen.size > _LARGE else quietly():
            loaded: Any = _class_of(seen.config).from_pretrained(
                str(seen.data),
                dtype=dtype,
                device_map=device_map,
                use_safetensors=True,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # otherwise they are not listed
                output_loading_info=True,
                **seen.options,
                **_LOCAL,
            )
            model, outcome = loaded
            _check_fit({kind: sorted(outcome[f"{kind}_keys"]) for kind in _MISFITS})
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ValueError(f"{device_map} leaves weights on the disk, or nowhere")
    return model, tokenizer, seen.own


class _Seen(NamedTuple):
    """What transformers may see of a folder or a GGUF file."""

    data: Path
    config: Any
    options: dict[str, Any]
    """Options of `from_pretrained`."""
    own: dict[str, Any]
    """This package's own fields."""
    dtype: Any
    """Name of the dtype of the weights."""
    size: int
    """Number of weights."""
    has_tokenizer: bool
    fields: Mapping[str, Any]
    """Metadata of a GGUF file."""


@scope
def _checked(source: Path) -> Iterator[_Seen]:
    """What transformers may see of a folder or GGUF file, after checking that the weights fit."""
    seen = _checked_folder if source.is_dir() else _checked_gguf
    with data_alone(source) as data:
        yield seen(source, data)


def _checked_folder(folder: Path, data: Path) -> _Seen:
    config = checked_config(folder)
    own = _own_fields(config.pop(OWN_FIELDS, None), folder)
    write_json(data / "config.json", config)
    weights, others = link_weights(folder, data)
    for name, layers in depths(config):
        check_depth(layers, len(weights), f"{folder / 'config.json'} as {name}")
    size = sum(weights.values())
    with _naming_source(folder, "model"):
        made = _config_in(data)
        _check_plan(made, size, others)
    dtype = config.get("dtype") if own else "float32"
    return _Seen(data, made, {}, own, dtype, size, has_tokenizer(folder), {})


def _checked_gguf(file: Path, data: Path) -> _Seen:
    header = read_header(file)
    link(file, data, NAME)
    with _naming_source(file, "model"):
        config = _config_in(data)
    vars(config).pop("_model_name_or_path", None)  # free text
    for name, layers in depths(config.to_dict()):
        check_depth(layers, len(header.sizes), f"{file} as {name}")
    size = sum(header.sizes.values())
    with _naming_source(file, "model"):
        take_fields(header.fields, config)
        check_taken(header, config.model_type, _check_plan(config, size, set()))
    options, fields = gguf_options(config), header.fields
    return _Seen(data, config, options, {}, "float32", size, header.has_tokenizer, fields)


def check_files(source: Path) -> None:
    """Check that configuration and weights can belong to one model, without reading the weights.

    Raises:
        ValueError: as in `read_model`.
    """
    with _checked(source):
        pass


def read_tokenizer(folder: Path, *, adds_bos: bool = False) -> Any:
    """Load the tokenizer in a folder.

    Args:
        folder: folder of the tokenizer's files.
        adds_bos: whether the tokenizer starts every text with its BOS token, if it has one, even if
            its files do not say so, as HookedTransformer requires.

    Raises:
        ValueError: the files are damaged.
    """
    with data_alone(folder) as data:
        return _tokenizer_in(data, folder, adds_bos=adds_bos)


def check_tokenizer(tokenizer: Any, d_vocab: int) -> None:
    """Check that a tokenizer fits a model with this many tokens.

    The model may have more tokens, since vocabularies are padded. A few added tokens, such as
    Gemma 3's image tokens, may exceed the model's vocabulary.

    Raises:
        ValueError: the tokenizer has more tokens than the model, or a BOS token that it lacks.
    """
    bos = tokenizer.bos_token_id
    if tokenizer.vocab_size > d_vocab or (bos is not None and bos >= d_vocab):
        raise ValueError(
            f"expected a tokenizer of a model with {d_vocab} tokens; got one of "
            f"{tokenizer.vocab_size} tokens that begins texts with number {bos}. It belongs to "
            "another model: use the model's own tokenizer, or remove the tokenizer's files"
        )


def _check_plan(config: Any, held: int, others: set[str]) -> int:
    """Check that the weights can fill the model, before allocating it; return how many it needs.

    Args:
        config: configuration of the model.
        held: number of available weights.
        others: names of weights that are not floating-point numbers.
    """
    kind = _class_of(config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # draws initial weights
        auto = kind is AutoModelForCausalLM
        plan = kind.from_config(config, trust_remote_code=False) if auto else kind(config)
    needed = sum(parameter.numel() for parameter in plan.parameters())
    if needed > held:
        raise ValueError(
            f"its configuration makes a model of {needed:,} numbers; it holds {held:,}"
        )
    wrong = sorted(others.intersection(name for name, _ in plan.named_parameters()))
    if wrong:
        raise ValueError(f"expected floating-point numbers as weights; {wrong[:5]!s:.200} are not")
    return needed


def _config_in(data: Path) -> Any:
    return AutoConfig.from_pretrained(str(data), **_file_in(data), **_LOCAL)


def _file_in(data: Path) -> dict[str, str]:
    """The option that names the GGUF file; empty if there is none."""
    return {"gguf_file": NAME} if (data / NAME).exists() else {}


def _class_of(config: Any) -> Any:
    """The class of a model: the one that its configuration names, if that predicts tokens.

    AutoModelForCausalLM does not know models that read images or sounds besides text, or loads only
    a part of them.
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
        said = ", ".join(f"{kind} {found[:5]!s:.200}" for kind, found in outcome.items())
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


def _tokenizer_in(
    data: Path, folder: Path, *, adds_bos: bool = False, fields: Mapping[str, Any] | None = None
) -> Any:
    said = data / "tokenizer_config.json"
    named = json_object(said).get("tokenizer_class") if said.is_file() else None
    # AutoTokenizer would pick the class of the model family, with its own vocabulary.
    whole = named in _WHOLE or bool(_file_in(data))
    reader: Any = PreTrainedTokenizerFast if whole else AutoTokenizer
    with _naming_source(folder, "tokenizer"):
        tokenizer: Any = reader.from_pretrained(str(data), **_file_in(data), **_LOCAL)
        if adds_bos and tokenizer.bos_token is not None:
            # If the template cannot hold this BOS token, TransformerLens prepends it.
            with suppress(ValueError):
                tokenizer = reader.from_pretrained(str(data), add_bos_token=True, **_LOCAL)
        if fields:
            follow_file(tokenizer, fields)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"its tokenizer_class makes a {type(tokenizer).__name__}")
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
    return tokenizer


@scope
def _naming_source(source: Path, what: str) -> Iterator[None]:
    """Inside the block, errors that transformers or tokenizers raise name the folder or file."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:1000]
        kind = "Hugging Face" if source.is_dir() else "GGUF"
        raise ValueError(f"expected a {kind} {what} in {source}; {reason}") from error

"""Read models and tokenizers from Hugging Face folders and GGUF files; none of their code runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from sparse_tl.backend.core.architecture import dtype_named
from sparse_tl.backend.loading.gguf_files import read_header, split_as_said, take_fields
from sparse_tl.storage.files import read_json

OWN_FIELDS = "sparse_tl"
"""Key in `config.json` of fields that this package adds to those of transformers."""
_GGUF = "model.gguf"
_WHOLE = ("TokenizersBackend", "PreTrainedTokenizerFast")  # tokenizer.json is complete
_MISFITS = ("missing", "unexpected", "mismatched")
_LARGE = 2 * 10**9  # bytes; smaller models load too fast for a bar
# By default, transformers asks on standard input whether to run code, and downloads files.
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


@contextmanager
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
    source: Path,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | None,
    device_map: str | dict[str, Any],
) -> tuple[PreTrainedModel, Any, dict[str, Any]]:
    """The model in a folder or GGUF file, its tokenizer if any, and this package's own fields."""
    if not source.is_dir():
        return *_read_gguf(source, tokenizer, dtype or torch.float32, device_map), {}
    config = read_config(source)
    own: dict[str, Any] = vars(config).pop(OWN_FIELDS, None) or {}
    if dtype is None:
        dtype = dtype_named(str(config.dtype)) if own else torch.float32
    if tokenizer is None and has_tokenizer(source):
        tokenizer = read_tokenizer(source)
    with _naming_source(source, "model"):
        return _loaded(source, config, dtype, device_map), tokenizer, own


def _read_gguf(
    file: Path, tokenizer: Any, dtype: torch.dtype, device_map: str | dict[str, Any]
) -> tuple[PreTrainedModel, Any]:
    fields, held = read_header(file)
    # transformers wants a folder, and would read other files in it, too.
    with tempfile.TemporaryDirectory() as temporary, _naming_source(file, "model"):
        folder = Path(temporary)
        (folder / _GGUF).symlink_to(file.resolve())
        config = AutoConfig.from_pretrained(folder, gguf_file=_GGUF, **_LOCAL)
        vars(config).pop("_model_name_or_path", None)  # free text
        take_fields(fields, config)
        if tokenizer is None and "tokenizer.ggml.tokens" in fields:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=_GGUF, **_LOCAL)
            split_as_said(tokenizer, fields)
            tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(file)
        # Otherwise transformers may keep quantised blocks, and run code from a hub on them.
        whole = transformers.GgufConfig(dequantize=True)
        model = _loaded(
            folder, config, dtype, device_map, gguf_file=_GGUF, quantization_config=whole
        )
        taken = sum(parameter.numel() for parameter in model.parameters())
        if taken != held:
            raise ValueError(
                f"transformers' {config.model_type} takes {taken:,} of its {held:,} weights, so "
                "that it would be a different model from the file's"
            )
    return model, tokenizer


def _loaded(
    folder: Path, config: Any, dtype: torch.dtype, device_map: str | dict[str, Any], **options: Any
) -> PreTrainedModel:
    """The model in a folder, with all weights in it and no others."""
    large = sum(file.stat().st_size for file in folder.glob("model*")) > _LARGE
    with nullcontext() if large else quietly():
        model, outcome = _class_of(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            attn_implementation="eager",
            # With a folder's own, at which transformers may find fault, saving could fail.
            generation_config=GenerationConfig.from_model_config(config),
            ignore_mismatched_sizes=True,  # otherwise they are not listed
            output_loading_info=True,
            **options,
            **_LOCAL,
        )
    # Of such weights, transformers only warns.
    found = {kind: sorted(outcome[f"{kind}_keys"]) for kind in _MISFITS}
    if any(found.values()):
        said = ", ".join(f"{kind} {some[:5]!s:.200}" for kind, some in found.items())
        raise ValueError(f"the weights do not fit their config.json; {said}")
    weights, prefix = dict(model.named_parameters()), model.base_model_prefix
    alone = folder / "model.safetensors"
    for file in [alone] if alone.is_file() else folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:  # transformers would convert them
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                kind = opened.get_slice(name).get_dtype()
                known = name in weights or f"{prefix}.{name}" in weights
                if known and not kind.startswith(("F", "BF")):
                    raise ValueError(f"{name} is of type {kind}, not a floating-point number")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{device_map} leaves weights on the disk, or nowhere")
    return model


def read_config(folder: Path) -> Any:
    """The configuration of the model in a folder, without fields that name code."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds an adapter of another model (adapter_config.json). Merge both (peft: "
            "merge_and_unload) and save the result"
        )
    with _naming_source(folder, "model"):
        names = read_json(folder / "config.json").get("architectures")
        if names and not any(hasattr(transformers, name) for name in names):
            raise ValueError(f"transformers has no {str(names)[:100]}, which its config.json names")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"there are no safetensors in {folder}. Pickles (.bin, .pt) are not read, since a "
            "pickle can run code. If you trust them, convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    with _naming_source(folder, "model"):
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        for part in _parts(config):
            if getattr(part, "quantization_config", None) is not None:
                raise ValueError("its weights are quantised (config.json); save it dequantised")
            # transformers asks whether to run the code of parts, and fetches and runs kernels.
            vars(part).pop("auto_map", None)
            part._experts_implementation = None
    return config


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and those in it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds tokenizer files."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def read_tokenizer(folder: Path, *, adds_bos: bool = False) -> Any:
    """Load the tokenizer in a folder.

    Args:
        folder: folder of the tokenizer's files.
        adds_bos: whether the tokenizer starts every text with its BOS token, if it has one, even if
            its files do not say so, as HookedTransformer requires.
    """
    said = folder / "tokenizer_config.json"
    with _naming_source(folder, "tokenizer"):
        named = read_json(said).get("tokenizer_class") if said.is_file() else None
        # AutoTokenizer would pick the class of the model family, with its own vocabulary.
        reader: Any = PreTrainedTokenizerFast if named in _WHOLE else AutoTokenizer
        tokenizer = reader.from_pretrained(folder, **_LOCAL)
        if adds_bos and tokenizer.bos_token is not None:
            # If the template cannot hold this BOS token, TransformerLens prepends it.
            with suppress(ValueError):
                tokenizer = reader.from_pretrained(folder, add_bos_token=True, **_LOCAL)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"its tokenizer_class makes a {type(tokenizer).__name__}")
    return tokenizer


def check_tokenizer(tokenizer: Any, d_vocab: int) -> None:
    """Check that a tokenizer fits a model with this many tokens.

    The model may have more tokens, since vocabularies are padded. A few added tokens, such as
    Gemma 3's image tokens, may exceed the model's vocabulary.
    """
    bos = tokenizer.bos_token_id
    if tokenizer.vocab_size > d_vocab or (bos is not None and bos >= d_vocab):
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and begins texts with number {bos}; "
            f"the model has {d_vocab} tokens. It belongs to another model: use the model's own, or "
            "remove the tokenizer's files"
        )


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


@contextmanager
def _naming_source(source: Path, what: str) -> Iterator[None]:
    """Inside the block, errors that transformers or tokenizers raise name the folder or file."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:1000]
        if "trust_remote_code" in reason:
            reason = (
                "it needs code of its own, which is not run. If you trust it, load it with "
                "transformers and pass the result"
            )
        raise ValueError(f"cannot read the {what} in {source}; {reason}") from error

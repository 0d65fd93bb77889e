"""Models and tokenizers of Hugging Face folders, read as data.

A folder may come from a stranger, and its files can name code to run: ``auto_map``, ``*.py``,
pickled weights, adapters, kernels. So transformers never sees the folder itself. It sees links to
the files that are data, in a temporary folder, with the fields left out that point elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

with suppress(ImportError):
    from transformer_lens import HookedTransformerConfig

from sparse_tl.files import read_json, write_json

_INDEX = "model.safetensors.index.json"
_VOCABULARIES = ("tokenizer.json", "vocab.json")
_PLAIN = (*_VOCABULARIES, "merges.txt", "vocab.txt", "added_tokens.json")
# Fields of config.json, at any depth, that name code or another place.
_POINTERS = (
    "auto_map _name_or_path trust_remote_code attn_implementation _attn_implementation "
    "experts_implementation _experts_implementation transformers_weights custom_pipelines"
)
_TOKENIZER_FIELDS = (
    "tokenizer_class backend bos_token eos_token unk_token sep_token pad_token cls_token "
    "mask_token additional_special_tokens extra_special_tokens added_tokens_decoder "
    "model_specific_special_tokens add_bos_token add_eos_token add_prefix_space legacy errors "
    "do_lower_case clean_up_tokenization_spaces split_special_tokens model_max_length "
    "padding_side truncation_side model_input_names"
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
# transformers asks on standard input where this is left out, and fetches where it may.
_LOCAL = {"trust_remote_code": False, "local_files_only": True}


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def read_model(
    folder: Path, dtype: torch.dtype, device: str | None
) -> tuple[HookedTransformerConfig, dict[str, torch.Tensor], Any]:
    """Configuration and weights in TransformerLens's form, and the tokenizer if there is one.

    Raises:
        ValueError: no model that TransformerLens knows, weights that are damaged, missing, pickled
            or quantised, or an adapter.
    """
    from transformer_lens.loading_from_pretrained import (
        get_pretrained_model_config,
        get_pretrained_state_dict,
    )
    from transformers import AutoModelForCausalLM

    config = _checked_config(folder)
    with _data_alone(folder) as data:
        write_json(data / "config.json", config)
        _link_weights(folder, data)
        with _said_of(folder, "model"):
            cfg = get_pretrained_model_config(
                str(data), dtype=dtype, device=device, trust_remote_code=False
            )
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(data),
                dtype=dtype,
                use_safetensors=True,
                attn_implementation="eager",
                output_loading_info=True,
                **_LOCAL,
            )
            hf_model, outcome = loaded
            if outcome["missing_keys"]:
                # transformers fills them with random numbers and only warns.
                raise ValueError(f"weights are missing: {sorted(outcome['missing_keys'])[:5]}")
            weights = get_pretrained_state_dict(str(data), cfg, hf_model, dtype=dtype)
        tokenizer = None
        if has_tokenizer(folder):
            # As TransformerLens does by name.
            adds_bos = not str(cfg.original_architecture).startswith(("Olmo", "Qwen3", "Phi"))
            tokenizer = _tokenizer_in(data, folder, adds_bos=adds_bos)
    cfg.tokenizer_name = None
    cfg.model_name = folder.resolve().name
    return cfg, weights, tokenizer


def read_tokenizer(folder: Path, *, adds_bos: bool) -> Any:
    """The tokenizer in a folder.

    Args:
        folder: that holds its files.
        adds_bos: whether it shall begin every text with its BOS token, where it has one.

    Raises:
        ValueError: damaged files.
    """
    with _data_alone(folder) as data:
        return _tokenizer_in(data, folder, adds_bos=adds_bos)


@contextmanager
def _data_alone(folder: Path) -> Iterator[Path]:
    """A temporary folder with the tokenizer's files alone, to which others can be added.

    Its path says nothing: TransformerLens guesses the architecture from a *path* that contains the
    name of a family ("llama", "gemma").
    """
    with tempfile.TemporaryDirectory(prefix="model-") as temporary:
        data = Path(temporary) / "model"
        data.mkdir()
        for name in _PLAIN:
            _link(folder / name, data)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (folder / name).is_file():
                fields = _json_object(folder / name)
                kept = {k: v for k, v in fields.items() if k in _TOKENIZER_FIELDS.split()}
                write_json(data / name, kept)
        yield data


def _link(file: Path, data: Path) -> None:
    # Links stay: the hub's cache is made of them. Pipes and devices would never end.
    if file.is_file():
        (data / file.name).symlink_to(file.resolve())


def _link_weights(folder: Path, data: Path) -> None:
    """Add the safetensors files, and their index if it names no others."""
    tensors = sorted(folder.glob("*.safetensors"))
    if not tensors:
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
        found = f"found {pickled[:5]}, which are not read: a pickle can run code" if pickled else ""
        raise ValueError(
            f"expected weights as safetensors in {folder}; {found or 'there are none'}. Where you "
            "trust them, convert them with transformers: AutoModelForCausalLM.from_pretrained(...)"
            ".save_pretrained(...)"
        )
    for file in tensors:
        _link(file, data)
    if (folder / _INDEX).is_file():
        index = _json_object(folder / _INDEX)
        named = index.get("weight_map")
        known = {file.name for file in tensors}
        if not isinstance(named, dict) or not all(name in known for name in named.values()):
            raise ValueError(f"expected a `weight_map` to files beside it in {folder / _INDEX}")
        write_json(data / _INDEX, index)


def _checked_config(folder: Path) -> dict[str, Any]:
    """The model's configuration without what points elsewhere."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"expected a whole model in {folder}; adapter_config.json makes it an adapter of "
            "another one. Merge both (peft: merge_and_unload) and save the result."
        )
    config = _without_pointers(_json_object(folder / "config.json"))
    if "quantization_config" in config:
        raise ValueError(
            f"expected plain weights in {folder}; its config.json has a quantization_config. "
            "Save the model dequantised."
        )
    if "n_positions" in config and "n_ctx" not in config:
        # transformers 5 no longer writes GPT-2's n_ctx, which TransformerLens asks for.
        config["n_ctx"] = config["n_positions"]
    return config


def _without_pointers(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_pointers(v) for k, v in value.items() if k not in _POINTERS.split()}
    return [_without_pointers(item) for item in value] if isinstance(value, list) else value


def _json_object(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object in {file}; got a {type(content).__name__}")
    return content


def _tokenizer_in(data: Path, folder: Path, *, adds_bos: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    with _said_of(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(str(data), **_LOCAL)
        if adds_bos and tokenizer.bos_token is not None:
            # Where its template cannot hold this BOS token, TransformerLens prepends it.
            with suppress(ValueError):
                tokenizer = AutoTokenizer.from_pretrained(str(data), add_bos_token=True, **_LOCAL)
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

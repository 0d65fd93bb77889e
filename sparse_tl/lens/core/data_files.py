"""Restrict what transformers can see of an untrusted folder.

Its files can name code to run: ``auto_map``, ``*.py``, pickled weights, adapters, kernels. So
transformers never sees the folder itself, but a temporary folder with links to the data files, in
which fields that point elsewhere are removed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open

from sparse_tl.calls.scopes import scope
from sparse_tl.storage.files import read_json, tensor_file, write_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_VOCABULARIES = ("tokenizer.json", "vocab.json")
# A chat template is a program, which transformers runs in a sandbox, and only when asked to.
_PLAIN = (*_VOCABULARIES, "merges.txt", "vocab.txt", "added_tokens.json", "chat_template.jinja")
# Fields of config.json, at any depth, that name code or another location.
_POINTERS = (
    "auto_map _name_or_path trust_remote_code attn_implementation _attn_implementation "
    "experts_implementation _experts_implementation transformers_weights custom_pipelines"
)
_TOKENIZER_FIELDS = (
    "tokenizer_class backend bos_token eos_token unk_token sep_token pad_token cls_token "
    "mask_token additional_special_tokens extra_special_tokens added_tokens_decoder "
    "model_specific_special_tokens add_bos_token add_eos_token add_prefix_space legacy errors "
    "do_lower_case clean_up_tokenization_spaces split_special_tokens model_max_length "
    "padding_side truncation_side model_input_names chat_template"
)
_DEPTHS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
# Integer, Boolean and complex dtypes, as safetensors names them.
_NO_FLOATS = ("I", "U", "BOOL", "C")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds tokenizer files."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


@scope
def data_alone(folder: Path) -> Iterator[Path]:
    """A temporary folder that holds only the tokenizer's files, to which others can be added.

    Its path is neutral, since readers may guess a model family from the path.
    """
    with tempfile.TemporaryDirectory(prefix="model-") as temporary:
        data = Path(temporary) / "model"
        data.mkdir()
        for name in _PLAIN:
            link(folder / name, data)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (folder / name).is_file():
                fields = json_object(folder / name)
                kept = {k: v for k, v in fields.items() if k in _TOKENIZER_FIELDS.split()}
                write_json(data / name, kept)
        yield data


def link(file: Path, data: Path, name: str | None = None) -> None:
    """Link a file into a folder, by its own name or another one."""
    # Follow links: the hub's cache consists of them. Pipes and devices would never end.
    if file.is_file():
        (data / (name or file.name)).symlink_to(file.resolve())


def link_weights(folder: Path, data: Path) -> tuple[dict[str, int], set[str]]:
    """Link the safetensors files, and their index if it names only these.

    Other safetensors files, including gates, are not linked. Returns the sizes of weights by name,
    and the names of those that are not floating-point.

    Raises:
        ValueError: weights are pickled or damaged, or the index names files elsewhere.
    """
    named: Any = {"": _WEIGHTS}
    if (folder / _WEIGHTS).is_file():
        pass  # transformers ignores an index beside it, too
    elif (folder / _INDEX).is_file():
        index = json_object(folder / _INDEX)
        named = index.get("weight_map")
        known = {file.name for file in folder.glob("*.safetensors") if file.is_file()}
        if not isinstance(named, dict) or any(
            not isinstance(name, str) or name not in known for name in named.values()
        ):
            raise ValueError(f"expected a `weight_map` to files beside it in {folder / _INDEX}")
        write_json(data / _INDEX, index)
    else:
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
        found = f"found {pickled[:5]}, which are not read: a pickle can run code"
        raise ValueError(
            f"expected weights as safetensors in {folder}; "
            f"{found if pickled else f'there is no {_WEIGHTS}'}. If you trust them, convert "
            "them with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    sizes, others = dict[str, int](), set[str]()
    for name in set(named.values()):
        link(folder / name, data)
        with tensor_file(folder / name), safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                found = file.get_slice(key)
                sizes[key] = math.prod(found.get_shape())
                if found.get_dtype().startswith(_NO_FLOATS):
                    others.add(key)
    return sizes, others


def checked_config(folder: Path) -> dict[str, Any]:
    """The model's configuration without fields that point elsewhere.

    Raises:
        ValueError: the model is an adapter, is quantised, or is of a class unknown to transformers.
    """
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"expected a whole model in {folder}; adapter_config.json makes it an adapter of "
            "another one. Merge both (peft: merge_and_unload) and save the result."
        )
    config = _without_pointers(json_object(folder / "config.json"))
    if "quantization_config" in config:
        raise ValueError(
            f"expected plain weights in {folder}; its config.json has a quantization_config. "
            "Save the model dequantised."
        )
    named = config.get("architectures") or ["PreTrainedModel"]
    known = isinstance(named, list) and any(hasattr(transformers, str(name)) for name in named)
    if not known:
        raise ValueError(
            f"expected a Hugging Face model in {folder} of a class that transformers has; its "
            f"config.json names {str(named)[:100]}"
        )
    return config


def depths(config: Any) -> Iterator[tuple[str, Any]]:
    """The layer counts in a configuration, at any depth."""
    for name, value in config.items():
        if name in _DEPTHS and value is not None:
            yield name, value
        elif isinstance(value, dict):
            yield from depths(value)


def check_depth(layers: Any, weights: int, said: str) -> None:
    """Check that there are enough weights for this many layers, before any is allocated.

    Raises:
        ValueError: there are more layers than weights, or `layers` is not a positive integer.
    """
    if type(layers) is not int or not 0 < layers <= weights:
        raise ValueError(
            f"expected a number of layers that the {weights} weights can fill in {said}; "
            f"got {layers!r:.200}"
        )


def _without_pointers(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_pointers(v) for k, v in value.items() if k not in _POINTERS.split()}
    return [_without_pointers(item) for item in value] if isinstance(value, list) else value


def json_object(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object in {file}; got a {type(content).__name__}")
    return content

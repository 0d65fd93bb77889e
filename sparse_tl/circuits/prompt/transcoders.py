"""Transcoders: what an MLP writes, as a sum over features that its input activates.

A transcoder of layer l reads x, the value at its input hook, and has the activations

    f = act(W_enc x + b_enc),      act(y) = y where y > threshold, otherwise 0.

It writes ``sum_l' f_l' W_dec[l' -> l] + b_dec[l]`` at its output hook, where l' is l alone, or all
layers up to l for cross-layer transcoders. What the MLP writes beyond that is its error.

Two published formats are read, as data:

- circuit-tracer's: a folder of ``config.yaml`` with ``layer_{i}.safetensors`` (per layer), or with
  ``W_enc_{i}.safetensors`` and ``W_dec_{i}.safetensors`` (cross-layer);
- SAELens's: a folder per layer, with ``cfg.json`` and ``sae_weights.safetensors``.

References: Dunefsky et al., arXiv 2406.11944; github.com/safety-research/circuit-tracer 0.5;
github.com/decoderesearch/SAELens 6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import ArgumentError, checked
from sparse_tl.backend import Adapter, Hook, Order
from sparse_tl.backend.load import fetch
from sparse_tl.storage.files import read_json, read_tensors

_CONFIG, _LENS_CONFIG, _LENS_WEIGHTS = "config.yaml", "cfg.json", "sae_weights.safetensors"


@checked
@dataclass(frozen=True, eq=False)
class Transcoder:
    """The features that read one layer.

    Args:
        encoder: what each feature reads.
        encoder_bias: added to it.
        decoder: what each feature writes, at its own layer and those after it that it writes to.
        bias: what is written at its layer without any feature.
        threshold: of each feature's activation; 0 for ReLU.
    """

    encoder: Float[Tensor, "feature d_model"]
    encoder_bias: Float[Tensor, " feature"]
    decoder: Float[Tensor, "feature layer d_model"]
    bias: Float[Tensor, " d_model"]
    threshold: Float[Tensor, " feature"]

    def activations(self, x: Float[Tensor, "*pos d_model"]) -> Float[Tensor, "*pos feature"]:
        """The features' activations, differentiable where they are above the threshold."""
        y = x.to(self.encoder.dtype) @ self.encoder.T + self.encoder_bias
        return y * (y > self.threshold)


@dataclass(frozen=True, eq=False)
class Transcoders:
    """A transcoder for each layer of a model.

    Args:
        input_hook: hook point of a layer that features read, such as ``"mlp.hook_in"``.
        output_hook: hook point where they write, such as ``"hook_mlp_out"``.
        layers: the transcoders, from layer 0.
        model_name: the model that they were trained on, if known.
    """

    input_hook: str
    output_hook: str
    layers: Sequence[Transcoder] = field(repr=False)
    model_name: str = ""

    def written(
        self, layer: int, features: Mapping[int, Float[Tensor, "*pos feature"]]
    ) -> Float[Tensor, "*pos d_model"]:
        """What the features of layers up to this one write at it."""
        whole = self.layers[layer].bias
        for source, active in features.items():
            decoder = self.layers[source].decoder
            if 0 <= layer - source < decoder.shape[1]:
                whole = whole + active @ decoder[:, layer - source]
        return whole


Basis = Literal["neurons"] | Transcoders
"""What MLPs are a sum of."""


def transcoders_of(basis: Basis, adapter: Adapter) -> Transcoders | None:
    """The transcoders of a basis, where and as the model computes; None for neurons."""
    if not isinstance(basis, Transcoders):
        return None
    like = torch.empty(0, device=adapter.device, dtype=adapter.dtype)
    layers = ((tensor.to(like) for tensor in vars(layer).values()) for layer in basis.layers)
    return replace(basis, layers=[Transcoder(*layer) for layer in layers])


def feature_hooks(
    adapter: Adapter,
    transcoders: Transcoders,
    features: Callable[[int, Tensor], Tensor],
    error: Callable[[int, Tensor], Tensor],
) -> list[Hook]:
    """Hooks that make what MLPs write the sum of features and an error.

    `features` and `error` are given a layer and its own, and return what is written instead.

    Raises:
        ValueError: the transcoders do not fit the model.
    """
    if (n := len(transcoders.layers)) != adapter.n_layers:
        raise ValueError(f"transcoders of {n} layers, and {adapter.name!r} has {adapter.n_layers}")
    own, used = dict[int, Tensor](), dict[int, Tensor]()

    def check(layer: int, hook: str, x: Tensor) -> None:
        width = transcoders.layers[layer].encoder.shape[1]
        if x.shape[-1] != width:
            raise ValueError(
                f"the transcoder of layer {layer} reads and writes {width} numbers, and {hook} of "
                f"{adapter.name!r} has {x.shape[-1]} there"
            )

    def encode(layer: int, x: Tensor) -> None:
        check(layer, transcoders.input_hook, x)
        own[layer] = transcoders.layers[layer].activations(x)
        used[layer] = features(layer, own[layer])

    def decode(layer: int, output: Tensor) -> Tensor:
        check(layer, transcoders.output_hook, output)
        found, changed = (transcoders.written(layer, x).to(output.dtype) for x in (own, used))
        return changed + error(layer, output - found)

    hooks: list[Hook] = []
    for layer in range(adapter.n_layers):
        block = f"blocks.{layer}"
        hooks.append((f"{block}.{transcoders.input_hook}", Order.LAST, partial(encode, layer)))
        hooks.append((f"{block}.{transcoders.output_hook}", Order.FIRST, partial(decode, layer)))
    return hooks


@checked
def load_transcoders(source: str | Path | Sequence[str | Path]) -> Transcoders:
    """Transcoders from a folder or the Hugging Face hub.

    Args:
        source: a folder, the name of a hub repository such as
            ``"mntss/transcoder-Llama-3.2-1B"``, or, in SAELens's format, one for each layer, in
            any order.

    Raises:
        ValueError: there is no such folder or repository; a file is missing, is damaged, or holds
            NaN; layers are missing; or the transcoders have parts that this package does not
            compute (skip connections, normalised activations, activation functions other than ReLU
            and JumpReLU).
    """
    sources = [source] if isinstance(source, str | Path) else source
    folders = [Path(each) if Path(each).is_dir() else fetch(str(each))[0] for each in sources]
    if len(folders) == 1 and (folders[0] / _CONFIG).is_file():
        return _of_tracer(folders[0])
    return _of_lens(folders)


def _of_tracer(folder: Path) -> Transcoders:
    """Transcoders in circuit-tracer's format."""
    path = folder / _CONFIG
    try:
        config: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        hooks = [str(config[f"feature_{way}_hook"]) for way in ("input", "output")]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} says nothing about transcoders: {error!s:.200}") from error
    layers = list[Transcoder]()
    while files := sorted(folder.glob(f"*_{len(layers)}.safetensors")):
        found = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
        of_layer = {name.removesuffix(f"_{len(layers)}"): x for name, x in found.items()}
        layers.append(_transcoder(files[0], of_layer))
    if not layers:
        raise ValueError(f"{folder} holds no layer_0.safetensors or W_enc_0.safetensors")
    read, written = (hook.removeprefix("blocks.{layer}.") for hook in hooks)
    return Transcoders(read, written, layers, str(config.get("model_name", "")))


def _of_lens(folders: Sequence[Path]) -> Transcoders:
    """Transcoders in SAELens's format."""
    found, made = dict[int, Transcoder](), set[tuple[str, str, str]]()
    for folder in folders:
        path = folder / _LENS_CONFIG
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no transcoders: neither circuit-tracer's {_CONFIG} nor SAELens's "
                f"{_LENS_CONFIG}"
            )
        said: Any = read_json(path)
        said = said | (said.get("metadata") or {})
        kind, normalised = said.get("architecture"), said.get("normalize_activations")
        if kind not in ("transcoder", "jumprelu_transcoder") or normalised not in ("none", None):
            raise ValueError(
                f"{path} describes {kind!r}, with activations normalised by {normalised!r}: only "
                "transcoders of ReLU or JumpReLU without normalisation are read"
            )
        hooks = [str(said.get(key)) for key in ("hook_name", "hook_name_out")]
        match = re.fullmatch(r"blocks\.(\d+)\.(\S+) blocks\.\1\.(\S+)", " ".join(hooks))
        if match is None:
            raise ValueError(f"{path} reads {hooks[0]!r} and writes {hooks[1]!r}, not one layer")
        tensors = read_tensors(folder / _LENS_WEIGHTS)
        if "W_enc" in tensors:
            tensors["W_enc"] = tensors["W_enc"].T
        found[int(match[1])] = _transcoder(folder / _LENS_WEIGHTS, tensors)
        made.add((match[2], match[3], str(said.get("model_name") or "")))
    numbers = sorted(found)
    if numbers != [*range(len(folders) or 1)] or len(made) > 1:
        raise ValueError(
            f"these are transcoders of layers {numbers} at {sorted(made)}: give one of each layer, "
            "from 0, of one model and its hook points"
        )
    read, written, name = made.pop()
    return Transcoders(read, written, [found[number] for number in numbers], name)


def _transcoder(path: Path, tensors: Mapping[str, Tensor]) -> Transcoder:
    """One layer's transcoder, from the tensors of its file."""
    if "W_skip" in tensors:
        raise ValueError(f"{path} has a skip connection, which is not supported")
    if lacking := {"W_enc", "W_dec", "b_enc", "b_dec"} - tensors.keys():
        raise ValueError(f"{path} lacks {', '.join(sorted(lacking))}")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} in {path} has NaN or infinite numbers")
    encoder, decoder, bias = (tensors[name].float() for name in ("W_enc", "W_dec", "b_enc"))
    decoder = decoder[:, None] if decoder.ndim == 2 else decoder
    thresholds = [tensors[name] for name in tensors if name.endswith("threshold")]
    threshold = thresholds[0].float().flatten() if thresholds else torch.zeros_like(bias)
    try:
        return Transcoder(encoder, bias, decoder, tensors["b_dec"].float(), threshold)
    except ArgumentError as error:
        raise ValueError(f"the shapes in {path} do not fit: {error}") from error

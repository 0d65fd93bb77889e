"""Read models and tokenizers from Hugging Face folders and GGUF files; none of their code runs.

What transformers would silently ignore in a GGUF file is set, or refused. Of the hyperparameters,
every one of the file's architecture is

1. decided by the shapes of the weights, which are checked, or without effect;
2. a number that the configuration has too: it is set; if the file lacks it, to llama.cpp's default;
3. anything else, which is refused.

`tokenizer.ggml.pre` names how byte-level BPE splits a text before merging; the merges are right for
that split alone. transformers knows some of these names and splits by GPT-2's rule wherever it does
not, which gives other tokens: SmolLM separates every digit first, and so keeps a blank line in one
token.

Reference: `load_hparams`, `load_arch_hparams` and `llm_tokenizer_bpe` in llama.cpp, and the
tokenizer.json files that the models' authors published.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from tokenizers import normalizers, pre_tokenizers
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
from transformers.utils.versions import require_version

from sparse_tl.backend.devices import dtype_named
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
        _take_fields(fields, config)
        if tokenizer is None and "tokenizer.ggml.tokens" in fields:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=_GGUF, **_LOCAL)
            _split_as_said(tokenizer, fields)
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
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"there are no safetensors in {folder}. Pickles (.bin, .pt) are not read, since a "
            "pickle can run code. If you trust them, convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    with _naming_source(folder, "model"):
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        names = config.architectures
        if names and not any(hasattr(transformers, name) for name in names):
            raise ValueError(f"transformers has no {str(names)[:100]}, which its config.json names")
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

    If `adds_bos`, as HookedTransformer requires, it starts every text with its BOS token, if it has
    one, even if its files do not say so.
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


# ---- GGUF files ----------------------------------------------------------------------------------

# Earlier versions of transformers build other tokenizers: without BOS, or of unknown kinds.
_NEEDED = "gguf>=0.17.1", "transformers>=5.23"

_IGNORED = """
context_length embedding_length block_count feed_forward_length vocab_size tensor_data_layout
use_parallel_residual attention.head_count_kv attention.key_length attention.value_length
expert_count expert_feed_forward_length expert_shared_feed_forward_length shortconv.l_cache
ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank
rope.scaling.original_context_length rope.scaling.finetuned
"""
"""Fields that the weights decide, or that only describe them or the training."""
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention.head_count": (0,),  # of models without attention
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "ssm.dt_b_c_rms": (False,),
}
_RMS, _LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_EPSILON = "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
_ATTRIBUTES = {
    "attention.head_count": ("num_attention_heads", "n_head"),
    _RMS: _EPSILON,
    _LAYER: _EPSILON,
    "expert_used_count": ("num_experts_per_tok",),
}
"""Names of a field in transformers' configurations."""
_WINDOW, _CAP = "attention.sliding_window", "final_logit_softcapping"
_OF_MODEL: dict[str, dict[str, float | None]] = {
    "gemma2": {_WINDOW: 4096, _CAP: 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {_WINDOW: None, _CAP: 0.0, "rope.freq_base_swa": 10_000.0},
    "phi3": {_WINDOW: 0},
    "starcoder2": {_WINDOW: 0},
}
"""Fields of some models only, with llama.cpp's defaults; None is for what a file must have."""
_PARTLY_ROTARY = "nemotron", "phi3", "stablelm"
# Their attention is scaled by the width per head; that of the other Gemmas by the head's.
_LARGEST_GEMMAS = ("gemma2", 46), ("gemma3_text", 62)

_GPT2 = {"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"}
_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Every digit on its own, then GPT-2's rule."""
_COMPOSED = {"olmo", "mpt", "command-r", "qwen2", "deepseek-r1-qwen", "megrez", "qwen35"}
"""Characters are composed first (NFC)."""
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
"""A word that is a token is taken as it is, even if merging would not lead to it."""
_OWN_TOKENIZER = "so prompts would get other tokens. Pass the model's own tokenizer: tokenizer=..."


def find_gguf(place: Path) -> Path | None:
    """The GGUF file at a path or in a folder, or None."""
    if not place.is_dir():
        return place if place.suffix == ".gguf" or place.is_file() else None
    found = sorted(place.glob("*.gguf"))
    if len(found) > 1:
        names = [file.name for file in found[:5]]
        raise ValueError(f"{place} has several GGUF files; give the path of one: {names}")
    return found[0] if found else None


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The metadata of a GGUF file without its long vocabulary, and its number of weights."""
    for needed in _NEEDED:
        require_version(needed, f"It is needed to read {file}: pip install '{needed}'")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = {
            name: () if name.startswith("tokenizer.") and len(field.data) > 1 else field.contents()
            for name, field in reader.fields.items()
        }
    except Exception as error:  # of any field
        raise ValueError(f"{file} is not a whole GGUF file: {error}") from error
    if (parts := fields.get("split.count", 1)) not in (0, 1):
        raise ValueError(
            f"{file} is one of {parts!s:.80} parts. Join them first: "
            "llama-gguf-split --merge FIRST_PART OUT"
        )
    return fields, sum(int(tensor.n_elements) for tensor in reader.tensors)


def _take_fields(fields: Mapping[str, Any], config: Any) -> None:
    """Set in the configuration that transformers made from a GGUF file what the file says."""
    start = f"{fields['general.architecture']}."
    said = {name.removeprefix(start): fields[name] for name in fields if name.startswith(start)}
    of_model, no_effect = _OF_MODEL.get(config.model_type, {}), dict(_NO_EFFECT)
    defaults = {**of_model, _RMS: said.get(_LAYER)}
    places = _places(config)
    if "attention.head_count" in places:
        width = config.hidden_size // config.num_attention_heads
        head = getattr(config, "head_dim", None) or width
        defaults["attention.head_count"] = None
        no_effect["rope.dimension_count"] = (head,)
        if "rope.freq_base" in places:
            defaults |= {"rope.freq_base": 10_000.0, "rope.dimension_count": head}
        if config.model_type in _PARTLY_ROTARY:
            share = said.get("rope.dimension_count", head) / head
            config.rope_parameters["partial_rotary_factor"] = share
            no_effect["rope.dimension_count"] = (int(head * share),)  # as transformers rounds it
        if hasattr(config, "query_pre_attn_scalar"):
            largest = (config.model_type, config.num_hidden_layers) in _LARGEST_GEMMAS
            config.query_pre_attn_scalar = width if largest else head
    taken: dict[tuple[int, str], Any] = {}
    for field, value in (defaults | said).items():
        quoted = f"{start + field!r:.80}"
        if value is None:
            raise ValueError(f"it lacks the field {quoted}")
        if field in places and isinstance(value, int | float):
            holder, name = places[field]
            holder[name] = (value or None) if field in of_model else value  # a window of 0 is none
            known = taken.setdefault((id(holder), name), value) == value
        else:
            known = field in _IGNORED.split() or value in no_effect.get(field, ())
        if not known:
            raise ValueError(
                f"transformers ignores its {quoted} = {value!r:.80}, so that it would be a "
                "different model from the file's"
            )


def _places(config: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """The dictionary and key at which a configuration has a field."""
    own, kind = vars(config), type(config)
    # A configuration of transformers also keeps names that its model does not read.
    had = {field: [n for n in names if hasattr(kind, n)] for field, names in _ATTRIBUTES.items()}
    found = {field: (own, names[0]) for field, names in had.items() if names}
    found |= {
        field: (own, field.rpartition(".")[2]) for field in _OF_MODEL.get(config.model_type, ())
    }
    if rope := own.get("rope_parameters"):
        found["rope.freq_base"] = rope.get("full_attention", rope), "rope_theta"
        found["rope.freq_base_swa"] = rope.get("sliding_attention", rope), "rope_theta"
    return found


def _split_as_said(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Make a tokenizer split texts as the metadata of its GGUF file says."""
    # Versions of transformers that cannot read such files do not have it.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind = fields.get("tokenizer.ggml.model")
    adds_space = tokenizer.tokenize("a")[0].startswith("\u2581")
    if kind == "llama" and adds_space != fields.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError(
            f"transformers ignores its tokenizer.ggml.add_space_prefix, {_OWN_TOKENIZER}"
        )
    if kind != "gpt2":
        return
    name, backend = fields.get("tokenizer.ggml.pre"), tokenizer.backend_tokenizer
    if name in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    elif name not in _GPT2 | GGUF_PRE_TOKENIZER_SPLITS.keys():
        raise ValueError(
            f"it splits texts into words by {str(name)[:80]!r} (tokenizer.ggml.pre), which is not "
            f"known here, {_OWN_TOKENIZER}"
        )
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if name in _WHOLE_WORDS:
        backend.model.ignore_merges = True

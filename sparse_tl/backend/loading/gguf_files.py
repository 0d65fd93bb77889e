"""GGUF files: what transformers would silently ignore in them is set, or refused.

Of the file's hyperparameters, every one of its architecture is

1. decided by the shapes of the weights, which are checked elsewhere, or without effect;
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

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import normalizers, pre_tokenizers
from transformers.utils.versions import require_version

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


def take_fields(fields: Mapping[str, Any], config: Any) -> None:
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


def split_as_said(tokenizer: Any, fields: Mapping[str, Any]) -> None:
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

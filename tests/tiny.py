"""Tiny random models of the newest kind that is installed, from one description for all kinds.

A description holds fields of HookedTransformer's configuration, whatever kind is made of it. Where
TransformerLens has no HookedTransformer any more (4.x), it is a TransformerBridge around a Hugging
Face model of the architecture that has these features; where there is none, the test is skipped.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the process that hands out tests to others needs nothing heavy
    import torch

    from sparse_tl.backend import Model
    from sparse_tl.data.batches import TokenBatch

HAS_HOOKED = version("transformer-lens").startswith("3.")
hooked_alone = pytest.mark.skipif(
    not HAS_HOOKED, reason="about HookedTransformer, which TransformerLens 4 has no more"
)

TINY: dict[str, Any] = {
    "model_name": "tiny",
    "n_layers": 2,
    "n_heads": 2,
    "d_model": 16,
    "d_head": 8,
    "d_mlp": 32,
    "n_ctx": 16,
    "d_vocab": 13,
    "act_fn": "gelu",
    "normalization_type": "LN",
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float64": {"dtype": "float64"},
    "grouped": {
        "n_heads": 4,
        "n_key_value_heads": 2,
        "d_head": 4,
        "act_fn": "silu",
        "gated_mlp": True,
        "normalization_type": "RMS",
        "final_rms": True,
        "positional_embedding_type": "rotary",
        "rotary_dim": 4,
    },
    "attention_only": {"attn_only": True, "d_mlp": None},
}
SHAPES = ["plain", "grouped", *(["attention_only"] if HAS_HOOKED else [])]
"""Kinds that the installed TransformerLens has, in float32."""

_GROUPED = (
    "gated_mlp",
    "normalization_type",
    "final_rms",
    "positional_embedding_type",
    "rotary_dim",
)
_LLAMA = {name: KINDS["grouped"][name] for name in _GROUPED}
_ARCHITECTURES: list[tuple[dict[str, Any], str]] = [
    ({"normalization_type": "LN"}, "GPT2Config"),
    ({"normalization_type": "LN", "parallel_attn_mlp": True}, "GPTNeoXConfig"),
    ({"normalization_type": "LNPre"}, "OlmoConfig"),
    (_LLAMA, "LlamaConfig"),
    ({**_LLAMA, "use_qk_norm": True}, "Qwen3Config"),
]
"""Features, and the Hugging Face architecture that has them."""
_FREE_HEADS = ("LlamaConfig", "Qwen3Config")
"""Heads of any size, and fewer of keys and values."""


def tiny_model(kind: str = "plain", seed: int = 0, **overrides: Any) -> Model:
    """A model of two layers with random weights, vocabulary 13 and context 16.

    Kinds: "plain", "float64", "grouped" (grouped-query attention, rotary positions, RMS
    normalisation, gated MLP) and "attention_only".
    """
    return small_model(seed=seed, **{**TINY, **KINDS[kind], **overrides})


def small_task_models(*_: Any, size: dict[str, int] | None = None, **__: Any) -> tuple[Model, Any]:
    """In place of `load_task_models` and `load_language_models`, with the words of the former.

    Four layers of eight heads or of another size, untrained, with room for longer prompts.
    """
    from sparse_tl.gates import SparseTransformer

    dense, gated = (_small_task_model(n_positions=128, **(size or {})) for _ in range(2))
    return dense, SparseTransformer(gated, initial_bias=0.0)


def save_small_task_models(folder: Path, **size: int) -> tuple[Path, Path]:
    """The same as folders; fields of `GPT2Config` make them smaller still."""
    from sparse_tl.backend import save_model
    from sparse_tl.gates import SparseTransformer

    dense = _small_task_model(**size)
    save_model(dense, folder / "dense")
    SparseTransformer(dense, initial_bias=0.0).save_pretrained(folder / "sparse")
    return folder / "dense", folder / "sparse"


def save_taught_task_models(folder: Path, **size: int) -> tuple[Path, Path]:
    """As `save_small_task_models`, of a model that does Greater-Than after a few steps."""
    import torch

    from sparse_tl.backend import save_model
    from sparse_tl.gates import SparseTransformer
    from sparse_tl.zoo import TASKS, task_pairs

    dense = _small_task_model(logits=1.0, **size)
    pairs = task_pairs(TASKS[0], 512, part="training")
    optimizer = torch.optim.Adam(dense.parameters(), lr=1e-2)
    for step in range(60):
        batch = pairs.select(torch.arange(64 * step, 64 * step + 64) % len(pairs))
        given = batch.answers >= 0
        logits = batch.read(dense(batch.clean)).log_softmax(dim=-1)
        found = logits.gather(1, batch.answers.clamp(min=0)) * given
        loss = -(found.sum(dim=1) / given.sum(dim=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(dense, folder / "dense")
    SparseTransformer(dense, initial_bias=4.0).save_pretrained(folder / "sparse")
    return folder / "dense", folder / "sparse"


def _small_task_model(logits: float = 10.0, **size: int) -> Model:
    """Its logits are ten times as large as an untrained model's, so that parts matter."""
    import torch

    from sparse_tl.zoo import task_recipe

    recipe = task_recipe()
    small = {**recipe.architecture, "n_layer": 4, "n_head": 8, "n_embd": 64, "n_inner": 64, **size}
    model = recipe.changed(architecture=small).build(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lm_head" in name:
                parameter.mul_(logits)
    return model


def tokenizer_of(words: Sequence[str], folder: Path, unknown: str | None = None) -> Any:
    """A tokenizer of these words alone, which splits at spaces, by way of a folder.

    Args:
        words: the vocabulary; the first one is the special token.
        folder: folder for its files.
        unknown: the word that stands for all others; the first one by default.
    """
    from made_tokenizers import word_level
    from transformers import AutoTokenizer

    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), words[0])
    word_level(*words, unknown=unknown or words[0], **special).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


WORDS = ["<s>", "the", "cat", "dog", "sat", "ran", "on", "a", "mat", "hill", ".", "and"]
"""Of the models that commands are given."""


def save_story(path: Path) -> Path:
    """Sixty stories of eleven of these words: ninety windows of eight tokens."""
    choice = random.Random(0)
    stories = [" ".join(choice.choices(WORDS[1:], k=11)) for _ in range(60)]
    path.write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    return path


def save_tiny(folder: Path, words: Sequence[str], unknown: str | None = None) -> Path:
    """Save a "grouped" tiny model with a tokenizer of these words, for commands."""
    from sparse_tl.backend import save_model

    tokenizer = tokenizer_of(words, folder, unknown)
    save_model(tiny_model("grouped", d_vocab=len(words), tokenizer=tokenizer), folder)
    return folder


def small_model(*, seed: int = 0, tokenizer: Any = None, **description: Any) -> Model:
    """A model with random weights; the test is skipped where no installed kind can be it."""
    if HAS_HOOKED:
        return _hooked(description, seed, tokenizer)
    return _bridge(description, seed, tokenizer)


def _hooked(description: dict[str, Any], seed: int, tokenizer: Any) -> Any:
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    dtype = getattr(torch, description.get("dtype", "float32"))
    fields = {**description, "seed": seed, "dtype": dtype, "device": "cpu"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
        return HookedTransformer(HookedTransformerConfig.from_dict(fields), tokenizer=tokenizer)


def _bridge(description: dict[str, Any], seed: int, tokenizer: Any) -> Any:
    import torch

    from sparse_tl.backend import boot

    fields = dict(description)
    name, dtype = fields.pop("model_name"), fields.pop("dtype", "float32")
    prepends_bos = fields.pop("default_prepend_bos", True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf_model = _hugging_face(fields)
        _randomise(hf_model)
    model = boot(hf_model.to(getattr(torch, dtype)), tokenizer, name=name)
    model.cfg.default_prepend_bos = prepends_bos
    if description["normalization_type"] is None:
        for module in list(model.modules()):
            if isinstance(getattr(module, "original_component", None), torch.nn.LayerNorm):
                module.set_original_component(torch.nn.Identity())
                # A bridge computes normalisations by itself unless it is told to call them.
                module.__dict__["use_native_layernorm_autograd"] = True
    return model


def _hugging_face(fields: dict[str, Any]) -> Any:
    """A model of the architecture that has just these features."""
    import transformers

    d_model, n_heads, d_head = (fields.pop(name) for name in ("d_model", "n_heads", "d_head"))
    activation, d_mlp = fields.pop("act_fn"), fields.pop("d_mlp", None)
    sizes: dict[str, Any] = {
        "vocab_size": fields.pop("d_vocab"),
        "hidden_size": d_model,
        "num_hidden_layers": fields.pop("n_layers"),
        "num_attention_heads": n_heads,
        "max_position_embeddings": fields.pop("n_ctx"),
        "intermediate_size": d_mlp,
        "hidden_act": activation,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        # GPT-2's own words
        "n_inner": d_mlp,
        "activation_function": activation,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if d_head * n_heads != d_model or "n_key_value_heads" in fields:
        kv_heads = fields.pop("n_key_value_heads", n_heads)
        sizes |= {"head_dim": d_head, "num_key_value_heads": kv_heads}
    unnormalised = fields["normalization_type"] is None  # once it is wrapped, see above
    features = fields | {"normalization_type": "LN"} if unnormalised else fields
    for known, config in _ARCHITECTURES:
        if known == features and ("head_dim" in sizes) <= (config in _FREE_HEADS):
            config = getattr(transformers, config)(**sizes)
            break
    else:
        pytest.skip(f"of HookedTransformer alone: {fields}, heads of {d_head} in {d_model}")
    hf_model: Any = transformers.AutoModelForCausalLM.from_config(config)
    return hf_model.eval()


def _randomise(hf_model: Any) -> None:
    """Matrices as large as HookedTransformer's at the start; Hugging Face's are smaller."""
    import torch

    with torch.no_grad():
        for parameter in hf_model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.8 / hf_model.config.hidden_size**0.5)


def in_pieces(model: Any, pieces: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Logits of a prompt that is given piece by piece, with a key-value cache between them."""
    import torch

    from sparse_tl.backend import adapt

    inner: Any = adapt(model).model
    if type(inner).__name__ == "HookedTransformer":
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        cache = TransformerLensKeyValueCache.init_cache(inner.cfg, "cpu", len(pieces[0]))
        for piece in pieces:
            yield model(piece, past_kv_cache=cache, attention_mask=torch.ones_like(piece))
    else:
        from transformers import DynamicCache

        cache = DynamicCache(config=inner.original_model.config)
        for piece in pieces:
            yield model(piece, past_key_values=cache, use_cache=True)


def learn_echo(model: Model, rows: Callable[..., TokenBatch]) -> None:
    """Train a tiny model on `echo_rows`, to about 0.05 nats held out."""
    from sparse_tl.data import ShuffledStream
    from sparse_tl.training import pretrain

    pretrain(
        model,
        ShuffledStream(rows(), 32),
        validation=rows(seed=1),
        steps=120,
        learning_rate=1e-2,
        warmup=10,
        progress=False,
    )


def keep_last_weights(patch: Any) -> None:
    """Post-training ends with its last weights, whatever they are worth."""
    from sparse_tl.training.post_train import SparsityObjective

    patch.setattr(SparsityObjective, "better", lambda self, new, old: True)

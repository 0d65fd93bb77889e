"""Gates on attention edges. The first paragraph of each docstring stands on the page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from architectures import N_HEADS, N_LAYERS, plain_transformer
from double_precision import DoublePrecision
from tiny import in_pieces
from torch import Tensor

from architecture_checks.subject import FLOAT32, FLOAT64, PAIRS, Subject, metric_of, near, require
from sparse_tl import SparseTransformer, load_model, save_model
from sparse_tl.gates import SigmoidGate


@torch.no_grad()
def open_gates(subject: Subject) -> None:
    """With all gates open, and again after the gates are removed, the logits equal the plain
    model's bit for bit."""
    model = subject.build()
    plain, sparse = model(PAIRS.clean), SparseTransformer(model)
    with sparse.opened():
        require(torch.equal(sparse(PAIRS.clean), plain), "open gates change the logits")
    require(torch.equal(sparse.unwrap()(PAIRS.clean), plain), "unwrapping changes the logits")


@torch.no_grad()
def gates_by_hand(subject: Subject) -> float:
    """Logits under hard gates, compared with a plain transformers model with the same gates written
    into its attention function by hand (float32)."""
    sparse = SparseTransformer(subject.build(), gates="score")
    sparse.gates.bias.normal_(0, 1.5, generator=torch.Generator().manual_seed(0))
    logits, counts = sparse.run_with_counts(PAIRS.clean)
    require(bool((counts.active < counts.possible).any()), "no gate was closed")
    plain = plain_transformer(subject.name)
    _gate_by_hand(plain, sparse.gates.bias, lambda scores: scores > 0)
    return near(logits, plain(PAIRS.clean).logits, FLOAT32, "the logits under gates")


def gradients(subject: Subject) -> float:
    """Gradients of the gates' biases and of the embedding's weights under smooth gates, compared
    with a plain transformers model with the same gates written into its attention function."""
    model = subject.build("float64")
    sparse = SparseTransformer(model, distribution=SigmoidGate(), initial_bias=0.0)
    plain = plain_transformer(subject.name, "float64")
    bias = torch.zeros(N_LAYERS, N_HEADS, dtype=torch.float64, requires_grad=True)
    _gate_by_hand(plain, bias, torch.sigmoid)
    with DoublePrecision():
        metric_of(sparse(PAIRS.clean)).backward()
        metric_of(plain(PAIRS.clean).logits).backward()
    # HookedTransformer has rotary tables of its own, rounded to float32.
    alike = FLOAT64 if subject.kind == "TransformerBridge" else 1e-6
    off = near(sparse.gates.bias.grad, bias.grad, alike, "the biases' gradient")
    found = model.embed.W_E.grad
    if subject.kind == "HookedTransformer" and plain.config.tie_word_embeddings:
        found = found + model.unembed.W_U.grad.T  # it has two copies of what is one
    expected = plain.get_input_embeddings().weight.grad
    return max(off, near(found, expected, alike, "the embedding's gradient"))


def _gate_by_hand(plain: Any, bias: Tensor, gate: Callable[[Tensor], Tensor]) -> None:
    """Let a model of transformers multiply its attention patterns by gates, by its own means."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def gated(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        key, value = (
            x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value)
        )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.transpose(2, 3) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = rows = scores + attention_mask
        if s_aux is not None:  # a sink of each head, which takes its share and writes nothing
            sinks = s_aux[:, None, None].expand(*scores.shape[:-1], 1)
            rows = torch.cat([scores, sinks], dim=-1)
        pattern = rows.softmax(dim=-1)[..., : key.shape[2]] * gate(
            scores + bias[module.layer_idx][:, None, None]
        )
        return (pattern @ value).transpose(1, 2).contiguous(), pattern

    AttentionInterface.register("gated_by_hand", gated)
    AttentionMaskInterface.register("gated_by_hand", eager_mask)
    plain.set_attn_implementation("gated_by_hand")


@torch.no_grad()
def generation(subject: Subject) -> float:
    """Logits under gates of a prompt that is fed in three pieces with a key-value cache, compared
    with one pass (float32); tokens generated with such a cache match those of full passes."""
    sparse, tokens = SparseTransformer(subject.build(), initial_threshold=0.2), PAIRS.clean
    pieces = list(in_pieces(sparse, (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:])))
    off = near(torch.cat(pieces, dim=1), sparse(tokens), FLOAT32, "the logits of pieces")
    options = {"max_new_tokens": 8, "do_sample": False, "use_past_kv_cache": True}
    options |= {"stop_at_eos": False, "return_type": "tokens", "verbose": False}
    if subject.kind == "HookedTransformer":
        options["prepend_bos"] = False
    found = sparse.generate(tokens, **options)
    for _ in range(8):
        tokens = torch.cat([tokens, sparse(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    require(torch.equal(found, tokens), "generated tokens differ")
    return off


@torch.no_grad()
def saving(subject: Subject) -> None:
    """A dense and a sparse model give the same logits bit for bit after saving and loading;
    transformers reads a bridge's folder and matches them to 1e-5."""
    from transformers import AutoModelForCausalLM

    model, tokens = subject.build(), PAIRS.clean
    plain = model(tokens)
    with tempfile.TemporaryDirectory() as home:
        dense, folder = Path(home, "dense"), Path(home, "sparse")
        dense.mkdir()
        save_model(model, dense)
        require(torch.equal(load_model(dense, device="cpu")(tokens), plain), "dense logits differ")
        if subject.kind != "HookedTransformer":
            read = AutoModelForCausalLM.from_pretrained(dense, local_files_only=True)
            near(read(tokens).logits, plain, FLOAT32, "what transformers reads")
        sparse = SparseTransformer(model, initial_bias=0.5)
        sparse.save_pretrained(folder)
        again = SparseTransformer.from_pretrained(folder, device="cpu")
        require(torch.equal(again(tokens), sparse(tokens)), "sparse logits differ")

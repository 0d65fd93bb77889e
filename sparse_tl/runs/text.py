"""Post-train any model on any text: from names to an output folder."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from sparse_tl.data import ShuffledStream, read_documents, token_windows
from sparse_tl.data.batches import TokenBatch
from sparse_tl.files import read_json, write_csv, write_json
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import adapt, add_lora, check_gates, check_lora, check_raw, load_model
from sparse_tl.runs.folder import RunFolder, SparseRun
from sparse_tl.training import evaluate_held_out, post_train

VALIDATION_WINDOWS = 200
"""Maximum number of windows for model selection; at most half of the held-out windows."""
TEST_WINDOWS = 800
"""Maximum number of windows to report on: the other held-out windows."""
TRAINED = ("all", "qk", "gates")
HELD_OUT_WINDOWS = VALIDATION_WINDOWS + TEST_WINDOWS


def run_post_training(
    out: str | Path,
    *,
    model: str,
    text: str,
    target_loss: float | str,
    held_out_text: str | None = None,
    window: int = 128,
    batch_size: int = 8,
    steps: int = 2000,
    learning_rate: float = 7e-4,
    trained: str = "all",
    lora: int = 0,
    head_cost: float = 0.0,
    mlps: bool = False,
    initial_bias: float = 4.0,
    precision: Literal["float32", "bf16"] = "float32",
    accumulate: int = 1,
    seed: int = 0,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
) -> SparseRun:
    """Run all unfinished steps and return all results.

    Some held-out windows select the weights; the others are reported on.

    Args:
        out: folder for the sparse model, ``metrics.json`` and ``history.csv``.
        model: hub name, Hugging Face folder, or folder written by `save_model`.
        text: text file, or dataset name (streamed).
        target_loss: nats per token, absolute or relative to the dense model (``"+0.05"``).
        held_out_text: separate held-out text; by default the last tenth of `text`.
        window: tokens per window; the text is cut into full windows.
        batch_size: windows per step.
        steps: number of post-training steps.
        learning_rate: peak learning rate.
        trained: weights to train besides the gates: "all", "qk", or "gates" for none.
        lora: rank of low-rank adapters, which are then trained in place of these weights; 0 for
            none.
        head_cost: cost of a head in use, in attention edges; as in `post_train`.
        mlps: whether to gate MLPs too; as in `SparseTransformer`.
        initial_bias: initial bias of the gates.
        precision: "bf16" runs the forward pass under autocast.
        accumulate: micro-batches per step, to save memory.
        seed: random seed for data order and gate noise.
        device: device for training.
        restart: discard an earlier run.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a setting is invalid, there is too little text, or `out` cannot be used.
    """
    settings = {
        "command": "post-train",
        "model": str(model),
        "text": str(text),
        "held_out_text": held_out_text,
        "target_loss": str(target_loss),
        "window": window,
        "batch_size": batch_size,
        "steps": steps,
        "learning_rate": learning_rate,
        "trained": trained,
        "lora": lora,
        "head_cost": head_cost,
        "mlps": mlps,
        "initial_bias": initial_bias,
        "precision": precision,
        "accumulate": accumulate,
        "seed": seed,
    }
    if trained not in TRAINED:
        raise ValueError(f"expected trained to be one of {TRAINED}; got {trained!r}")
    if lora:
        check_lora(lora)
    folder = RunFolder(out, settings, restart=restart)
    if not folder.finished("metrics.json"):
        dense_model = load_model(model, device=device)
        check_gates(adapt(dense_model))
        check_raw(dense_model)
        if lora:
            add_lora(dense_model, lora)
        if window > adapt(dense_model).n_ctx:
            raise ValueError(
                f"expected a window of at most {adapt(dense_model).n_ctx} tokens, the model's "
                f"context; got {window}"
            )
        cut = partial(token_windows, tokenizer=dense_model.tokenizer, window=window)
        windows = cut(read_documents(text), limit=steps * batch_size + HELD_OUT_WINDOWS)
        other = None
        if held_out_text is not None:
            documents = read_documents(held_out_text, split="validation")
            other = cut(documents, limit=HELD_OUT_WINDOWS)
        train, validation, test = map(TokenBatch.next_token, _split(windows, other))
        if steps * batch_size > len(train):
            warnings.warn(
                f"the run takes {steps * batch_size:,} windows and the text has {len(train):,}: "
                "some are seen more than once, and may meet a target that held-out text misses. "
                "More text helps, or fewer steps",
                stacklevel=2,
            )
        with folder.stage("post-training"):
            dense = evaluate_held_out(dense_model, test)
            sparse = SparseTransformer(dense_model, initial_bias=initial_bias, mlps=mlps)
            outcome = post_train(
                sparse,
                ShuffledStream(train, min(batch_size, len(train)), seed, accumulate=accumulate),
                validation=validation,
                target_loss=target_loss,
                steps=steps,
                learning_rate=dict.fromkeys(dict.fromkeys(["gates", trained]), learning_rate),
                head_cost=head_cost,
                seed=seed,
                precision=precision,
                checkpoint=folder / "checkpoint",
                progress=progress,
            )
        write_csv(folder / "history.csv", outcome.history)
        sparse.save_pretrained(folder / "sparse")
        measured = {
            "seed": seed,
            "verdict": outcome.verdict,
            "feasible": outcome.feasible,
            "held_out_windows": len(test),
            "dense": asdict(dense),
            "sparse": asdict(evaluate_held_out(sparse, test)),
        }
        write_json(folder / "metrics.json", measured)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    sparse = SparseTransformer.from_pretrained(folder / "sparse", device=device)
    return SparseRun(read_json(folder / "metrics.json"), sparse)


def _split(windows: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Split into training, validation and test windows."""
    if other is None:
        kept = min(HELD_OUT_WINDOWS, len(windows) // 10)
        if kept < 2:
            raise ValueError(
                f"expected at least 20 windows of text, to hold out two; got {len(windows)}. Give "
                "more text, a smaller window, or --held-out-text."
            )
        windows, other = windows[:-kept], windows[-kept:]
    elif len(other) < 2:
        raise ValueError("expected at least two windows of held-out text; got one")
    n_validation = min(VALIDATION_WINDOWS, len(other) // 2)
    return windows, other[:n_validation], other[n_validation:]

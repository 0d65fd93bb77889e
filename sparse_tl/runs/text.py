"""Post-train any model on any text: from names to an output folder."""

from __future__ import annotations

import math
import shutil
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from sparse_tl import ranks
from sparse_tl.arguments import AtLeastOne, Count, Logit, NotNegative, Positive, Seed, checked
from sparse_tl.data import Boundaries, ShuffledStream, TextStream, read_documents
from sparse_tl.data.windows import cut_windows, window_rows
from sparse_tl.files import write_csv, write_json
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import (
    adapt,
    add_lora,
    check_lora,
    check_raw,
    check_scores,
    checkpointed_activations,
    load_model,
    shard_model,
)
from sparse_tl.runs.folder import RunFolder, SparseRun
from sparse_tl.training import TargetLoss, evaluate_held_out, post_train

VALIDATION_WINDOWS = 200
"""Maximum number of windows for model selection; at most half of the held-out windows."""
TEST_WINDOWS = 800
"""Maximum number of windows to report on: the other held-out windows."""
WINDOW_TOKENS = 2**24
"""Maximum number of tokens whose windows are all in memory, 128 MB; runs on more text stream it."""
HELD_OUT_WINDOWS = VALIDATION_WINDOWS + TEST_WINDOWS


@checked
def run_post_training(
    out: str | Path,
    *,
    model: str,
    text: str,
    target_loss: float | str,
    held_out_text: str | None = None,
    window: AtLeastOne = 128,
    boundaries: Boundaries = "predict",
    batch_size: AtLeastOne = 8,
    steps: AtLeastOne = 2000,
    learning_rate: Positive = 7e-4,
    trained: Literal["all", "qk", "gates"] = "all",
    lora: Count = 0,
    head_cost: NotNegative = 0.0,
    mlps: bool = False,
    initial_bias: Logit = 4.0,
    dtype: Literal["float32", "bfloat16"] | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    accumulate: AtLeastOne = 1,
    checkpoint_activations: bool = False,
    shard: bool = False,
    seed: Seed = 0,
    device: str | None = None,
    restart: bool = False,
    progress: bool = True,
) -> SparseRun:
    """Run all unfinished steps and return all results.

    Some held-out windows select the weights; the others are reported on. Several ranks share the
    windows of every step; see `sparse_tl.ranks`.

    Args:
        out: folder for the sparse model, ``metrics.json`` and ``history.csv``.
        model: hub name, Hugging Face folder, or folder written by `save_model`.
        text: text file, or dataset name (streamed).
        target_loss: nats per token, absolute or relative to the dense model (``"+0.05"``).
        held_out_text: separate held-out text; by default the last tenth of what is read of `text`
            before training.
        window: tokens per window.
        boundaries: what happens where one document follows another: "predict", "skip" or "split";
            as in `text_rows`.
        batch_size: windows per step.
        steps: number of post-training steps.
        learning_rate: peak learning rate.
        trained: weights to train besides the gates: "all", "qk", or "gates" for none.
        lora: rank of low-rank adapters, which are then trained in place of these weights; 0 for
            none.
        head_cost: cost of a head in use, in attention edges; as in `post_train`.
        mlps: whether to gate MLPs too; as in `SparseTransformer`.
        initial_bias: initial bias of the gates.
        dtype: precision of the model's weights, by default as in `load_model`; of those in
            bfloat16 that are trained, float32 copies are.
        precision: "bf16" runs the forward pass under autocast; as in `post_train`.
        accumulate: micro-batches per step, to save memory.
        checkpoint_activations: whether to save memory by computing activations twice; the outcome
            is the same. See `checkpointed_activations`.
        shard: whether every rank holds only a part of every weight; `precision` is then that of all
            passes. See `shard_model`.
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
        "boundaries": boundaries,
        "batch_size": batch_size,
        "steps": steps,
        "learning_rate": learning_rate,
        "trained": trained,
        "lora": lora,
        "head_cost": head_cost,
        "mlps": mlps,
        "initial_bias": initial_bias,
        "dtype": dtype,
        "precision": precision,
        "accumulate": accumulate,
        "seed": seed,
    }
    TargetLoss.parse(target_loss)
    piece = math.ceil(batch_size / accumulate)
    least = batch_size % piece or piece
    if least < ranks.count():
        raise ValueError(
            f"expected at least one window for each of {ranks.count()} ranks in every micro-batch; "
            f"{batch_size} windows in {accumulate} micro-batches leave {least}. Give a larger "
            "--batch-size, fewer --accumulate, or fewer ranks."
        )
    if lora:
        check_lora()
        if trained != "all":
            raise ValueError(
                "expected lora, which trains adapters in place of weights, or "
                f"trained={trained!r}; got both"
            )
    if shard:
        if device is not None:
            raise ValueError(f"expected shard, which places the model, or a device; got {device}")
        device = "cpu"  # before it is sharded, and when it is saved
    folder = RunFolder(out, settings, restart=restart)
    if not folder.finished("metrics.json"):
        dense_model = load_model(model, device=device, dtype=dtype)
        check_scores(adapt(dense_model))
        check_raw(dense_model)
        if lora:
            add_lora(dense_model, lora)
        if shard:
            shard_model(dense_model, precision=precision)
        if window > adapt(dense_model).n_ctx:
            raise ValueError(
                f"expected a window of at most {adapt(dense_model).n_ctx} tokens, the model's "
                f"context; got {window}"
            )
        documents = read_documents(text)
        tokenizer = dense_model.tokenizer
        cut = partial(cut_windows, tokenizer=tokenizer, window=window, boundaries=boundaries)
        as_rows = partial(window_rows, tokenizer=tokenizer, boundaries=boundaries)
        needed = steps * batch_size + HELD_OUT_WINDOWS
        limit = min(needed, WINDOW_TOKENS // window)
        windows = cut(documents, limit=limit)
        other = None
        if held_out_text is not None:
            other = cut(read_documents(held_out_text, split="validation"), limit=HELD_OUT_WINDOWS)
        train, held_out = _split(windows, other)
        n_validation = min(VALIDATION_WINDOWS, len(held_out) // 2)
        validation, test = as_rows(held_out[:n_validation]), as_rows(held_out[n_validation:])
        order = {"seed": seed, "accumulate": accumulate}
        if len(windows) == limit < needed:
            left_out = range(len(train), len(windows))
            how = {"left_out": left_out, "boundaries": boundaries, **order}
            stream = TextStream(documents, tokenizer, window, batch_size, **how)
        else:
            _warn_of_repeats(steps * batch_size, len(train))
            stream = ShuffledStream(as_rows(train), min(batch_size, len(train)), **order)
        del windows, train
        with folder.stage("post-training"):
            dense = evaluate_held_out(dense_model, test)
            sparse = SparseTransformer(dense_model, initial_bias=initial_bias, mlps=mlps)
            with checkpointed_activations(sparse) if checkpoint_activations else nullcontext():
                outcome = post_train(
                    sparse,
                    stream,
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
        if isinstance(stream, TextStream) and stream.n_windows is not None:
            _warn_of_repeats(steps * batch_size, stream.n_windows)
        measured = {
            "seed": seed,
            "verdict": outcome.verdict,
            "feasible": outcome.feasible,
            "held_out_windows": len(test),
            "dense": asdict(dense),
            "sparse": asdict(evaluate_held_out(sparse, test)),
        }

        def write() -> None:
            write_csv(folder / "history.csv", outcome.history)
            if not shard:
                sparse.save_pretrained(folder / "sparse")
            write_json(folder / "metrics.json", measured)
            shutil.rmtree(folder / "checkpoint", ignore_errors=True)

        if shard:
            sparse.save_pretrained(folder / "sparse")
        ranks.on_first(write)
    sparse = SparseTransformer.from_pretrained(folder / "sparse", device=device)
    return SparseRun.read(folder.path, sparse)


def _warn_of_repeats(taken: int, n_windows: int) -> None:
    if taken > n_windows:
        warnings.warn(
            f"the run takes {taken:,} windows and the text has {n_windows:,}: some are seen more "
            "than once, and may meet a target that held-out text misses. More text helps, or fewer "
            "steps",
            stacklevel=3,
        )


def _split(windows: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
    """Split into training and held-out windows."""
    if other is None:
        kept = min(HELD_OUT_WINDOWS, len(windows) // 10)
        if kept < 2:
            raise ValueError(
                f"expected at least 20 windows of text, to hold out two; got {len(windows)}. Give "
                "more text, a smaller window, or --held-out-text."
            )
        return windows[:-kept], windows[-kept:].clone()  # so that the others can be let go
    if len(other) < 2:
        raise ValueError("expected at least two windows of held-out text; got one")
    return windows, other

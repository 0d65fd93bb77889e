"""``sparse-tl post-train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sparse_tl.cli.app import call, command
from sparse_tl.cli.options import Device, Out, Quiet, Restart, Seed, setting, subject
from sparse_tl.cli.printing import console, held_out


@command(
    "post-train",
    (
        "a model and a text by name",
        "--model gpt2 --text wikitext:wikitext-103-raw-v1\n--target-loss +0.05 --out runs/gpt2",
    ),
    (
        "from this machine alone",
        "--model models/mine --text story.txt --target-loss +0.02",
    ),
    (
        "in less memory",
        "--model gpt2 --text story.txt --target-loss +0.05\n--accumulate 4 --precision bf16",
    ),
)
def post_train(
    model: Annotated[
        str, subject("NAME", "A hub name, a local Hugging Face folder, or one of our folders.")
    ],
    text: Annotated[
        str, subject("SOURCE", "A text file, or a dataset's name (name or name:configuration).")
    ],
    target_loss: Annotated[str, subject("NATS", "Per token: 2.5, or +0.05 over the dense model.")],
    held_out_text: Annotated[
        str | None,
        subject("SOURCE", "Other text to select and report on; else a tenth of --text is kept."),
    ] = None,
    window: Annotated[int, setting("N", "Tokens per training window.")] = 128,
    batch_size: Annotated[int, setting("N", "Windows per step.")] = 8,
    accumulate: Annotated[int, setting("N", "Micro-batches per step.")] = 1,
    steps: Annotated[int, setting("N", "Steps of post-training.")] = 2000,
    learning_rate: Annotated[float, setting("RATE", "At its peak.")] = 1e-3,
    trained: Annotated[str, setting("NAME", "Weights to train: all, qk, gates or evenly.")] = "all",
    initial_bias: Annotated[float, setting("B", "The gates' bias at the start.")] = 4.0,
    distillation: Annotated[float, setting("SHARE", "Share of KL(dense || sparse), 0..1.")] = 0.0,
    precision: Annotated[str, setting("NAME", "float32 or bf16.")] = "float32",
    out: Out = Path("runs/post-train"),
    seed: Seed = 0,
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Make the attention of any model sparse on any text, at a loss of your choice.

    Writes the sparse model (sparse/), metrics.json and history.csv. Called again, it goes on
    where it stopped.
    """
    outcome = call("run_post_training", locals())
    held_out(
        f"{model}: {outcome.metrics['held_out_windows']} held-out windows",
        outcome.held_out,
        {
            "loss": "loss (nats per token)",
            "active_attention_edges_per_token": "active attention edges per token",
        },
    )
    console.print(outcome.verdict, markup=False)

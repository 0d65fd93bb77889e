"""``sparse-tl post-train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparse_tl.cli.app import command
from sparse_tl.cli.options import METHOD, MODEL, Device, Out, Quiet, Restart, Seed
from sparse_tl.cli.printing import console, table


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
        str,
        typer.Option(
            metavar="NAME",
            help="A hub name, a local Hugging Face folder, or one of our folders.",
            rich_help_panel=MODEL,
        ),
    ],
    text: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="A text file, or a dataset's name (name or name:configuration).",
            rich_help_panel=MODEL,
        ),
    ],
    target_loss: Annotated[
        str,
        typer.Option(
            metavar="NATS",
            help="Per token: 2.5, or +0.05 over the dense model.",
            rich_help_panel=MODEL,
        ),
    ],
    held_out_text: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Other text to select and report on; else a tenth of --text is kept.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    window: Annotated[
        int, typer.Option(metavar="N", help="Tokens per training window.", rich_help_panel=METHOD)
    ] = 128,
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Windows per step.", rich_help_panel=METHOD)
    ] = 8,
    accumulate: Annotated[
        int, typer.Option(metavar="N", help="Micro-batches per step.", rich_help_panel=METHOD)
    ] = 1,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Steps of post-training.", rich_help_panel=METHOD)
    ] = 2000,
    learning_rate: Annotated[
        float, typer.Option(metavar="RATE", help="At its peak.", rich_help_panel=METHOD)
    ] = 1e-3,
    trained: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Weights to train: all, qk, gates or evenly.",
            rich_help_panel=METHOD,
        ),
    ] = "all",
    initial_bias: Annotated[
        float,
        typer.Option(metavar="B", help="The gates' bias at the start.", rich_help_panel=METHOD),
    ] = 4.0,
    distillation: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Share of KL(dense || sparse), 0..1.", rich_help_panel=METHOD
        ),
    ] = 0.0,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="float32 or bf16.", rich_help_panel=METHOD)
    ] = "float32",
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
    from sparse_tl.runs import run_post_training

    outcome = run_post_training(
        out,
        model=model,
        text=text,
        target_loss=target_loss,
        held_out_text=held_out_text,
        window=window,
        batch_size=batch_size,
        initial_bias=initial_bias,
        seed=seed,
        device=device,
        restart=restart,
        progress=not quiet,
        steps=steps,
        learning_rate=learning_rate,
        trained=trained,
        distillation=distillation,
        accumulate=accumulate,
        precision=precision,
    )
    dense, sparse = outcome.metrics["dense"], outcome.metrics["sparse"]
    shown = {
        "loss (nats per token)": ("held_out_loss", ".4f"),
        "active attention edges per token": ("active_attention_edges_per_token", ",.1f"),
        "share of possible edges": ("active_share", ".2%"),
        "heads in use": ("active_heads", "d"),
    }
    table(
        f"{model}: {outcome.metrics['held_out_windows']} held-out windows",
        ["", "dense", "sparse"],
        [
            [name, format(dense[key], form), format(sparse[key], form)]
            for name, (key, form) in shown.items()
        ],
    )
    console.print(outcome.verdict, markup=False)

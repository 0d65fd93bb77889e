"""What stands in for models and texts of the hub where a notebook is to run without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def small_gpt2(folder: Path) -> dict[str, str | None]:
    """A random GPT-2 with the heads of GPT-2 small, but narrow, and the documentation as text.

    Its tokenizer is that of the built-in task model, which knows words of IOI.

    Returns:
        What the parameters of a notebook are to be.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from sparse_tl.models.task_text import task_tokenizer

    tokenizer = task_tokenizer()
    config = GPT2Config(
        n_embd=48, n_positions=128, vocab_size=len(tokenizer), initializer_range=0.3
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    pages = sorted(ROOT.glob("docs/*.md"))
    text = "<|endoftext|>".join(page.read_text("utf-8") for page in pages)
    (folder / "text.txt").write_text(text, encoding="utf-8")
    names = {"NAME": str(folder / "gpt2"), "TEXT": str(folder / "text.txt")}
    return {**names, "PREPEND_BOS": None}  # its tokenizer has no BOS token


def give(notebook: Any, parameters: Mapping[str, Any]) -> None:
    """Set the variables of the cell that is tagged "parameters", if there is one."""
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())

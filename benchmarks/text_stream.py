"""What a stream of text costs: memory, time to the first batch, windows per second, resuming.

A text is made by repeating the files given, as documents and as a single one; each line is one
process. Memory is the largest resident size over that before the text was touched. The whole text
is read as fast as it goes. Steps of 10 ms are those of an accelerator: the process sleeps after
each of 2,000 batches of 8 windows, so that 800 windows per second are the most there can be.

    OMP_NUM_THREADS=1 python benchmarks/text_stream.py tokenizer.json story.txt ...
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from own_process import own_process, peak
from transformers import PreTrainedTokenizerFast

from sparse_tl import TextStream, read_documents, token_windows

WINDOW, BATCH, STEPS = 128, 8, 2000
SEPARATOR = "<|endoftext|>"


class InTurn:
    """An executor that works at once, in the thread of its caller."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*arguments))
        return future


def _measured(tokenizer_file: str, path: Path, kind: str) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, eos_token=SEPARATOR)
    tokenizer("a word")
    before = peak()
    started = time.perf_counter()
    if kind == "all windows in memory":
        windows = token_windows(read_documents(path), tokenizer, WINDOW)
        seconds = time.perf_counter() - started
        return f"{len(windows):,} windows, {seconds:.2f} s, {peak() - before:.0f} MB"
    stream = TextStream(read_documents(path), tokenizer, WINDOW, BATCH)
    if kind.endswith("no thread"):
        stream._thread = InTurn()  # type: ignore[assignment]
    stream.batch(0)
    first = time.perf_counter() - started
    if kind == "resuming":
        stream.batch(20_000)
        return f"step 20,000 after {time.perf_counter() - started:.2f} s"
    step = 0
    started = time.perf_counter()
    while stream.n_windows is None if kind == "whole text" else step < STEPS:
        stream.batch(step)
        step += 1
        if kind.startswith("10 ms steps"):
            time.sleep(0.01)
    rate = step * BATCH / (time.perf_counter() - started)
    return f"first batch {first:.2f} s, {rate:,.0f} windows/s, {peak() - before:.0f} MB"


def main() -> None:
    """Print one line for each text and way to read it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    given = parser.parse_args()
    text = SEPARATOR.join(path.read_text(encoding="utf-8") for path in given.texts)
    with tempfile.TemporaryDirectory() as folder:
        for name, size, written in (
            ("a tenth", given.megabytes // 10, text),
            ("documents", given.megabytes, text),
            ("one document", given.megabytes, text.replace(SEPARATOR, "\n")),
        ):
            path = Path(folder) / f"{name}.txt"
            between = SEPARATOR if written is text else "\n"
            with path.open("w", encoding="utf-8") as file:
                while file.tell() < size * 10**6:
                    file.write(written + between)
            kinds = ["whole text"]
            if name != "a tenth":
                kinds += ["resuming"]
            if name == "documents":
                kinds += ["all windows in memory"]
                kinds += 3 * ["10 ms steps", "10 ms steps, no thread"]
            for kind in kinds:
                found = own_process(_measured, given.tokenizer, path, kind)
                print(f"{name}, {path.stat().st_size / 1e6:.0f} MB; {kind}: {found}", flush=True)


if __name__ == "__main__":
    main()

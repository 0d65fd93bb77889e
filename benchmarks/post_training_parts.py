"""Where the time of a post-training step with low-rank adapters goes, for any model folder.

The floor is the same training step without this package: the model of `transformers` with adapters
of `peft` on all its projections; forward pass, cross-entropy, backward pass, clipping and AdamW.
Over it, a step of the training loop on adapters and share gates, with a target relative to the
dense model, and its parts:

- dense: the dense model's predictions, on windows that are new and on windows that come again;
- gated: the pass under sampled gates, the losses and the size;
- backward: the backward pass;
- rest: the batch and its hash, clipping, the optimizer, lambda, the history.

Last, a step on average over a run in which every window comes eight times, as in the default run of
`sparse-tl post-train`: 2,000 steps of 8 windows, of 2,000; and 40 evaluations of 64 windows, as a
share of such a run. All are taken in turn. With one thread, times are the process's own, which
other processes disturb little.

Usage: python benchmarks/post_training_parts.py FOLDER [--shapes 8x128] [--runs 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_tl.backend import add_lora, load_model, read_parameters
from sparse_tl.cli.app import keep_freed_memory
from sparse_tl.data import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import evaluate_held_out
from sparse_tl.training.constraint import LossConstraint
from sparse_tl.training.distillation import DensePredictions, reference_of
from sparse_tl.training.loop import Run, TrainingConfig, choose_trained
from sparse_tl.training.post_train import SparsityObjective

RANK, EVALUATIONS, WINDOWS, STEPS, VISITS = 16, 40, 64, 2000, 8
Taken = dict[str, list[float]]


class Windows:
    """A stream of random windows; every batch comes twice in a row, new and again."""

    def __init__(self, rows: int, window: int, vocabulary: int) -> None:
        self.shape, self.vocabulary = (rows, window), vocabulary

    def batch(self, step: int) -> TokenBatch:
        """The batch of a step."""
        generator = torch.Generator().manual_seed(step // 2)
        drawn = torch.randint(self.vocabulary, self.shape, generator=generator)
        return TokenBatch.next_token(drawn)


def floor(folder: str) -> tuple[Callable[[TokenBatch], None], int]:
    """A plain training step with adapters as a function of the batch; and the vocabulary's size."""
    import transformers
    from peft import LoraConfig, inject_adapter_in_model

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    inject_adapter_in_model(config, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)

    def step(batch: TokenBatch) -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(batch.tokens, use_cache=False).logits
        F.cross_entropy(logits[batch.loss_mask], batch.loss_labels()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step, model.config.vocab_size


def run_of(sparse: SparseTransformer, stream: Windows) -> Run:
    """The training loop's own steps, on adapters and gates."""
    trained = choose_trained(sparse, {"all": 1.0})
    for name, parameter in read_parameters(sparse).items():
        parameter.requires_grad_(name in trained)
    constraint = LossConstraint(torch.tensor([0.05]))
    objective = SparsityObjective(sparse, reference_of(sparse, trained), constraint)
    config = TrainingConfig(steps=10_000, learning_rate=1e-5)
    return Run(sparse, objective, stream, config, trained)


def measured(
    step: Callable[[TokenBatch], None], run: Run, runs: int, clock: Callable[[], float]
) -> Taken:
    """Seconds of the floor's step, of a post-training step, and of its parts."""
    taken: Taken = defaultdict(list)
    parts: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            result = function(*args, **kwargs)
            parts[name] += clock() - started
            return result

        return call

    with ExitStack() as stack:
        for owner, method in [
            (DensePredictions, "logits"),
            (SparsityObjective, "measure"),
            (Tensor, "backward"),
        ]:
            replaced = timed(method, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, replaced))
        for number in range(runs + 1):
            for rows in ("new", "again"):
                batch = run.stream.batch(run.state.step)
                started = clock()
                step(batch)
                plain = clock() - started
                parts.clear()
                started = clock()
                run.step()
                whole = clock() - started
                if number:  # after a round to warm up
                    taken["floor"].append(plain)
                    taken[f"dense, windows {rows}"].append(parts["logits"])
                    taken["gated"].append(parts["measure"] - parts["logits"])
                    taken["backward"].append(parts["backward"])
                    taken["rest"].append(whole - parts["measure"] - parts["backward"])
                    taken[f"step, windows {rows}"].append(whole)
    return taken


def main() -> None:
    """Print a table per shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--shapes", default="8x128,4x64,4x256")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as commands do
    clock = time.process_time if options.threads == 1 else time.perf_counter
    step, vocabulary = floor(options.folder)
    sparse = SparseTransformer(add_lora(load_model(options.folder), RANK), gates="share")
    for shape in options.shapes.split(","):
        rows, window = map(int, shape.split("x"))
        stream = Windows(rows, window, vocabulary)
        taken = measured(step, run_of(sparse, stream), options.runs, clock)
        print(f"\n{shape}: {options.runs} steps of each, {options.threads} threads")
        floor_taken = taken["floor"]
        for name, seconds in taken.items():
            least, median = min(seconds), statistics.median(seconds)
            ratios = least / min(floor_taken), median / statistics.median(floor_taken)
            print(
                f"  {name:20} least {least:7.3f} s, median {median:7.3f} s   "
                f"{ratios[0]:5.3f}x and {ratios[1]:5.3f}x the floor",
                flush=True,
            )
        held_out = Windows(WINDOWS, window, vocabulary).batch(0)
        started = clock()
        evaluate_held_out(sparse, held_out)
        evaluation = clock() - started
        steps = [taken[f"step, windows {kind}"] for kind in ("new", "again")]
        new, again = map(statistics.median, steps)
        mean = (new + (VISITS - 1) * again) / VISITS
        of_run = STEPS * mean
        print(
            f"  a step on average, every window {VISITS} times: {mean:.3f} s, "
            f"{mean / statistics.median(floor_taken):.3f}x the floor"
        )
        print(
            f"  evaluation of {WINDOWS} windows {evaluation:.2f} s; {EVALUATIONS} of them are "
            f"{EVALUATIONS * evaluation / of_run:.1%} of {STEPS} steps"
        )


if __name__ == "__main__":
    main()

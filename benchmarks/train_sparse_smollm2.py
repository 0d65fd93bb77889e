"""Train the sparse SmolLM2 that comes with the package further, in a given time.

Continues from its adapters and gates, or from others, on the model's own text and the texts that
are given, as windows and as short text, each a group, and on tasks on request, which make one group
(as a group each, they cost skills that look like them). Prints what became of every group, and of
skills that no group asks for. Run it again to resume.

With ``--minutes``, a few steps and an evaluation are timed first, and the run has as many steps as
fit into the rest, the sampling of the model's own text included.

    python benchmarks/train_sparse_smollm2.py --text stories.txt wikitext.txt code.txt \\
        --minutes 9 --target-edges 320 --window-step 64 --short-step 256
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sparse_tl import SparseTransformer, compare_skills, load_language_model
from sparse_tl.backend import adapt, merge_lora
from sparse_tl.data import ShuffledStream, TokenBatch, read_documents, text_rows
from sparse_tl.devices import is_slow_in_bfloat16
from sparse_tl.tasks import TASKS_BY_NAME
from sparse_tl.training import post_train, sampled_windows, short_rows
from sparse_tl.training.constraint import EVALUATIONS, Target, Validation
from sparse_tl.zoo.building import SHIPPED


def main() -> None:
    """Continue post-training, and write the sparse model as a folder."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    shipped = SHIPPED / "smollm2" / "sparse"
    parser.add_argument("--adapters", type=Path, default=shipped, help="folder to continue from")
    parser.add_argument("--mlps", action="store_true", help="gate MLPs too")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=900, help="of each text")
    parser.add_argument("--own-windows", type=int, default=330, help="that the model generates")
    parser.add_argument("--tasks", nargs="*", default=[], choices=list(TASKS_BY_NAME))
    parser.add_argument("--prompts", type=int, default=1000, help="of each task")
    parser.add_argument("--window-step", type=int, default=1, help="own and other windows")
    parser.add_argument("--short-step", type=int, default=6, help="short rows of each kind")
    parser.add_argument("--task-step", type=int, default=8, help="prompts, of all tasks")
    parser.add_argument("--held-out-tokens", type=int, default=1280, help="that select, by group")
    parser.add_argument("--steps", type=int, default=460)
    parser.add_argument("--minutes", type=float, help="that the whole run takes, instead of steps")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--gate-learning-rate", type=float, default=1e-3)
    parser.add_argument("--target-loss", help="kl+0.1 by default")
    parser.add_argument("--target-edges")
    parser.add_argument("--out", type=Path, default=Path("runs/longer"))
    args = parser.parse_args()
    dense = load_language_model()
    sparse = loaded(args.adapters, dense, args.mlps)
    args.out.mkdir(parents=True, exist_ok=True)
    streams, validation = dict[str, ShuffledStream](), dict[str, TokenBatch]()

    def add(name: str, rows: TokenBatch, per_step: int) -> None:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
        n = max(2, args.held_out_tokens * len(rows) // rows.loss_mask.numel())
        validation[name] = rows.select(order[:n])
        streams[name] = ShuffledStream(rows.select(order[n:]), per_step)

    def add_text(name: str, windows: TokenBatch, kinds: int) -> None:
        add(name, windows, args.window_step)
        for kind, rows in islice(short_rows(windows.tokens, dense.tokenizer).items(), kinds):
            add(f"{name}, {kind}", rows, args.short_step)

    file = args.out / "own.safetensors"
    add_text("own", sampled_windows(dense, args.own_windows, args.window, save_to=file), 3)
    texts = [
        text_rows(read_documents(file), dense.tokenizer, args.window, limit=args.windows).tokens
        for file in args.text
    ]
    add_text("texts", TokenBatch.next_token(torch.cat(texts)), 1)
    if args.tasks:
        pairs = (TASKS_BY_NAME[name].pairs(sparse, args.prompts, seed=7) for name in args.tasks)
        rows = TokenBatch.joined([some.answer_rows() for some in pairs])
        add("tasks", replace(rows, groups=None), args.task_step)
    options: dict[str, Any] = {
        "validation": validation,
        "target_loss": args.target_loss or (None if args.target_edges else "kl+0.1"),
        "target_edges": args.target_edges,
        "learning_rate": {"lora": args.learning_rate},
        "gate_learning_rate": args.gate_learning_rate,
        "precision": "float32" if is_slow_in_bfloat16(adapt(dense).device) else "bf16",
    }
    plan = args.out / "steps.json"
    if args.minutes and not plan.exists():
        seconds = 60 * args.minutes - (time.monotonic() - began)
        plan.write_text(json.dumps(steps_within(seconds, sparse, streams, options)))
        sparse = loaded(args.adapters, dense, args.mlps)
    if args.minutes:
        args.steps = json.loads(plan.read_text())
    checkpoint = args.out / "checkpoint"
    outcome = post_train(sparse, streams, steps=args.steps, checkpoint=checkpoint, **options)
    print(outcome)
    print(sparse.save_pretrained(args.out / "adapters", adapters_only=True))
    outcome.history.to_csv(args.out / "history.csv")
    print(compare_skills(dense, sparse).to_pandas().to_string())
    merge_lora(sparse.model)
    print(sparse.save_pretrained(args.out / "sparse"))


def loaded(folder: Path, dense: Any, mlps: bool) -> SparseTransformer:
    """The sparse model of a folder, with new gates on its MLPs on request."""
    sparse = SparseTransformer.from_pretrained(folder, base=adapt(dense).copy())
    if not mlps or sparse.mlp_gates is not None:
        return sparse
    gated = SparseTransformer(sparse.unwrap(), mlps=True)
    gated.gates.load_state_dict(sparse.gates.state_dict())
    return gated


def steps_within(
    seconds: float,
    sparse: SparseTransformer,
    streams: dict[str, ShuffledStream],
    options: dict[str, Any],
) -> int:
    """How many steps a run can have, its evaluations included; `sparse` is trained a little."""
    target = Target.parse(options["target_loss"], options["target_edges"])
    rows = Validation(sparse, options["validation"], {}, target, None, options["precision"], None)

    def took(work: Any) -> float:
        started = time.monotonic()
        work()
        return time.monotonic() - started

    evaluation = took(lambda: rows.measured(rows.rows))
    one, three = (took(lambda n=n: post_train(sparse, streams, steps=n, **options)) for n in (1, 3))
    # These have an evaluation before training and one after each step; and a beginning and an end.
    step = max((three - one) / 2 - evaluation, 0.01)
    ends = max(0.0, one - step - 2 * evaluation)
    left = seconds - 2 * one - three - ends - (EVALUATIONS + 1) * evaluation
    if left < step:
        raise SystemExit(f"{seconds:.0f} s are left, too few: a step takes {step:.1f} s")
    print(f"{int(left / step):,} steps of {step:.2f} s; an evaluation takes {evaluation:.1f} s")
    return int(left / step)


if __name__ == "__main__":
    main()
